"""Checks of a run's arguments that one rank can make alone, before the run begins.

Each check raises a ConfigError of one line: what was given, what is expected. None communicates:
`settings.agree_on_settings` runs all of them before anything else, so that what is wrong on one
rank is told to all of them.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterable, Mapping
from numbers import Integral, Real
from typing import Any

from ..arrays import named_arrays
from ..checkpoint.arguments import path_of
from ..data import Loading, Position, Sampler
from ..errors import ConfigError

_OPTIMIZER = "expected an optimizer such as md.optim.sgd(0.1), or an object with init and update"
_MODEL = (
    "expected an object with parameters (a dict of name -> array) and loss_and_gradients(batch, "
    "gradients, ready=None), see docs/models.md"
)

#: Why servers cannot do what these arguments ask for.
_ON_SERVERS = {
    "check_replicas": "servers hold each parameter once",
    "patience": "under servers each worker has a loss of its own",
}


def shown(value, longest: int = 60) -> str:
    """Return any value as one short line for an error message."""
    if isinstance(value, type):
        return f"the class {value.__name__}"
    try:
        text = " ".join(repr(value).split())
    except Exception:  # a repr of a user's own
        text = type(value).__name__
    if text.startswith("<") or len(text) > longest:
        name = getattr(value, "__name__", None)
        if callable(value) and isinstance(name, str):
            return f"the function {name}"
        return f"{text[:longest]}..." if isinstance(value, str) else type(value).__name__
    return text


# ------------------------------------------------------------------------------------- numbers


def is_whole_number(value) -> bool:
    """Whether `value` is a whole number, and no bool."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return False
    return isinstance(value, Integral) or (math.isfinite(value) and math.floor(value) == value)


