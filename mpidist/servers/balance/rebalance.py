"""Propose shares from the measured busy seconds of the servers; uses no MPI.

    shares           1/2         1/2         of each model
    busy seconds     0.2         0.8         since the last measurement
    speed            2.5         0.6         share per busy second
    in proportion    0.8         0.2         the shares with which both would be busy for 0.32 s

By default, a share moves only half of the way from its present value to the share in proportion to
the speed. The shares change only if the predicted time (here 0.32 s) is clearly below the longest
measured busy time (here 0.8 s).
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
    """Measured during `seconds` seconds: how long a server was busy, and how many pushes it got."""

    busy: float = 0.0
    pushes: int = 0
    seconds: float = 0.0

    def since(self, before: BusySince) -> BusySince:
        """Return the busy seconds, pushes and seconds in all since the measurement `before`."""
        busy, pushes, seconds = before
        return BusySince(self.busy - busy, self.pushes - pushes, self.seconds - seconds)


@dataclass(frozen=True)
class Rebalance:
    """When and how far mpidist changes the servers' shares, according to how busy the servers are.

    A share is the fraction of each model that a server holds. A server is busy while it receives
    requests, makes updates or writes answers.

    Parameters
    ----------
    every : int
        The number of steps between two measurements, at least 1.
    gain : float
        Above 0 and below 1. The shares change only if the predicted busy seconds of the busiest
        server fall by at least this fraction. The prediction assumes new shares in proportion to
        the measured speeds. The speed of a server is its share divided by its busy seconds.
    step : float
        Above 0 and at most 1. How far the shares move from their present values to shares in
        proportion to the measured speeds. 1 is the whole way, and 0.5 is half of the way.

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
        """Return a new share for each server, or None if the shares stay.

        A share is the fraction of each model that a server holds. `shares` has the present share of
        each server, and `since` has what each server has measured since the last call. None means
        that a server got no push, that all servers were busy for too little time, or that `propose`
        returns None.
        """
        if any(not one.pushes for one in since):
            return None
        if all(one.busy < _BUSY * one.seconds for one in since):
            return None
        return self.propose(shares, [one.busy for one in since])

    def propose(self, shares: Sequence[float], busy: Sequence[float]) -> list[float] | None:
        """Return a new share for each server, computed from busy seconds; None if the shares stay.

        A share is the fraction of each model that a server holds. `shares` has the present share of
        each server, and `busy` has its busy seconds. The shares stay if a change would save too
        little time (see `gain`), if fewer than two servers have a share, or if one of them was not
        busy at all.
        """
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
    """Return a strategy's setting `rebalance` as a `Rebalance` object; None stays None.

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
