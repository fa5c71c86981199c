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
        context.wait(run.progress)  # nobody else has it: no lock
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
        if is_device(data):
            scratch = mpi_empty(self.scratch_size, self.dtype, like=data)
        elif owner is None or self.scratch_size * self.dtype.itemsize <= POOLED_BYTES:
            scratch = np.empty(self.scratch_size, self.dtype)
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
        self.device = not isinstance(data, np.ndarray)
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
        if self.owner is not None and not self.device and self.scratch.nbytes > POOLED_BYTES:
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
            return self.progress()
        except BaseException:
            self.broken = True
            raise
        finally:
            self._testing.release()

    def progress(self) -> bool:
        """Do what `test` does, for the one thread that has this run. Local."""
        if not self.left:
            return True
        done = _testsome(self.requests)
        if not done:
            return False
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
                released = self._open(i)
            else:
                self.left -= 1
                released = dependents[i] if i != _HEADER_SENT else ()
            for k in released:
                needs[k] -= 1
                if not needs[k]:
                    ready.append(k)
        if ready:
            self._release(ready)
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
        comm, tag, owners, requests = self.comm, self.tag, self.owners, self.requests
        todo = list(reversed(ready))
        while todo:
            i = todo.pop()
            step = compiled.steps[i]
            kind = step.kind
            released = compiled.followers[i]
            if kind == RECV:
                if first[i]:
                    self._await_header(i, step.peer)
                    continue  # what follows on this channel is received when the header is known
                request = comm.Irecv([self._view(step.target), _BYTE], step.peer, tag)
                requests.append(request)
                owners.append(i)
            elif kind == SEND:
                message = self._view(step.source)
                if first[i]:
                    message = self._headed(message, step.peer)
                requests.append(comm.Isend([message, _BYTE], step.peer, tag))
                owners.append(i)
            else:
                self._compute(step)
                self.left -= 1
                released = compiled.dependents[i]
            for k in released:
                needs[k] -= 1
                if not needs[k]:
                    todo.append(k)

    def _headed(self, view, peer: int):
        """Return a first message with its header; or send that ahead of one that is long. Local."""
        if view.nbytes > PACKED_BYTES:
            self.left += 1
            self.requests.append(self.comm.Isend([self.header, _BYTE], peer, self.tag))
            self.owners.append(_HEADER_SENT)
            return view
        if not self.device:
            return self.header + view.tobytes()
        buffer = bytearray(len(self.header) + view.nbytes)
        buffer[: len(self.header)] = self.header
        copy_into(np.frombuffer(buffer, view.dtype, offset=len(self.header)), view)
        return buffer

    def _await_header(self, i: int, peer: int) -> None:
        # Room for whatever another operation may send first.
        inbox = self.inboxes[i] = bytearray(_HEADER.size + PACKED_BYTES)
        self.requests.append(self.comm.Irecv([inbox, _BYTE], peer, self.tag))
        self.owners.append(i)

    def _open(self, i: int) -> Sequence[int]:
        """Look at the first message of a channel; return the steps that it releases."""
        inbox, header = self.inboxes.pop(i), self.header
        if not inbox.startswith(header):
            self._mismatch(inbox)
        compiled = self.program.compiled
        step = compiled.steps[i]
        target = self._view(step.target)
        if target.nbytes > PACKED_BYTES:
            self.requests.append(self.comm.Irecv([target, _BYTE], step.peer, self.tag))
            self.owners.append(i)
            return compiled.followers[i]
        values = np.frombuffer(inbox, self.program.dtype, target.size, len(header))
        if self.device:
            copy_into(target, values)
        else:
            target[...] = values
        self.left -= 1
        return (*compiled.followers[i], *compiled.dependents[i])

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
        if self.device:
            # It has only queued the work, and the next step may hand the target to MPI.
            synchronize(target)
