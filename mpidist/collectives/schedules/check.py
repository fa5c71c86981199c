"""Check schedules: run the steps of all ranks on symbols that record which values were added.

For each element, the checker keeps the list of ranks whose values were added to the element, in
order. It therefore finds values that are added twice or never, and values that two ranks add in
different orders. One process checks the schedules of any number of ranks, without MPI. The argument
`build` of the functions here is the function that returns the steps of one rank.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import islice

from ...partition import bounds_of
from .schedule import (
    COPY,
    FINISH,
    NODE_SYNC,
    RECV,
    REDUCE,
    SEND,
    Step,
    extent,
    intervals,
    length,
    split_messages,
    without_empty,
)

#: A rank (its own value), the number of a sum made by `Sums`, or None for an unwritten element.
Value = int | None


class Sums:
    """A table of all sums that were computed, each with a number that identifies it.

    Two sums have the same number if their left operands are the same and their right operands are
    the same. Such sums have equal bits.
    """

    _FIRST = 1 << 20

    def __init__(self):
        self._numbers: dict[tuple[int, int], int] = {}
        self._ranks: dict[int, list[int]] = {}

    def add(self, left: int, right: int) -> int:
        """Return the number that identifies the sum ``left op right``.

        `left` and `right` are ranks or the numbers of other sums. Equal operands give the same
        number.
        """
        return self._numbers.setdefault((left, right), self._FIRST + len(self._numbers))

    def ranks(self, value: Value) -> list[int]:
        """Return the ranks whose values were added to get `value`, in the order of the operands."""
        if value is None:
            return []
        if value < self._FIRST:
            return [value]
        if value not in self._ranks:
            # The operands of a sum have lower numbers than the sum, so in ascending order the
            # operands are computed first.
            for (left, right), number in islice(self._numbers.items(), len(self._ranks), None):
                self._ranks[number] = self.ranks(left) + self.ranks(right)
        return self._ranks[value]


class ScheduleError(AssertionError):
    """A schedule (list of steps) is wrong; the message names the wrong rank, step or element."""


def run(
    programs: Sequence[list[Step]], vectors: Sequence[Sequence[Value]]
) -> tuple[list[list], Sums]:
    """Run all ranks' steps on vectors of `Value`; return each rank's final memory, and all sums.

    `programs` has the steps of each rank, and `vectors` the vector with which each rank begins.
    Each element is a `Value`: a number from `vectors`, or the number of a sum in the returned
    `Sums`. If this function returns, a real run of these steps cannot deadlock.
    """
    n = max((len(v) for v in vectors), default=0)
    memory = [
        [*v] + [None] * (extent(p, n) - len(v)) for v, p in zip(vectors, programs, strict=True)
    ]
    wires: dict[tuple[int, int], deque] = {}
    sums = Sums()
    left = [deque(steps) for steps in programs]
    moved = True
    while moved:
        moved = False
        for rank, steps in enumerate(left):
            while steps and _execute(rank, steps[0], memory[rank], wires, sums):
                steps.popleft()
                moved = True
    for rank, steps in enumerate(left):
        if steps:
            raise ScheduleError(f"rank {rank} waits for ever in {steps[0]}")
    unread = {pair: len(queue) for pair, queue in wires.items() if queue}
    if unread:
        raise ScheduleError(f"messages nobody received: {unread}")
    return memory, sums


def _execute(rank: int, step: Step, memory: list, wires: dict, sums: Sums) -> bool:
    """Execute a step and return True; return False for a receive whose message is not sent yet."""
    (a, b), (c, d) = step.source, step.target
    if step.kind == SEND:
        wires.setdefault((rank, step.peer), deque()).append(memory[a:b])
    elif step.kind == RECV:
        queue = wires.get((step.peer, rank))
        if not queue:
            return False
        message = queue.popleft()
        if len(message) != d - c:
            raise ScheduleError(f"rank {rank}: {step} meets a message of {len(message)} elements")
        memory[c:d] = message
    elif step.kind == COPY:
        memory[c:d] = memory[a:b]
    else:
        if b - a != d - c:
            raise ScheduleError(f"rank {rank}: {step} reduces ranges of different length")
        for i, j in zip(range(a, b), range(c, d), strict=True):
            pair = (memory[j], memory[i]) if step.kind == REDUCE else (memory[i], memory[j])
            if None in pair:
                raise ScheduleError(f"rank {rank}: {step} reads an element nobody wrote")
            memory[j] = sums.add(*pair)
    return True


def programs(build: Callable, size: int, *args, limit: int | None = None, **kwargs):
    """Return all ranks' steps as the executor runs them: no empty steps, and long messages cut.

    ``build(size, rank, *args)`` returns the steps of one rank. If `limit` is given, no message has
    more than `limit` elements.
    """
    built = [without_empty(build(size, rank, *args, **kwargs)) for rank in range(size)]
    return [split_messages(steps, limit) for steps in built] if limit else built


def check_allreduce(build: Callable, size: int, n: int, **kwargs) -> None:
    """Check that every element is the sum of all ranks, added in the same order on all ranks."""
    memory, sums = run(programs(build, size, n, **kwargs), [[rank] * n for rank in range(size)])
    _check_sums(sums, size, memory[0][:n], "rank 0")
    for rank, vector in enumerate(memory):
        for element in range(n):
            if vector[element] != memory[0][element]:
                raise ScheduleError(f"element {element} of rank {rank} is added in another order")


def _check_sums(sums: Sums, size: int, values: Iterable[Value], where: str) -> None:
    """Raise ScheduleError unless each of `values` contains the value of every rank exactly once."""
    for element, value in enumerate(values):
        if sorted(sums.ranks(value)) != list(range(size)):
            raise ScheduleError(f"element {element} of {where} holds {sums.ranks(value)}")


def check_reduce_scatter(build: Callable, size: int, counts: Sequence[int], **kwargs) -> None:
    """Check that each rank r gets the sum of block r over all ranks.

    `counts` are the lengths of the blocks.
    """
    bounds = bounds_of(counts)
    start = [[r] * bounds[-1] for r in range(size)]
    memory, sums = run(programs(build, size, counts, **kwargs), start)
    for rank in range(size):
        block = memory[rank][bounds[rank] : bounds[rank + 1]]
        _check_sums(sums, size, block, f"block {rank}")


def check_reduce(build: Callable, size: int, n: int, root: int) -> None:
    """Check that the root gets the sum of all ranks' vectors, which have `n` elements."""
    start = [[rank] * n for rank in range(size)]
    memory, sums = run(programs(build, size, n, root=root), start)
    _check_sums(sums, size, memory[root][:n], f"root {root}")


