"""Allreduce of a short vector inside a node: everyone copies in, one sync, everyone adds all.

The steps are `node.flat`; here they are written out for speed, for at these sizes a function call
of Python costs as much as the addition. Slots are double: when a rank writes a slot for the second
time, it has passed the sync between, at which everybody had read the first.

On nodes of more than `node.FEW_RANKS` ranks one call of NumPy looks at all counters, one compares
all keys, and one adds all slots, in rank order as well.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from threading import get_ident

import numpy as np

from ...events import Counters
from ...runtime.agreement.calls import mark_told
from ...runtime.agreement.mismatch import Signature
from ...runtime.context import Context
from ..schedules.node import FLAT_BYTES
from . import node_barrier
from .node_barrier import NodeMemory
from .reductions import Reduction, finish_mean

_ALIGNED = 128  # bytes: slots of two ranks never share a cache line, nor a prefetched pair


def can_run(memory: NodeMemory, reduction: Reduction, n: int) -> bool:
    """Whether a vector of `n` elements is short enough."""
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
        size = memory.topology.local_size
        #: Two sets of slots; the first axis is the rank.
        self.sets = [_slots(area, size, reduction.work, shape) for area in memory.flat]
        if self.gate.many and prod(shape) == 1:
            # NumPy adds up a single column in another order. So every number is there twice.
            self.sets = [_slots(area, size, reduction.work, (2,)) for area in memory.flat]
        self.rank = memory.topology.local_rank
        sent = Counters(shared_bytes=self.nbytes, bytes_reduced=self.nbytes * (size - 1))
        self.run, calls = _hot_path(self)
        self.runs = context.count(sent, calls, numbers=True)

    def bind(self, x: np.ndarray):
        """Return ``run()`` for this array."""
        run = self.run
        return lambda: run(x)

    def close(self) -> None:
        """Nothing to free: the memory is the communicator's."""


def _slots(area: np.ndarray, size: int, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
    """Return a slot of `shape` for each rank, as one array over `area`."""
    nbytes = prod(shape) * dtype.itemsize
    stride = _stride(nbytes)
    return area[: size * stride].reshape(size, stride)[:, :nbytes].view(dtype).reshape(size, *shape)


def _add_all(flat: Flat) -> Callable[[int, np.ndarray], np.ndarray]:
    """Return ``add_all(set, x)``: the sum of all slots of a set, in `x` where it can be."""
    ufunc, work, sets = flat.reduction.ufunc, flat.reduction.work, flat.sets
    scratch = np.empty(sets[0].shape[1:], work)
    twice = sets[0].shape[1:] != flat.shape

    def add_all(odd: int, x: np.ndarray) -> np.ndarray:
        result = x if x.dtype == work and x.flags.c_contiguous and not twice else scratch
        ufunc.reduce(sets[odd], axis=0, dtype=work, out=result, initial=None)
        return result[:1].reshape(flat.shape) if twice else result

    return add_all


def _hot_path(flat: Flat):
    """Return ``run(x, total)`` and ``calls()``, written out flat; see `native._hot_paths`."""
    context, note, signature = flat.context, flat.context.history.append, flat.signature
    gate, lines, me, others = flat.gate, flat.gate.lines, flat.gate.mine, flat.gate.others
    key, ordered, rank, size = signature.key, node_barrier.ORDERED, flat.rank, context.size
    reduction, ufunc, mean = flat.reduction, flat.reduction.ufunc, flat.reduction.mean
    work, scratch = reduction.work, np.empty(flat.shape, reduction.work)
    views = [[slots[r, ...] for r in range(len(slots))] for slots in flat.sets]
    sets = [(slots[rank], slots[0], slots[1], slots[2:]) for slots in views]
    owner, kind, many, add_all = context.owner, signature.kind, gate.many, _add_all(flat)
    quick = ordered and not many

    calls = 0

    def run(x, total=size):
        nonlocal calls
        before = context.stopped
        if before or (owner is not None and get_ident() != owner):
            before = context.check_free(kind)
        context.stopped = True  # a second thread must not come in: see `calls`
        complete = False
        try:
            calls += 1  # numbers the operation: see `Context.sequence`
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
            if complete:  # the others have all they need from this rank
                mark_told(error, context, for_now=True)
            else:
                gate.leave(error)
            context.stopped = before or context.failed is not None
            raise
        context.stopped = before
        return x

    return run, lambda: calls
