"""Policies for gradients that were computed from old parameters (stale gradients). Uses no MPI.

The age of a push is the number of updates that its server made after the worker's pull and before
the push. If n workers are equally fast, each push has an age of about n - 1.

=================== ==========================================================================
policy              effect on an update of age a
=================== ==========================================================================
KeepStale           none
DropStale           left out if a is above `beyond`, except pushes of many samples
ScaleStale          its weight is multiplied by 2 ** (-a / half_life)
DelayCompensated    its gradient becomes g + lam * g * g * (w - w at the worker's pull)
MomentumCorrected   what it adds to the velocity of momentum is multiplied by beta ** a
=================== ==========================================================================

One push may have a different age on each server. BSP, SSP(0) and backup workers take no policy,
because their gradients are not stale.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any, ClassVar

import numpy as np

from ...arrays import work_dtype
from ...errors import ConfigError, shown
from ...registry import build, checked_whole


@dataclass(frozen=True)
class Stale:
    """Base class of the policies for stale gradients.

    Attributes
    ----------
    compensates : bool
        Whether the server must keep the parameters that each worker has pulled.
    corrects : bool
        Whether the policy changes how much of a gradient is added to the velocity of momentum.
    """

    compensates: ClassVar[bool] = False
    corrects: ClassVar[bool] = False

    def factor(self, age: int, samples: int, global_batch: int | None) -> float:
        """Return the factor for the weight of a push that is `age` updates old; 0 drops the push.

        `samples` is the number of samples of the push, or -1 if the worker gave no number.
        """
        return 1.0

    def corrected(self, age: int, beta: float) -> tuple[float, float]:
        """Return two factors for a gradient that is `age` updates old.

        The gradient is multiplied by the first factor to update the parameters, and by the second
        to be added to the velocity; `beta` is the velocity's decay.
        """
        return 1.0, 1.0

    def compensated(self, gradient: np.ndarray, now: np.ndarray, before: np.ndarray) -> np.ndarray:
        """Return the gradient to apply in place of `gradient`, computed from old parameters.

        `now` are the present parameters, and `before` are the parameters that the worker had
        pulled.
        """
        return gradient


@dataclass(frozen=True)
class KeepStale(Stale):
    """Apply stale gradients as they are (the default)."""


@dataclass(frozen=True)
class DropStale(Stale):
    """Drop a gradient that is more than `beyond` updates old, unless it has many samples.

    If one worker is always slow, all its gradients may be dropped; the server then prints a
    warning.

    Parameters
    ----------
    beyond : int
        The largest age of a push that is applied. If n workers are equally fast, the age is about n
        - 1.
    keep_if_samples : int or float, optional
        A push of at least this many samples is always applied. A number below 1 is a fraction of
        the model's `global_batch`.

    Raises
    ------
    ConfigError
        `beyond` is negative or not a whole number, or `keep_if_samples` is not above 0.
    """

    beyond: int
    keep_if_samples: int | float | None = None

    def __post_init__(self):
        beyond = checked_whole("DropStale: beyond", self.beyond, 0)
        object.__setattr__(self, "beyond", beyond)  # the dataclass is frozen
        if self.keep_if_samples is not None:
            _checked_number("DropStale: keep_if_samples", self.keep_if_samples, 0.0)

    def factor(self, age: int, samples: int, global_batch: int | None) -> float:
        """Return 0 for a push that is dropped because of its age, else 1."""
        if age <= self.beyond:
            return 1.0
        enough = self.keep_if_samples
        if enough is None:
            return 0.0
        if enough < 1:
            return float(global_batch is not None and samples >= enough * global_batch)
        return float(samples >= enough)


@dataclass(frozen=True)
class ScaleStale(Stale):
    """Multiply the weight of a gradient of age a by ``2 ** (-a / half_life)``.

    Jiang et al., "Heterogeneity-aware distributed parameter servers", SIGMOD 2017, and Zhang et
    al., "Staleness-aware async-SGD", IJCAI 2016, arXiv 1511.05950, divide by the age instead.

    Parameters
    ----------
    half_life : float
        The age at which the weight of a gradient is halved.

    Raises
    ------
    ConfigError
        `half_life` is not above 0.
    """

    half_life: float

    def __post_init__(self):
        _checked_number("ScaleStale: half_life", self.half_life, 0.0)

    def factor(self, age: int, samples: int, global_batch: int | None) -> float:
        """Return the factor of the weight of a push that is `age` updates old; it is never 0."""
        return max(2.0 ** (-age / self.half_life), 1e-9)


@dataclass(frozen=True)
class DelayCompensated(Stale):
    """Correct a gradient for the updates since its worker's pull, by a Taylor expansion.

    In place of the gradient g, the server applies ``g + lam * g * g * (w - w_pulled)``, where w are
    its present parameters and w_pulled those that the worker had pulled. The squares of the
    gradient estimate the diagonal of the Hessian. The server keeps the parameters that each worker
    has pulled, which takes the memory of one more model per worker. ``lam=0`` has the effect of
    `KeepStale`.

    Zheng et al., "Asynchronous stochastic gradient descent with delay compensation", ICML 2017,
    arXiv 1609.08326.

    Parameters
    ----------
    lam : float
        The strength of the correction; the paper uses 0.04 to 2.

    Raises
    ------
    ConfigError
        `lam` is negative or not a finite number.
    """

    lam: float = 0.04
    compensates = True

    def __post_init__(self):
        _checked_number("DelayCompensated: lam", self.lam, None)

    def compensated(self, gradient: np.ndarray, now: np.ndarray, before: np.ndarray) -> np.ndarray:
        """Return the corrected gradient, in the dtype of `gradient`.

        A value of the gradient is not corrected if the corrected value would not be finite.
        """
        dtype = work_dtype(gradient.dtype)
        wide = gradient.astype(dtype)
        moved = now.astype(dtype) - before.astype(dtype)
        with np.errstate(over="ignore", invalid="ignore"):
            corrected = (wide + self.lam * wide * wide * moved).astype(gradient.dtype)
        return np.where(np.isfinite(corrected), corrected, gradient)


@dataclass(frozen=True)
class MomentumCorrected(Stale):
    """Multiply what an old gradient adds to the velocity of momentum by a factor below 1.

    ``optim.momentum`` repeats a gradient in all later updates, each time multiplied by ``beta``
    once more. With this policy an old gradient moves the parameters once, and is added to the
    velocity with the factor ``beta ** age``. The age is the number of updates by which the gradient
    is late. So its part of the velocity is as small as if the gradient had come in time.

    The policy is similar to the momentum factor masking of Lin et al., "Deep gradient compression",
    ICLR 2018, arXiv 1712.01887. Mitliagkas et al., "Asynchrony begets momentum", 2016, arXiv
    1605.09774, explain why asynchronous updates need less momentum.

    Parameters
    ----------
    catch_up : bool
        If true, an old gradient moves the parameters further at once, so that in total it moves
        them as far as a gradient that came in time.

    Raises
    ------
    ConfigError
        `catch_up` is not true or false; or, when a model is added, the optimizer has no velocity.
    """

    catch_up: bool = False
    corrects = True

    def __post_init__(self):
        if not isinstance(self.catch_up, bool):
            raise ConfigError(
                f"MomentumCorrected: catch_up is {shown(self.catch_up)}, expected true or false"
            )

    def corrected(self, age: int, beta: float) -> tuple[float, float]:
        """Return two factors for a gradient that is `age` updates old.

        The gradient is multiplied by the first factor to update the parameters, and by the second
        to be added to the velocity; `beta` is the velocity's decay.
        """
        kept = beta**age
        missed = beta * (1 - kept) / (1 - beta) if self.catch_up else 0.0
        return 1.0 + missed, kept


def check_momentum(model: str, stale: Stale, optimizer, elsewhere: bool = False) -> None:
    """Raise ConfigError if `stale` is `MomentumCorrected`, but the model cannot use this policy.

    The policy needs the optimizer ``optim.momentum``. It cannot be used if the velocity is also on
    another server or on a GPU (`elsewhere`).
    """
    if not stale.corrects:
        return
    if beta_of(optimizer) is None:
        kind = getattr(optimizer, "name", type(optimizer).__name__)
        raise ConfigError(
            f"model {model!r}: stale={stale} needs the optimizer momentum, got {kind}; leave stale "
            "out, or use another policy"
        )
    # The velocity is also on another server, or on a GPU.
    if elsewhere:
        raise ConfigError(
            f"model {model!r}: stale={stale} needs servers with neither copies (replicas) nor a GPU"
        )


def beta_of(optimizer) -> float | None:
    """Return the decay of the velocity of an optimizer, or None if it has no velocity."""
    settings = getattr(optimizer, "settings", None)
    has = isinstance(settings, Mapping) and getattr(optimizer, "name", "") == "momentum"
    return float(settings["beta"]) if has and settings else None


def _checked_number(name: str, value, above: float | None) -> None:
    number = isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
    if not number or (value < 0 if above is None else value <= above):
        least = "of at least 0" if above is None else f"above {above:g}"
        raise ConfigError(f"{name} is {shown(value)}, expected a number {least}")


#: name in job files -> policy. For a new policy, add a subclass of `Stale` and a line here.
STALE: dict[str, Callable[..., Stale]] = {
    "keep": KeepStale,
    "drop": DropStale,
    "scale": ScaleStale,
    "delay_compensated": DelayCompensated,
    "momentum_corrected": MomentumCorrected,
}


def stale_policy(given) -> Stale:
    """Return the policy for stale gradients that a setting describes.

    `given` is None, a name, a mapping with the key ``name``, or a policy.
    """
    if given is None:
        return KeepStale()
    if isinstance(given, str):
        return build(STALE, given, {}, "policy for stale gradients")
    if isinstance(given, Mapping):
        settings = {str(key): value for key, value in given.items()}
        name = settings.pop("name", None)
        return build(STALE, name, settings, "policy for stale gradients")
    if not isinstance(given, Stale):
        raise ConfigError(
            f"stale is {shown(given)}; give md.KeepStale(), md.DropStale(beyond), "
            "md.ScaleStale(half_life), md.DelayCompensated(lam) or md.MomentumCorrected()"
        )
    return given


def update_corrected(
    shard: Any, gradients: Mapping[str, Any], weight: float, factors: tuple[float, float]
) -> None:
    """Update a server's part of a model with stale gradients, for the policy `MomentumCorrected`.

    The parameters are updated with the gradients times the first of the two `factors`. The
    gradients times the second factor are added to the velocity of momentum.
    """
    factor, kept = factors
    rows = {key: g if isinstance(g, tuple) else (None, g) for key, g in gradients.items()}
    scaled = {key: g * g.dtype.type(factor) for key, (_, g) in rows.items()}
    shard.update(
        {key: g if rows[key][0] is None else (rows[key][0], g) for key, g in scaled.items()},
        weight,
    )
    for key, (where, gradient) in rows.items():
        velocity = shard.state["velocity"][key]
        less = gradient * gradient.dtype.type(factor - kept)
        if where is None:
            velocity -= less
        elif len(where):
            velocity.reshape(-1, less[0].size)[where] -= less.reshape(len(where), -1)