def check_allgather(
    build: Callable, size: int, counts: Sequence[int], receivers: Sequence[int] = (), **kwargs
) -> None:
    """Check that all `receivers` (by default all ranks) get the block of every rank.

    `counts` are the lengths of the blocks.
    """
    owner = [r for r in range(size) for _ in range(counts[r])]
    start = [[r if r == rank else None for r in owner] for rank in range(size)]
    memory, _ = run(programs(build, size, counts, **kwargs), start)
    for rank in receivers or range(size):
        if memory[rank][: len(owner)] != owner:
            raise ScheduleError(f"rank {rank} did not gather all blocks")


def check_gather(build: Callable, size: int, counts: Sequence[int], root: int) -> None:
    """Check that the root gets the block of every rank; `counts` are the lengths of the blocks."""
    check_allgather(build, size, counts, [root], root=root)


def check_broadcast(build: Callable, size: int, n: int, root: int) -> None:
    """Check that every rank gets the root's vector, which has `n` elements."""
    start = [[root if r == root else None] * n for r in range(size)]
    memory, _ = run(programs(build, size, n, root=root), start)
    for rank in range(size):
        if memory[rank][:n] != [root] * n:
            raise ScheduleError(f"rank {rank} did not get the vector of rank {root}")


def check_scatter(build: Callable, size: int, counts: Sequence[int], root: int) -> None:
    """Check that every rank gets its block of the root's vector; `counts` are their lengths."""
    bounds = bounds_of(counts)
    whole: list[Value] = list(range(bounds[-1]))
    start = [whole[:] if r == root else [None] * bounds[-1] for r in range(size)]
    memory, _ = run(programs(build, size, counts, root=root), start)
    for rank in range(size):
        block = slice(bounds[rank], bounds[rank + 1])
        if memory[rank][block] != whole[block]:
            raise ScheduleError(f"rank {rank} did not get its block")


