"""The settings of an elastic run of `md.train`."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import ConfigError, shown
from ..registry import checked_whole
from .deadline import parse_deadline


@dataclass(frozen=True)
class Elastic:
    """How a run of `md.train` goes on after ranks have died; see docs/elastic.md.

    Parameters
    ----------
    min_ranks : int
        If fewer ranks live, the run ends with the error RankFailure.
    spares : int
        The last `spares` ranks wait and do not train. After a death, a spare replaces the dead
        rank, so the number of ranks that train stays the same.
    deadline : "stopped", "auto" or float
        When the other ranks of a node evict (kill) a rank. With "stopped", a rank is evicted after
        it has been stopped for 5 seconds. With a number, a rank is evicted after it has been
        stopped for this number of seconds, or has computed for so long while other ranks waited.
        With "auto", the number is the time of 20 median steps.
    slow : float
        A rank is evicted if it needs this many times as long for a step as the median of the other
        ranks, in the last ten steps and in the ten steps before. 0 switches this off.
    copies : "memory", "none" or int
        Under ``mpidist launch --elastic``, each node keeps a copy of the state in its memory. If
        the ranks cannot go on after a death, `mpidist launch` starts them again from this copy. A
        number says how many steps are between two copies. With "memory", the copies are made so
        often that they take at most 3 % of the time. With "none", there are no copies.
    on_exception : "end" or "evict"
        What happens if the model, the reading of data or a callback raises an exception on one
        rank: with "end" the job ends, and with "evict" only this rank is evicted. Even with
        "evict", the job ends if more than half of the ranks raise, or if another rank raises when
        the step is repeated.
    """

    min_ranks: int = 1
    spares: int = 0
    deadline: str | float = "stopped"
    slow: float = 0
    copies: str | int = "memory"
    on_exception: str = "end"

    def __post_init__(self):
        checked_whole("min_ranks", self.min_ranks, 1)
        checked_whole("spares", self.spares, 0)
        parse_deadline(self.deadline, self.slow)
        if self.copies not in ("memory", "none"):
            checked_whole("copies", self.copies, 1, ', or "memory", or "none"')
        if self.on_exception not in ("end", "evict"):
            wanted = 'expected "end" or "evict"'
            raise ConfigError(f"on_exception={shown(self.on_exception)}; {wanted}")

    @property
    def every(self) -> int | str | None:
        """How often nodes copy their state to memory (`every` of `MemoryCopies`); None: never."""
        return {"memory": "auto 1h", "none": None}.get(str(self.copies), self.copies)


def as_elastic(given) -> Elastic:
    """Return the settings for the argument `elastic` of `md.train`.

    Raises ConfigError if the argument is wrong.
    """
    if given is True:
        return Elastic()
    if isinstance(given, Elastic):
        return given
    raise ConfigError(f"elastic={shown(given, 60)}; expected True, False or md.Elastic(...)")
