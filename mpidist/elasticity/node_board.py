"""A board: shared memory in which each rank of a node shows what it does, without MPI calls.

    rank 0   pid 4711   beat 12.5 s   wait      since 12.1 s   step 812
    rank 1   pid 4712   beat 12.4 s   wait      since 12.1 s   step 812
    rank 2   pid 4713   beat 12.0 s   compute   since 11.9 s   step 812      stopped?
    rank 3   pid 4714   beat 12.3 s   save      since  7.0 s   step 812      not evicted

The record of each rank has a memory page of its own, in a file in /dev/shm whose name has been
removed. All times come from CLOCK_MONOTONIC. This clock is the same for all processes of a host,
and does not advance while the machine is suspended. A record stays after its process has ended, so
the living ranks of a node can read why a rank was evicted. The board is made once, and is used
further when ranks die.
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
    """The record of one rank of the node. Times are in seconds of CLOCK_MONOTONIC.

    `rank` is the rank in the communicator with which the board (the shared memory for the records)
    was made. `beat` is the time of the rank's last sign of life. `phase` is the number of what the
    rank does, such as waiting or saving. `since` is the time at which the phase began, or at which
    the rank finished its newest step in this phase. `seen` and `last` are the first and the last
    time at which another rank saw that the process was stopped. `state` is the state letter in
    /proc/PID/stat, or "X" if the process has ended.
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
        For each rank that was evicted (killed by other ranks), as far as this process knows: the
        number of the cause, and an amount (seconds, a factor or a step, see
        `evict.cause_in_words`).
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
        """Write the time `now` to this rank's record: the threads of this process run."""
        self._mine[_BEAT] = now

    def last_beat(self) -> float:
        """Return the time of this rank's last sign of life, which `beat` has written."""
        return self._mine[_BEAT]

    def show(self, phase: int, now: float) -> int:
        """Show the other ranks that this rank begins `phase`; return the phase before.

        A phase is the number of what a rank does, such as waiting or saving.
        """
        before, self._mine[_SINCE] = int(self._mine[_PHASE]), now
        # Written after the time, so that no reader finds a new phase with an old time.
        self._mine[_PHASE] = phase
        return before

    def show_step(self, step: int, now: float) -> None:
        """Show the other ranks that this rank has now done all steps before `step`."""
        self._mine[_STEP], self._mine[_SINCE] = step, now

    # -- all records -----------------------------------------------------------------------

    def read(self, known: Container[int] | None = None) -> list[Record]:
        """Return the records of the living ranks on this node and in this container, in rank order.

        The field `state` of a record is read from /proc only for the ranks in `known` (by default
        all).
        """
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
        """Write when rank ``one.rank`` was first and last seen stopped (SIGSTOP)."""
        view = self._view(one.rank)
        view[_SEEN], view[_LAST] = one.seen, one.last

    def note_fate(self, rank: int, why: int, amount: float) -> None:
        """Write to the shared memory why a rank is evicted (killed).

        `why` is the number of the cause, 0 for none. `amount` is a number of seconds, a factor or a
        step, see `evict.cause_in_words`.
        """
        self.fates[rank] = why, amount
        if (view := self._view(rank)) is not None:
            view[_AMOUNT] = amount
            view[_WHY] = why

    def fate(self, rank: int) -> tuple[int, float]:
        """Return why `rank` was evicted (killed): (number of the cause, amount).

        The amount is a number of seconds, a factor or a step. The result is (0, 0.0) if no cause is
        known.
        """
        view = self._view(rank)
        if view is not None and view[_WHY]:
            return int(view[_WHY]), view[_AMOUNT]
        return self.fates.get(rank, (0, 0.0))

    def agree_on_fates(self, comm: MPI.Intracomm) -> None:
        """Tell all ranks which ranks were evicted (killed), and why. Collective over `comm`.

        The message has an entry for each rank of the original communicator, dead or not. The length
        of the message does not depend on known deaths, because ranks may know of different deaths.
        """
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
    """Return the state letter (as in /proc/PID/stat) of a record's process; "X" if it has ended."""
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