#: The steps of every rank (or of some ranks), and the length of their private vectors. If a
#: position of the node's memory is not one byte, a third item is a function that returns the byte
#: of a position.
Operation = tuple[Sequence[list[Step]], int] | tuple[Sequence[list[Step]], int, Callable]


def check_races(operations: Sequence[Operation]) -> None:
    """Check that between two barriers no rank reads or writes memory that another rank writes.

    The caller may pass the steps of some ranks only; these ranks are then checked against each
    other.
    """
    spans: list[list[tuple[int, int, int, bool, Step]]] = [[]]
    ends = [0] * len(operations[0][0])
    for programs, n, *place in operations:
        counts = {sum(step.kind == NODE_SYNC for step in steps) for steps in programs}
        if len(counts) != 1:
            raise ScheduleError(f"the ranks pass different numbers of syncs: {sorted(counts)}")
        start = place[0] if place else int
        # The end of a range is computed from its length, because the byte of position `span[1]`
        # need not be next to the last byte of the range.
        width = start(1) - start(0)
        for rank, steps in enumerate(programs):
            for k, interval in enumerate(intervals(steps), ends[rank]):
                if k == len(spans):
                    spans.append([])
                for step in interval:
                    for span, writes in ((step.source, False), (step.target, step.kind != SEND)):
                        if span[1] > span[0] >= n:
                            first = start(span[0] - n)
                            stop = first + length(span) * width
                            spans[k].append((first, stop, rank, writes, step))
            ends[rank] = k
    for k, touched in enumerate(spans):
        _check_interval(k, touched)


def _check_interval(k: int, touched: list[tuple[int, int, int, bool, Step]]) -> None:
    """Check interval `k` between two barriers: no rank writes data that another rank uses."""
    touched.sort(key=lambda span: span[0])
    # `furthest[False]` has two of all spans so far, and `furthest[True]` two of the spans that are
    # written: the span that ends last, and the span of another rank that ends last.
    furthest: dict[bool, list[tuple[int, int, int, bool, Step]]] = {False: [], True: []}
    for span in touched:
        start, stop, rank, writes, step = span
        for other in furthest[not writes]:
            if other[2] != rank and other[1] > start:
                if writes and other[3]:
                    raise ScheduleError(f"{step}: two ranks write position {start}")
                reader, writer = (other[2], rank) if writes else (rank, other[2])
                raise ScheduleError(
                    f"interval {k}: rank {reader} reads {start} while rank {writer} writes"
                )
        for of in (False, True) if writes else (False,):
            kept = [old for old in furthest[of] if old[2] != rank]
            mine = [old for old in furthest[of] if old[2] == rank and old[1] > stop] or [span]
            furthest[of] = sorted([*kept, *mine], key=lambda old: -old[1])[:2]


def run_node(
    programs: Sequence[list[Step]], vectors: Sequence[Sequence[Value]], shared: Sequence[Value]
) -> tuple[list[list], list, Sums]:
    """Run the steps of one node's ranks on symbolic vectors.

    Returns the vectors of the ranks, the memory that they share, and the `Sums`, the table of all
    sums that the steps have computed.

    `vectors` has the symbolic values with which each rank's vector begins, and `shared` those of
    the memory that the ranks share.
    """
    n = len(vectors[0])
    private, common, sums = [list(v) for v in vectors], list(shared), Sums()
    cut_up = [intervals(steps) for steps in programs]
    for k in range(len(cut_up[0])):
        for rank, rounds in enumerate(cut_up):
            whole = private[rank] + common
            for step in rounds[k]:
                if step.kind != FINISH:
                    _execute(rank, step, whole, {}, sums)
            private[rank], common = whole[:n], whole[n:]
    return private, common, sums
