"""Learning rates as functions of the step: constant, cosine and step decay.

A schedule is called with the number of updates so far and returns the learning rate of the next
update. Any callable ``step -> float`` is a valid schedule.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from ..errors import ConfigError
from ..registry import checked_whole

Rate = float | Callable[[float], float]


@dataclass(frozen=True)
class Schedule:
    """A callable ``step -> rate`` that also has a name, and settings that are plain numbers."""

    name: str
    settings: dict
    rate: Callable[[float], float] = field(repr=False, compare=False)

    def __call__(self, step: float) -> float:
        """Return the learning rate of the update that follows `step` updates."""
        return self.rate(step)


def constant(lr: float) -> Schedule:
    """Return the schedule with the same rate `lr` at every step."""
    lr = _rate("learning rate", "lr", lr)
    return Schedule("constant", {"lr": lr}, lambda step: lr)


def cosine(lr: float, steps: int, warmup: int = 0, final: float = 0.0) -> Schedule:
    """Return a schedule: a linear warm-up, then half a cosine from `lr` to `final` at step `steps`.

    During the warm-up the rate is ``lr * (step + 1) / warmup`` while ``step < warmup``, so the
    first update already moves the parameters. After `steps` updates the rate stays `final`.

    References
    ----------
    Loshchilov and Hutter, SGDR, ICLR 2017, arXiv:1608.03983 (without restarts). Warm-up: Goyal
    et al., Accurate, Large Minibatch SGD, 2017, arXiv:1706.02677.
    """
    lr, final = _rate("cosine", "lr", lr), _rate("cosine", "final", final)
    steps = checked_whole("cosine: steps", steps, 1)
    warmup = checked_whole("cosine: warmup", warmup, 0)
    if warmup >= steps:
        raise ConfigError(f"cosine: warmup is {warmup}, expected fewer than steps ({steps})")

    def rate(step: float) -> float:
        if step < warmup:
            return lr * min(step + 1, warmup) / warmup
        share = min((step - warmup) / (steps - warmup), 1.0)
        return final + (lr - final) * 0.5 * (1 + math.cos(math.pi * share))

    settings = {"lr": lr, "steps": steps, "warmup": warmup, "final": final}
    return Schedule("cosine", settings, rate)


def step_decay(lr: float, every: int, factor: float = 0.1, warmup: int = 0) -> Schedule:
    """Return the schedule ``lr * factor ** floor(step / every)``, with a linear warm-up.

    During the warm-up the rate is ``lr * (step + 1) / warmup`` while ``step < warmup``. The steps
    of the decay are counted from step 0, not from the end of the warm-up.
    """
    lr = _rate("step_decay", "lr", lr)
    every = checked_whole("step_decay: every", every, 1)
    warmup = checked_whole("step_decay: warmup", warmup, 0)
    if not 0 < factor <= 1:
        raise ConfigError(f"step_decay: factor is {factor}, expected 0 < factor <= 1")

    def rate(step: float) -> float:
        rise = min(step + 1, warmup) / warmup if step < warmup else 1.0
        # The weights of several updates add up to a whole number only up to rounding: the sum of
        # ten times 0.1 is less than 1.
        return lr * rise * factor ** math.floor(step / every + 1e-9)

    settings = {"lr": lr, "every": every, "factor": float(factor), "warmup": warmup}
    return Schedule("step_decay", settings, rate)


SCHEDULES: dict[str, Callable[..., Schedule]] = {
    "constant": constant,
    "cosine": cosine,
    "step_decay": step_decay,
}


def as_schedule(lr: Rate) -> Schedule:
    """Return `lr` as a Schedule.

    A number becomes the schedule `constant`. A function becomes a Schedule with the function's
    name.
    """
    if isinstance(lr, Schedule):
        return lr
    if callable(lr):
        return Schedule(getattr(lr, "__name__", type(lr).__name__), {}, lambda s: float(lr(s)))
    return constant(lr)


def check_range(
    maker: str, name: str, value: float, high: float = math.inf, kind: str = "a number"
) -> float:
    """Return an argument as a float; raise ConfigError unless 0 <= `value` < `high`."""
    if isinstance(value, bool | np.bool_) or not hasattr(value, "__float__") or np.ndim(value):
        raise ConfigError(f"{maker}: {name} is {value!r}, expected {kind}")
    if not 0 <= float(value) < high:
        raise ConfigError(f"{maker}: {name} is {value}, expected 0 <= {name} < {high}")
    return float(value)


_rate = partial(check_range, kind="a number or a schedule")
