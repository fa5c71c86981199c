"""The executor: it runs any schedule (list of steps) over MPI point-to-point messages.

Additions happen in the order of the schedule, even if messages arrive in another order.

The first message of an operation from one rank to another begins with a header (`heading`), which
identifies the operation. A header that belongs to another operation raises MismatchError.
"""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
from mpi4py import MPI

from ...arrays import copy_into, device_of, is_device, mpi_empty, synchronize
from ...events import Counters
from ...runtime import ulfm
from ...runtime.context_end import CHAIN_DIFFERS
from ...runtime.elastic_requests import test_some
from ..schedules.schedule import (
    COPY,
    RECV,
    REDUCE,
    REDUCE_LEFT,
    SEND,
    Step,
    compile_steps,
    extent,
    length,
    split_messages,
    without_empty,
)

#: The largest number of bytes of a message. The limit keeps element counts far below 2^31, the
#: limit of many MPI libraries. Tests set a smaller number.
MAX_MESSAGE = 1 << 30
#: A first message of at most this many bytes is copied into one buffer with its header. On one
#: node, a copy of 16 KiB takes as long as sending a second message.
PACKED_BYTES = 2048

#: Scratch memory of at most this many bytes is newly allocated, because this is quicker than taking
#: a buffer from the buffer pool.
POOLED_BYTES = 65536

#: Seconds that a rank waits for its messages to end after an exception, before the caller may
#: write into the memory of these messages.
GRACE = 1.0

_HEADER = struct.Struct("<qq")
_KEY_BYTES = 8
_HEADER_SENT = -1  # in place of a step number: this message is a header

_testsome, _BYTE = MPI.Request.Testsome, MPI.BYTE


def heading(context, key: int) -> bytes:
    """Return the first bytes of a message, which identify the operation that was just begun."""
    return _HEADER.pack(key, context.chain)


def hear_first(context) -> None:
    """If another rank has reported an error, raise it; called before an operation begins."""
    now = time.monotonic()
    if context.size > 1 and now - context.heard > GRACE / 2:
        context.statuses.listen()
    context.heard = now


class Engine:
    """An object that reduces 1-D vectors by one algorithm; `programs` chooses the engine."""

    #: Whether the engine divides a mean itself, while the piece is in the cache.
    divides = False
    #: Whether the engine's messages carry the number of the operation.
    tagged = True
    #: The barrier of the node, if the engine uses one. No rank passes the barrier after this rank
    #: has stopped the operation because of an error.
    gate: Any = None
    #: The number of messages and bytes of one run.
    counters = Counters()

    def run(self, work, key, number: int = 0, divisor=None) -> None:
        """Reduce `work` in place. Collective.

        `number` is the number of the operation, and `key` is a digest of its kind, dtype and shape.
        If the attribute `divides` of this object is true and `divisor` is given, `run` divides the
        sum by `divisor`.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Do nothing, because this object owns no memory and no MPI request."""


