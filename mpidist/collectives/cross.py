"""The executor of `node.in_place` schedules on vectors that lie in private memory.

In an arena slot r is mapped; here it is the vector of local rank r, wherever that lies, and the
kernel copies (`cross_memory`). A piece of another rank's vector is read into a buffer that stays
in the cache, added, and the sum written back to everyone while it is still there: N bytes are read
and N written per rank, as in an arena, where staging passes every number through memory twice more.

Addresses travel on the gate's cache lines beside the key of the operation, so the first sync
proves both; nobody announces another address before all have passed the last sync.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..cross_memory import CrossMemory
from ..events import Counters
from .schedule import COPY, NODE_SYNC, NOTHING, REDUCE, Step, length
from .shared import ADDRESS, LINE, Gate

#: Private vectors of more bytes are reached, shorter ones staged: a system call costs 1 us and
#: 0.1 us a page. Measured at 2 ranks: staging wins up to 256 KiB, in the cache up to 512 KiB.
REACHED_BYTES = 256 << 10
#: Bytes of a piece.
PIECE_BYTES = 512 << 10


class CrossProgram:
    """Steps of one rank of `node.in_place` or its halves, made ready to run; see `SharedProgram`.

    Positions ``[r n, (r + 1) n)`` are the vector of local rank r.
    """

    def __init__(self, steps: list[Step], n: int, rank: int, dtype, ufunc, memory: CrossMemory):
        self.memory, self.ufunc, self.itemsize = memory, ufunc, dtype.itemsize
        self.rounds: list[list[tuple]] = [[]]
        longest = 0
        for step in steps:
            if step.kind == NODE_SYNC:
                self.rounds.append([])
            elif length(step.target):
                own, other = step.target, step.source
                if step.kind == COPY:
                    own, other = other, own
                else:
                    longest = max(longest, length(own))
                peer, offset = divmod(other[0], n) if other != NOTHING else (rank, 0)
                span = slice(own[0] - rank * n, own[1] - rank * n)
                self.rounds[-1].append((step.kind, span, peer, offset * dtype.itemsize))
        self.scratch = np.empty(longest, dtype)
        kinds = [(kind, span.stop - span.start) for part in self.rounds for kind, span, *_ in part]
        self.counters = Counters(
            shared_bytes=dtype.itemsize * sum(count for kind, count in kinds if kind == COPY),
            bytes_reduced=dtype.itemsize * sum(count for kind, count in kinds if kind == REDUCE),
        )
        self._held: Any = None

    def run(self, gate: Gate, key: int | None, x: np.ndarray, divisor) -> None:
        """Run all rounds on the flat vector `x`. Collective over the node.

        `key` is None for the second half of an operation, on the same vector.
        """
        # Others write into x. If this is broken off, it must not become other memory meanwhile.
        self._held = x
        if key is not None:
            gate.lines[gate.mine + ADDRESS] = x.ctypes.data
            gate.announce(key)
        last = len(self.rounds) - 1
        for number in range(last + 1):
            self._compute(gate, number, x, divisor)
            if number < last:
                gate.sync()
                if number == 0 and key is not None:
                    gate.check(key)
        self._held = None

    def _compute(self, gate: Gate, number: int, x: np.ndarray, divisor) -> None:
        memory, lines, itemsize, scratch = self.memory, gate.lines, self.itemsize, self.scratch
        mine, buffer = x.ctypes.data, scratch.ctypes.data
        for kind, span, peer, offset in self.rounds[number]:
            part = x[span]
            if kind == REDUCE:
                address = lines[LINE * peer + ADDRESS] + offset
                memory.read(peer, address, buffer, part.nbytes)
                self.ufunc(part, scratch[: part.size], out=part)
            elif kind == COPY:
                address = lines[LINE * peer + ADDRESS] + offset
                memory.write(peer, address, mine + span.start * itemsize, part.nbytes)
            elif divisor is not None:
                np.divide(part, divisor, out=part)
