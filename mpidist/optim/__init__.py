"""Optimizers as (init, update) pairs over dicts of arrays, and learning-rate schedules.

No optimizer here knows about ranks: a worker applies one to the reduced gradients, a parameter
server to the pushed ones, and both get the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ..errors import ConfigError
from ..registry import build
from .adam import adam
from .clipping import clip_by_global_norm, clipped, global_norm
from .momentum import momentum
from .optimizer import Optimizer
from .schedules import SCHEDULES, Schedule, constant, cosine, step_decay
from .sgd import sgd

OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {"sgd": sgd, "momentum": momentum, "adam": adam}

__all__ = [
    "OPTIMIZERS",
    "SCHEDULES",
    "Optimizer",
    "Schedule",
    "adam",
    "clip_by_global_norm",
    "clipped",
    "constant",
    "cosine",
    "from_settings",
    "global_norm",
    "momentum",
    "sgd",
    "step_decay",
]


def from_settings(name: str, settings: Mapping) -> Optimizer:
    """Make the optimizer `name` as a job file describes it.

    `settings` are the maker's keywords; ``lr`` may be a number or a table with the key
    ``schedule`` and that schedule's keywords, as in
    ``{"lr": {"schedule": "cosine", "lr": 0.05, "steps": 2000}}``, which is also how
    ``Optimizer.settings`` gives it back. With ``clip_norm`` the optimizer is `clipped`. Raises
    ConfigError for an unknown name or key (with the nearest one) and for a missing one.
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
