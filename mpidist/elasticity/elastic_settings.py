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
        The last `spares` ranks do not train; they wait to replace dead ranks.
    deadline : "stopped", "auto" or float
        When the other ranks of a node kill a rank in order to go on without it. With "stopped", a
        rank is killed after its process has been stopped (SIGSTOP), or its threads have not run,
        for 5 s. If `deadline` is a number of seconds, it replaces the 5 s for a stopped process,
        and, if it is larger than 5, also for threads that do not run. A rank is then also killed if
        it computes for more than this number of seconds while other ranks wait. With "auto", the
        number is the time of 20 median steps, but at least 1 s, and a stopped process is killed
        after at most 5 s.
    slow : float
        A rank is killed if, in two successive groups of ten steps, it needs more than this many
        times as long as the median of the other ranks, and more than 5 ms longer for a step. 0
        switches this off.
    copies : "memory", "none" or int
        Under ``mpidist launch --elastic``, each node keeps a copy of the state in its memory. If
        the ranks cannot go on after a death, `mpidist launch` starts them again from this copy. A
        number is the number of steps between two copies. With "memory", making the copies takes at
        most 3 % of the time.
    on_exception : "end" or "evict"
        What happens if the model, the reading of data or a callback raises an exception on one
        rank: with "end" the job ends, and with "evict" only this rank ends. The job always ends if
        more than half of the ranks raise, or if a rank raises when the step is repeated.
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
        """The argument `every` of `MemoryCopies`: when nodes copy their state. None for never."""
        return {"memory": "auto 1h", "none": None}.get(str(self.copies), self.copies)


def as_elastic(given) -> Elastic:
    """Return the settings for the argument `elastic` of `md.train`. Raises ConfigError."""
    if given is True:
        return Elastic()
    if isinstance(given, Elastic):
        return given
    raise ConfigError(f"elastic={shown(given, 60)}; expected True, False or md.Elastic(...)")
