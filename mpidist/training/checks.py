"""Checks of the arguments of `md.train` that need no communication, before the run begins."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterable, Mapping
from numbers import Integral, Real
from typing import Any

from ..arrays import is_device, named_arrays
from ..checkpoint.arguments import checked_path
from ..data import Loading, Position, Sampler
from ..elasticity.elastic_settings import Elastic, as_elastic
from ..errors import ConfigError

_OPTIMIZER = "expected an optimizer such as md.optim.sgd(0.1), or an object with init and update"
_MODEL = (
    "expected an object with parameters (a dict of name -> array) and loss_and_gradients(batch, "
    "gradients, ready=None), see docs/models.md"
)

#: argument -> why parameter servers do not support it. The attribute `reasons` of a strategy has
#: the reasons of this strategy.
_ON_SERVERS = {
    "microbatches": "servers add gradients in the order in which they arrive",
    "check_replicas": "servers hold each parameter once",
    "patience": "under servers each worker has a loss of its own",
}


def brief(value, longest: int = 60) -> str:
    """Return any value as one short line (at most `longest` characters) for an error message."""
    if isinstance(value, type):
        return f"the class {value.__name__}"
    try:
        text = " ".join(repr(value).split())
    except Exception:  # a user's `__repr__` may raise
        text = type(value).__name__
    if text.startswith("<") or len(text) > longest:
        name = getattr(value, "__name__", None)
        if callable(value) and isinstance(name, str):
            return f"the function {name}"
        return f"{text[:longest]}..." if isinstance(value, str) else type(value).__name__
    return text


def expect(good: bool, name: str, value, wanted: str) -> None:
    """Raise ConfigError if `good` is false.

    The text of the error is ``<name>=<value>: expected <wanted>``.
    """
    if not good:
        raise ConfigError(f"{name}={brief(value)}: expected {wanted}")


# ------------------------------------------------------------------------------------- numbers


def is_whole_number(value) -> bool:
    """Return whether `value` is a whole number (a float such as 3.0 is one) and not a bool."""
    if isinstance(value, Integral):
        return not isinstance(value, bool)
    return isinstance(value, Real) and math.isfinite(value) and math.floor(value) == value


def has_methods(value, *names: str) -> bool:
    """Return whether `value` is an object, not a class, that has a method for each of `names`."""
    methods = (callable(getattr(value, name, None)) for name in names)
    return not isinstance(value, type) and all(methods)


def last_step(
    epochs: int | None,
    steps: int | None,
    sampler: Sampler,
    step: int = 0,
    position: Position | None = None,
) -> int:
    """Return the number of the run's last step.

    The remaining epochs are counted in samples, so a run that is resumed with another global batch
    still ends at the end of its last epoch.
    """
    if (epochs is None) == (steps is None):
        raise ConfigError(f"epochs={brief(epochs)}, steps={brief(steps)}: give one of the two")
    name, value = ("steps", steps) if epochs is None else ("epochs", epochs)
    if value is None or not is_whole_number(value) or value < 1:
        raise ConfigError(f"{name}={brief(value)}: expected a whole number of 1 or more")
    if name == "steps":
        return int(value)
    epoch, offset = position or Position()
    if epoch >= value:
        return step
    rest = -(-(sampler.count - offset) // sampler.global_batch)
    return step + rest + (int(value) - epoch - 1) * sampler.steps_per_epoch


def check_whole(**values: int | None) -> None:
    """Raise ConfigError unless each argument is None or a whole number of 1 or more."""
    for name, value in values.items():
        number = isinstance(value, Integral) and not isinstance(value, bool) and value >= 1
        expect(value is None or number, name, value, "a whole number of 1 or more, or None")


def _number(value) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def check_share(max_bad: float) -> None:
    """Raise ConfigError unless `max_bad`, the allowed fraction of bad records, is from 0 to 1."""
    expect(_number(max_bad) and 0 <= max_bad <= 1, "max_bad", max_bad, "a share from 0 to 1")


def check_time_limit(time_limit) -> None:
    """Raise ConfigError unless `time_limit` is a number above 0, "auto" or None."""
    auto = time_limit is None or (isinstance(time_limit, str) and time_limit == "auto")
    good = auto or (_number(time_limit) and time_limit > 0)
    expect(good, "time_limit", time_limit, "seconds > 0, 'auto', or None")


def check_watch(watch_seconds) -> None:
    """Raise ConfigError if `watch_seconds` is negative or not finite."""
    good = _number(watch_seconds) and 0 <= watch_seconds <= sys.float_info.max
    expect(good, "watch_seconds", watch_seconds, "seconds, 0 is off")


# ------------------------------------------------------------------------- batches and strategies


def check_batch(global_batch: int, workers: int) -> None:
    """Raise ConfigError if a global batch is too small to give each worker a sample."""
    if global_batch < workers:
        raise ConfigError(
            f"global_batch={global_batch} is smaller than the {workers} workers, and some would "
            "never have a sample; use a larger batch or fewer ranks"
        )


def check_microbatches(microbatches: int | None, global_batch: int, strategy) -> None:
    """Raise ConfigError if `microbatches` does not suit the global batch or the strategy."""
    check_whole(microbatches=microbatches)
    if microbatches is None:
        return
    if microbatches > global_batch:
        raise ConfigError(
            f"microbatches={brief(microbatches)} is more than the {global_batch} samples of a "
            "global batch; use at most as many"
        )
    if not getattr(strategy, "takes_microbatches", False):
        raise ConfigError(
            f"microbatches={microbatches} needs the allreduce strategy or a pipeline: "
            f"{_reason(strategy, 'microbatches')}; leave microbatches out, or use md.AllReduce()"
        )
    if getattr(strategy, "accumulate", 1) > 1:
        raise ConfigError(
            f"accumulate={strategy.accumulate} and microbatches={microbatches}: a step "
            "already computes the microbatches one by one; leave accumulate out"
        )


def check_replicated(strategy, **settings: int | None) -> None:
    """Raise ConfigError if any of `settings` is given although `strategy` does not support it."""
    check_whole(**settings)
    for name, value in settings.items():
        if value is not None and not getattr(strategy, "has_replicas", False):
            raise ConfigError(
                f"{name}={value} needs the allreduce strategy: {_reason(strategy, name)}; leave it "
                "out, or use md.AllReduce()"
            )


def _reason(strategy, name: str) -> str:
    """Return why a strategy does not support the argument `name`."""
    return getattr(strategy, "reasons", _ON_SERVERS)[name]


# ------------------------------------------------------------------------------------- objects


def check_model(model, predicts: bool) -> None:
    """Raise ConfigError if `model` lacks an attribute or a method that the run needs."""
    if isinstance(model, type) or not hasattr(model, "parameters"):
        raise ConfigError(f"model is {brief(model)}; {_MODEL}")
    arrays, problem = named_arrays(model)
    if problem is None and not model.parameters:
        problem = "its parameters are empty"
    where = {is_device(x): name for name, x in arrays if name in model.parameters}
    if len(where) == 2:
        problem = f"{where[False]!r} is on the host, {where[True]!r} on a device; move all to one"
    if problem is None and not isinstance(getattr(model, "state", {}), Mapping):
        problem = f"its state is {brief(model.state)}, not a dict of arrays"
    if problem is not None:
        raise ConfigError(f"model {type(model).__name__}: {problem}; {_MODEL}")
    needed = {"loss_and_gradients": "", "predict": ", which test_data= needs"}
    for name, why in needed.items():
        if not has_methods(model, name) and (predicts or not why):
            raise ConfigError(f"model {type(model).__name__} has no method {name}{why}; {_MODEL}")


def check_optimizer(optimizer) -> None:
    """Raise ConfigError if `optimizer` does not have the methods `init` and `update`."""
    if has_methods(optimizer, "init", "update"):
        return
    call = ""
    if callable(optimizer) or isinstance(optimizer, str):
        name = optimizer if isinstance(optimizer, str) else getattr(optimizer, "__name__", "")
        call = f" (call it: md.optim.{name}(...))" if str(name).isidentifier() else ""
    raise ConfigError(f"optimizer is {brief(optimizer)}{call}; {_OPTIMIZER}")


def check_checkpoint(checkpoint, resume) -> None:
    """Raise ConfigError if `checkpoint` is neither a path nor a store, or `resume` is unknown."""
    if isinstance(checkpoint, str | os.PathLike):
        checked_path("checkpoint", checkpoint)
    elif not (
        checkpoint is None
        or (callable(checkpoint) and not isinstance(checkpoint, type))
        or has_methods(checkpoint, "save", "restore", "all_steps")
    ):
        raise ConfigError(
            f"checkpoint is {brief(checkpoint)}; expected a path, a CheckpointStore, a "
            "TieredStore, a function of the communicator that returns a store, or None"
        )
    word = isinstance(resume, str) and resume in ("auto", "fresh")
    known = isinstance(resume, bool) or word
    expect(known, "resume", resume, "True, False, 'auto' or 'fresh'")
    if resume is True and checkpoint is None:
        raise ConfigError("resume=True needs checkpoint=, the folder to resume from")


def check_elastic(elastic, strategy, checkpoint) -> Elastic | None:
    """Return the settings of a run that goes on after a rank's death, or None for other runs.

    Raises ConfigError if the strategy or the checkpoint does not allow such a run.
    """
    if elastic is None or elastic is False:
        if getattr(strategy, "keeps_copies", False):
            raise ConfigError(
                f"replicas={strategy.replicas} needs elastic: otherwise the job ends when a "
                "server dies, and no rank uses the copies; give elastic=True, or leave replicas out"
            )
        return None
    settings = as_elastic(elastic)
    if not getattr(strategy, "survives", False):
        raise ConfigError(
            f"elastic: {type(strategy).__name__} cannot go on after a death"
            f"{getattr(strategy, 'reasons', {}).get('elastic', '')}; use AllReduce or "
            "ParameterServer, or leave elastic out and start the job by mpidist launch"
        )
    if getattr(strategy, "is_rare", False):
        raise ConfigError(
            f"elastic: push_every={strategy.push_every}, pull_every={strategy.pull_every}: a death "
            "would lose gradients that are not pushed yet; leave both at 1, or leave elastic out"
        )
    if getattr(strategy, "changes", None) is not None:
        raise ConfigError(
            "elastic: changes: after a death the servers would go on with the first mode; leave "
            "changes out, or leave elastic out"
        )
    mode = getattr(strategy, "consistency", None)
    if not getattr(mode, "survives", True):
        raise ConfigError(
            f"elastic: a run with {mode} cannot go on after a death; use BSP, SSP, DSSP or ASP, or "
            "leave elastic out and start the job by mpidist launch"
        )
    if settings.slow and not getattr(strategy, "has_replicas", False):
        raise ConfigError(
            f"elastic: slow={settings.slow} needs strategy AllReduce; workers of parameter servers "
            "need not wait for a slow one: use md.SSP or md.ASP, and leave slow out"
        )
    if hasattr(checkpoint, "restore"):
        raise ConfigError(
            "elastic: checkpoint is a store on this communicator; give a path, or a function such "
            "as lambda comm: md.CheckpointStore(comm, path, keep=5)"
        )
    return settings


def check_functions(callbacks, on_resize) -> tuple:
    """Return the callbacks as a tuple; raise ConfigError if a function cannot be called."""
    if callable(callbacks) or isinstance(callbacks, str) or not isinstance(callbacks, Iterable):
        one = f", for one [{brief(callbacks)}]" if callable(callbacks) else ""
        raise ConfigError(
            f"callbacks is {brief(callbacks)}; expected a list of functions of a StepReport{one}"
        )
    functions = tuple(callbacks) if getattr(callbacks, "shape", None) != () else (callbacks,)
    for number, callback in enumerate(functions):
        if not callable(callback):
            what = f"callbacks[{number}] is {brief(callback)}"
            raise ConfigError(f"{what}; expected a function of a StepReport")
    if on_resize is not None and not callable(on_resize):
        raise ConfigError(
            f"on_resize is {brief(on_resize)}; expected a function of (old ranks, new ranks, "
            "run), or None"
        )
    return functions


def check_reading(loading, quarantine, retry_bad) -> None:
    """Raise ConfigError if `loading`, `quarantine` or `retry_bad` has the wrong type."""
    if loading is not None and not isinstance(loading, Loading):
        raise ConfigError(f"loading is {brief(loading)}; expected md.data.Loading(...), or None")
    if quarantine is not None and not isinstance(quarantine, str | os.PathLike):
        raise ConfigError(f"quarantine is {brief(quarantine)}; expected the path of a file")
    expect(isinstance(retry_bad, bool), "retry_bad", retry_bad, "True or False")


def check_loss(loss) -> Any:
    """Return the loss of a model as a number.

    Raises ConfigError unless the loss is a number, or an array of one element (on the CPU or on a
    GPU). NaN and infinity raise no error.
    """
    if isinstance(loss, Real):
        return loss
    if getattr(loss, "shape", None) in ((), (1,)) and loss.dtype.kind in "fiuV":
        return loss.item()
    raise ConfigError(
        f"the model's loss_and_gradients returned {brief(loss)}; expected the mean loss of its "
        "batch, a number"
    )
