"""`PieceSum`: vectors that arrive piece by piece, summed over all ranks in one fixed tree.

    sums = PieceSum(comm, n, np.float32, pieces=16)
    for piece in sums.mine:             # this rank's pieces, in their order
        sums.add(vector_of(piece), weight)
    sums.finish(out)                    # collective: the same bits on any number of ranks

A piece is added as soon as the tree allows (``fixed_tree.push``), so of V/p pieces about
log2(V/p) + 1 vectors are kept, in the rows of one buffer; what is left at the end lies in the
first rows, which is where the schedules of ``fixed_tree`` expect it. Where all ranks are on one
node the rows lie in memory that they share, and no message is sent (``fixed_tree.on_slots``).
Whoever has several pieces at once hands them over by `add_all`, which adds a level of the tree per
call.
"""

from __future__ import annotations

import itertools

import numpy as np

from ...arrays import array_module, copy_into, host_empty, mpi_direct, synchronize
from ...arrays import work_dtype as work_of
from ...errors import ConfigError, ProtocolError
from ...events import emit
from ...runtime.agreement.mismatch import Signature
from ...runtime.arena import Segment
from ...runtime.context import of
from ..plan import CachedPlan
from ..schedules import algorithms, fixed_tree, node
from .node_barrier import SharedProgram, memory_of
from .programs import SlotSpace
from .transfer import prepared


