"""MPI's own allreduce with a check: if the ranks' calls differ, all ranks raise an error.

For short vectors (class `Staged`), the data and a header are copied into one buffer, and MPI sums
both. The header is a number that identifies the operation, its dtype and its shape. The sum of the
headers shows whether all ranks were in the same operation. Longer vectors (class `Blocking`) are
summed by a blocking call of MPI. Before this call, the ranks check with a small allreduce that all
of them are about to make it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from itertools import starmap
from math import prod
from threading import get_ident
from typing import Any

import numpy as np
from mpi4py import MPI

from ...events import Counters
from ...runtime import ulfm
from ...runtime.agreement.mismatch import BALLOT, Signature
from ...runtime.communicator import one_step
from ...runtime.context import Context
from .executor import MAX_MESSAGE, Engine, ends_within
from .reductions import Reduction, finish_mean, native_op

#: Vectors of at most this many bytes are copied into a buffer beside a header (class `Staged`).
#: Measured at 2 ranks: for longer vectors the blocking call of Open MPI, with its handshake, is
#: faster than the persistent call.
STAGED_BYTES = 2048

#: How many times a short reduction is tested before the rank begins a wait in which other processes
#: can use the core. The setup of this wait takes longer than a test.
SPINS = 64

#: Seconds that a rank with an exception waits in a handshake for other ranks that may still begin
#: the handshake.
GRACE = 1.0

_MANTISSA = {"f4": 24, "f8": 53, "i4": 31, "i8": 62, "u4": 31, "u8": 62}


def header_values(key: int, code: str, size: int) -> np.ndarray | None:
    """Encode `key`, which identifies an operation, as an array of 8 bytes with dtype `code`.

    MPI adds the arrays of `size` ranks. Returns None if this sum would not be exact.
    """
    bits = _MANTISSA[code] - size.bit_length()
    if bits < 8:
        return None
    pieces = 8 // int(code[1])
    return np.array([key >> (bits * k) & ((1 << bits) - 1) for k in range(pieces)], code)


def can_stage(reduction: Reduction, n: int, size: int) -> bool:
    """Whether `Staged` can reduce `n` elements on `size` ranks by this reduction."""
    code = f"{reduction.work.kind}{reduction.work.itemsize}"
    return (
        reduction.ufunc is np.add
        and n * reduction.work.itemsize <= STAGED_BYTES
        and code in _MANTISSA
        and header_values(0, code, size) is not None
    )


class _Nonblocking:
    """A replacement for a persistent MPI request, for libraries older than MPI 4."""

    def __init__(self, comm, arguments):
        self.arguments, self.comm = arguments, comm
        self.request = MPI.REQUEST_NULL

    def Start(self):
        self.request = self.comm.Iallreduce(*self.arguments)

    def Test(self) -> bool:
        return self.request.Test()

    def Free(self) -> None:
        """Do nothing, because the call of `Test` has already freed the request."""


def persistent_allreduce(comm: MPI.Comm, source: np.ndarray, result: np.ndarray, op: MPI.Op):
    """Return an object with `Start` and `Test` that reduces `source` into `result`. Collective."""
    datatype = MPI.Datatype.fromcode(source.dtype.char)
    arguments = ([source, source.size, datatype], [result, result.size, datatype], op)
    try:
        return comm.Allreduce_init(*arguments)
    except NotImplementedError:
        return _Nonblocking(comm, arguments)


class Staged:
    """Allreduce of a short vector, copied with a header into buffers that stay allocated."""

    def __init__(self, context: Context, signature: Signature, reduction: Reduction, shape):
        self.request, self.run, self.bind, calls = _hot_paths(context, signature, reduction, shape)
        sent = Counters(native_calls=1, native_bytes=prod(shape) * reduction.work.itemsize)
        self.runs = context.count(sent, calls, numbers=True)

    def close(self) -> None:
        """Free the persistent MPI request."""
        self.request.Free()


def _bytes(array: np.ndarray) -> memoryview:
    return memoryview(array).cast("B")  # type: ignore[arg-type]


def _hot_paths(context: Context, signature: Signature, reduction: Reduction, shape):
    """Return what a `Staged` object needs: the MPI request, ``run``, ``bind`` and ``calls``.

    ``run`` reduces an array in place; collective. ``bind`` returns a function without arguments
    that reduces one array. ``calls`` returns how many reductions have been made.
    """
    size, n, dtype, mean = context.size, prod(shape), reduction.work, reduction.mean
    values = header_values(signature.key, f"{dtype.kind}{dtype.itemsize}", size)
    assert values is not None  # `can_stage` has checked that `values` exist
    sent, received = np.zeros(n + values.size, dtype), np.zeros(n + values.size, dtype)
    sent[n:] = values
    request = persistent_allreduce(context.data, sent, received, MPI.SUM)
    begin, test, whole = request.Start, request.Test, slice(None)
    source, result = sent[:n].reshape(shape), received[:n].reshape(shape)
    raw_source, raw_result = _bytes(sent)[: source.nbytes], _bytes(received)[: source.nbytes]
    header = _bytes(received)[source.nbytes :].cast("q")
    expected = int((values * dtype.type(size)).view(np.int64)[0])
    note, owner, kind = context.history.append, context.owner, signature.kind
    count = 0

    def run(x, total=size):
        nonlocal count
        before = context.stopped
        if before or (owner is not None and get_ident() != owner):
            before = context.check_free(kind)
        context.stopped = True  # refuses a second thread, see `agreement/calls.py`
        try:
            count += 1  # also counts for `Context.sequence`
            note(signature)
            source[...] = x
            begin()
            # The first tests are written without a loop, because the setup of a loop takes as long
            # as the tests.
            if not (test() or test() or test() or test() or test() or test()):
                _wait(context, test)
            if header[0] != expected:
                context.disagree()
            if mean:
                finish_mean(reduction, result, total)
            x[...] = result
        except BaseException as error:
            context.break_off(error)
            context.stopped = before or context.failed is not None
            raise
        context.stopped = before
        return x

    def bind(x: np.ndarray):
        flags = x.flags  # `memoryview` needs aligned memory
        plain = flags.c_contiguous and flags.aligned and x.dtype == dtype and x.size
        if not plain or mean:
            return lambda: run(x)  # a partial would take an argument as a divisor
        mine = _bytes(x)

        def run_bound():
            nonlocal count
            before = context.stopped
            if before or (owner is not None and get_ident() != owner):
                before = context.check_free(kind)
            context.stopped = True
            try:
                count += 1
                note(signature)
                raw_source[whole] = mine
                begin()
                if not (test() or test() or test() or test() or test() or test()):
                    _wait(context, test)
                if header[0] != expected:
                    context.disagree()
                mine[whole] = raw_result
            except BaseException as error:
                context.break_off(error)
                context.stopped = before or context.failed is not None
                raise
            context.stopped = before
            return x

        return run_bound

    return request, run, bind, lambda: count


def _wait(context: Context, test: Callable[[], bool]) -> None:
    """Call `test` a few times; if it always returns false, wait with little CPU use. Collective."""
    for _ in range(SPINS):
        if test():
            return
    context.wait(test)


class Handshake:
    """A small allreduce that checks that all ranks are about to make the same blocking call.

    Once all ranks have begun the handshake, each of them must make the blocking call, even a rank
    that an exception has interrupted.
    """

    def __init__(self, context: Context):
        self.context, self.last = context, time.monotonic()
        mine, most = np.zeros(BALLOT, np.int64), np.empty(BALLOT, np.int64)
        self.mine, self.most = memoryview(mine), memoryview(most)  # type: ignore[arg-type]
        self.request = persistent_allreduce(context.control, mine, most, MPI.MAX)

    def __call__(self, key: int) -> BaseException | None:
        """Wait for all ranks; raise MismatchError if `key` differs between ranks. Collective.

        `key` is a number that identifies the operation. If an exception interrupted this rank, the
        method returns it, and otherwise None; the caller must raise it after the blocking call.
        """
        now = time.monotonic()
        if now - self.last > GRACE / 2:
            # One call of `listen` may receive only some of the messages, and an error may be the
            # last of them.
            for _ in range(SPINS):
                self.context.statuses.listen()
        held: BaseException | None = None
        begun = False
        try:
            self.mine[0], self.mine[1] = key, -key
            begun = True
            self.request.Start()
            _wait(self.context, self.request.Test)
        except BaseException as error:
            self.context.break_off(error)
            if not begun or not ends_within(GRACE, self.request.Test):
                raise
            held = error
        self.last = now
        if self.most[0] != key or self.most[1] != -key:
            if held is not None:
                raise held
            self.context.disagree()
        return held

    def close(self) -> None:
        """Free the persistent MPI request."""
        self.request.Free()


def handshake(context: Context) -> Handshake:
    """Return the `Handshake` of a communicator; the first call makes it, and is collective."""
    if "handshake" not in context.store:
        context.store["handshake"] = Handshake(context)
    return context.store["handshake"]


#: MPI's calls for a vector, in order: (method, arguments).
Calls = Iterable[tuple[Callable, tuple]]


class Blocking(Engine):
    """An object that makes MPI's blocking calls, after a check that all ranks will make them."""

    tagged = False

    def __init__(self, context: Context, calls: Callable[[Any], Calls], nbytes: int):
        self.context, self.calls = context, calls
        self.counters = Counters(native_calls=1, native_bytes=nbytes)
        handshake(context)

    def run(self, work, key, number: int = 0, divisor=None) -> None:
        """Reduce the vector `work` by blocking MPI calls. Collective.

        An exception on this rank, for example from a signal handler, is raised only after the
        blocking calls have ended.
        """
        held = handshake(self.context)(key)
        for method, arguments in self.calls(work):
            call, made = one_step(method), list[Any]()
            for _ in range(2):
                try:
                    # The interpreter runs this line as one step. A signal handler can raise only
                    # before or after the step, and the length of the list shows whether the MPI
                    # call was made.
                    made.extend(starmap(call, (arguments,)))
                    break
                except MPI.Exception:
                    raise
                except BaseException as error:
                    held = held or error
                    if made:
                        break
        if ulfm.current is not None:
            ulfm.current.look()  # after a death, the call may return as if it had succeeded
        if held is not None:
            self.context.break_off(held)
            raise held


