"""Learning rates as functions of the step: constant, cosine and step decay.

A schedule is called with the number of updates already made (a float: on a parameter server a
push counts as its share of a global batch) and returns the rate of the next one. Any callable
``step -> float`` will do where a schedule is expected; the ones made here also know their name
and settings, so that a run's summary and its checkpoint can say what they were.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from ..errors import ConfigError

Rate = float | Callable[[float], float]


@dataclass(frozen=True)
class Schedule:
    """A callable ``step -> rate`` that can be described in plain numbers."""

    name: str
    settings: dict
    rate: Callable[[float], float] = field(repr=False, compare=False)

    def __call__(self, step: float) -> float:
        """The rate of the update after `step` updates."""
        return self.rate(step)


def constant(lr: float) -> Schedule:
    """The same rate `lr` at every step."""
    lr = _rate("learning rate", "lr", lr)
    return Schedule("constant", {"lr": lr}, lambda step: lr)


def cosine(lr: float, steps: int, warmup: int = 0, final: float = 0.0) -> Schedule:
    """Half a cosine from `lr` down to `final` at step `steps`, after a linear warm-up.

    Warm-up: ``lr * (step + 1) / warmup`` while ``step < warmup``, so the first update already
    moves. Beyond `steps` the rate stays `final`: training longer than planned with ``final=0``
    changes nothing any more.

    References
    ----------
    Loshchilov and Hutter, SGDR, ICLR 2017, arXiv:1608.03983 (without restarts). Warm-up: Goyal
    et al., Accurate, Large Minibatch SGD, 2017, arXiv:1706.02677.
    """
    lr, final = _rate("cosine", "lr", lr), _rate("cosine", "final", final)
    steps, warmup = _count("cosine", "steps", steps, 1), _count("cosine", "warmup", warmup, 0)
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
    """``lr * factor ** floor(step / every)``, after a linear warm-up.

    The warm-up is that of `cosine`; decay counts from step 0, not from its end.
    """
    lr = _rate("step_decay", "lr", lr)
    every, warmup = (
        _count("step_decay", "every", every, 1),
        _count("step_decay", "warmup", warmup, 0),
    )
    if not 0 < factor <= 1:
        raise ConfigError(f"step_decay: factor is {factor}, expected 0 < factor <= 1")

    def rate(step: float) -> float:
        rise = min(step + 1, warmup) / warmup if step < warmup else 1.0
        # Shares of pushes add up to a whole number only to rounding: 10 * 0.1 falls short of 1.
        return lr * rise * factor ** math.floor(step / every + 1e-9)

    settings = {"lr": lr, "every": every, "factor": float(factor), "warmup": warmup}
    return Schedule("step_decay", settings, rate)


SCHEDULES: dict[str, Callable[..., Schedule]] = {
    "constant": constant,
    "cosine": cosine,
    "step_decay": step_decay,
}


def as_schedule(lr: Rate) -> Schedule:
    """Return `lr` as a Schedule: a number becomes constant, a callable keeps its name."""
    if isinstance(lr, Schedule):
        return lr
    if callable(lr):
        return Schedule(getattr(lr, "__name__", type(lr).__name__), {}, lambda s: float(lr(s)))
    return constant(lr)


def _rate(schedule: str, name: str, value: float) -> float:
    number = isinstance(value, int | float) or hasattr(value, "__float__")
    if isinstance(value, bool | str) or not number:
        raise ConfigError(f"{schedule}: {name} is {value!r}, expected a number or a schedule")
    if not 0 <= float(value) < math.inf:
        raise ConfigError(f"{schedule}: {name} is {value}, expected 0 <= {name} < inf")
    return float(value)


def _count(schedule: str, name: str, value: int, low: int) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise ConfigError(f"{schedule}: {name} is {value!r}, expected a whole number")
    if value < low:
        raise ConfigError(f"{schedule}: {name} is {value}, expected at least {low}")
    return int(value)
