"""End ranks that are much slower than the others, at the end of a step (``slow = F``).

The ranks exchange their own times per step every ten steps (`fault_tolerance.stragglers`). A slow
rank prints the reason and ends itself, and the others go on as after any death.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .. import events
from ..fault_tolerance.stragglers import AGAIN, Stragglers, find_stragglers
from ..runtime.failure import this_rank
from .evict import end_itself
from .node_board import SLOW, NodeBoard


class SlowRanks:
    """Ends ranks that were slow in the last 20 steps. Collective over ``stragglers.comm``.

    After each change of the group, make a new `Stragglers` and a new `SlowRanks`. Call
    `end_of_step` on all ranks at the end of each step:

    >>> stragglers = Stragglers(group.comm)
    >>> slow = SlowRanks(stragglers, factor, group.min_ranks, group.watch.board, names)
    >>> for step in group.steps(first, last):
    ...     with step:
    ...         one_step()  # ends with group.done(step)
    ...         stragglers.note(seconds_for_data, seconds_for_gradients)
    ...         slow.end_of_step()

    Parameters
    ----------
    stragglers : Stragglers
    factor : float
        A rank is slow if its time is more than `factor` times the median of the other ranks' times,
        and more than 5 ms longer. 0 means that no rank is evicted.
    min_ranks : int
        The smallest number of ranks that must remain.
    board : NodeBoard, optional
        The shared memory in which a rank writes why it ends.
    ranks : sequence of int, optional
        For each rank of ``stragglers.comm``, the rank that its process had when `board` was made.
    """

    def __init__(
        self,
        stragglers: Stragglers,
        factor: float,
        min_ranks: int = 1,
        board: NodeBoard | None = None,
        ranks: Sequence[int] | None = None,
    ):
        self.stragglers, self.factor, self.min_ranks = stragglers, factor, min_ranks
        self.board = board
        self.ranks = range(stragglers.comm.size) if ranks is None else ranks
        self._judged, self._before = 0, dict[int, float]()

    def end_of_step(self) -> list[int]:
        """End this rank if it is slow; return all ranks that end now. Collective."""
        stragglers, times = self.stragglers, self.stragglers.newest
        if not self.factor or stragglers.windows == self._judged or times is None:
            return []
        # If this method was not called at the end of a window, the two windows are not in a row.
        in_a_row = stragglers.windows == self._judged + 1
        self._judged = stragglers.windows
        slow = slow_ranks(times, self.factor)
        again = {rank: by for rank, by in slow.items() if in_a_row and rank in self._before}
        self._before = slow
        if again:
            crowded = stragglers.share_cores()
            again = {k: by for k, by in again.items() if stragglers.ranks[k] not in crowded}
        verdict = slowest(again, stragglers.comm.size - self.min_ranks)
        for rank in verdict:
            if self.board is not None:
                self.board.note_fate(self.ranks[rank], SLOW, again[rank])
        if stragglers.comm.rank in verdict:
            _leave(again[stragglers.comm.rank])
        return verdict


def slow_ranks(times: np.ndarray, factor: float) -> dict[int, float]:
    """Return, for each rank that was slow in ten steps, its time divided by that of the others.

    The time of the others is their median. `find_stragglers` explains `times` and `factor`.
    """
    totals = times.sum(axis=1)
    return {
        one.rank: float(totals[one.rank] / max(totals[one.rank] - one.lag, 1e-9))
        for one in find_stragglers(times, [""] * times.shape[1], factor)
    }


def slowest(slow: dict[int, float], most: int) -> list[int]:
    """Return the slowest of the slow ranks, at most `most` of them, in rank order."""
    return sorted(sorted(slow, key=lambda rank: (-slow[rank], rank))[: max(most, 0)])


def _leave(by: float) -> None:
    """Print why this rank is evicted, and end this process."""
    text = f"needs {by:.1f} times as long for a step as the others and ends itself"
    line = f"{this_rank()} {text}" if events.VERBOSITY else ""
    end_itself(line, f"{by:.1f} times slower than the others", windows=AGAIN)
