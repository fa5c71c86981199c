"""The memory that the ranks of a node share for a communicator, and the executor of node schedules.

`memory_of(context)` makes it once: flags, two sets of slots for short vectors, staging for long
ones. `NodeBarrier` is the barrier of the node. `SharedProgram` runs the steps of `node.py` on
vectors that lie in shared memory, `staging.StagedProgram` on private ones.

A rank that breaks an operation off never arrives at the next sync: its counter says so, and nobody
passes, so that nobody returns with half a sum.

Order of memory. A rank writes data, then its counter; another reads the counter, then the data.
x86 processors keep stores in order and loads in order (TSO), the kernel's and C library's streaming
copies end in a fence, and an aligned 8-byte write is one write, so the counters need nothing more.
Other processors may swap them: there the counters are not used, and a barrier of MPI, whose
messages order memory, stands in their place.
"""

from __future__ import annotations

import platform
from functools import lru_cache
from itertools import chain

import numpy as np
from mpi4py import MPI

from ...errors import ConfigError
from ...events import Counters, emit
from ...runtime.arena import Segment
from ...runtime.context import Context, of
from ...runtime.cross_memory import CrossMemory
from ...runtime.polling import wait_until
from ...runtime.topology import Topology, topology_of
from ..schedules.node import FEW_RANKS, FLAT_BYTES, staging_bytes
from ..schedules.schedule import COPY, NODE_SYNC, REDUCE, Step, length
from .executor import Engine

#: Looks at the counters before the polite wait begins.
SPINS = 200

ORDERED = platform.machine().lower() in ("x86_64", "amd64", "i686")

LINE = 8  # int64 per cache line
#: On a rank's line: its counter, two keys, the address of its vector (`cross_copy`).
KEYS, ADDRESS = 1, 3
_PAGE = 4096

#: Seconds in which a rank that broke an operation off says why.
HEARSAY = 5.0


