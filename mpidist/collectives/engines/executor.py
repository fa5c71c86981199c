"""The one executor: runs any schedule over MPI point-to-point, step after released step.

Receives into fresh scratch are posted ahead as soon as the schedule allows, messages leave the
moment their data is final, and additions happen while other segments are on the wire. The order
of additions is that of the schedule, never that of arrival.

The tag of an operation is its number. What proves that a message belongs to it is a header: the
first message from one rank to another begins with `heading`. A short message goes with its header
in one buffer, a longer one has it sent ahead. Nothing more is received from that rank before its
header was looked at: the long message of another operation would meet a receive that is too short
for it, and some MPIs crash on that. Counters count data: a header is no message.
"""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np
from mpi4py import MPI

from ...arrays import copy_into, is_device, mpi_empty, synchronize
from ...events import Counters
from ...runtime.context_end import CHAIN_DIFFERS
from ..schedules.schedule import (
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
#: First messages up to so many bytes travel in one buffer with their header. On one node to copy
#: 16 KiB costs as much as a second message, and what lies on a device is packed on the host.
PACKED_BYTES = 2048

#: Scratch up to so many bytes is made anew: that is quicker than to borrow it.
POOLED_BYTES = 65536

#: Seconds in which messages may end after an exception, before their memory is the user's again.
GRACE = 1.0

_HEADER = struct.Struct("<qq")
_KEY_BYTES = 8
_HEADER_SENT = -1  # in place of a step

_testsome, _BYTE = MPI.Request.Testsome, MPI.BYTE


def heading(context, key: int) -> bytes:
    """Return the header of an operation that this rank has just begun.

    Its signature's key, and what `context.chain` knows of the operations before it.
    """
    return _HEADER.pack(key, context.chain)


def hear_first(context) -> None:
    """Raise the error that other ranks have reported, for a rank that begins late.

    A rank that has broken the operation off keeps what it sends for `GRACE` seconds, not for ever.
    """
    now = time.monotonic()
    if context.size > 1 and now - context.heard > GRACE / 2:
        context.statuses.listen()
    context.heard = now


class Engine:
    """What a plan runs on a flat vector of the work dtype. `programs` makes them."""

    #: Whether it divides a mean itself, while the piece is in the cache.
    divides = False
    #: Whether its messages carry the number of the operation.
    tagged = True
    #: The barrier of the node, where there is one: nobody passes it when this rank breaks off.
    gate: Any = None
    #: What a run sends.
    counters = Counters()

    def run(self, work, key, number: int = 0, divisor=None) -> None:
        """Reduce `work` in place as operation `number`, whose signature has that `key`. Collective.

        `divisor` finishes a mean, for those that divide.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Nothing to free: the memory is Python's, or the communicator's."""


class Program(Engine):
    """A schedule made ready for vectors of `n` elements of one dtype. Used again at every step."""

    def __init__(self, context, steps: list[Step], n: int, dtype: np.dtype, ufunc: np.ufunc):
        limit = max(1, MAX_MESSAGE // dtype.itemsize)
        steps = split_messages(without_empty(steps), limit)
        self.context, self.n, self.dtype, self.ufunc = context, n, dtype, ufunc
        self.compiled: Compiled = compile_steps(steps)
        self.ready = [i for i, needs in enumerate(self.compiled.needs) if not needs]
        self.ready.reverse()  # a run takes them from the end
        self.scratch_size = extent(steps, n) - n
        self.counters = _count(steps, dtype.itemsize)

    def run(self, work, key, number: int = 0, divisor=None) -> None:
        """Run the schedule on `work`, in place, and wait. Collective."""
        context = self.context
        hear_first(context)
        run = Run(self, work, context.tag(number), heading(context, key))
        try:
            context.wait(run.progress)  # nobody else has it: no lock
        except BaseException:
            run.finish_sends()
            raise

    def scratch(self, data):
        """Return scratch for a run on `data`; those at the same time need each their own."""
        if is_device(data):  # that has a pool of cupy's
            return mpi_empty(self.scratch_size, self.dtype, like=data)
        if self.scratch_size * self.dtype.itemsize <= POOLED_BYTES:
            return np.empty(self.scratch_size, self.dtype)
        return self.context.pool.take(self.scratch_size, self.dtype)


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
    """One execution of a program on `data`, a 1-D contiguous vector that is used in place.

    Begins at once; poll `test`. `data` is host memory, or device memory that MPI takes; scratch
    lies where the data does. Where another `header` comes MismatchError is raised; without one
    none is sent.
    """

    def __init__(self, program: Program, data, tag: int, header: bytes):
        self.program, self.comm, self.tag = program, program.context.data, tag
        self.header = header
        self.sequence: int | None = None  # of this operation, where others are begun after it
        self.data, self.scratch = data, program.scratch(data)
        self.device = not isinstance(data, np.ndarray)
        self.needs = program.compiled.needs.copy()
        self.left = len(self.needs)
        self.requests: list = []
        self.owners: list[int] = []
        self.inboxes: dict[int, bytearray] = {}
        self.broken = False  # by an exception: nothing is sent or added any more
        self._first = bytearray(program.compiled.first if header else self.left)
        self._testing = threading.Lock()
        try:
            self.progress(program.ready.copy())
        except BaseException:
            self.broken = True
            self.finish_sends()
            raise

    def finish_sends(self) -> None:
        """Wait a moment until nothing is sent any more from memory that the caller may change."""
        steps = self.program.compiled.steps
        owned = zip(self.owners, self.requests, strict=False)
        sends = [r for i, r in owned if i == _HEADER_SENT or steps[i].kind == SEND]
        end = time.monotonic() + GRACE
        with suppress(MPI.Exception):  # what is raised already is the cause
            while not MPI.Request.Testall(sends) and time.monotonic() < end:
                time.sleep(0.0005)

    def test(self) -> bool:
        """Make progress; true when this rank's part is done.

        False for a thread that comes while another one is in here, and after an exception.
        """
        if not self.left:
            return True
        if self.broken or not self._testing.acquire(blocking=False):
            return False
        try:
            return self.progress()
        except BaseException:
            self.broken = True
            raise
        finally:
            self._testing.release()

    def progress(self, ready: list[int] | None = None) -> bool:
        """Do what `test` does, for the one thread that has this run.

        Begins the steps that are `ready`, or that what has come in releases, and what each of them
        releases. A list, not recursion: chains are long. Nor calls: MPI is entered from here.
        """
        if not self.left:
            return True
        if ready is None:
            done = _testsome(self.requests)
            if not done:
                return False
            ready = self._released(done)
        compiled, needs, first = self.program.compiled, self.needs, self._first
        comm, tag, owners, requests = self.comm, self.tag, self.owners, self.requests
        while ready:
            i = ready.pop()
            step = compiled.steps[i]
            kind = step.kind
            released = compiled.followers[i]
            if kind == RECV:
                if first[i]:
                    # Room for whatever another operation may send first. What follows on this
                    # channel is received when the header is known.
                    target = self.inboxes[i] = bytearray(_HEADER.size + PACKED_BYTES)
                    released = ()
                else:
                    target = self._view(step.target)
                requests.append(comm.Irecv([target, _BYTE], step.peer, tag))
                owners.append(i)
            elif kind == SEND:
                message = self._view(step.source)
                if first[i]:
                    if message.nbytes > PACKED_BYTES:  # the header goes ahead
                        self.left += 1
                        requests.append(comm.Isend([self.header, _BYTE], step.peer, tag))
                        owners.append(_HEADER_SENT)
                    else:
                        message = self._headed(message)
                requests.append(comm.Isend([message, _BYTE], step.peer, tag))
                owners.append(i)
            else:
                self._compute(step)
                self.left -= 1
                released = compiled.dependents[i]
            for k in released:
                needs[k] -= 1
                if not needs[k]:
                    ready.append(k)
        if self.left:
            return False
        if not self.device and self.scratch.nbytes > POOLED_BYTES:
            self.program.context.pool.give(self.scratch)  # the next run may have it
        return True

    def _released(self, done: list[int]) -> list[int]:
        """Return the steps that may begin now that the requests at `done` are complete."""
        owners, requests = self.owners, self.requests
        if len(done) == len(requests):
            finished = owners.copy()
            owners.clear()
            requests.clear()
        else:
            finished = [owners[k] for k in done]
            for k in sorted(done, reverse=True):
                # Order in the list does not matter, so the last entry fills the gap.
                owners[k], requests[k] = owners[-1], requests[-1]
                owners.pop()
                requests.pop()
        needs, dependents, ready = self.needs, self.program.compiled.dependents, []
        for i in finished:
            if i in self.inboxes:
                if not self._open(i):
                    ready.append(i)  # the long message itself
                    continue
                released: Sequence[int] = (
                    *self.program.compiled.followers[i],
                    *dependents[i],
                )
            else:
                self.left -= 1
                released = dependents[i] if i != _HEADER_SENT else ()
            for k in released:
                needs[k] -= 1
                if not needs[k]:
                    ready.append(k)
        ready.reverse()
        return ready

    def _view(self, span):
        start, stop = span
        n = self.program.n
        if start >= n and stop > n:
            return self.scratch[start - n : stop - n]
        return self.data[start:stop]

    def _headed(self, view):
        """Return a short first message behind its header."""
        if not self.device:
            return self.header + view.tobytes()
        buffer = bytearray(len(self.header) + view.nbytes)
        buffer[: len(self.header)] = self.header
        copy_into(np.frombuffer(buffer, view.dtype, offset=len(self.header)), view)
        return buffer

    def _open(self, i: int) -> bool:
        """Look at the first message of a channel; whether its data came with the header."""
        inbox, header = self.inboxes.pop(i), self.header
        if not inbox.startswith(header):
            self._mismatch(inbox)
        self._first[i] = 0
        target = self._view(self.program.compiled.steps[i].target)
        if target.nbytes > PACKED_BYTES:
            return False
        values = np.frombuffer(inbox, self.program.dtype, target.size, len(header))
        if self.device:
            copy_into(target, values)
        else:
            target[...] = values
        self.left -= 1
        return True

    def _mismatch(self, inbox: bytearray) -> None:
        """Raise MismatchError: a message of another operation has come under this one's tag."""
        context = self.program.context
        if inbox.startswith(self.header[:_KEY_BYTES]):
            context.statuses.fail(f"{CHAIN_DIFFERS}; operation #{context.sequence} found it")
        context.disagree(self.sequence)

    def _compute(self, step: Step) -> None:
        source, target = self._view(step.source), self._view(step.target)
        if step.kind == COPY:
            target[:] = source
        elif step.kind == REDUCE:
            self.program.ufunc(target, source, out=target)
        else:
            self.program.ufunc(source, target, out=target)
        if self.device:
            # It has only queued the work, and the next step may hand the target to MPI.
            synchronize(target)
