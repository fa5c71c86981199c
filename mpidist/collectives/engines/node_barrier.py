"""Memory that the ranks of a node share, a barrier in it, and an allreduce that uses both.

`memory_of(context)` allocates this memory once: the counters of a barrier, two areas for short
vectors of all ranks, and buffers through which long vectors are copied. A rank that stops an
operation because of an error marks its counter as failed, so that no other rank passes the next
barrier and returns an incomplete sum.
"""

from __future__ import annotations

import platform
from functools import lru_cache
from typing import Any

import numpy as np
from mpi4py import MPI

from ...errors import ConfigError
from ...events import Counters, emit
from ...runtime.context import Context, of
from ...runtime.node_memory.arena import Segment
from ...runtime.node_memory.cross_memory import CrossMemory
from ...runtime.polling import wait_until
from ...runtime.topology import Topology, topology_of
from ..schedules.node import FEW_RANKS, FLAT_BYTES, staging_bytes
from ..schedules.schedule import COPY, REDUCE, Step, intervals, length
from .executor import Engine

#: How many times the counters are read before the rank begins a wait in which other processes can
#: use the core.
SPINS = 200

#: Whether the processor keeps the order of stores and of loads. A rank writes its data before its
#: counter, and reads another rank's counter before the data. Without this order, the ranks use an
#: MPI barrier in place of the counters.
ORDERED = platform.machine().lower() in ("x86_64", "amd64", "i686")

LINE = 8  # int64 per cache line
#: The cache line of a rank has its counter, two keys, and the address of its vector (see
#: `cross_copy`).
KEYS, ADDRESS = 1, 3
_PAGE = 4096

#: Seconds that other ranks wait for the error text of a rank that has stopped an operation.
HEARSAY = 5.0