class NodeBarrier:
    """A barrier of the ranks of a node: a counter for each, on a cache line of its own.

    Beside the counter lie two keys, so that the first sync of an operation also proves that all
    ranks are in the same one. Two, because a quick rank may announce its next operation while a
    slow one still looks at the keys of this; it cannot be two ahead.

    A rank that gives up (`leave`) writes the complement of the last count that it arrived at: less
    than any count, so nobody passes unseeing, and those who still wait for that count find it in
    there and do pass.

    Nodes of more than `node.FEW_RANKS` ranks (`many`) look at a column of all lines in one call.
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
        """Say which operation begins; `check` compares after the next sync."""
        self.lines[self.mine + KEYS + (self.count + 1) % 2] = key

    def check(self, key: int) -> None:
        """Raise MismatchError unless all ranks announced `key`. Comes after the first sync."""
        if self.many:
            if self.keys[self.count % 2].tobytes() != same_keys(key, len(self.counters)):
                self.context.disagree()
            return
        for other in self.others:
            if self.lines[other + KEYS + self.count % 2] != key:
                self.context.disagree()

    def all_told(self) -> bool:
        """Whether all ranks have told an address. Comes after a sync."""
        return bool(self.addresses.all())

    def sync(self) -> None:
        """Wait until all ranks of the node are here. Collective over the node."""
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
        """Look a few times, then wait politely: a look costs less than the wait's beginning."""
        for _ in range(SPINS):
            if self.arrived(count):
                return
        self.context.wait(lambda: self.arrived(count))

    def arrived(self, count: int) -> bool:
        """Whether all ranks have arrived at sync `count`; raises if one never will."""
        lines = self.lines
        if self.many and (first := least(self.counters)) >= 0:
            return first >= count
        for other in self.others:
            seen = lines[other]
            if seen < count and ~seen < count:
                if seen < 0:
                    self._hear(other // LINE)
                return False
        return True

    def leave(self, error: BaseException) -> None:
        """Break off the operation under way: nobody passes another sync with this rank."""
        self.lines[self.mine] = ~self.count
        self.context.break_off(error)

    def _mpi_barrier(self, count: int) -> None:
        test = self.topology.intra_comm.Ibarrier().Test

        def passed() -> bool:
            # Whoever has left may have entered this barrier or not. If not, it never ends.
            return test() or (least(self.counters) < 0 and self.arrived(count) and test())

        self.context.wait(passed)

    def _hear(self, local_rank: int) -> None:
        """Raise what the rank that broke the operation off says about it."""
        context, topology = self.context, self.topology

        def speak_for_it(seconds: float) -> None:
            if seconds > HEARSAY:
                rank = topology.members(topology.node)[local_rank]
                begun = context.operation(context.sequence)
                context.statuses.fail(
                    f"{begun.kind if begun else 'operation'} #{context.sequence} was broken off by "
                    f"rank {rank} of {context.size} ({topology.hosts[topology.node]}), which has "
                    "not said why; see its output"
                )

        def heard() -> bool:
            context.statuses.listen()
            return False

        wait_until(heard, speak_for_it)


def least(column: np.ndarray) -> int:
    """Return the smallest number of a column of lines."""
    return np.minimum.reduce(column)


@lru_cache(maxsize=256)
def same_keys(key: int, size: int) -> bytes:
    """Return a column of keys in which all ranks say `key`, as bytes. Pure."""
    return np.full(size, key, np.int64).tobytes()


class NodeMemory:
    """What a communicator's ranks on one node share. Collective over the communicator.

    `reason` says why there is none, on all ranks alike; then only `topology` may be used. `cross`
    is None where the ranks of this node cannot reach each other's private memory.
    """

    def __init__(self, context: Context, ranks_per_node: int | None = None):
        self.topology = topology_of(context, ranks_per_node)
        size = self.topology.local_size
        flags = -(-8 * LINE * size // _PAGE) * _PAGE
        flat = 2 * FLAT_BYTES
        staging = staging_bytes(size)
        self.reason: str | None = None
        try:
            each = -(-(flags + flat + staging) // size)
            parts = Segment(self.topology.intra_comm, each, context.wait).parts
        except ConfigError as error:
            self.reason = str(error)
        failed = np.array([self.reason is not None], np.int64)
        context.wait(context.control.Iallreduce(MPI.IN_PLACE, failed, MPI.SUM).Test)
        if failed[0]:
            self.reason = self.reason or "no memory shared by the ranks of another node"
            emit("node_memory", reason=self.reason)
            return
        memory = parts[0].base  # the parts are cut from one mapping
        assert isinstance(memory, np.ndarray)
        lines = memoryview(memory[:flags]).cast("q")  # type: ignore[arg-type]
        self.gate = NodeBarrier(context, lines, self.topology)
        self.flat = [
            memory[flags + k * FLAT_BYTES : flags + (k + 1) * FLAT_BYTES] for k in range(2)
        ]
        self.staging = memory[flags + flat : flags + flat + staging]
        self.cross: CrossMemory | None = None
        try:
            self.cross = CrossMemory(self.topology.intra_comm)
        except ConfigError as error:
            emit("cross_memory", reason=str(error))


def memory_of(context: Context, ranks_per_node: int | None = None) -> NodeMemory:
    """Return the node memory of a communicator; made on first use. Collective on first use."""
    if "node" not in context.store:
        context.store["node"] = NodeMemory(context, ranks_per_node)
    return context.store["node"]


def faked_nodes(comm: MPI.Comm) -> int | None:
    """Return the ranks per node that `comm`'s collectives were told to believe in."""
    node = of(comm).store.get("node")
    return None if node is None else node.topology.ranks_per_node


class NodeProgram(Engine):
    """What runs the steps of one rank of a node: an operation, or a half of one.

    `run` takes None for the key within an operation that was checked: a second half.
    """

    divides, tagged = True, False

    def __init__(self, gate: NodeBarrier | None):
        self.gate = gate

    def prepare(self, x: np.ndarray) -> None:
        """Tell the others where `x` lies, if they must know. Before the first sync."""


class SharedProgram(NodeProgram):
    """Steps of one rank made ready to run: rounds between syncs, shared ranges as views.

    `memory` holds what lies at positions from `n` on; positions below are the vector of each call.
    """

    def __init__(
        self, gate: NodeBarrier | None, steps: list[Step], n: int, memory, ufunc: np.ufunc
    ):
        super().__init__(gate)

        def place(span):
            if span[0] < n:
                return slice(*span)
            return memory[span[0] - n : span[1] - n]

        self.rounds: list[list[tuple]] = [[]]
        self.ufunc = ufunc
        for step in steps:
            if step.kind == NODE_SYNC:
                self.rounds.append([])
            elif length(step.target):
                self.rounds[-1].append((step.kind, place(step.target), place(step.source)))
        moved = chain.from_iterable(self.rounds)
        shared = [t.nbytes for kind, t, _ in moved if kind == COPY and not isinstance(t, slice)]
        added = [length(step.target) for step in steps if step.kind == REDUCE]
        self.counters = Counters(
            shared_bytes=sum(shared), bytes_reduced=sum(added) * memory.dtype.itemsize
        )

    def run(self, work, key, number: int = 0, divisor=None) -> None:
        """Run all rounds on the flat vector `work`. Collective over the node."""
        gate = self.gate
        if key is not None:
            gate.announce(key)
        last = len(self.rounds) - 1
        for k in range(last + 1):
            self.compute(k, work, divisor)
            if k < last:
                gate.sync()
                if k == 0 and key is not None:
                    gate.check(key)

    def compute(self, number: int, x: np.ndarray | None = None, divisor=None) -> None:
        """Do what lies between two syncs: copies, sums, divisions."""
        for kind, target, source in self.rounds[number]:
            if type(target) is slice:
                target = x[target]  # type: ignore[index]
            if type(source) is slice:
                source = x[source]  # type: ignore[index]
            if kind == COPY:
                target[...] = source
            elif kind == REDUCE:
                self.ufunc(target, source, out=target)
            elif divisor is not None:
                np.divide(target, divisor, out=target)
