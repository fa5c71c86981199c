"""The one executor: runs any schedule over MPI point-to-point, step after released step.

Receives into fresh scratch are posted ahead as soon as the schedule allows, messages leave the
moment their data is final, and additions happen while other segments are on the wire. The order
of additions is that of the schedule, never that of arrival.
"""

from __future__ import annotations

import numpy as np
from mpi4py import MPI

from ..arrays import is_device, mpi_empty, synchronize
from ..events import Counters
from .schedule import (
    COPY,
    RECV,
    REDUCE,
    REDUCE_LEFT,
    SEND,
    Compiled,
    Step,
    compile_steps,
    extent,
    length,
    split_messages,
    without_empty,
)

#: Longest message in bytes. Counts stay far below 2^31 whatever the MPI; tests lower it.
MAX_MESSAGE = 1 << 30

_testsome = MPI.Request.Testsome


class Program:
    """A schedule made ready for vectors of `n` elements of one dtype. Local; re-used every step."""

    def __init__(self, steps: list[Step], n: int, dtype: np.dtype, ufunc: np.ufunc):
        limit = max(1, MAX_MESSAGE // dtype.itemsize)
        steps = split_messages(without_empty(steps), limit)
        self.n, self.dtype, self.ufunc = n, dtype, ufunc
        self.compiled: Compiled = compile_steps(steps)
        self.ready = [i for i, needs in enumerate(self.compiled.needs) if not needs]
        self.scratch_size = extent(steps, n) - n
        self.counters = _count(steps, dtype.itemsize)
        self._idle: dict[bool, list] = {False: [], True: []}

    def start(self, comm: MPI.Comm, data, tag: int) -> Run:
        """Begin on `data`, a 1-D contiguous vector that is used in place. Poll ``run.test``.

        `data` is host memory, or device memory that MPI takes; scratch lies where the data does.
        """
        # Concurrent runs of one plan need scratch of their own; finished runs give theirs back.
        idle = self._idle[is_device(data)]
        scratch = idle.pop() if idle else mpi_empty(self.scratch_size, self.dtype, like=data)
        return Run(self, comm, data, scratch, tag)

    def give_back(self, scratch) -> None:
        """Keep the scratch of a finished run for the next one."""
        self._idle[is_device(scratch)].append(scratch)


def _count(steps: list[Step], itemsize: int) -> Counters:
    sent = [length(s.source) for s in steps if s.kind == SEND]
    received = [length(s.target) for s in steps if s.kind == RECV]
    reduced = sum(length(s.target) for s in steps if s.kind in (REDUCE, REDUCE_LEFT))
    return Counters(
        messages_sent=len(sent),
        bytes_sent=sum(sent) * itemsize,
        messages_received=len(received),
        bytes_received=sum(received) * itemsize,
        bytes_reduced=reduced * itemsize,
    )


class Run:
    """One execution of a program."""

    def __init__(self, program: Program, comm: MPI.Comm, data, scratch, tag: int):
        self.program, self.comm, self.tag = program, comm, tag
        self.data, self.scratch = data, scratch
        self.needs = program.compiled.needs.copy()
        self.left = len(self.needs)
        self.requests: list = []
        self.owners: list[int] = []
        self._release(program.ready)
        if not self.left:
            program.give_back(scratch)

    def test(self) -> bool:
        """Make progress; true when this rank's part is done. Local."""
        if not self.left:
            return True
        done = _testsome(self.requests)
        if not done:
            return False
        owners, requests = self.owners, self.requests
        finished = [owners[k] for k in done]
        for k in sorted(done, reverse=True):
            # Order in the list does not matter, so the last entry fills the gap.
            owners[k], requests[k] = owners[-1], requests[-1]
            owners.pop()
            requests.pop()
        for i in finished:
            self._finish(i)
        if not self.left:
            self.program.give_back(self.scratch)
            return True
        return False

    def _view(self, span):
        start, stop = span
        n = self.program.n
        if start >= n and stop > n:
            return self.scratch[start - n : stop - n]
        return self.data[start:stop]

    def _release(self, ready: list[int]) -> None:
        """Begin steps, and what each of them releases. A list, not recursion: chains are long."""
        compiled, needs = self.program.compiled, self.needs
        todo = list(reversed(ready))
        while todo:
            i = todo.pop()
            released = compiled.followers[i]
            if self._begin(i, compiled.steps[i]):
                self.left -= 1
                released = released + compiled.dependents[i]
            for k in released:
                needs[k] -= 1
                if not needs[k]:
                    todo.append(k)

    def _begin(self, i: int, step: Step) -> bool:
        """Post or compute one step; true when it is finished already."""
        if step.kind == SEND:
            buffer = [self._view(step.source), MPI.BYTE]
            self.requests.append(self.comm.Isend(buffer, step.peer, self.tag))
        elif step.kind == RECV:
            buffer = [self._view(step.target), MPI.BYTE]
            self.requests.append(self.comm.Irecv(buffer, step.peer, self.tag))
        else:
            self._compute(step)
            return True
        self.owners.append(i)
        return False

    def _compute(self, step: Step) -> None:
        source, target = self._view(step.source), self._view(step.target)
        if step.kind == COPY:
            target[:] = source
        elif step.kind == REDUCE:
            self.program.ufunc(target, source, out=target)
        else:
            self.program.ufunc(source, target, out=target)
        # A device has only queued the work, and the next step may hand the target to MPI.
        synchronize(target)

    def _finish(self, i: int) -> None:
        self.left -= 1
        released = []
        for k in self.program.compiled.dependents[i]:
            self.needs[k] -= 1
            if not self.needs[k]:
                released.append(k)
        if released:
            self._release(released)
