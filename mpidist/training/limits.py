"""What can be said against a run before MPI starts. Pure."""

from __future__ import annotations

from ..data import Position, Sampler
from ..errors import ConfigError


def last_step(
    epochs: int | None,
    steps: int | None,
    sampler: Sampler,
    step: int = 0,
    position: Position | None = None,
) -> int:
    """Return the number of steps of a whole run that stands at `step` and `position`. Local.

    Epochs are counted in samples: a run that goes on with another global batch ends with them.
    """
    if (epochs is None) == (steps is None):
        raise ConfigError(f"epochs={epochs}, steps={steps}: give one of the two")
    name, value = ("steps", steps) if epochs is None else ("epochs", epochs)
    if value is None or isinstance(value, bool) or int(value) != value or value < 1:
        raise ConfigError(f"{name}={value!r}: expected a whole number of 1 or more")
    if name == "steps":
        return int(value)
    epoch, offset = position or Position()
    if epoch >= value:
        return step
    rest = -(-(sampler.count - offset) // sampler.global_batch)
    return step + rest + (int(value) - epoch - 1) * sampler.steps_per_epoch


def check_whole(**values: int | None) -> None:
    """Raise ConfigError for a number of steps that is none; None is no number at all. Local."""
    for name, value in values.items():
        whole = value is None or (isinstance(value, int) and not isinstance(value, bool))
        if not whole or (value is not None and value < 1):
            raise ConfigError(f"{name}={value!r}: expected a whole number of 1 or more, or None")


def check_batch(global_batch: int, workers: int) -> None:
    """Raise ConfigError where some worker would never have a sample. Local."""
    if global_batch < workers:
        raise ConfigError(
            f"global_batch={global_batch} is smaller than the {workers} workers, and some would "
            "never have a sample; use a larger batch or fewer ranks"
        )


def check_microbatches(microbatches: int | None, global_batch: int, strategy) -> None:
    """Raise ConfigError for a number of pieces that a batch or a strategy cannot have. Local."""
    check_whole(microbatches=microbatches)
    if microbatches is None:
        return
    if microbatches > global_batch:
        raise ConfigError(
            f"microbatches={microbatches} is more than the {global_batch} samples of a global "
            "batch; use at most as many"
        )
    if not getattr(strategy, "takes_microbatches", False):
        raise ConfigError(
            f"microbatches={microbatches} needs the allreduce strategy: servers add what comes in "
            "the order of arrival; leave microbatches out, or use md.AllReduce()"
        )


def check_share(max_bad: float) -> None:
    """Raise ConfigError for a share that is none. Local."""
    if isinstance(max_bad, bool) or not 0 <= max_bad <= 1:
        raise ConfigError(f"max_bad={max_bad!r}: expected a share from 0 to 1")


def check_replicated(check_replicas: int | None, strategy) -> None:
    """Raise ConfigError where replicas are to be compared and there are none. Local."""
    check_whole(check_replicas=check_replicas)
    if check_replicas is not None and not getattr(strategy, "has_replicas", False):
        raise ConfigError(
            f"check_replicas={check_replicas} needs the allreduce strategy: servers hold each "
            "parameter once; leave it out, or use md.AllReduce()"
        )


def check_patience(patience: int | None, strategy) -> None:
    """Raise ConfigError where a stalled loss is looked for and no loss is everybody's. Local."""
    check_whole(patience=patience)
    if patience is not None and not getattr(strategy, "has_replicas", False):
        raise ConfigError(
            f"patience={patience} needs the allreduce strategy: under servers each worker has a "
            "loss of its own; leave it out, or use md.AllReduce()"
        )
