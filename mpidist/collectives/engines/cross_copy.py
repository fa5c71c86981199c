"""Allreduce inside a node: the Linux kernel copies data between the ranks' private memories.

The table shows what each rank does in two algorithms, with 2 ranks and n elements, of which each
rank adds n/2; ``node`` adds them in pieces of m elements. A sync is a barrier of the node's ranks.

    node          a copy in, a sum, a copy out by the kernel        3 + n/(2m) syncs
    single_copy   a copy by the kernel, a sum, a copy back by it    2 syncs

If the cores of two ranks share no cache, ``single_copy`` is faster than ``node``, because the data
moves between the cores half as often.
"""

from __future__ import annotations

import numpy as np

from ...errors import MpidistError
from ...events import Counters
from ...runtime.node_memory.cross_memory import CrossMemory
from ..schedules.schedule import COPY, FINISH, REDUCE, Step, intervals, length
from .node_barrier import ADDRESS, LINE, NodeBarrier, NodeProgram
from .reductions import Reduction

#: If private vectors have more bytes than this, the kernel writes the results into them. Shorter
#: vectors are copied in and out through shared buffers, because a system call takes about 4 us.
#: Measured at 2 ranks: with pages of 4 KiB, both ways are equally fast from 2 MiB on; with huge
#: pages, the kernel is faster by a fifth from 1 MiB on.
REACHED_BYTES = 512 << 10
#: If private vectors have more bytes than this, the algorithm "node" runs `single_copy` instead.
#: Measured at 2 ranks: `single_copy` is slower by up to a sixth if the two cores share a cache, and
#: twice as fast if they do not.
WHOLE_BYTES = 2 << 20
#: Bytes that `single_copy` reads in one system call: few enough to stay in the cache until they are
#: added.
PIECE_BYTES = 512 << 10


class CrossProgram(NodeProgram):
    """An object that runs the steps of `node.in_place_allreduce` or `node.in_place_allgather`."""

    def __init__(
        self,
        steps: list[Step],
        n: int,
        reduction: Reduction,
        memory: CrossMemory,
        staged: NodeProgram,
    ):
        super().__init__(staged.gate)
        self.memory, self.staged, self.ufunc = memory, staged, reduction.ufunc
        itemsize = reduction.work.itemsize
        self._seen = self._published = 0
        self._held: np.ndarray | None = None

        def place(step: Step) -> tuple[str, int, slice, int]:
            """Return a step's kind, peer and elements, and the byte offset of the first element."""
            other = step.source if step.kind == REDUCE else step.target
            peer, start = divmod(other[0], n)
            return step.kind, peer, slice(start, start + length(other)), start * itemsize

        self.rounds = [
            [place(step) for step in interval if length(step.target)]
            for interval in intervals(steps)
        ]
        copied = [length(step.target) for step in steps if step.kind == COPY]
        added = [length(step.target) for step in steps if step.kind == REDUCE]
        self._buffer = np.empty(max(added, default=0), reduction.work)
        self.counters = Counters(
            shared_bytes=sum(copied) * itemsize, bytes_reduced=sum(added) * itemsize
        )

    def prepare(self, x: np.ndarray) -> None:
        """Write the address of `x` where other ranks read it; called before the first barrier."""
        # The other ranks write into `x`, so `x` must stay allocated, even after an exception.
        self._held = x
        address = x.ctypes.data
        if address != self._seen:
            self._seen = address
            self._published = address if self.memory.holds(address, x.nbytes) else 0
        self.gate.lines[self.gate.mine + ADDRESS] = self._published

    def run(self, work, key, number: int = 0, divisor=None) -> None:
        """Run all steps on the 1-D vector `work`. Collective over the node.

        The argument `key` is a number that identifies the operation. It is None for an allgather,
        before which the caller must call `prepare` with the same vector.
        """
        gate, rounds = self.gate, self.rounds
        if key is not None:
            self.prepare(work)
            gate.announce(key)
            gate.sync()
            gate.check(key)
            rounds = rounds[1:]  # the round before the first sync is empty
        if gate.addresses.all():  # every rank has written an address
            for k, steps in enumerate(rounds):
                if k:
                    gate.sync()
                try:
                    self._compute(gate, steps, work, divisor)
                except MpidistError as error:
                    # The other ranks wait for this rank at a barrier. If this rank marked its
                    # arrival at the barrier, the other ranks would return an incomplete result.
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