class Program(Engine):
    """An object that runs a schedule (list of steps) on vectors of `n` elements of one dtype."""

    def __init__(self, context, steps: list[Step], n: int, dtype: np.dtype, ufunc: np.ufunc):
        limit = max(1, MAX_MESSAGE // dtype.itemsize)
        steps = split_messages(without_empty(steps), limit)
        self.context, self.n, self.dtype, self.ufunc = context, n, dtype, ufunc
        self.compiled = compile_steps(steps)
        # The steps that depend on no other step, in reverse order, because a run takes steps from
        # the end of the list.
        self.ready = [i for i in reversed(range(len(steps))) if not self.compiled.needs[i]]
        self.scratch_size = extent(steps, n) - n
        self.counters = _count(steps, dtype.itemsize)

    def run(self, work, key, number: int = 0, divisor=None) -> None:
        """Run the steps on `work`, in place, and wait for their end. Collective."""
        context = self.context
        hear_first(context)
        run = Run(self, work, context.tag(number), heading(context, key))
        try:
            context.wait(run.progress)  # without a lock: only this thread uses this run
        except BaseException as error:
            run.finish_sends(error)
            raise

    def scratch(self, data):
        """Return scratch memory for one run on `data`; two simultaneous runs must not share it."""
        if is_device(data):  # cupy has its own memory pool
            return mpi_empty(self.scratch_size, self.dtype, like=data)
        if self.scratch_size * self.dtype.itemsize <= POOLED_BYTES:
            return np.empty(self.scratch_size, self.dtype)
        return self.context.pool.take(self.scratch_size, self.dtype)


def _count(steps: list[Step], itemsize: int) -> Counters:
    """Return how many messages and bytes this rank sends, receives and adds in a run of `steps`."""
    sent = [length(s.source) for s in steps if s.kind == SEND]
    received = [length(s.target) for s in steps if s.kind == RECV]
    reduced = [length(s.target) for s in steps if s.kind in (REDUCE, REDUCE_LEFT)]
    return Counters(
        messages_sent=len(sent),
        bytes_sent=sum(sent) * itemsize,
        messages_received=len(received),
        bytes_received=sum(received) * itemsize,
        bytes_reduced=sum(reduced) * itemsize,
    )


def ends_within(seconds: float, test: Callable[[], bool]) -> bool:
    """Call `test` repeatedly for at most `seconds`; return whether it returned true."""
    end = time.monotonic() + seconds
    while not test():
        if time.monotonic() >= end:
            return False
        time.sleep(0.0005)
    return True


class Run:
    """One execution of a list of steps on `data`, a 1-D contiguous vector, reduced in place.

    The constructor begins the execution; the caller must call `test` until it returns true. The
    first message to each rank begins with `header`, and a message with another header raises
    MismatchError.
    """

    def __init__(self, program: Program, data, tag: int, header: bytes):
        self.program, self.comm, self.tag = program, program.context.data, tag
        self.header = header
        self.sequence: int | None = None  # the operation's number, if newer ones may begin
        self.data, self.scratch = data, program.scratch(data)
        self.device = not isinstance(data, np.ndarray)
        self.needs = program.compiled.needs.copy()
        self.left = len(self.needs)
        self.requests: list = []
        self.owners: list[int] = []
        self.inboxes: dict[int, bytearray] = {}
        self.broken = False  # after an exception the run sends and adds no more
        self._first = bytearray(program.compiled.first if header else self.left)
        self._testing = threading.Lock()
        try:
            self.progress(program.ready.copy())
        except BaseException as error:
            self.broken = True
            self.finish_sends(error)
            raise

    def finish_sends(self, error: BaseException) -> None:
        """Wait at most one second until MPI has sent all messages from the caller's memory."""
        if ulfm.is_death(error):
            ulfm.keep_alive(self)
            return
        steps = self.program.compiled.steps
        owned = zip(self.owners, self.requests, strict=False)
        sends = [r for i, r in owned if i == _HEADER_SENT or steps[i].kind == SEND]
        with suppress(MPI.Exception):  # an earlier exception is being raised
            ends_within(GRACE, lambda: MPI.Request.Testall(sends))

    def test(self) -> bool:
        """Continue the schedule (list of steps); return whether this rank has done all its steps.

        Returns False while another thread is in this method, and after an exception.
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
        """Continue the schedule (list of steps); return whether this rank has done all its steps.

        `ready` has the numbers of the steps to begin; None means all steps that can begin by now,
        because the messages for which they waited have ended. Only one thread at a time may call
        this method.
        """
        if not self.left:
            return True
        if ready is None:
            requests = self.requests
            done = _testsome(requests) if ulfm.current is None else test_some(requests)
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
                    # This receive has room for the first message of any operation, even of a wrong
                    # one. The next message from this peer is received only after the header has
                    # been checked.
                    target = self.inboxes[i] = bytearray(_HEADER.size + PACKED_BYTES)
                    released = ()
                else:
                    target = self._view(step.target)
                requests.append(comm.Irecv([target, _BYTE], step.peer, tag))
                owners.append(i)
            elif kind == SEND:
                message = self._view(step.source)
                if first[i]:
                    if message.nbytes > PACKED_BYTES:  # the header is sent ahead
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
            self.program.context.pool.give(self.scratch)  # for the next run
        return True

    def _released(self, done: list[int]) -> list[int]:
        """Return the steps that may begin after the MPI requests numbered `done` have ended."""
        owners, requests = self.owners, self.requests
        if len(done) == len(requests):
            finished = owners.copy()
            owners.clear()
            requests.clear()
        else:
            finished = [owners[k] for k in done]
            for k in sorted(done, reverse=True):
                # The order of the requests in the list does not matter, so the last request fills
                # the gap.
                owners[k], requests[k] = owners[-1], requests[-1]
                owners.pop()
                requests.pop()
        needs, dependents, ready = self.needs, self.program.compiled.dependents, []
        for i in finished:
            if i in self.inboxes:
                if not self._open(i):
                    ready.append(i)  # now receive the long message itself
                    continue
                released: Sequence[int] = (*self.program.compiled.followers[i], *dependents[i])
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
        """Return a buffer that contains the header and the data `view` of a short first message."""
        if self.device:
            view, source = np.empty(view.size, view.dtype), view
            copy_into(view, source)
        return self.header + view.tobytes()

    def _open(self, i: int) -> bool:
        """Check the header of a peer's first message; return whether data came with the header."""
        inbox, header = self.inboxes.pop(i), self.header
        if not inbox.startswith(header):
            self._mismatch(inbox)
        self._first[i] = 0
        target = self._view(self.program.compiled.steps[i].target)
        if target.nbytes > PACKED_BYTES:
            return False
        values = np.frombuffer(inbox, self.program.dtype, target.size, len(header))
        (copy_into if self.device else np.copyto)(target, values)
        self.left -= 1
        return True

    def _mismatch(self, inbox: bytearray) -> None:
        """Raise MismatchError for a message of another operation that has this operation's tag."""
        context = self.program.context
        if inbox.startswith(self.header[:_KEY_BYTES]):
            context.statuses.fail(f"{CHAIN_DIFFERS}; operation #{context.sequence} found it")
        context.disagree(self.sequence)

    def _compute(self, step: Step) -> None:
        source, target = self._view(step.source), self._view(step.target)
        if not self.device:
            self._combine(step, source, target)
            return
        with device_of(target):
            self._combine(step, source, target)
            # The device may still be computing the sum, and the next step may pass this memory to
            # MPI, so this rank waits for the device.
            synchronize(target)

    def _combine(self, step: Step, source, target) -> None:
        if step.kind == COPY:
            target[:] = source
        elif step.kind == REDUCE:
            self.program.ufunc(target, source, out=target)
        else:
            self.program.ufunc(source, target, out=target)
