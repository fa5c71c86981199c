"""Propose shares from the measured busy seconds of the servers; uses no MPI.

    shares           1/2         1/2         of each model
    busy seconds     0.2         0.8         since the last measurement
    speed            2.5         0.6         share per busy second
    in proportion    0.8         0.2         the shares with which both would be busy for 0.32 s

By default, a share moves only half of the way from its present value to the share in proportion to
the speed. The shares change only if the busiest server would be busy for clearly less time with the
new shares than with the old ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ...errors import ConfigError, shown
from ...registry import checked_whole

#: A server keeps at least this fraction of an equal share, so that its speed is still measured.
_LEAST = 0.1

#: If the servers are busy for less than this fraction of the time, shares do not change.
_BUSY = 0.02


class BusySince(NamedTuple):
    """How many seconds a server was busy, and how many pushes it got, within `seconds` seconds."""

    busy: float = 0.0
    pushes: int = 0
    seconds: float = 0.0

    def since(self, before: BusySince) -> BusySince:
        """Return the increase of all numbers since the earlier measurement `before`."""
        busy, pushes, seconds = before
        return BusySince(self.busy - busy, self.pushes - pushes, self.seconds - seconds)


@dataclass(frozen=True)
class Rebalance:
    """When and how far mpidist changes the shares of servers according to their busy seconds.

    Parameters
    ----------
    every : int
        The number of steps between two measurements, at least 1.
    gain : float
        Above 0 and below 1. The shares change only if shares in proportion to the measured speeds
        (share per busy second) would reduce the busy seconds of the busiest server by at least this
        fraction.
    step : float
        Above 0 and at most 1. With 1, the new shares are in proportion to the measured speeds. With
        0.5, they are half-way between those and the present shares.

    Raises
    ------
    ConfigError
        A value is outside its range.
    """

    every: int = 100
    gain: float = 0.1
    # Half of the way, because a part of the busy seconds does not depend on the share, and because
    # a measurement may be disturbed.
    step: float = 0.5

    def __post_init__(self):
        whole = checked_whole("Rebalance: every", self.every, 1)
        object.__setattr__(self, "every", whole)  # the dataclass is frozen
        for name, most in (("gain", 1 - 1e-9), ("step", 1.0)):
            value = getattr(self, name)
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not number or not 0 < value <= most:
                limits = "above 0 and below 1" if name == "gain" else "above 0, at most 1"
                raise ConfigError(f"Rebalance: {name} is {shown(value)}, expected {limits}")

    def follow(self, shares: Sequence[float], since: Sequence[BusySince]) -> list[float] | None:
        """Return new shares from what the servers have measured since the last call, or None.

        None means that a server got no push, that all servers were busy for too little time, or
        that `propose` changes nothing.
        """
        if any(not one.pushes for one in since):
            return None
        if all(one.busy < _BUSY * one.seconds for one in since):
            return None
        return self.propose(shares, [one.busy for one in since])

    def propose(self, shares: Sequence[float], busy: Sequence[float]) -> list[float] | None:
        """Return new shares from the servers' busy seconds; None if the present ones are good."""
        # A server with share 0 keeps this share.
        serving = [k for k, share in enumerate(shares) if share]
        if len(serving) < 2 or min(busy[k] for k in serving) <= 0:
            return None
        speeds = {k: shares[k] / busy[k] for k in serving}
        total, least = sum(speeds.values()), _LEAST / len(serving)
        goals = {k: max(least, speeds[k] / total) for k in serving}
        goals = {k: goal / sum(goals.values()) for k, goal in goals.items()}
        expected = max(busy[k] * goals[k] / shares[k] for k in serving)
        if expected > (1 - self.gain) * max(busy[k] for k in serving):
            return None
        found = [0.0] * len(shares)
        for k in serving:
            found[k] = shares[k] + self.step * (goals[k] - shares[k])
        return found


def rebalance_policy(given) -> Rebalance | None:
    """Return the setting `rebalance` of a strategy as a `Rebalance`; None if shares never change.

    `given` is None, "auto", a number of steps, a mapping of settings, or a `Rebalance`.
    """
    if given is None or isinstance(given, Rebalance):
        return given
    if isinstance(given, str) and given == "auto":
        return Rebalance()
    if isinstance(given, Mapping):
        known = ("every", "gain", "step")
        if wrong := [name for name in given if name not in known]:
            raise ConfigError(
                f"rebalance has {shown(wrong[0])}; expected some of {', '.join(known)}"
            )
        return Rebalance(**{str(name): value for name, value in given.items()})
    if isinstance(given, int) and not isinstance(given, bool):
        return Rebalance(given)
    raise ConfigError(
        f"rebalance={shown(given)}; expected 'auto', every how many steps, md.Rebalance(...), or a "
        "table with every, gain and step"
    )
