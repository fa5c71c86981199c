"""Shared memory in which each rank of a node shows what it does, without MPI calls.

    rank 0   pid 4711   beat 12.5 s   wait      since 12.1 s   step 812
    rank 1   pid 4712   beat 12.4 s   wait      since 12.1 s   step 812
    rank 2   pid 4713   beat 12.0 s   compute   since 11.9 s   step 812      stopped?
    rank 3   pid 4714   beat 12.3 s   save      since  7.0 s   step 812      not evicted

The memory is called a board, and what one rank writes there is its record. A record stays after its
process has ended, so the living ranks can read why a rank was evicted.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Container
from typing import NamedTuple

import numpy as np
from mpi4py import MPI

from ..errors import ConfigError
from ..launch.process_table import born, state_and_birth
from ..runtime.elastic_requests import wait_for
from ..runtime.node_memory.arena import Segment, first_problem
from ..runtime.polling import PHASES, wait_until

#: The numbers of the phases, and of the causes of an eviction.
OUTSIDE, COMPUTE, WAIT, *_, PLAN = range(len(PHASES))
STOPPED, SILENT, LATE, SLOW, RAISED = 1, 2, 3, 4, 5

# The positions of the fields. A reader copies a record in this order, so it reads the phase before
# the time at which the phase began.
_PID, _BORN, _SPACE, _RANK, _BEAT, _PHASE, _SINCE, _STEP = range(8)
_SEEN, _LAST, _WHY, _AMOUNT, _FIELDS = range(8, 13)


class Record(NamedTuple):
    """What a rank publishes for the other ranks of its node. Times are in seconds.

    `beat` is the time of the last sign of life. `phase` is a number for what the rank does, such as
    waiting or saving. `since` is the later of two times: the beginning of this phase, and the
    beginning of the rank's newest step. All times are those of CLOCK_MONOTONIC. `state` is the
    letter of the state in /proc/PID/stat, or "X" if the process has ended.
    """

    rank: int
    pid: int
    born: int
    beat: float
    phase: int
    since: float
    step: int
    seen: float = 0.0
    last: float = 0.0
    state: str = "R"


class NodeBoard:
    """Shared memory with a record of what each rank of this node does. Collective over `comm`.

    Attributes
    ----------
    size, ranks : int
        The number of ranks of this node, and the number of ranks of `comm`.
    rank : int
        The rank of this process in `comm`. This number stays the same when other ranks die.
    fates : dict of int -> (int, float)
        For each rank that is known to be evicted (killed by other ranks): the number of the cause,
        and a second number, such as the seconds that the cause lasted. `evict.cause_in_words`
        explains both.
    """

    def __init__(self, comm: MPI.Intracomm):
        node, problem = comm.Split_type(MPI.COMM_TYPE_SHARED), ""
        parts = [np.zeros(8 * _FIELDS, np.uint8)]
        try:
            if node.size > 1:
                parts = Segment(node, 8 * _FIELDS, wait_until).parts
        except ConfigError as error:
            problem = str(error)
        if problem := first_problem(comm, problem, wait_until):
            wrong = ConfigError(f"md.elastic: {problem}")
            wrong.everywhere = True
            raise wrong
        self._records = [memoryview(part[: 8 * _FIELDS].data).cast("d") for part in parts]
        self._mine = self._records[node.rank]
        self.size, self.rank, self.ranks = node.size, comm.rank, comm.size
        self.fates: dict[int, tuple[int, float]] = {}
        node.Free()
        for field, value in {
            _BORN: float(born("self") or 0),
            _SPACE: _clock_and_numbers(),
            _RANK: comm.rank,
            _PID: os.getpid(),
        }.items():
            self._mine[field] = value

    # -- the record of this rank -----------------------------------------------------------

    def beat(self, now: float) -> None:
        """Write the time `now` as a sign of life of this process."""
        self._mine[_BEAT] = now

    def last_beat(self) -> float:
        """Return the time of this rank's last sign of life."""
        return self._mine[_BEAT]

    def show(self, phase: int, now: float) -> int:
        """Publish `phase`, a number for what this rank does now; return its previous phase."""
        before, self._mine[_SINCE] = int(self._mine[_PHASE]), now
        # Written after the time, so that no reader finds a new phase with an old time.
        self._mine[_PHASE] = phase
        return before

    def show_step(self, step: int, now: float) -> None:
        """Show the other ranks that this rank has now done all steps before `step`."""
        self._mine[_STEP], self._mine[_SINCE] = step, now

    # -- all records -----------------------------------------------------------------------

    def read(self, known: Container[int] | None = None) -> list[Record]:
        """Return the records of the living ranks on this node and in this container, by rank."""
        space, found = self._mine[_SPACE], []
        for view in self._records:
            pid, birth, where, rank, beat, phase, since, step, seen, last, why, _ = view.tolist()
            # A process in another container has another process number here, and may have another
            # clock, so it is left out. A rank with a cause was killed, and may need a while to end.
            if pid and where == space and not why:
                one = Record(int(rank), int(pid), int(birth), beat, int(phase), since, int(step),
                             seen, last)  # fmt: skip
                if known is None or one.rank in known:
                    one = one._replace(state=state_of(one))
                if one.state != "X":
                    found.append(one)
        return sorted(found)

    def note_stop(self, one: Record) -> None:
        """Store the times at which rank ``one.rank`` was first and last seen stopped (SIGSTOP)."""
        view = self._view(one.rank)
        view[_SEEN], view[_LAST] = one.seen, one.last

    def note_fate(self, rank: int, why: int, amount: float) -> None:
        """Write why a rank is evicted (killed); `evict.cause_in_words` explains the arguments."""
        self.fates[rank] = why, amount
        if (view := self._view(rank)) is not None:
            view[_AMOUNT] = amount
            view[_WHY] = why

    def fate(self, rank: int) -> tuple[int, float]:
        """Return why `rank` was killed: arguments of `cause_in_words`, or (0, 0.0) if unknown."""
        view = self._view(rank)
        if view is not None and view[_WHY]:
            return int(view[_WHY]), view[_AMOUNT]
        return self.fates.get(rank, (0, 0.0))

    def agree_on_fates(self, comm: MPI.Intracomm) -> None:
        """Tell all ranks which ranks were evicted (killed), and why. Collective over `comm`."""
        # An entry for each rank, dead or not, because ranks may know of different deaths.
        known = np.array([self.fate(rank) for rank in range(self.ranks)], float)
        wait_for([comm.Iallreduce(MPI.IN_PLACE, known, MPI.MAX)], known)
        for rank in np.flatnonzero(known[:, 0]):
            self.fates[int(rank)] = int(known[rank, 0]), float(known[rank, 1])

    def _view(self, rank: int):
        return next((one for one in self._records if one[_PID] and one[_RANK] == rank), None)

    def withdraw(self) -> None:
        """Clear this rank's record, so that the other ranks no longer watch this process."""
        self._mine[_PID] = 0


def state_of(one: Record) -> str:
    """Return the letter of the process state (as in /proc/PID/stat); "X" if it has ended."""
    state, birth = state_and_birth(one.pid)
    return "X" if birth != one.born or state in "ZX" else state


def _clock_and_numbers() -> float:
    """Return a number that two processes share if they have the same process IDs and clock."""
    names = []
    for kind in ("pid", "time"):
        try:
            names.append(os.readlink(f"/proc/self/ns/{kind}"))  # noqa: PTH115 - a name, not a path
        except OSError:
            names.append("?")
    return float(zlib.crc32(" ".join(names).encode()) + 1)
