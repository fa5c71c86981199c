"""The executor of `node.in_place_allgather` on vectors that lie in private memory.

In an arena slot r is mapped; here it is the vector of local rank r, wherever that lies, and the
kernel copies (`cross_memory`). An allreduce of private vectors is staged on its way in, where the
owner adds what the others put into shared memory, and written where it is wanted on its way out,
which saves two of four copies. Reading the others' vectors through the kernel as well costs more
than staging them: it copies no less, and enters pages one by one.

    2 ranks, n elements     a copy in, a sum, a copy out, of n/2 each; 3 + n/(2 pieces) syncs

Addresses travel on the gate's cache lines beside the key of the operation: the first sync proves
both, and nobody tells another before all have passed the last one. Nobody writes into a vector
before its rank has staged all of it, for owners write after the last sync of the first half.
"""

from __future__ import annotations

import numpy as np

from ..cross_memory import CrossMemory
from ..errors import MpidistError
from ..events import Counters
from .schedule import COPY, NODE_SYNC, Step, length
from .shared import ADDRESS, LINE, Gate, SharedProgram

#: Private vectors of more bytes are written through the kernel; shorter ones are staged twice, for
#: a system call costs some 4 us. Measured at 2 ranks: on pages of 4 KiB both are equal from 2 MiB
#: on, on huge pages the kernel is faster by a fifth from 1 MiB on.
REACHED_BYTES = 512 << 10


class CrossProgram:
    """Steps of one rank of `node.in_place_allgather`, made ready to run; see `SharedProgram`.

    Positions ``[r n, (r + 1) n)`` are the vector of local rank r. `staged` does the same where
    some rank's vector is no memory that the kernel copies; that rank tells the address 0.
    """

    def __init__(
        self,
        steps: list[Step],
        n: int,
        rank: int,
        itemsize: int,
        memory: CrossMemory,
        staged: SharedProgram,
    ):
        self.memory, self.staged = memory, staged
        self._seen = self._told = 0
        self.rounds: list[list[tuple[int | None, slice, int]]] = [[]]
        self._held: np.ndarray | None = None
        written = 0
        for step in steps:
            if step.kind == NODE_SYNC:
                self.rounds.append([])
            elif length(step.target):
                peer, start = divmod(step.target[0], n)
                span = slice(start, start + length(step.target))
                to = peer if step.kind == COPY else None
                self.rounds[-1].append((to, span, start * itemsize))
                written += length(step.target) * itemsize * (to is not None)
        self.counters = Counters(shared_bytes=written)

    def prepare(self, gate: Gate, x: np.ndarray) -> None:
        """Tell the others where `x` lies. Local, before the first sync of the operation."""
        # They write into it. If this is broken off, it must not become other memory meanwhile.
        self._held = x
        address = x.ctypes.data
        if address != self._seen:
            self._seen = address
            self._told = address if self.memory.holds(address, x.nbytes) else 0
        gate.lines[gate.mine + ADDRESS] = self._told

    def run(self, gate: Gate, key: None, x: np.ndarray, divisor) -> None:
        """Run all rounds on the flat vector `x`, the one of `prepare`. Collective over the node."""
        mine = x.ctypes.data
        if not all(gate.lines[line + ADDRESS] for line in (gate.mine, *gate.others)):
            self.staged.run(gate, key, x, divisor)
            self._held = None
            return
        for number, steps in enumerate(self.rounds):
            if number:
                gate.sync()
            for peer, span, offset in steps:
                part = x[span]
                if peer is not None:
                    address = gate.lines[LINE * peer + ADDRESS] + offset
                    try:
                        self.memory.write(peer, address, mine + offset, part.nbytes)
                    except MpidistError as error:
                        # The peer waits for the rest. If this rank went on, its next sync would
                        # let the peer return with half a result.
                        gate.context.statuses.fail(str(error))
                elif divisor is not None:
                    np.divide(part, divisor, out=part)
        self._held = None
