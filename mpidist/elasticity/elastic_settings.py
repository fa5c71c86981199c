"""The settings of an elastic run of `md.train`."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import ConfigError, shown
from ..registry import checked_whole
from .evict import parse_deadline


@dataclass(frozen=True)
class Elastic:
    """How a run of `md.train` goes on after ranks have died; see docs/elastic.md.

    Parameters
    ----------
    min_ranks : int
        With fewer living ranks the run ends by RankFailure.
    spares : int
        So many of the last ranks wait, and do not train. After a death, a spare steps in, so the
        number of ranks that train stays the same.
    deadline : "stopped", "auto" or float
        When a rank that does not come is evicted (killed by the ranks of its node): after it has
        been stopped for 5 seconds, or by a number of seconds, or by 20 times the median time of a
        step.
    slow : float
        A rank that computes this many times slower than the median of the others, in two windows
        of ten steps, is evicted at the end of a step; 0 is never.
    """

    min_ranks: int = 1
    spares: int = 0
    deadline: str | float = "stopped"
    slow: float = 0

    def __post_init__(self):
        checked_whole("min_ranks", self.min_ranks, 1)
        checked_whole("spares", self.spares, 0)
        parse_deadline(self.deadline, self.slow)


def as_elastic(given) -> Elastic:
    """Return the settings for the argument `elastic` of `md.train`; raise ConfigError if wrong."""
    if given is True:
        return Elastic()
    if isinstance(given, Elastic):
        return given
    raise ConfigError(f"elastic={shown(given, 60)}; expected True, False or md.Elastic(...)")
