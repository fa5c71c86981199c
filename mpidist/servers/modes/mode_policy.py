"""Policies that say in which steps of `md.train` the consistency mode changes. Uses no MPI."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ...errors import ConfigError, shown
from ...registry import checked_whole
from ..consistency import Consistency
from .agreed_changes import encode_mode

#: A policy is a function of the step that returns a mode, or None to keep the present mode. All
#: workers call it in each step, and it must return the same mode on all workers.
ModePolicy = Callable[[int], Consistency | None]


@dataclass(frozen=True)
class ModeSteps:
    """A policy for `md.train`, made of pairs (step, consistency mode that begins with the step)."""

    pairs: tuple[tuple[int, Consistency], ...] = ()

    def __call__(self, step: int) -> Consistency | None:
        """Return the mode of a step, or None before the first change."""
        found = bisect_right([first for first, _ in self.pairs], step)
        return self.pairs[found - 1][1] if found else None


def mode_policy(given, first: Consistency) -> ModePolicy | None:
    """Return a function that chooses the consistency mode of each step; None if it never changes.

    The function takes the number of a step, and returns a mode, or None to keep the present mode.
    `given` is the user's setting `changes`: a mapping of step to mode, such as ``{1000:
    md.ASP()}``, a list of such pairs, a function, or None for no changes. `first` is the mode
    before the first change. Raises ConfigError if training cannot change between these modes.
    """
    if given is None:
        return None
    encode_mode(first)
    if callable(given):
        return given
    try:
        pairs = list(given.items() if isinstance(given, Mapping) else map(tuple, given))
        steps = [step for step, _ in pairs]
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"changes is {shown(given)}; expected a mapping of step to mode, such as "
            "{1000: md.ASP()}, or a function of the step"
        ) from error
    steps = [checked_whole("changes: step", step, 2) for step in steps]
    for _, mode in pairs:
        encode_mode(mode)
    if steps != sorted(set(steps)):
        raise ConfigError(f"changes: the steps {steps} are not in ascending order")
    return ModeSteps(tuple(zip(steps, (mode for _, mode in pairs), strict=True)))