class NodeBarrier:
    """A barrier of the ranks of a node: each rank has a counter on a cache line of its own.

    Next to its counter, each rank writes a key (a number that identifies an operation). At the
    first barrier of an operation, the ranks compare their keys to check that all ranks are in the
    same operation.
    """

    def __init__(self, context: Context, lines: memoryview, topology: Topology):
        self.context, self.lines, self.topology = context, lines, topology
        size = topology.local_size
        self.mine = LINE * topology.local_rank
        self.others = [LINE * r for r in range(size) if r != topology.local_rank]
        self.count = 0
        self.many = size > FEW_RANKS
        table = np.frombuffer(lines, np.int64)[: LINE * size].reshape(size, LINE)
        self.counters, self.addresses = table[:, 0], table[:, ADDRESS]
        self.keys = table[:, KEYS], table[:, KEYS + 1]

    def announce(self, key: int) -> None:
        """Write the key (number) of a new operation for the other ranks, which `check` it."""
        # A rank has two keys, because a quick rank may write the key of its next operation while a
        # slow rank still reads the current one.
        self.lines[self.mine + KEYS + (self.count + 1) % 2] = key

    def check(self, key: int) -> None:
        """Raise MismatchError unless all ranks wrote `key`, the number of the operation.

        This method is called after the first barrier of the operation.
        """
        if self.many:
            if self.keys[self.count % 2].tobytes() != same_keys(key, len(self.counters)):
                self.context.disagree()
            return
        for other in self.others:
            if self.lines[other + KEYS + self.count % 2] != key:
                self.context.disagree()

    def sync(self) -> None:
        """Wait at the barrier until all ranks of the node are there. Collective over the node."""
        self.count = count = self.count + 1
        lines = self.lines
        lines[self.mine] = count
        if not ORDERED:
            self._mpi_barrier(count)
        elif self.many:
            if least(self.counters) < count:
                self.wait(count)
        else:
            for other in self.others:
                if lines[other] < count:
                    self.wait(count)
                    return

    def wait(self, count: int) -> None:
        """Wait until all ranks have reached barrier number `count`."""
        for _ in range(SPINS):
            if self.arrived(count):
                return
        self.context.wait(lambda: self.arrived(count), keep=False)

    def arrived(self, count: int) -> bool:
        """Whether all ranks have reached barrier number `count`; raises if a rank has failed."""
        lines = self.lines
        if self.many and (first := least(self.counters)) >= 0:
            return first >= count
        for other in self.others:
            seen = lines[other]
            if seen < count and ~seen < count:
                if seen < 0:
                    self._raise_reason(other // LINE)
                return False
        return True

    def leave(self, error: BaseException) -> None:
        """Stop the operation because of `error`, so that no rank passes a later barrier."""
        # The complement is negative, so it is less than any count. `arrived` computes the count
        # from it, and lets ranks pass only the barriers that this rank has reached.
        self.lines[self.mine] = ~self.count
        self.context.break_off(error)

    def _mpi_barrier(self, count: int) -> None:
        test = self.topology.intra_comm.Ibarrier().Test

        def passed() -> bool:
            # If another rank has left the operation before this barrier, a wait for the barrier
            # would never end.
            return test() or (least(self.counters) < 0 and self.arrived(count) and test())

        self.context.wait(passed)

    def _raise_reason(self, local_rank: int) -> None:
        """Wait for the error message of the rank that stopped, and raise that error."""
        context, topology = self.context, self.topology

        def without_reason(seconds: float) -> None:
            if seconds > HEARSAY:
                rank = topology.members(topology.node)[local_rank]
                begun = context.operation(context.sequence)
                context.statuses.fail(
                    f"{begun.kind if begun else 'operation'} #{context.sequence} was broken off by "
                    f"rank {rank} of {context.size} ({topology.hosts[topology.node]}), which has "
                    "not said why; see its output"
                )

        def listen() -> bool:
            context.statuses.listen()  # raises the reason when it arrives
            return False

        wait_until(listen, without_reason)


def least(column: np.ndarray) -> int:
    """Return the smallest of the barrier counters in the array `column`."""
    return np.minimum.reduce(column)


@lru_cache(maxsize=256)
def same_keys(key: int, size: int) -> bytes:
    """Return a bytes object with `size` copies of the int64 `key`, the number of an operation."""
    return np.full(size, key, np.int64).tobytes()


class NodeMemory:
    """The memory that a communicator's ranks on one node share. Collective over the communicator.

    If the memory cannot be allocated, the attribute `reason` says why, on all ranks, and only
    `reason` and `topology` may be used; otherwise `reason` is None. The attribute `cross` is None
    if some rank of this node cannot read or write the private memory of another rank.
    """

    def __init__(self, context: Context, ranks_per_node: int | None = None):
        self.topology = topology_of(context, ranks_per_node)
        size = self.topology.local_size
        flags = -(-8 * LINE * size // _PAGE) * _PAGE
        sizes = (flags, FLAT_BYTES, FLAT_BYTES, staging_bytes(size))
        self.reason: str | None = None
        try:
            parts = Segment(self.topology.intra_comm, -(-sum(sizes) // size), context.wait).parts
        except ConfigError as error:
            self.reason = str(error)
        comm: Any = context.comm
        group = comm.membership if getattr(comm, "places", None) else None
        # After a death, the living ranks need no new test whether they can use each other's memory,
        # if all ranks made this test before the death.
        proved = group.cross if group and self.topology.nodes == 1 else None
        failed = np.array([self.reason is not None, not proved], np.int64)
        context.wait(context.control.Iallreduce(MPI.IN_PLACE, failed, MPI.SUM).Test)
        if failed[0]:
            self.reason = self.reason or "no memory shared by the ranks of another node"
            emit("node_memory", reason=self.reason)
            return
        memory = parts[0].base  # all parts are views of one mapping
        assert isinstance(memory, np.ndarray)
        words, *self.flat, self.staging, _ = np.split(memory, np.cumsum(sizes))
        lines = memoryview(words).cast("q")  # type: ignore[arg-type]
        self.gate = NodeBarrier(context, lines, self.topology)
        self.cross: CrossMemory | None = None
        if not failed[1]:
            self.cross = proved
            return
        try:
            self.cross = CrossMemory(self.topology.intra_comm, context.wait)
        except ConfigError as error:
            emit("cross_memory", reason=str(error))
        if group and self.topology.nodes == 1:
            group.cross = self.cross


def memory_of(context: Context, ranks_per_node: int | None = None) -> NodeMemory:
    """Return the memory that ranks of a node share; the first call allocates it, collectively."""
    if "node" not in context.store:
        context.store["node"] = NodeMemory(context, ranks_per_node)
    return context.store["node"]


def faked_nodes(comm: MPI.Comm) -> int | None:
    """Return the ranks per node if a caller has set simulated nodes for `comm`, otherwise None."""
    node = of(comm).store.get("node")
    return None if node is None else node.topology.ranks_per_node


class NodeProgram(Engine):
    """An object that runs one rank's steps of an allreduce inside a node, or of one half of it.

    The first half is a reduce-scatter, and the second half an allgather. In the second half, the
    argument `key` of `run` is None, because the ranks have already checked that they run the same
    operation.
    """

    divides, tagged = True, False

    def __init__(self, gate: NodeBarrier | None):
        self.gate = gate

    def prepare(self, x: np.ndarray) -> None:
        """Write the address of `x` for the other ranks, if they read or write `x` directly.

        Called before the first barrier of each operation.
        """


class SharedProgram(NodeProgram):
    """An object that runs the steps of one rank on vectors in shared memory, between barriers."""

    def __init__(self, gate: NodeBarrier | None, steps: list[Step], memory, ufunc: np.ufunc):
        super().__init__(gate)
        self.ufunc = ufunc
        self.rounds = [
            [
                (step.kind, memory[slice(*step.target)], memory[slice(*step.source)])
                for step in interval
                if length(step.target)
            ]
            for interval in intervals(steps)
        ]
        shared = sum(length(step.target) for step in steps if step.kind == COPY)
        added = sum(length(step.target) for step in steps if step.kind == REDUCE)
        size = memory.dtype.itemsize
        self.counters = Counters(shared_bytes=shared * size, bytes_reduced=added * size)

    def run(self, work, key, number: int = 0, divisor=None) -> None:
        """Run all steps on the vectors in `memory`. Collective over the node.

        `key` is a number that identifies the operation, so that the ranks can check that they run
        the same one. It is None in the second half of an allreduce (the allgather), because the
        ranks have checked it in the first half. If `divisor` is given, the sums are divided by it.
        """
        gate = self.gate
        if key is not None:
            gate.announce(key)
        for k in range(len(self.rounds)):
            if k:
                gate.sync()
            if k == 1 and key is not None:
                gate.check(key)
            self.compute(k, divisor)

    def compute(self, number: int, divisor=None) -> None:
        """Run the copies, sums and divisions between two successive barriers.

        If `divisor` is given, the sums are divided by it.
        """
        for kind, target, source in self.rounds[number]:
            if kind == COPY:
                target[...] = source
            elif kind == REDUCE:
                self.ufunc(target, source, out=target)
            elif divisor is not None:
                np.divide(target, divisor, out=target)
