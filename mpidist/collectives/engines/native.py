"""The MPI library's own allreduce, made safe: ranks that disagree find out instead of hanging.

Short vectors (`Staged`): the data is copied beside a header (a number that stands for operation,
dtype, shape) into a registered buffer and both are summed by one persistent `Allreduce_init`. A
wrong header sum means that the ranks were in different operations. Two copies and one comparison
are all it costs, and nothing is looked up in the call.

Longer vectors (`Blocking`): a blocking call cannot be left, so the ranks first agree, by the header
alone, that all are about to make it; then MPI's blocking Allreduce runs in pieces below 2^31.
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
from ...runtime.agreement.mismatch import BALLOT, Signature
from ...runtime.context import Context
from .executor import MAX_MESSAGE, Engine
from .reductions import Reduction, finish_mean, native_op

#: Vectors up to this many bytes are staged beside a header; measured at 2 ranks: beyond, the
#: persistent call of Open MPI loses to the blocking one by more than the handshake costs.
STAGED_BYTES = 2048

#: Looks at a short reduction before the polite wait begins: it costs more than it waits for.
SPINS = 64

#: Seconds that a rank stays in a handshake that it would leave: the others may still begin.
GRACE = 1.0

_MANTISSA = {"f4": 24, "f8": 53, "i4": 31, "i8": 62, "u4": 31, "u8": 62}


def header_values(key: int, code: str, size: int) -> np.ndarray | None:
    """Cut `key` into eight bytes of elements whose sum over `size` ranks is exact.

    Returns None where the ranks are too many for the elements of type `code` to carry enough.
    """
    bits = _MANTISSA[code] - size.bit_length()
    if bits < 8:
        return None
    pieces = 8 // int(code[1])
    return np.array([key >> (bits * k) & ((1 << bits) - 1) for k in range(pieces)], code)


def can_stage(reduction: Reduction, n: int, size: int) -> bool:
    """Whether `Staged` can run this: a sum of a few kilobytes of plain numbers."""
    code = f"{reduction.work.kind}{reduction.work.itemsize}"
    return (
        reduction.ufunc is np.add
        and n * reduction.work.itemsize <= STAGED_BYTES
        and code in _MANTISSA
        and header_values(0, code, size) is not None
    )


class _Nonblocking:
    """Start and Test of an allreduce, for an MPI without persistent collectives (before MPI 4)."""

    def __init__(self, comm, arguments):
        self.arguments, self.comm = arguments, comm
        self.request = MPI.REQUEST_NULL

    def Start(self):
        self.request = self.comm.Iallreduce(*self.arguments)

    def Test(self) -> bool:
        return self.request.Test()

    def Free(self) -> None:
        """Nothing to free."""


def persistent_allreduce(comm: MPI.Comm, source: np.ndarray, result: np.ndarray, op: MPI.Op):
    """Return a request with Start and Test that reduces `source` into `result`. Collective."""
    datatype = MPI.Datatype.fromcode(source.dtype.char)
    arguments = ([source, source.size, datatype], [result, result.size, datatype], op)
    try:
        return comm.Allreduce_init(*arguments)
    except NotImplementedError:
        return _Nonblocking(comm, arguments)


class Staged:
    """Allreduce of a short vector through registered buffers with a header.

    The send buffer's header never changes; the receive buffer's must come back as `size` times
    that. It is eight bytes, so one look at an integer tells.
    """

    def __init__(self, context: Context, signature: Signature, reduction: Reduction, shape):
        n = prod(shape)
        dtype = reduction.work
        header = header_values(signature.key, f"{dtype.kind}{dtype.itemsize}", context.size)
        assert header is not None  # can_stage has asked
        source, result = np.zeros(n + header.size, dtype), np.zeros(n + header.size, dtype)
        source[n:] = header
        self.context, self.signature, self.reduction = context, signature, reduction
        self.raw_source, self.raw_result = _bytes(source), _bytes(result)
        self.nbytes = n * dtype.itemsize
        self.source, self.result = source[:n].reshape(shape), result[:n].reshape(shape)
        self.header = self.raw_result[self.nbytes :].cast("q")
        self.expected = int((header * dtype.type(context.size)).view(np.int64)[0])
        self.request = persistent_allreduce(context.data, source, result, MPI.SUM)
        self.run, self.bind, calls = _hot_paths(self)
        self.runs = context.count(
            Counters(native_calls=1, native_bytes=self.nbytes), calls, numbers=True
        )

    def close(self) -> None:
        """Free the persistent request."""
        self.request.Free()


def _bytes(array: np.ndarray) -> memoryview:
    return memoryview(array).cast("B")  # type: ignore[arg-type]


def _hot_paths(staged: Staged):
    """Return ``run(x, total)``, ``bind(x)`` and ``calls()``.

    ``run`` reduces `x` in place as the next operation. Collective. ``bind`` returns the same for
    one array, whose bytes are at hand. ``calls`` returns how often they ran. Closures, written out
    flat: a lookup in an object costs 20 ns and a function call 100, where MPI itself needs 1,000.
    """
    context, note, signature = staged.context, staged.context.history.append, staged.signature
    source, result, header, expected = staged.source, staged.result, staged.header, staged.expected
    begin, test, whole = staged.request.Start, staged.request.Test, slice(None)
    reduction, mean, size = staged.reduction, staged.reduction.mean, staged.context.size
    owner, kind = context.owner, signature.kind
    raw_source = staged.raw_source[: staged.nbytes]
    raw_result = staged.raw_result[: staged.nbytes]
    count = 0

    def look():
        """Wait on: setting up this loop costs as much as the first looks, which need none."""
        for _ in range(SPINS):
            if test():
                return
        context.wait(test)

    def run(x, total=size):
        nonlocal count
        before = context.stopped
        if before or (owner is not None and get_ident() != owner):
            before = context.check_free(kind)
        context.stopped = True  # a second thread must not come in: see `calls`
        try:
            count += 1  # numbers the operation: see `Context.sequence`
            note(signature)
            source[...] = x
            begin()
            if not (test() or test() or test() or test() or test() or test()):
                look()
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
        flags = x.flags  # not aligned: it has no format that a memoryview can be cast from
        plain = flags.c_contiguous and flags.aligned and x.dtype == reduction.work and x.size
        if not plain or mean:
            return lambda: run(x)
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
                    look()
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

    return run, bind, lambda: count


class Handshake:
    """A few bytes that prove that all ranks are about to make the same blocking call.

    Whoever has begun one may be the last whom the others wait for: they go on into a call that
    nobody can leave. So an exception in here is held back where the call comes off after all, and
    this rank takes part in it first. Whether it does is certain after `GRACE` seconds, for ranks
    that come later are told before they begin.
    """

    def __init__(self, context: Context):
        self.context, self.last = context, time.monotonic()
        mine, most = np.zeros(BALLOT, np.int64), np.empty(BALLOT, np.int64)
        self.mine, self.most = memoryview(mine), memoryview(most)  # type: ignore[arg-type]
        self.request = persistent_allreduce(context.control, mine, most, MPI.MAX)
        self.begin, self.test = self.request.Start, self.request.Test

    def __call__(self, key: int) -> BaseException | None:
        """Return when all ranks passed the same key; raise MismatchError otherwise. Collective.

        An exception that is returned must be raised after the call that all make now.
        """
        now = time.monotonic()
        if now - self.last > GRACE / 2:
            # A look brings in a message or two, and others may have come before that word.
            for _ in range(SPINS):
                self.context.statuses.listen()
        held: BaseException | None = None
        begun = False
        try:
            self.mine[0], self.mine[1] = key, -key
            begun = True
            self.begin()
            test = self.test
            for _ in range(SPINS):
                if test():
                    break
            else:
                self.context.wait(test)
        except BaseException as error:
            self.context.break_off(error)
            if not begun or not self._comes_off():
                raise
            held = error
        self.last = now
        if self.most[0] != key or self.most[1] != -key:
            if held is not None:
                raise held
            self.context.disagree()
        return held

    def _comes_off(self) -> bool:
        """Whether all ranks begin, after an exception on one of them."""
        end = time.monotonic() + GRACE
        while time.monotonic() < end:
            if self.test():
                return True
            time.sleep(0.0005)
        return False

    def close(self) -> None:
        """Free the persistent request."""
        self.request.Free()


def handshake(context: Context) -> Handshake:
    """Return the handshake of a communicator; made on first use. Collective on first use."""
    if "handshake" not in context.store:
        context.store["handshake"] = Handshake(context)
    return context.store["handshake"]


#: MPI's calls for a vector, in order: (method, arguments).
Calls = Iterable[tuple[Callable, tuple]]


class Blocking(Engine):
    """Agree, then make MPI's blocking calls, which all ranks make; `calls` says which."""

    tagged = False

    def __init__(self, context: Context, calls: Callable[[Any], Calls], nbytes: int):
        self.context, self.calls = context, calls
        self.counters = Counters(native_calls=1, native_bytes=nbytes)
        handshake(context)

    def run(self, work, key, number: int = 0, divisor=None) -> None:
        """Make the calls on `work`. Collective.

        What this rank raises on the way is raised when all ranks have come through: `Handshake`.
        """
        held = handshake(self.context)(key)
        for call, arguments in self.calls(work):
            made: list = []
            for _ in range(2):
                try:
                    # One step of the interpreter: what a signal's handler raises comes before it
                    # or after it, and the list tells which.
                    made.extend(starmap(call, (arguments,)))
                    break
                except MPI.Exception:
                    raise
                except BaseException as error:
                    held = held or error
                    if made:
                        break
        if held is not None:
            self.context.break_off(held)
            raise held