def last_step(
    epochs: int | None,
    steps: int | None,
    sampler: Sampler,
    step: int = 0,
    position: Position | None = None,
) -> int:
    """Return the number of steps of a whole run that stands at `step` and `position`.

    Epochs are counted in samples: a run that goes on with another global batch ends with them.
    """
    if (epochs is None) == (steps is None):
        raise ConfigError(f"epochs={shown(epochs)}, steps={shown(steps)}: give one of the two")
    name, value = ("steps", steps) if epochs is None else ("epochs", epochs)
    if value is None or not is_whole_number(value) or value < 1:
        raise ConfigError(f"{name}={shown(value)}: expected a whole number of 1 or more")
    if name == "steps":
        return int(value)
    epoch, offset = position or Position()
    if epoch >= value:
        return step
    rest = -(-(sampler.count - offset) // sampler.global_batch)
    return step + rest + (int(value) - epoch - 1) * sampler.steps_per_epoch


def check_whole(**values: int | None) -> None:
    """Refuse what is not a number of steps; None stands for no number."""
    for name, value in values.items():
        number = isinstance(value, Integral) and not isinstance(value, bool)
        if value is not None and not (number and value >= 1):
            raise ConfigError(
                f"{name}={shown(value)}: expected a whole number of 1 or more, or None"
            )


def _number(value) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def check_share(max_bad: float) -> None:
    """Refuse a share that is none."""
    if not _number(max_bad) or not 0 <= max_bad <= 1:
        raise ConfigError(f"max_bad={shown(max_bad)}: expected a share from 0 to 1")


def check_time_limit(time_limit) -> None:
    """Refuse a time that is none."""
    if time_limit is None or (isinstance(time_limit, str) and time_limit == "auto"):
        return
    if not _number(time_limit) or not time_limit > 0:
        raise ConfigError(f"time_limit={shown(time_limit)}: expected seconds > 0, 'auto', or None")


def check_watch(watch_seconds) -> None:
    """Refuse a time after which a run would hang at once, or that is none."""
    if not _number(watch_seconds) or not 0 <= watch_seconds <= sys.float_info.max:
        raise ConfigError(f"watch_seconds={shown(watch_seconds)}: expected seconds, 0 is off")


# ------------------------------------------------------------------------- batches and strategies


def check_batch(global_batch: int, workers: int) -> None:
    """Refuse a batch of which some worker would never have a sample."""
    if global_batch < workers:
        raise ConfigError(
            f"global_batch={global_batch} is smaller than the {workers} workers, and some would "
            "never have a sample; use a larger batch or fewer ranks"
        )


def check_microbatches(microbatches: int | None, global_batch: int, strategy) -> None:
    """Refuse a number of pieces that a batch or a strategy cannot have."""
    check_whole(microbatches=microbatches)
    if microbatches is None:
        return
    if microbatches > global_batch:
        raise ConfigError(
            f"microbatches={shown(microbatches)} is more than the {global_batch} samples of a "
            "global batch; use at most as many"
        )
    if not getattr(strategy, "takes_microbatches", False):
        raise ConfigError(
            f"microbatches={microbatches} needs the allreduce strategy: servers add what comes in "
            "the order of arrival; leave microbatches out, or use md.AllReduce()"
        )
    if getattr(strategy, "accumulate", 1) > 1:
        raise ConfigError(
            f"accumulate={strategy.accumulate} and microbatches={microbatches}: pieces are "
            "computed one by one already; leave accumulate out"
        )


def check_replicated(strategy, **settings: int | None) -> None:
    """Refuse what needs replicas, or a loss that is everybody's, where there is none."""
    check_whole(**settings)
    for name, value in settings.items():
        if value is not None and not getattr(strategy, "has_replicas", False):
            raise ConfigError(
                f"{name}={value} needs the allreduce strategy: {_ON_SERVERS[name]}; leave it out, "
                "or use md.AllReduce()"
            )


# ------------------------------------------------------------------------------------- objects


def check_model(model, predicts: bool) -> None:
    """Refuse what is not a model, or a model without `predict` if the run needs it."""
    if isinstance(model, type) or not hasattr(model, "parameters"):
        raise ConfigError(f"model is {shown(model)}; {_MODEL}")
    _, problem = named_arrays(model)
    if problem is None and not model.parameters:
        problem = "its parameters are empty"
    if problem is None and not isinstance(getattr(model, "state", {}), Mapping):
        problem = f"its state is {shown(model.state)}, not a dict of arrays"
    if problem is not None:
        raise ConfigError(f"model {type(model).__name__}: {problem}; {_MODEL}")
    for name, needed in (("loss_and_gradients", True), ("predict", predicts)):
        if needed and not callable(getattr(model, name, None)):
            why = "" if name == "loss_and_gradients" else ", which test_data= needs"
            raise ConfigError(f"model {type(model).__name__} has no method {name}{why}; {_MODEL}")


def check_optimizer(optimizer) -> None:
    """Refuse what is not an optimizer, such as a name or a function that makes one."""
    methods = (callable(getattr(optimizer, name, None)) for name in ("init", "update"))
    if not isinstance(optimizer, type) and all(methods):
        return
    call = ""
    if callable(optimizer) or isinstance(optimizer, str):
        name = optimizer if isinstance(optimizer, str) else getattr(optimizer, "__name__", "")
        call = f" (call it: md.optim.{name}(...))" if str(name).isidentifier() else ""
    raise ConfigError(f"optimizer is {shown(optimizer)}{call}; {_OPTIMIZER}")


def check_checkpoint(checkpoint, resume) -> None:
    """Refuse what is neither a path nor a store, and an order to resume that cannot be meant."""
    path = isinstance(checkpoint, str | os.PathLike)
    store = not isinstance(checkpoint, type) and all(
        callable(getattr(checkpoint, name, None)) for name in ("save", "restore", "all_steps")
    )
    if checkpoint is not None and not (path or store):
        raise ConfigError(
            f"checkpoint is {shown(checkpoint)}; expected a path, a CheckpointStore, a "
            "TieredStore, or None"
        )
    if isinstance(checkpoint, str | os.PathLike):
        path_of("checkpoint", checkpoint)
    word = isinstance(resume, str) and resume in ("auto", "fresh")
    if not isinstance(resume, bool) and not word:
        raise ConfigError(f"resume={shown(resume)}: expected True, False, 'auto' or 'fresh'")
    if resume is True and checkpoint is None:
        raise ConfigError("resume=True needs checkpoint=, the folder to resume from")


def check_functions(callbacks, on_resize) -> tuple:
    """Return the callbacks; refuse functions that cannot be called."""
    if callable(callbacks) or isinstance(callbacks, str) or not isinstance(callbacks, Iterable):
        one = f", for one [{shown(callbacks)}]" if callable(callbacks) else ""
        raise ConfigError(
            f"callbacks is {shown(callbacks)}; expected a list of functions of a Step{one}"
        )
    functions = tuple(callbacks) if getattr(callbacks, "shape", None) != () else (callbacks,)
    for number, callback in enumerate(functions):
        if not callable(callback):
            raise ConfigError(
                f"callbacks[{number}] is {shown(callback)}; expected a function of a Step"
            )
    if on_resize is not None and not callable(on_resize):
        raise ConfigError(
            f"on_resize is {shown(on_resize)}; expected a function of (old ranks, new ranks, "
            "run), or None"
        )
    return functions


def check_reading(loading, quarantine, retry_bad) -> None:
    """Refuse what does not say how to read."""
    if loading is not None and not isinstance(loading, Loading):
        raise ConfigError(f"loading is {shown(loading)}; expected md.data.Loading(...), or None")
    if quarantine is not None and not isinstance(quarantine, str | os.PathLike):
        raise ConfigError(f"quarantine is {shown(quarantine)}; expected the path of a file")
    if not isinstance(retry_bad, bool):
        raise ConfigError(f"retry_bad={shown(retry_bad)}: expected True or False")


def check_loss(loss) -> Any:
    """Return what a model gave as its loss; ConfigError where that is no number."""
    if isinstance(loss, Real):
        return loss
    if getattr(loss, "shape", None) in ((), (1,)) and loss.dtype.kind in "fiuV":
        return loss  # of an array module, maybe on a device
    raise ConfigError(
        f"the model's loss_and_gradients returned {shown(loss)}; expected the mean loss of its "
        "batch, a number"
    )
