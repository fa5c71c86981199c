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
from contextlib import suppress

import numpy as np
from mpi4py import MPI

from ..arrays import copy_into, is_device, mpi_empty, synchronize
from ..events import Counters
from ..leaving import CHAIN_DIFFERS
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
#: First messages up to so many bytes travel in one buffer with their header. Every MPI sends that
#: without asking the receiver.
PACKED_BYTES = 2048

#: Seconds in which messages may end after an exception, before their memory is the user's again.
GRACE = 1.0

_HEADER = struct.Struct("<qq")
_KEY_BYTES = 8
_HEADER_SENT = -1  # in place of a step

_testsome = MPI.Request.Testsome


def heading(context, key: int) -> bytes:
    """Return the header of an operation that this rank has just begun. Local.

    Its signature's key, and what `context.chain` knows of the operations before it.
    """
    return _HEADER.pack(key, context.chain)


def execute(context, program: Program, data, key: int, number: int) -> None:
    """Run `program` on `data` as operation `number` of `context`, and wait. Collective."""
    hear_first(context)
    tag, header = context.tag(number), heading(context, key)
    run = program.start(context.data, data, tag, header, context)
    try:
        context.wait(run.test)
    except BaseException:
        run.finish_sends()
        raise


def hear_first(context) -> None:
    """Raise what the others have said meanwhile, for a rank that comes late. Local.

    A rank that has broken the operation off keeps what it sends for `GRACE` seconds, not for ever.
    """
    now = time.monotonic()
    if context.size > 1 and now - context.heard > GRACE / 2:
        context.statuses.listen()
    context.heard = now


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

    def start(self, comm: MPI.Comm, data, tag: int, header: bytes = b"", owner=None) -> Run:
        """Begin on `data`, a 1-D contiguous vector that is used in place. Poll ``run.test``.

        `data` is host memory, or device memory that MPI takes; scratch lies where the data does.
        With a `header`, `owner` is the context that raises MismatchError where another one comes.
        """
        # Concurrent runs of one plan need scratch of their own. The device has a pool of cupy's.
        if owner is None or is_device(data):
            scratch = mpi_empty(self.scratch_size, self.dtype, like=data)
        else:
            scratch = owner.pool.take(self.scratch_size, self.dtype)
        return Run(self, comm, data, scratch, tag, header, owner)


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

    def __init__(self, program: Program, comm: MPI.Comm, data, scratch, tag: int, header, owner):
        self.program, self.comm, self.tag = program, comm, tag
        self.header, self.owner = header, owner
        self.sequence: int | None = None  # of this operation, where others are begun after it
        self.data, self.scratch = data, scratch
        self.needs = program.compiled.needs.copy()
        self.left = len(self.needs)
        self.requests: list = []
        self.owners: list[int] = []
        self.inboxes: dict[int, bytearray] = {}
        self.broken = False  # by an exception: nothing is sent or added any more
        self._first = program.compiled.first if header else bytes(self.left)
        self._testing = threading.Lock()
        try:
            self._release(program.ready)
        except BaseException:
            self.broken = True
            self.finish_sends()
            raise
        if not self.left:
            self._give_back()

    def finish_sends(self) -> None:
        """Wait a moment until nothing is sent any more from memory that the caller may change."""
        steps = self.program.compiled.steps
        owned = zip(self.owners, self.requests, strict=False)
        sends = [r for i, r in owned if i == _HEADER_SENT or steps[i].kind == SEND]
        end = time.monotonic() + GRACE
        with suppress(MPI.Exception):  # what is raised already is the cause
            while not MPI.Request.Testall(sends) and time.monotonic() < end:
                time.sleep(0.0005)

    def _give_back(self) -> None:
        """Let the next run have the scratch."""
        if self.owner is not None and not is_device(self.scratch):
            self.owner.pool.give(self.scratch)

    def test(self) -> bool:
        """Make progress; true when this rank's part is done. Local.

        False for a thread that comes while another one is in here, and after an exception.
        """
        if not self.left:
            return True
        if self.broken or not self._testing.acquire(blocking=False):
            return False
        try:
            return self._progress()
        except BaseException:
            self.broken = True
            raise
        finally:
            self._testing.release()

    def _progress(self) -> bool:
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
            if i in self.inboxes:
                self._open(i)
            else:
                self._finish(i)
        if not self.left:
            self._give_back()
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
        compiled, needs, first = self.program.compiled, self.needs, self._first
        todo = list(reversed(ready))
        while todo:
            i = todo.pop()
            step = compiled.steps[i]
            kind = step.kind
            if kind == RECV:
                if first[i]:
                    self._await_header(i, step.peer)
                    continue  # what follows on this channel is received when the header is known
                self._receive(i, step)
                released = compiled.followers[i]
            elif kind == SEND:
                self._send(i, step)
                released = compiled.followers[i]
            else:
                self._compute(step)
                self.left -= 1
                released = compiled.dependents[i]
            for k in released:
                needs[k] -= 1
                if not needs[k]:
                    todo.append(k)

    def _send(self, i: int, step: Step) -> None:
        view = self._view(step.source)
        if self._first[i]:
            if self._is_short(step.source):
                self._post(i, self.comm.Isend([self._packed(view), MPI.BYTE], step.peer, self.tag))
                return
            self.left += 1
            self._post(_HEADER_SENT, self.comm.Isend([self.header, MPI.BYTE], step.peer, self.tag))
        self._post(i, self.comm.Isend([view, MPI.BYTE], step.peer, self.tag))

    def _receive(self, i: int, step: Step) -> None:
        buffer = [self._view(step.target), MPI.BYTE]
        self._post(i, self.comm.Irecv(buffer, step.peer, self.tag))

    def _post(self, i: int, request: MPI.Request) -> None:
        self.requests.append(request)
        self.owners.append(i)

    def _is_short(self, span) -> bool:
        return length(span) * self.program.dtype.itemsize <= PACKED_BYTES

    def _packed(self, view):
        """Return the header and the elements of `view` in one buffer on the host."""
        if isinstance(view, np.ndarray):
            return self.header + view.tobytes()
        buffer = bytearray(len(self.header) + view.nbytes)
        buffer[: len(self.header)] = self.header
        copy_into(np.frombuffer(buffer, view.dtype, offset=len(self.header)), view)
        return buffer

    def _await_header(self, i: int, peer: int) -> None:
        # Room for whatever another operation may send first.
        inbox = self.inboxes[i] = bytearray(_HEADER.size + PACKED_BYTES)
        self._post(i, self.comm.Irecv([inbox, MPI.BYTE], peer, self.tag))

    def _open(self, i: int) -> None:
        """Look at the first message of a channel, and go on with the others."""
        inbox, header = self.inboxes.pop(i), self.header
        if not inbox.startswith(header):
            self._mismatch(inbox)
        compiled = self.program.compiled
        step = compiled.steps[i]
        if self._is_short(step.target):
            count = length(step.target)
            values = np.frombuffer(inbox, self.program.dtype, count, len(header))
            copy_into(self._view(step.target), values)
            self._finish(i)
        else:
            self._receive(i, step)
        self._count_down(compiled.followers[i])

    def _mismatch(self, inbox: bytearray) -> None:
        """Raise MismatchError: a message of another operation has come under this one's tag."""
        if inbox.startswith(self.header[:_KEY_BYTES]):
            self.owner.statuses.fail(f"{CHAIN_DIFFERS}; operation #{self.owner.sequence} found it")
        self.owner.disagree(self.sequence)

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
        if i != _HEADER_SENT:
            self._count_down(self.program.compiled.dependents[i])

    def _count_down(self, steps) -> None:
        released = []
        for k in steps:
            self.needs[k] -= 1
            if not self.needs[k]:
                released.append(k)
        if released:
            self._release(released)
