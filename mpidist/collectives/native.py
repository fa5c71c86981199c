"""The MPI library's own allreduce, made safe: ranks that disagree find out instead of hanging.

Short vectors (`Staged`): the data is copied beside a header (a number that stands for operation,
dtype, shape) into a registered buffer and both are summed by one persistent `Allreduce_init`. A
wrong header sum means that the ranks were in different operations. Two copies and one comparison
are all it costs, and nothing is looked up in the call.

Longer vectors (`Blocking`): a blocking call cannot be left, so the ranks first agree, by the header
alone, that all are about to make it; then MPI's blocking Allreduce runs in pieces below 2^31.
"""

from __future__ import annotations

from math import prod

import numpy as np
from mpi4py import MPI

from ..context import Context
from ..events import Counters
from ..mismatch import Signature
from .executor import MAX_MESSAGE
from .reductions import Reduction, finish_mean, native_op

#: Vectors up to this many bytes are staged beside a header.
STAGED_BYTES = 4096

_MANTISSA = {"f4": 24, "f8": 53, "i4": 31, "i8": 62, "u4": 31, "u8": 62}


def header_values(key: int, code: str, size: int) -> np.ndarray | None:
    """Cut `key` into numbers whose sum over `size` ranks is exact in elements of type `code`.

    Local. Returns None where the ranks are too many for a few elements to carry 32 bits.
    """
    bits = _MANTISSA[code] - size.bit_length()
    if bits < 6:
        return None
    pieces = -(-32 // bits)
    key &= (1 << 32) - 1
    return np.array([key >> (bits * k) & ((1 << bits) - 1) for k in range(pieces)], np.dtype(code))


def can_stage(reduction: Reduction, n: int, size: int) -> bool:
    """Whether `Staged` can run this: a sum of a few kilobytes of plain numbers. Local."""
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
    that. Both are eight bytes (or more), so one look at an integer tells.
    """

    def __init__(self, context: Context, signature: Signature, reduction: Reduction, shape):
        n = prod(shape)
        dtype = reduction.work
        header = header_values(signature.key, f"{dtype.kind}{dtype.itemsize}", context.size)
        assert header is not None  # can_stage has asked
        source, result = np.zeros(n + header.size, dtype), np.zeros(n + header.size, dtype)
        source[n:] = header
        self.context, self.history = context, context.history
        self.reduction, self.mean, self.size = reduction, reduction.mean, context.size
        self.source, self.result = source[:n].reshape(shape), result[:n].reshape(shape)
        raw = memoryview(result).cast("B")  # type: ignore[arg-type]
        self.header = raw[n * dtype.itemsize :]
        self.expected = (header * dtype.type(context.size)).tobytes()
        self.request = persistent_allreduce(context.data, source, result, MPI.SUM)
        self.begin, self.test = self.request.Start, self.request.Test
        self.signature, self.last_used = signature, context.sequence
        self.nbytes, self.calls = n * dtype.itemsize, 0

    def __call__(self, x: np.ndarray, total=None) -> None:
        """Reduce `x` in place as the next operation. Collective.

        The hot path of small messages: written out flat, because a function call of Python costs
        a tenth of what the whole reduction does.
        """
        context = self.context
        if context.stopped:
            context.begin(self.signature)
        context.sequence = self.last_used = sequence = context.sequence + 1
        self.history[sequence & 63] = self.signature
        self.source[...] = x
        self.begin()
        test = self.test
        if not (test() or test() or test() or test() or test() or test()):
            context.wait(test)
        if self.header != self.expected:
            context.disagree()
        if self.mean:
            finish_mean(self.reduction, self.result, total or self.size)
        x[...] = self.result
        self.calls += 1

    def counters(self) -> Counters:
        """Return what ran since the last look."""
        calls, self.calls = self.calls, 0
        return Counters(native_calls=calls, native_bytes=calls * self.nbytes)

    def close(self) -> None:
        """Free the persistent request. Local."""
        self.request.Free()


class Handshake:
    """A few bytes that prove that all ranks are about to make the same blocking call."""

    def __init__(self, context: Context):
        self.context = context
        self.mine, self.most = np.empty(2, np.int64), np.empty(2, np.int64)
        self.request = persistent_allreduce(context.control, self.mine, self.most, MPI.MAX)

    def __call__(self, key: int) -> None:
        """Return when all ranks passed the same key; raise MismatchError otherwise. Collective."""
        self.mine[0], self.mine[1] = key, -key
        self.request.Start()
        self.context.wait(self.request.Test)
        if self.most[0] != key or self.most[1] != -key:
            self.context.disagree()

    def close(self) -> None:
        """Free the persistent request. Local."""
        self.request.Free()


def handshake(context: Context) -> Handshake:
    """Return the handshake of a communicator; made on first use. Collective on first use."""
    if "handshake" not in context.store:
        context.store["handshake"] = Handshake(context)
    return context.store["handshake"]


class Blocking:
    """Agree, then MPI's blocking Allreduce in place, in pieces."""

    def __init__(self, context: Context, signature: Signature, reduction: Reduction, n: int):
        self.context, self.key = context, signature.key
        self.op, self.n = native_op(reduction), n
        self.agreed = handshake(context)
        self.piece = max(1, MAX_MESSAGE // reduction.work.itemsize)
        self.counters = Counters(native_calls=1, native_bytes=n * reduction.work.itemsize)

    def __call__(self, work: np.ndarray) -> None:
        """Reduce the flat vector `work` in place. Collective."""
        self.agreed(self.key)
        if self.n <= self.piece:
            self._reduce(work)
            return
        for start in range(0, self.n, self.piece):
            self._reduce(work[start : start + self.piece])

    def _reduce(self, part: np.ndarray) -> None:
        comm = self.context.data
        if self.op.is_predefined:
            comm.Allreduce(MPI.IN_PLACE, part, self.op)
            return
        # An operation made from a ufunc may depend on the order of its operands (minimum of the
        # two zeros), and MPI's allreduce may order them differently on each rank: reduce once.
        if comm.rank == 0:
            comm.Reduce(MPI.IN_PLACE, part, self.op, root=0)
        else:
            comm.Reduce(part, None, self.op, root=0)
        comm.Bcast(part, root=0)

    def close(self) -> None:
        """Nothing of its own to free."""
