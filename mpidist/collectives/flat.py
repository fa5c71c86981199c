"""Allreduce of a short vector inside a node: everyone copies in, one sync, everyone adds all.

The steps are `node.flat`; here they are written out for speed, for at these sizes a function call
of Python costs as much as the addition. Slots are double: when a rank writes a slot for the second
time, it has passed the sync between, at which everybody had read the first.
"""

from __future__ import annotations

from math import prod

import numpy as np

from ..context import Context
from ..events import Counters
from ..mismatch import Signature
from . import shared
from .node import FLAT_BYTES
from .reductions import Reduction, finish_mean
from .shared import NodeMemory

_ALIGNED = 128  # bytes: slots of two ranks never share a cache line, nor a prefetched pair


def can_run(memory: NodeMemory, reduction: Reduction, n: int) -> bool:
    """Whether a vector of `n` elements is short enough. Local."""
    return memory.topology.local_size * _stride(n * reduction.work.itemsize) <= FLAT_BYTES


def _stride(nbytes: int) -> int:
    return -(-max(nbytes, 1) // _ALIGNED) * _ALIGNED


class Flat:
    """One allreduce of a short vector, ready to run: ``run(x, total)`` reduces `x` in place."""

    def __init__(
        self,
        context: Context,
        signature: Signature,
        reduction: Reduction,
        shape: tuple[int, ...],
        memory: NodeMemory,
    ):
        self.context, self.signature, self.reduction = context, signature, reduction
        self.gate, self.shape = memory.gate, shape
        self.nbytes = prod(shape) * reduction.work.itemsize
        stride, size = _stride(self.nbytes), memory.topology.local_size
        self.sets = [
            [
                area[r * stride : r * stride + self.nbytes].view(reduction.work).reshape(shape)
                for r in range(size)
            ]
            for area in memory.flat
        ]
        self.rank = memory.topology.local_rank
        sent = Counters(shared_bytes=self.nbytes, bytes_reduced=self.nbytes * (size - 1))
        self.run, calls = _hot_path(self)
        self.runs = context.count(sent, calls, numbers=True)

    def bind(self, x: np.ndarray):
        """Return ``run()`` for this array. Local."""
        run = self.run
        return lambda: run(x)

    def close(self) -> None:
        """Nothing to free: the memory is the communicator's."""


def _hot_path(flat: Flat):
    """Return ``run(x, total)`` and ``calls()``, written out flat; see `native._hot_paths`."""
    context, note, signature = flat.context, flat.context.history.append, flat.signature
    gate, lines, me, others = flat.gate, flat.gate.lines, flat.gate.mine, flat.gate.others
    key, ordered, rank, size = signature.key, shared.ORDERED, flat.rank, context.size
    reduction, ufunc, mean = flat.reduction, flat.reduction.ufunc, flat.reduction.mean
    work, scratch = reduction.work, np.empty(flat.shape, reduction.work)
    sets = [(slots[rank], slots[0], slots[1], slots[2:]) for slots in flat.sets]

    calls = 0

    def run(x, total=size):
        nonlocal calls
        if context.stopped:
            context.check_free(signature.kind)
        calls += 1  # numbers the operation: see `Context.sequence`
        note(signature)
        count = gate.count + 1
        odd = count & 1
        mine, first, second, rest = sets[odd]
        mine[...] = x
        lines[me + 1 + odd] = key
        if ordered:
            gate.count = lines[me] = count
            for other in others:
                if lines[other] < count:
                    gate.wait(count)
                    break
        else:
            gate.sync()
        for other in others:
            if lines[other + 1 + odd] != key:
                context.disagree()
        result = x if x.dtype == work else scratch
        ufunc(first, second, out=result)
        for slot in rest:
            ufunc(result, slot, out=result)
        if mean:
            finish_mean(reduction, result, total)
        if result is scratch:
            x[...] = scratch
        return x

    return run, lambda: calls
