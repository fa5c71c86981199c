"""Add many vectors, which are spread over the ranks, in the order of one fixed tree.

    sums = PieceSum(comm, n, np.float32, pieces=16)
    for piece in sums.mine:             # this rank's pieces, in their order
        sums.add(vector_of(piece), weight)
    sums.finish(out)                    # collective: the same bits on any number of ranks

Each of the vectors to add is called a piece. A rank adds each piece as soon as the tree allows, so
with V pieces on p ranks, a rank keeps only about log2(V/p) + 1 vectors in memory. If all ranks are
on one node, these vectors are in memory that the ranks share, and no message is sent. To save
copies, the caller may pass a piece in several parts (`begin_piece`), or write it to an array that
`next_row` returns, and call `add_row`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np

from ...arrays import array_module, copy_into, host_empty, mpi_direct, synchronize, work_dtype
from ...errors import ConfigError, ProtocolError
from ...events import emit
from ...partition import pieces as blocks
from ...registry import checked_whole
from ...runtime.agreement.mismatch import Signature
from ...runtime.context import of, running
from ...runtime.node_memory.arena import Segment
from ..plan import CachedPlan
from ..schedules import algorithms, fixed_tree, node
from .executor import Run, heading, hear_first
from .node_barrier import SharedProgram, memory_of
from .prepare_call import prepared
from .programs import SlotSpace

#: Elements that `add` adds at a time, which stay in the cache.
BLOCK = 1 << 15


class PieceSum:
    """A weighted sum of `pieces` vectors, added in the order of one binary tree.

    Creating a `PieceSum` is collective over `comm`, and so are the methods `finish` and `close`.
    After `finish` the object can be used for the next sum.

    Parameters
    ----------
    n : int
        Length of the vectors.
    dtype : dtype
        The dtype of the vectors. float16 and bfloat16 are added in float32 and rounded once.
    pieces : int
        The number of vectors (pieces) of all ranks together, at least 1; a rank may have none.
    votes : int
        How many numbers every rank passes to `finish`, which sums them over the ranks and writes
        the sums to the end of the result. They are part of the length `n`.
    like : array, optional
        A device array if the vectors are on a device.

    Attributes
    ----------
    mine : range
        The numbers of the pieces that this rank must add, in this order.
    """

    def __init__(self, comm, n: int, dtype, pieces: int, *, votes: int = 0, like=None):
        self.context = of(comm)
        with self.context.call("piece_sum"):
            self._open(n, dtype, pieces, votes, like)

    def _open(self, n: int, dtype, pieces: int, votes: int, like) -> None:
        """Check the arguments and allocate the memory. Collective."""
        size, rank = self.context.size, self.context.rank
        pieces = checked_whole("PieceSum: pieces", pieces, 1)
        self.n, self.pieces, self.votes = n, pieces, votes
        start, stop = fixed_tree.cuts(pieces, size)[rank : rank + 2]
        self.mine = range(start, stop)
        self.dtype = work_dtype(dtype)
        self.held = max(len(fixed_tree.partials(start, stop, pieces)), 1)
        self._stack: list = []
        self._next = start
        self._weight: float | None = None  # weight of the newest row, if not applied yet
        self._total: np.ndarray | None = None  # the whole sum, if not in the first row
        self._staging: np.ndarray | None = None
        self._ahead: CachedPlan | None = None
        self._run: ProgramRun | None = None
        facts = f"{pieces} pieces, {votes} votes"
        self._signature = Signature("piece_sum", self.dtype.name, f"({n})", "sum", "ordered", facts)
        xp = np if like is None else array_module(like)
        slots = self._slots() if xp is np else None
        self._plan: CachedPlan | None = None  # where the rows lie in the node's memory
        if slots is None:
            self.rows = xp.zeros((fixed_tree.vectors_held(start, stop, pieces), n), self.dtype)
        else:
            self._plan = CachedPlan(self.context, self._signature, self._on_slots(slots))
            self.rows = slots[self.context.rank].reshape(-1, n)

    def _slots(self) -> list[np.ndarray] | None:
        """Return shared memory for all ranks' partial sums, or None on all ranks. Collective."""
        context = self.context
        if context.size == 1 or not self.n:
            return None
        context.begin_agreed(self._signature, "first call")
        memory = memory_of(context)
        if memory.reason is not None or memory.topology.nodes > 1:
            return None
        spans = itertools.pairwise(fixed_tree.cuts(self.pieces, context.size))
        rows = max(fixed_tree.vectors_held(*span, self.pieces) for span in spans)
        nbytes = rows * self.n * self.dtype.itemsize
        try:
            parts = Segment(memory.topology.intra_comm, nbytes, context.wait).parts
        except ConfigError as error:  # all ranks raise this error
            emit("fallback", algorithm="node", instead="messages", reason=str(error))
            return None
        return [part[:nbytes].view(self.dtype) for part in parts]

    def _on_slots(self, slots: list[np.ndarray]) -> SharedProgram:
        context, stride = self.context, slots[0].size
        steps = fixed_tree.on_slots(
            context.size, context.rank, self.n, self.pieces, stride,
            node.in_place_length(self.dtype.itemsize), votes=self.votes,
        )  # fmt: skip
        return SharedProgram(memory_of(context).gate, steps, SlotSpace(slots), np.add)

    def close(self) -> None:
        """Free the memory. Collective, but sends no message; a second call does nothing."""
        if self._plan is not None:
            self._plan.close()
            self._plan = None
        if self._ahead is not None:
            self._ahead.release()
            self._ahead = None
        self.rows = self.rows[:0].copy()  # a view would keep the memory
        self._total = self._staging = None

    def add(self, vector, weight: float = 1.0, *, last: bool = False) -> None:
        """Add ``weight * vector`` as the next piece (summand) of this rank.

        The caller may change `vector` after the call. If `vector` is None, zeros are added. If
        `last` is true, the caller must later pass the same array as `out` of `finish`. If this rank
        has all pieces, the sum can then be written into the array without a copy.
        """
        if vector is not None and isinstance(self.rows, np.ndarray):
            self.begin_piece(weight, out=vector if last else None)(0, vector)
            return
        self._take(1)
        row = self.rows[len(self._stack)]
        if vector is None:
            self._weigh()
            row[...] = 0
        else:
            array_module(row).multiply(vector, self.dtype.type(weight), out=row, dtype=self.dtype)
        self._join((self._next - 1, self._next))

    def begin_piece(self, weight: float = 1.0, *, out=None) -> Callable[[int, np.ndarray], None]:
        """Begin the next piece (summand) of this rank, which the caller adds in several parts.

        Returns the function ``add(start, part)``, which adds ``weight * part`` to the elements from
        `start` on; `part` is in host memory. The parts must together have each element of the piece
        once, and all of them must be added before the next piece is begun. `out` is the array that
        the caller will pass to `finish`, or None.
        """
        self._take(1)
        top, weight = len(self._stack), self.dtype.type(weight)
        joins = fixed_tree.push(self._stack, (self._next - 1, self._next), self.pieces)
        ahead, self._weight = self._weight, None
        rows = [self.rows[k] for k in range(top - 1, top - joins - 1, -1)]
        whole = self._next == self.pieces == len(self.mine) and not self.votes
        if joins and whole and out is not None and out.dtype == self.dtype:
            self._total = out
        into = self.rows[top - joins] if self._total is None else self._total
        scratch = np.empty(min(BLOCK, self.n) if joins else 0, self.dtype)

        def add(start: int, part) -> None:
            if not joins:
                if ahead is not None:
                    self.rows[top - 1][start : start + len(part)] *= ahead
                target = into[start : start + len(part)]
                np.multiply(part, weight, out=target, dtype=self.dtype)
                return
            for begin, end in blocks(0, len(part), BLOCK):
                here, total = slice(start + begin, start + end), scratch[: end - begin]
                np.multiply(part[begin:end], weight, out=total, dtype=self.dtype)
                block = rows[0][here]
                if ahead is not None:
                    block *= ahead
                for row in rows[:-1]:
                    np.add(row[here], total, out=total)
                np.add(rows[-1][here], total, out=into[here])

        return add

    def next_row(self) -> np.ndarray | None:
        """Return memory into which the caller may write the next piece (summand), or None.

        The caller must then call `add_row`, before it adds another piece. The memory has the dtype
        of the additions. None means that the caller must call `add`.
        """
        if self._next == self.mine.stop or not isinstance(self.rows, np.ndarray):
            return None
        node = self._next, self._next + 1
        joins = fixed_tree.push(list(self._stack), node, self.pieces)
        return None if joins else self.rows[len(self._stack)]

    def add_row(self, weight: float = 1.0) -> None:
        """Add what the caller has written into `next_row`, times `weight`, as the next summand."""
        self._take(1)
        self._weigh()
        fixed_tree.push(self._stack, (self._next - 1, self._next), self.pieces)
        self._weight = self.dtype.type(weight)

    def _weigh(self) -> None:
        """Multiply the vector that was stored last by its weight, if that is not done yet."""
        weight, self._weight = self._weight, None
        if weight is not None:
            self.rows[len(self._stack) - 1] *= weight

    def add_all(self, vectors, weight: float = 1.0) -> None:
        """Add each row of ``weight * vectors`` as one piece (summand), in the order of the rows.

        `vectors` has the shape (pieces, n). The method overwrites `vectors` with partial sums.
        """
        first = self._next
        self._take(len(vectors))
        self._weigh()
        xp = array_module(vectors)
        out = vectors if vectors.dtype == self.dtype else None
        values = xp.multiply(vectors, self.dtype.type(weight), out=out, dtype=self.dtype)
        for start, stop in fixed_tree.partials(first, self._next, self.pieces):
            node = values[start - first : stop - first]
            # The tree adds pairs of neighbours, level by level. If the number of sums is odd, the
            # last sum waits for the next level.
            while len(node) > 1:
                node[:-1:2] += node[1::2]
                node = node[::2]
            self.rows[len(self._stack)] = node[0]
            self._join((start, stop))

    def add_node(self, node: tuple[int, int], vector) -> None:
        """Add `vector`, which is already the sum of the next pieces (summands) of this rank.

        These pieces have the numbers ``node[0]`` to ``node[1] - 1``. They must be all pieces below
        one node of the binary tree of all pieces (see the module `fixed_tree`). The caller may
        change `vector` after the call.
        """
        self._take(node[1] - node[0])
        self._weigh()
        copy_into(self.rows[len(self._stack)], vector)
        self._join(node)

    def _take(self, count: int) -> None:
        if self._next + count > self.mine.stop:
            given = self._next - self.mine.start
            raise ProtocolError(
                f"{given} of this rank's {len(self.mine)} pieces were given, now {count} more"
            )
        self._next += count

    def _join(self, node) -> None:
        """Add the newest sum, that of tree node `node`, to earlier sums, as the tree demands."""
        joins = fixed_tree.push(self._stack, node, self.pieces)
        for right in range(len(self._stack) + joins - 1, len(self._stack) - 1, -1):
            self.rows[right - 1] += self.rows[right]

    def prepare(self) -> None:
        """Prepare the messages of the sum, so that `begin` waits for no other rank. Collective.

        The method does nothing if the vectors are on a device, if the ranks of one node share
        memory for the sum, or if the argument `votes` of the `PieceSum` is not 0.
        """
        sent = self.context.size > 1 and self._plan is None and isinstance(self.rows, np.ndarray)
        if sent and not self.votes and self.n:
            with self.context.call("piece_sum"):
                self._ahead = self._message_plan(self.held * self.n).owned()

    def begin(self) -> None:
        """Begin to send the sums of this rank, which has added all its vectors. Collective.

        If `prepare` was not called, `begin` does nothing, and `finish` does all the work.
        """
        if self._ahead is not None:
            with self.context.call("piece_sum"):
                if self._next != self.mine.stop:
                    raise ProtocolError(f"begin: {self._added()}")
                self._weigh()
                vector = self.rows[: self.held].reshape(-1)
                self._run = ProgramRun(self.context, self._ahead, vector)

    def test(self) -> None:
        """Continue the sum that `begin` has begun, if any."""
        if self._run is not None:
            self._run.test()

    def finish(self, out, votes=()) -> None:
        """Write the sum over all vectors into `out`. Collective; every rank gets the same bits.

        Every rank, even one without vectors, passes `votes`: a few numbers to add over the ranks.
        The last elements of `out` are the sums of all ranks' `votes`.
        """
        context = self.context
        with context.call("piece_sum"):
            if self._next != self.mine.stop or len(votes) != self.votes:
                given = f"{len(votes)} of {self.votes} votes given"
                error = ProtocolError(f"finish: {self._added()}, and {given}")
                if self._run is not None:  # the others wait in the sum that `begin` has begun
                    context.break_off(error, self._run.sequence)
                raise error
            self._weigh()
            counted = self.rows[: self.held, self.n - self.votes :]
            counted[...] = 0
            for k, vote in enumerate(votes):
                counted[0, k] = vote
            if self._run is not None:
                self._run.wait()
                self._run = None
            elif context.size == 1:
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
            if self._total is not out:
                copy_into(out, self.rows[0] if self._total is None else self._total)
        self._total = None
        self._stack.clear()
        self._next = self.mine.start

    def _added(self) -> str:
        """Return a text with the number of pieces that this rank has added."""
        given = self._next - self.mine.start
        return f"{given} of this rank's {len(self.mine)} pieces were added"

    def _message_plan(self, length: int) -> CachedPlan:
        """Return the prepared operation that adds the ranks' partial sums by messages.

        The first call for a length is collective.
        """

        def steps(size: int, rank: int, _length: int, itemsize: int):
            count = algorithms.segments(self.n * itemsize, size)
            options = {"votes": self.votes, "segments": count, "itemsize": itemsize}
            return fixed_tree.piecewise(size, rank, self.n, self.pieces, **options)

        return prepared(self.context, self._signature, steps, length, self.dtype)

    def _exchange(self, partial_sums) -> None:
        """Add the partial sums of all ranks by messages; the total is then in the first row."""
        plan = self._message_plan(len(partial_sums))
        if mpi_direct(partial_sums):
            synchronize(partial_sums)
            plan.run(partial_sums)
            return
        if self._staging is None:
            self._staging = host_empty(len(partial_sums), self.dtype, like=partial_sums)
        copy_into(self._staging, partial_sums)
        plan.run(self._staging)
        copy_into(self.rows[0], self._staging[: self.n])


class ProgramRun:
    """A run of a prepared operation, which goes on while this rank computes."""

    def __init__(self, context, plan: CachedPlan, vector):
        self.context = context
        number = context.begin(plan.signature, plan.runs)
        self.sequence = context.sequence
        hear_first(context)
        self._run = Run(plan.engine, vector, context.tag(number), heading(context, plan.key))
        self._run.sequence = self.sequence
        running.append(self)
        self.done = False

    def test(self) -> bool:
        """Continue the operation; return whether this rank has finished its part of it."""
        try:
            if not self.done and self._run.test():
                self.done = True
                running.remove(self)
        except BaseException as error:
            self.context.break_off(error, self.sequence)
            raise
        return self.done

    def wait(self) -> None:
        """Wait until this rank has finished its part of the operation. Collective."""
        try:
            self.context.wait(self.test, self.sequence)
        except BaseException as error:
            self._run.finish_sends(error)
            raise
