"""What can be said against a run before MPI starts. Pure."""

from __future__ import annotations

from ..data import Sampler
from ..errors import ConfigError


def last_step(epochs: int | None, steps: int | None, sampler: Sampler) -> int:
    """Return the number of steps of a whole run. Local."""
    if (epochs is None) == (steps is None):
        raise ConfigError(f"epochs={epochs}, steps={steps}: give one of the two")
    given = {"epochs": epochs} if steps is None else {"steps": steps}
    for name, value in given.items():
        if isinstance(value, bool) or int(value) != value or value < 1:
            raise ConfigError(f"{name}={value!r}: expected a whole number of 1 or more")
    return int(steps) if epochs is None else int(epochs) * sampler.steps_per_epoch


def check_batch(global_batch: int, workers: int) -> None:
    """Raise ConfigError where some worker would never have a sample. Local."""
    if global_batch < workers:
        raise ConfigError(
            f"global_batch={global_batch} is smaller than the {workers} workers, and some would "
            "never have a sample; use a larger batch or fewer ranks"
        )
