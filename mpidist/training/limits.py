"""What can be said against a run before MPI starts. Pure."""

from __future__ import annotations

from ..data import Sampler
from ..errors import ConfigError


def last_step(epochs: int | None, steps: int | None, sampler: Sampler) -> int:
    """Return the number of steps of a whole run. Local."""
    if (epochs is None) == (steps is None):
        raise ConfigError(f"epochs={epochs}, steps={steps}: give one of the two")
    name, value = ("steps", steps) if epochs is None else ("epochs", epochs)
    if value is None or isinstance(value, bool) or int(value) != value or value < 1:
        raise ConfigError(f"{name}={value!r}: expected a whole number of 1 or more")
    return int(value) if name == "steps" else int(value) * sampler.steps_per_epoch


def check_batch(global_batch: int, workers: int) -> None:
    """Raise ConfigError where some worker would never have a sample. Local."""
    if global_batch < workers:
        raise ConfigError(
            f"global_batch={global_batch} is smaller than the {workers} workers, and some would "
            "never have a sample; use a larger batch or fewer ranks"
        )
