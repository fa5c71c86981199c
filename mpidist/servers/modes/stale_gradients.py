"""What a server does with a gradient that was computed from old parameters. Uses no MPI.

The age of a push is the number of updates that its server made after the worker's pull and before
the push. Of n workers with equal speed, each push is about n - 1 updates old.

=================== ==========================================================================
policy              an update of age a
=================== ==========================================================================
KeepStale           counts in full
DropStale           is left out if a is above `beyond`, but for pushes of many samples
ScaleStale          has its weight multiplied by 2 ** (-a / half_life)
DelayCompensated    gets the gradient g + lam * g * g * (w - w at the worker's pull)
MomentumCorrected   moves the parameters, and is left in the velocity by beta ** a only
=================== ==========================================================================

The weight multiplies the learning rate, as the weight of a push by its samples does. Each server
counts the age of its own part of a push, so one push may have a different age on each server.

Under BSP and with backup workers each gradient that counts is of the newest parameters, and under
SSP(0) of the step before, so these modes take no policy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import ClassVar

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
        Whether the policy changes what a gradient leaves in the velocity, see `MomentumCorrected`.
    """

    compensates: ClassVar[bool] = False
    corrects: ClassVar[bool] = False

    def factor(self, age: int, samples: int, global_batch: int | None) -> float:
        """Return a factor of the weight of a push; 0 drops it. `samples` is -1 if not given."""
        return 1.0

    def corrected(self, age: int, beta: float) -> tuple[float, float]:
        """Return by what to multiply a gradient in its update, and what stays in the velocity."""
        return 1.0, 1.0

    def compensated(self, gradient: np.ndarray, now: np.ndarray, before: np.ndarray) -> np.ndarray:
        """Return the gradient to apply, from the parameters of today and those of the pull."""
        return gradient


@dataclass(frozen=True)
class KeepStale(Stale):
    """Apply stale gradients as they are (the default)."""


@dataclass(frozen=True)
class DropStale(Stale):
    """Drop a gradient that is more than `beyond` updates old, unless it has many samples.

    If one worker is always slow, all its gradients may be dropped; the server then warns. Give
    `keep_if_samples` to keep what such a worker has computed from much data.

    Parameters
    ----------
    beyond : int
        The largest age that counts. n workers of equal speed have an age of about n - 1.
    keep_if_samples : int or float, optional
        A push of at least this many samples counts whatever its age. A number below 1 is a share
        of the model's `global_batch`.

    Raises
    ------
    ConfigError
        `beyond` is negative or no whole number, or `keep_if_samples` is not above 0.
    """

    beyond: int
    keep_if_samples: int | float | None = None

    def __post_init__(self):
        beyond = checked_whole("DropStale: beyond", self.beyond, 0)
        object.__setattr__(self, "beyond", beyond)  # the dataclass is frozen
        if self.keep_if_samples is not None:
            _checked_number("DropStale: keep_if_samples", self.keep_if_samples, 0.0)

    def factor(self, age: int, samples: int, global_batch: int | None) -> float:
        """Return 0 for a push that is dropped, else 1."""
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

    The samples of a push are part of its weight already, so an old gradient of much data still
    counts more than an old one of little data.

    Jiang et al., "Heterogeneity-aware distributed parameter servers", SIGMOD 2017, and Zhang et
    al., "Staleness-aware async-SGD", IJCAI 2016, arXiv 1511.05950, divide by the age instead.

    Parameters
    ----------
    half_life : float
        The age at which a gradient counts by half.

    Raises
    ------
    ConfigError
        `half_life` is not above 0.
    """

    half_life: float

    def __post_init__(self):
        _checked_number("ScaleStale: half_life", self.half_life, 0.0)

    def factor(self, age: int, samples: int, global_batch: int | None) -> float:
        """Return the factor of the weight; it is never 0."""
        return max(2.0 ** (-age / self.half_life), 1e-9)


@dataclass(frozen=True)
class DelayCompensated(Stale):
    """Correct a gradient for the updates since its worker's pull, by a Taylor expansion.

    The server applies ``g + lam * g * g * (w - w_pulled)``, with the squares of the gradient as an
    estimate of the diagonal of the Hessian. It keeps the parameters that each worker has pulled,
    which takes the memory of one more model per worker. ``lam=0`` is `KeepStale`.

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

        Squares may overflow, mostly in half precision. A value of the gradient is not corrected if
        the corrected value would not be finite.
        """
        dtype = work_dtype(gradient.dtype)
        wide = gradient.astype(dtype)
        moved = now.astype(dtype) - before.astype(dtype)
        with np.errstate(over="ignore", invalid="ignore"):
            corrected = (wide + self.lam * wide * wide * moved).astype(gradient.dtype)
        return np.where(np.isfinite(corrected), corrected, gradient)


@dataclass(frozen=True)
class MomentumCorrected(Stale):
    """Leave in the velocity of momentum only what an old gradient would have left by now.

    ``optim.momentum`` repeats a gradient in all later updates, by a factor of ``beta`` less in
    each. An old gradient that is repeated drives the parameters on in a direction that is no longer
    right, beside those that came in time. With this policy a gradient of age a moves the parameters
    once, and ``beta ** a`` of it stays in the velocity, as if it had come a updates before.

    The momentum factor masking of Lin et al., "Deep gradient compression", ICLR 2018, arXiv
    1712.01887, which takes late gradients out of the velocity. Mitliagkas et al., "Asynchrony
    begets momentum", 2016, arXiv 1605.09774, says why asynchronous updates need less momentum.

    Parameters
    ----------
    catch_up : bool
        Whether the gradient also moves the parameters at once as far as the repetitions that it has
        missed. In total it then moves them as far as a gradient that came in time.

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
        """Return by what to multiply a gradient in its update, and what stays in the velocity."""
        kept = beta**age
        missed = beta * (1 - kept) / (1 - beta) if self.catch_up else 0.0
        return 1.0 + missed, kept


def check_momentum(model: str, stale: Stale, optimizer, elsewhere: bool = False) -> None:
    """Raise ConfigError if a policy corrects the momentum of an optimizer that has none.

    `elsewhere` says that the velocity is also on another server, or on a device.
    """
    if not stale.corrects:
        return
    if beta_of(optimizer) is None:
        kind = getattr(optimizer, "name", type(optimizer).__name__)
        raise ConfigError(
            f"model {model!r}: stale={stale} needs the optimizer momentum, got {kind}; leave stale "
            "out, or use another policy"
        )
    if elsewhere:
        raise ConfigError(
            f"model {model!r}: stale={stale} needs servers without copies (replicas) or a GPU"
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


#: The policies by their names in job files. A new one is a subclass of `Stale` and a line here.
STALE: dict[str, Callable[..., Stale]] = {
    "keep": KeepStale,
    "drop": DropStale,
    "scale": ScaleStale,
    "delay_compensated": DelayCompensated,
    "momentum_corrected": MomentumCorrected,
}


def stale_policy(given) -> Stale:
    """Return the policy for None, a name, a mapping with ``name`` and settings, or a policy."""
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