class PieceSum:
    """A weighted sum of `pieces` vectors in the order of the tree over them.

    Collective over `comm` to make, to finish and to close; `add` is local. Used again after
    `finish`.

    Parameters
    ----------
    n : int
        Length of the vectors.
    dtype : dtype
        Of the vectors. float16 and bfloat16 are added in float32 and rounded once.
    pieces : int
        How many vectors there are over all ranks together, at least 1; ranks may have none.
    votes : int
        The last `votes` elements are a sum over ranks instead, see `finish`.
    like : array, optional
        Where the vectors are: a device array for vectors on a device.

    Attributes
    ----------
    mine : range
        The pieces of this rank.
    """

    def __init__(self, comm, n: int, dtype, pieces: int, *, votes: int = 0, like=None):
        self.context = of(comm)
        self.n, self.pieces, self.votes = n, pieces, votes
        start, stop = fixed_tree.cuts(pieces, comm.size)[comm.rank : comm.rank + 2]
        self.mine = range(start, stop)
        self.dtype = work_of(dtype)
        self.held = max(len(fixed_tree.partials(start, stop, pieces)), 1)
        self._stack: list = []
        self._next = start
        self._staging: np.ndarray | None = None
        facts = f"{pieces} pieces, {votes} votes"
        self._signature = Signature("piece_sum", self.dtype.name, f"({n})", "sum", "ordered", facts)
        xp = np if like is None else array_module(like)
        with self.context.call("piece_sum"):
            slots = self._slots() if xp is np else None
        self._plan: CachedPlan | None = None  # where the rows lie in the node's memory
        if slots is None:
            self.rows = xp.zeros((fixed_tree.vectors_held(start, stop, pieces), n), self.dtype)
        else:
            self._plan = CachedPlan(self.context, self._signature, self._on_slots(slots))
            self.rows = slots[self.context.rank].reshape(-1, n)

    def _slots(self) -> list[np.ndarray] | None:
        """Return memory that all ranks see, room for every rank's rows; None where there is none.

        Collective, and the same on all ranks.
        """
        context = self.context
        if context.size == 1 or not self.n:
            return None
        context.begin_agreed(self._signature, "first call")
        memory = memory_of(context)
        if memory.reason is not None or memory.topology.nodes > 1:
            return None
        bounds = fixed_tree.cuts(self.pieces, context.size)
        depths = (
            fixed_tree.vectors_held(*span, self.pieces) for span in itertools.pairwise(bounds)
        )
        nbytes = max(depths) * self.n * self.dtype.itemsize
        try:
            parts = Segment(memory.topology.intra_comm, nbytes, context.wait).parts
        except ConfigError as error:  # on all ranks together
            emit("fallback", algorithm="node", instead="messages", reason=str(error))
            return None
        return [part[:nbytes].view(self.dtype) for part in parts]

    def _on_slots(self, slots: list[np.ndarray]) -> SharedProgram:
        context, stride = self.context, slots[0].size
        steps = fixed_tree.on_slots(
            context.size, context.rank, self.n, self.pieces, stride,
            node.in_place_length(self.dtype.itemsize), votes=self.votes,
        )  # fmt: skip
        return SharedProgram(memory_of(context).gate, steps, 0, SlotSpace(slots), np.add)

    def close(self) -> None:
        """Let go of the memory. Collective, though nothing is sent; idempotent."""
        if self._plan is not None:
            self._plan.close()
            self._plan = None
        self.rows = self.rows[:0]

    def add(self, vector, weight: float = 1.0) -> None:
        """Add ``weight * vector`` as the next piece of this rank; it may change afterwards.

        Without a vector the piece is zero.
        """
        self._take(1)
        row = self.rows[len(self._stack)]
        if vector is None:
            row[...] = 0
        else:
            array_module(row).multiply(vector, self.dtype.type(weight), out=row, dtype=self.dtype)
        self._join((self._next - 1, self._next))

    def add_all(self, vectors, weight: float = 1.0) -> None:
        """Add each row of ``weight * vectors`` as a piece, in their order.

        `vectors`, (pieces, n), is used for the sums: what it holds afterwards is of no use.
        """
        first = self._next
        self._take(len(vectors))
        xp = array_module(vectors)
        out = vectors if vectors.dtype == self.dtype else None
        values = xp.multiply(vectors, self.dtype.type(weight), out=out, dtype=self.dtype)
        for start, stop in fixed_tree.partials(first, self._next, self.pieces):
            node = values[start - first : stop - first]
            # Pairs of neighbours, level by level; an odd last one waits. That is the tree.
            while len(node) > 1:
                node[:-1:2] += node[1::2]
                node = node[::2]
            self.rows[len(self._stack)] = node[0]
            self._join((start, stop))

    def _take(self, count: int) -> None:
        if self._next + count > self.mine.stop:
            given = self._next - self.mine.start
            raise ProtocolError(
                f"{given} of this rank's {len(self.mine)} pieces were given, now {count} more"
            )
        self._next += count

    def _join(self, node) -> None:
        """Join the sum of `node`, in the next free row, with what the tree joins it to."""
        joins = fixed_tree.push(self._stack, node, self.pieces)
        for right in range(len(self._stack) + joins - 1, len(self._stack) - 1, -1):
            self.rows[right - 1] += self.rows[right]

    def finish(self, out, votes=()) -> None:
        """Write the sum over all pieces into `out`. Collective; every rank gets the same bits.

        `votes` are this rank's numbers for the last elements, which every rank has a say in,
        whether it has pieces or not: `out` ends with their sums over the ranks.
        """
        if self._next != self.mine.stop or len(votes) != self.votes:
            raise ProtocolError(
                f"finish: {self._next - self.mine.start} of this rank's {len(self.mine)} pieces "
                f"were added, and {len(votes)} of {self.votes} votes given"
            )
        counted = self.rows[: self.held, self.n - self.votes :]
        counted[...] = 0
        for k, vote in enumerate(votes):
            counted[0, k] = vote
        context = self.context
        with context.call("piece_sum"):
            if context.size == 1:
                context.begin(self._signature)
            elif self._plan is not None:
                plan = self._plan
                number = context.begin(plan.signature, plan.runs)
                try:
                    plan.engine.run(self.rows[0], plan.key, number)
                except BaseException as error:
                    plan.engine.gate.leave(error)
                    raise
            else:
                self._exchange(self.rows[: self.held].reshape(-1))
            copy_into(out, self.rows[0])
        self._stack.clear()
        self._next = self.mine.start

    def _exchange(self, partial_sums) -> None:
        """Run the schedule on this rank's partial sums; the total replaces the first of them."""
        plan = prepared(
            self.context, self._signature, self._steps, len(partial_sums), self.dtype, np.add
        )
        if mpi_direct(partial_sums):
            synchronize(partial_sums)
            plan.run(partial_sums)
            return
        if self._staging is None:
            self._staging = host_empty(len(partial_sums), self.dtype, like=partial_sums)
        copy_into(self._staging, partial_sums)
        plan.run(self._staging)
        copy_into(self.rows[0], self._staging[: self.n])

    def _steps(self, size: int, rank: int, _length: int, itemsize: int):
        return fixed_tree.piecewise(
            size,
            rank,
            self.n,
            self.pieces,
            votes=self.votes,
            segments=algorithms.segments(self.n * itemsize, size),
            itemsize=itemsize,
        )
