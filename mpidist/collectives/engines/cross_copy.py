"""The executor of `node.in_place` and its second half on vectors that lie in private memory.

In an arena slot r is mapped; here it is the vector of local rank r, wherever that lies, and the
kernel copies (`cross_memory`). Two ways, 2 ranks and n elements, each step of n/2:

    node          a copy in, a sum, a copy out by the kernel        3 + n/(2 pieces) syncs
    single_copy   a copy by the kernel, a sum, a copy back by it    2 syncs

Staging what comes in keeps the syncs and system calls few. Where the cores of two ranks share no
cache, what is staged moves between them twice more, and reading the vectors where they lie wins.

Addresses travel on the gate's cache lines beside the key of the operation: the first sync proves
both, and nobody tells another before all have passed the last one. Nobody writes into a vector
before its rank has staged all of it, for owners write after the last sync of the first half; and
each element has one owner, who alone reads and writes it everywhere.
"""

from __future__ import annotations

import numpy as np

from ...errors import MpidistError
from ...events import Counters
from ...runtime.cross_memory import CrossMemory
from ..schedules.schedule import COPY, FINISH, NODE_SYNC, REDUCE, Step, length
from .node_barrier import ADDRESS, LINE, NodeBarrier, NodeProgram
from .reductions import Reduction

#: Private vectors of more bytes are written through the kernel; shorter ones are staged twice, for
#: a system call costs some 4 us. Measured at 2 ranks: on pages of 4 KiB both are equal from 2 MiB
#: on, on huge pages the kernel is faster by a fifth from 1 MiB on.
REACHED_BYTES = 512 << 10
#: Private vectors of more bytes go by `single_copy` under "node" as well. Measured at 2 ranks: it
#: is slower by up to a sixth where the cores share a cache, and twice as fast where they do not.
WHOLE_BYTES = 2 << 20
#: Bytes that `single_copy` reads at once, which stay in the cache until they are added.
PIECE_BYTES = 512 << 10


class CrossProgram(NodeProgram):
    """Steps of one rank of `node.in_place` or its second half, made ready; see `NodeProgram`.

    Positions ``[r n, (r + 1) n)`` are the vector of local rank r. `staged` does the same where
    some rank's vector is no memory that the kernel copies; that rank tells the address 0.
    """

    def __init__(
        self,
        steps: list[Step],
        n: int,
        rank: int,
        reduction: Reduction,
        memory: CrossMemory,
        staged: NodeProgram,
    ):
        super().__init__(staged.gate)
        self.memory, self.staged, self.ufunc = memory, staged, reduction.ufunc
        itemsize = reduction.work.itemsize
        self._seen = self._told = 0
        self._held: np.ndarray | None = None
        self.rounds: list[list[tuple[str, int, slice, int]]] = [[]]
        moved = {COPY: 0, REDUCE: 0, FINISH: 0}
        longest = 0
        for step in steps:
            if step.kind == NODE_SYNC:
                self.rounds.append([])
            elif length(step.target):
                # The other rank's range has the same place in its vector as ours in ours.
                other = {COPY: step.target, REDUCE: step.source, FINISH: step.target}[step.kind]
                peer, start = divmod(other[0], n)
                span = slice(start, start + length(step.target))
                self.rounds[-1].append((step.kind, peer, span, start * itemsize))
                moved[step.kind] += length(step.target) * itemsize
                if step.kind == REDUCE:
                    longest = max(longest, length(step.target))
        self._buffer = np.empty(longest, reduction.work)
        self.counters = Counters(shared_bytes=moved[COPY], bytes_reduced=moved[REDUCE])

    def prepare(self, x: np.ndarray) -> None:
        """Tell the others where `x` lies. Before the first sync of the operation."""
        # They write into it. If this is broken off, it must not become other memory meanwhile.
        self._held = x
        address = x.ctypes.data
        if address != self._seen:
            self._seen = address
            self._told = address if self.memory.holds(address, x.nbytes) else 0
        self.gate.lines[self.gate.mine + ADDRESS] = self._told

    def run(self, work, key, number: int = 0, divisor=None) -> None:
        """Run all rounds on the flat vector `work`. Collective over the node.

        `key` is None for the second half of an operation, on the vector of its `prepare`.
        """
        gate, rounds = self.gate, self.rounds
        if key is not None:
            self.prepare(work)
            gate.announce(key)
            gate.sync()
            gate.check(key)
            rounds = rounds[1:]  # the first is empty: nothing is touched before that sync
        if gate.all_told():
            for k, steps in enumerate(rounds):
                if k:
                    gate.sync()
                try:
                    self._compute(gate, steps, work, divisor)
                except MpidistError as error:
                    # The peers wait for the rest. If this rank went on, its next sync would let
                    # them return with half a result.
                    gate.context.statuses.fail(str(error))
        else:
            self.staged.run(work, None, 0, divisor)
        self._held = None

    def _compute(self, gate: NodeBarrier, steps, x: np.ndarray, divisor) -> None:
        mine, buffer = x.ctypes.data, self._buffer.ctypes.data
        for kind, peer, span, offset in steps:
            part = x[span]
            if kind == FINISH:
                if divisor is not None:
                    np.divide(part, divisor, out=part)
                continue
            address = gate.lines[LINE * peer + ADDRESS] + offset
            if kind == COPY:
                self.memory.write(peer, address, mine + offset, part.nbytes)
            else:
                self.memory.read(peer, address, buffer, part.nbytes)
                self.ufunc(part, self._buffer[: part.size], out=part)
