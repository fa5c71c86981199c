"""Allreduce of short vectors in a node: all vectors are copied to shared memory, then added.

The steps are those of the schedule `node.flat`, written out by hand, because for short vectors one
Python function call costs as much as the addition.
"""

from __future__ import annotations

from math import prod
from threading import get_ident

import numpy as np

from ...events import Counters
from ...runtime.agreement.calls import mark_told
from ...runtime.agreement.mismatch import Signature
from ..schedules.node import FLAT_BYTES
from . import node_barrier
from .node_barrier import NodeMemory
from .reductions import Reduction, finish_mean

_ALIGNED = 128  # bytes: two ranks share no cache line and no prefetched pair of lines


def can_run(memory: NodeMemory, reduction: Reduction, n: int) -> bool:
    """Whether a vector of `n` elements fits into a rank's buffers for short vectors in `memory`."""
    return memory.topology.local_size * _stride(n * reduction.work.itemsize) <= FLAT_BYTES


def _stride(nbytes: int) -> int:
    return -(-max(nbytes, 1) // _ALIGNED) * _ALIGNED


class NodeShort:
    """A prepared allreduce of short arrays of one shape; ``run(x)`` reduces `x` in place."""

    def __init__(
        self, signature: Signature, reduction: Reduction, shape: tuple[int, ...], memory: NodeMemory
    ):
        self.gate, self.reduction = memory.gate, reduction
        size, n = memory.topology.local_size, prod(shape)
        # NumPy adds up a single column in another order than several columns. A vector of one
        # number is therefore stored as two equal columns.
        slot = (2,) if self.gate.many and n == 1 else shape
        #: Two arrays, used in turn; each has a slot (buffer) per rank, and the first axis is the
        #: rank.
        self.sets = [_slots(area, size, reduction.work, slot) for area in memory.flat]
        nbytes = n * reduction.work.itemsize
        sent = Counters(shared_bytes=nbytes, bytes_reduced=nbytes * (size - 1))
        rank = memory.topology.local_rank
        self.run, calls = _hot_path(self, signature, shape, rank)
        self.runs = self.gate.context.count(sent, calls, numbers=True)

    def bind(self, x: np.ndarray):
        """Return a function without arguments that reduces the array `x` in place."""
        run = self.run
        return lambda: run(x)  # a partial would take an argument as a divisor

    def close(self) -> None:
        """Do nothing: the memory belongs to the communicator."""


def _slots(area: np.ndarray, size: int, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
    """Return the shared memory `area` as one array with a buffer of the given shape per rank."""
    nbytes = prod(shape) * dtype.itemsize
    stride = _stride(nbytes)
    return area[: size * stride].reshape(size, stride)[:, :nbytes].view(dtype).reshape(size, *shape)


def _hot_path(short: NodeShort, signature: Signature, shape, rank: int):
    """Return two functions: ``run(x, total)`` reduces `x`, ``calls()`` returns how often it ran."""
    gate, context, slots = short.gate, short.gate.context, short.sets
    note, owner, kind, key = context.history.append, context.owner, signature.kind, signature.key
    size = context.size
    lines, me, others, many = gate.lines, gate.mine, gate.others, gate.many
    reduction, ufunc, mean = short.reduction, short.reduction.ufunc, short.reduction.mean
    work, scratch = reduction.work, np.empty(slots[0].shape[1:], reduction.work)
    twice = scratch.shape != shape
    views = [[each[r, ...] for r in range(len(each))] for each in slots]
    sets = [(each[rank], each[0], each[1], each[2:]) for each in views]
    quick = node_barrier.ORDERED and not many
    calls = 0

    def add_all(odd: int, x: np.ndarray) -> np.ndarray:
        """Return the sum of all ranks' vectors, in `x` if its dtype and layout allow that.

        `odd` (0 or 1) says which of each rank's two buffers contains the vector.
        """
        result = x if x.dtype == work and x.flags.c_contiguous and not twice else scratch
        ufunc.reduce(slots[odd], axis=0, dtype=work, out=result, initial=None)
        return result[:1].reshape(shape) if twice else result

    def run(x, total=size):
        nonlocal calls
        before = context.stopped
        if before or (owner is not None and get_ident() != owner):
            before = context.check_free(kind)
        context.stopped = True  # refuses a second thread, see `agreement/calls.py`
        complete = False
        try:
            calls += 1  # also counts for `Context.sequence`
            note(signature)
            count = gate.count + 1
            odd = count & 1
            mine, first, second, rest = sets[odd]
            mine[...] = x
            lines[me + 1 + odd] = key
            if quick:
                gate.count = lines[me] = count
                for other in others:
                    if lines[other] < count:
                        gate.wait(count)
                        break
            else:
                gate.sync()
            complete = True
            if many:
                gate.check(key)
                result = add_all(odd, x)
            else:
                for other in others:
                    if lines[other + 1 + odd] != key:
                        context.disagree()
                result = x if x.dtype == work else scratch
                ufunc(first, second, out=result)
                for slot in rest:
                    ufunc(result, slot, out=result)
            if mean:
                finish_mean(reduction, result, total)
            if result is not x:
                x[...] = result
        except BaseException as error:
            if complete:  # the other ranks need no more data of this rank
                mark_told(error, context, for_now=True)
            else:
                gate.leave(error)
            context.stopped = before or context.failed is not None
            raise
        context.stopped = before
        return x

    return run, lambda: calls
