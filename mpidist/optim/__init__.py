"""Optimizers as (init, update) pairs over dicts of arrays, and learning-rate schedules.

With allreduce, each worker applies the optimizer to the averaged gradients; a parameter server
applies it to the gradients that workers send.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ..errors import ConfigError
from ..registry import build
from .adagrad import adagrad
from .adam import adam
from .clipping import clip_by_global_norm, clipped, global_norm
from .ftrl import ftrl
from .momentum import momentum
from .optimizer import Optimizer
from .schedules import SCHEDULES, Schedule, constant, cosine, step_decay
from .sgd import sgd

OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "sgd": sgd,
    "momentum": momentum,
    "adam": adam,
    "adagrad": adagrad,
    "ftrl": ftrl,
}

__all__ = [
    "OPTIMIZERS",
    "SCHEDULES",
    "Optimizer",
    "Schedule",
    "adagrad",
    "adam",
    "clip_by_global_norm",
    "clipped",
    "constant",
    "cosine",
    "from_settings",
    "ftrl",
    "global_norm",
    "momentum",
    "sgd",
    "step_decay",
]


def from_settings(name: str, settings: Mapping) -> Optimizer:
    """Make the optimizer called `name` from the settings in a job file.

    `settings` are the keyword arguments of the function with that name, such as `sgd`. ``lr`` may
    be a number, or a table with the key ``schedule`` and the keywords of that schedule, as in
    ``{"lr": {"schedule": "cosine", "lr": 0.05, "steps": 2000}}``. The key ``clip_norm`` makes an
    optimizer that clips gradients (see `clipped`). Raises ConfigError for an unknown name or key,
    or for a missing key.
    """
    settings = dict(settings)
    clip_norm = settings.pop("clip_norm", None)
    rate = settings.get("lr")
    if isinstance(rate, Mapping):
        rate = dict(rate)
        if "schedule" not in rate:
            known = ", ".join(repr(key) for key in SCHEDULES)
            raise ConfigError(
                f"optimizer {name!r}: lr is a table without the key 'schedule'; give one of {known}"
            )
        settings["lr"] = build(SCHEDULES, rate.pop("schedule"), rate, "schedule")
    optimizer = build(OPTIMIZERS, name, settings, "optimizer")
    return optimizer if clip_norm is None else clipped(optimizer, clip_norm)


def __dir__():
    return sorted(__all__)
