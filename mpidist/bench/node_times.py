"""`mpidist bench node`: what one rank of a large node does itself, without waiting for anybody.

One process is one rank; of the others it sees what they would have left in the shared memory:
counters far ahead, the key of the operation, their slots. So the figure is Python's part and this
rank's copies and sums: a lower bound of a call on as many cores, and what more ranks per node cost
each of them. On this machine's caches, of which the others take nothing.
"""

from __future__ import annotations

import timeit
from collections import deque
from types import SimpleNamespace
from typing import Any

import numpy as np

from ..collectives.engines import node_short
from ..collectives.engines.node_barrier import KEYS, LINE, NodeBarrier
from ..collectives.engines.reductions import resolve
from ..collectives.engines.staging import STAGED, StagedProgram
from ..collectives.schedules import node
from ..events import Runs
from ..runtime.agreement.mismatch import Signature
from ..runtime.agreement.statuses import HISTORY

_AHEAD = 1 << 60


class FakedNode:
    """A node of `size` ranks of which only `rank` is there; the others are always ahead."""

    def __init__(self, size: int, rank: int):
        self.size, self.rank = size, rank
        lines = memoryview(np.zeros(LINE * size, np.int64))  # type: ignore[arg-type]
        topology = SimpleNamespace(local_size=size, local_rank=rank, nodes=1)
        self.context: Any = SimpleNamespace(
            rank=rank, size=size, stopped=False, failed=None, owner=None,
            history=deque(maxlen=HISTORY), count=lambda *_, **__: Runs(None, None),  # type: ignore
        )  # fmt: skip
        self.memory: Any = SimpleNamespace(
            topology=topology,
            gate=NodeBarrier(self.context, lines, topology),  # type: ignore[arg-type]
            flat=[np.zeros(node.FLAT_BYTES, np.uint8) for _ in range(2)],
            staging=np.zeros(node.staging_bytes(size), np.uint8),
        )
        self.lines = np.frombuffer(lines, np.int64).reshape(size, LINE)

    def allreduce(self, n: int, dtype: str = "f4", op: str = "sum"):
        """Return ``run(x)`` for vectors of `n` elements, and what it is: "flat" or "staged"."""
        reduction = resolve(op, np.dtype(dtype))
        signature = Signature("allreduce", reduction.dtype.name, f"({n})", op, "node")
        others = np.arange(self.size) != self.rank
        self.lines[others, 0] = _AHEAD
        self.lines[others, KEYS : KEYS + 2] = signature.key
        if node_short.can_run(self.memory, reduction, n):
            self.flat = node_short.Flat(self.context, signature, reduction, (n,), self.memory)
            return self.flat.run, "flat"
        program = StagedProgram(
            self.memory.gate, STAGED, self.size, self.rank, n, self.size, self.memory.staging,
            reduction.work, reduction.ufunc,
        )  # fmt: skip
        divisor = reduction.work.type(self.size) if reduction.mean else None
        return lambda x: program.run(x, signature.key, 0, divisor), "staged"


def measure(size: int, nbytes: int, rounds: int) -> dict:
    """Return the row of one size, float32.

    Returns
    -------
    dict
        ranks, bytes, form, us (the least of `rounds`), staging_bytes (of the node).
    """
    faked = FakedNode(size, size // 2)
    x = np.zeros(max(1, nbytes // 4), np.float32)
    run, form = faked.allreduce(x.size)
    run(x)
    number, seconds = timeit.Timer(lambda: run(x)).autorange(lambda *_: None)
    number = max(1, round(number * 0.02 / seconds))
    least = min(timeit.repeat(lambda: run(x), number=number, repeat=rounds)) / number
    return {
        "ranks": size,
        "bytes": x.nbytes,
        "form": form,
        "us": round(least * 1e6, 3),
        "staging_bytes": faked.memory.staging.nbytes,
    }