def blocking_allreduce(context: Context, reduction: Reduction, n: int) -> Blocking:
    """Return MPI's own allreduce of `n` elements, in place, in pieces. Collective."""
    comm, op, root = context.data, native_op(reduction), context.rank == 0
    piece = max(1, MAX_MESSAGE // reduction.work.itemsize)

    def calls(work: np.ndarray) -> Iterator[tuple[Callable, tuple]]:
        for start in range(0, max(n, 1), piece):
            part = work[start : start + piece]
            if op.is_predefined:
                yield comm.Allreduce, (MPI.IN_PLACE, part, op)
                continue
            # An operation made from a ufunc may depend on the order of its operands (minimum of the
            # two zeros), and MPI's allreduce may order them differently on each rank: reduce once.
            yield comm.Reduce, (MPI.IN_PLACE if root else part, part if root else None, op, 0)
            yield comm.Bcast, (part, 0)

    return Blocking(context, calls, n * reduction.work.itemsize)


def run_native(context: Context, signature: Signature, nbytes: int, *calls) -> None:
    """Begin an operation that is MPI's own, agree, make its `calls`, count it. Collective."""
    engine = Blocking(context, lambda _: calls, nbytes)
    context.begin(signature)
    engine.run(None, signature.key)
    context.under_way = False
    context.sent.add(engine.counters)