def blocking_allreduce(context: Context, reduction: Reduction, n: int) -> Blocking:
    """Return an object that runs MPI's own allreduce of `n` elements, in place. Collective."""
    comm, op, root = context.data, native_op(reduction), context.rank == 0
    piece = max(1, MAX_MESSAGE // reduction.work.itemsize)

    def calls(work: np.ndarray) -> Iterator[tuple[Callable, tuple]]:
        for start in range(0, max(n, 1), piece):
            part = work[start : start + piece]
            if op.is_predefined:
                yield comm.Allreduce, (MPI.IN_PLACE, part, op)
                continue
            # The result of an operation made from a ufunc may depend on the order of its operands
            # (for example, the minimum of 0.0 and -0.0), and MPI's allreduce may order them
            # differently on each rank. If the operation is made from a ufunc, one rank therefore
            # reduces and broadcasts the result.
            yield comm.Reduce, (MPI.IN_PLACE if root else part, part if root else None, op, 0)
            yield comm.Bcast, (part, 0)

    return Blocking(context, calls, n * reduction.work.itemsize)


def run_native(context: Context, signature: Signature, nbytes: int, *calls) -> None:
    """Check that all ranks run the same operation, then make the MPI calls `calls`. Collective.

    `signature` describes the operation, and `nbytes` is the number of bytes that it sends.
    """
    engine = Blocking(context, lambda _: calls, nbytes)
    context.begin(signature)
    engine.run(None, signature.key)
    context.under_way = False
    context.sent.add(engine.counters)
