"""The proof: run all ranks' steps symbolically and see what every element is made of.

Each element carries the list of ranks whose values were added into it, in order, so a value added
twice, forgotten, or added in another order on another rank is found. No MPI: the schedules of any
number of ranks are proved in one process. Messages match in posting order, as MPI promises.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from ...partition import bounds_of
from .schedule import (
    COPY,
    FINISH,
    NODE_SYNC,
    NOTHING,
    RECV,
    SEND,
    Step,
    extent,
    length,
    reads_writes,
    split_messages,
    without_empty,
)

#: A rank (its own value), the number of a sum made by `Sums`, or nothing yet.
Value = int | None


class Sums:
    """Gives every sum of two values a number, the same one each time: equal numbers, equal bits."""

    _FIRST = 1 << 20

    def __init__(self):
        self._numbers: dict[tuple[int, int], int] = {}
        self._pairs: list[tuple[int, int]] = []
        self._ranks: dict[int, list[int]] = {}

    def add(self, left: int, right: int) -> int:
        """Return the number of ``left op right``."""
        pair = (left, right)
        number = self._numbers.get(pair)
        if number is None:
            number = self._numbers[pair] = self._FIRST + len(self._pairs)
            self._pairs.append(pair)
        return number

    def ranks(self, value: Value) -> list[int]:
        """Ranks whose values were added into `value`, left to right."""
        if value is None:
            return []
        if value < self._FIRST:
            return [value]
        if value not in self._ranks:
            # Operands are older than their sum, so going up in age needs no recursion.
            for number in range(self._FIRST + len(self._ranks), value + 1):
                left, right = self._pairs[number - self._FIRST]
                self._ranks[number] = self.ranks(left) + self.ranks(right)
        return self._ranks[value]


class ScheduleError(AssertionError):
    """A schedule is wrong; the message says which rank, step or element."""


def run(
    programs: Sequence[list[Step]], vectors: Sequence[Sequence[Value]]
) -> tuple[list[list], Sums]:
    """Execute all programs on symbolic vectors; returns the memories at the end, and the sums.

    Sends do not block; a receive waits for its message. In-order execution that ends proves that
    the executor, which only starts steps earlier than that, ends as well.
    """
    n = max((len(v) for v in vectors), default=0)
    memory = [
        [*v] + [None] * (extent(p, n) - len(v)) for v, p in zip(vectors, programs, strict=True)
    ]
    wires: dict[tuple[int, int], deque] = {}
    sums = Sums()
    cursor = [0] * len(programs)
    moved = True
    while moved:
        moved = False
        for rank, steps in enumerate(programs):
            while cursor[rank] < len(steps):
                if not _execute(rank, steps[cursor[rank]], memory[rank], wires, sums):
                    break
                cursor[rank] += 1
                moved = True
    for rank, steps in enumerate(programs):
        if cursor[rank] < len(steps):
            raise ScheduleError(f"rank {rank} waits for ever in {steps[cursor[rank]]}")
    left = {pair: len(queue) for pair, queue in wires.items() if queue}
    if left:
        raise ScheduleError(f"messages nobody received: {left}")
    return memory, sums


def _execute(rank: int, step: Step, memory: list, wires: dict, sums: Sums) -> bool:
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
        if length(step.source) != length(step.target):
            raise ScheduleError(f"rank {rank}: {step} reduces ranges of different length")
        for i, j in zip(range(a, b), range(c, d), strict=True):
            pair = (memory[j], memory[i]) if step.kind == "reduce" else (memory[i], memory[j])
            if None in pair:
                raise ScheduleError(f"rank {rank}: {step} reads an element nobody wrote")
            memory[j] = sums.add(*pair)
    return True


def programs(build: Callable, size: int, *args, limit: int | None = None, **kwargs):
    """Build the steps of all ranks as the executor sees them (empty steps gone, messages cut)."""
    result = []
    for rank in range(size):
        steps = without_empty(build(size, rank, *args, **kwargs))
        result.append(split_messages(steps, limit) if limit else steps)
    return result


def check_allreduce(build: Callable, size: int, n: int, **kwargs) -> None:
    """Every element, everywhere: each rank exactly once, and the same order of additions."""
    memory, sums = run(programs(build, size, n, **kwargs), [[rank] * n for rank in range(size)])
    everyone = list(range(size))
    for element in range(n):
        first = memory[0][element]
        if sorted(sums.ranks(first)) != everyone:
            raise ScheduleError(f"element {element} on rank 0 holds {sums.ranks(first)}")
        for rank in range(1, size):
            if memory[rank][element] != first:
                raise ScheduleError(f"element {element} of rank {rank} is added in another order")


def check_reduce_scatter(build: Callable, size: int, counts: Sequence[int], **kwargs) -> None:
    """Block r on rank r: each rank exactly once."""
    bounds = bounds_of(counts)
    start = [[r] * bounds[-1] for r in range(size)]
    memory, sums = run(programs(build, size, counts, **kwargs), start)
    for rank in range(size):
        for element in range(bounds[rank], bounds[rank + 1]):
            if sorted(sums.ranks(memory[rank][element])) != list(range(size)):
                raise ScheduleError(f"element {element} of block {rank} is not the full sum")


def check_allgather(build: Callable, size: int, counts: Sequence[int], **kwargs) -> None:
    """Every block on every rank is its owner's."""
    bounds = bounds_of(counts)
    owner = [r for r in range(size) for _ in range(counts[r])]
    memory, _ = run(
        programs(build, size, counts, **kwargs),
        [[r if owner[e] == r else None for e in range(bounds[-1])] for r in range(size)],
    )
    for rank in range(size):
        if memory[rank][: bounds[-1]] != owner:
            raise ScheduleError(f"rank {rank} did not gather all blocks")


def check_broadcast(build: Callable, size: int, n: int, root: int) -> None:
    """Every rank ends with the root's vector."""
    start = [[root if r == root else None] * n for r in range(size)]
    memory, _ = run(programs(build, size, n, root=root), start)
    for rank in range(size):
        if memory[rank][:n] != [root] * n:
            raise ScheduleError(f"rank {rank} did not get the vector of rank {root}")


def check_reduce(build: Callable, size: int, n: int, root: int) -> None:
    """The root ends with each rank exactly once."""
    start = [[rank] * n for rank in range(size)]
    memory, sums = run(programs(build, size, n, root=root), start)
    for element in range(n):
        if sorted(sums.ranks(memory[root][element])) != list(range(size)):
            raise ScheduleError(f"element {element} on root {root} is not the full sum")


def check_gather(build: Callable, size: int, counts: Sequence[int], root: int) -> None:
    """The root ends with every rank's block."""
    bounds = bounds_of(counts)
    owner = [r for r in range(size) for _ in range(counts[r])]
    start = [[r if owner[e] == r else None for e in range(bounds[-1])] for r in range(size)]
    memory, _ = run(programs(build, size, counts, root=root), start)
    if memory[root][: bounds[-1]] != owner:
        raise ScheduleError(f"root {root} did not gather all blocks")


def check_scatter(build: Callable, size: int, counts: Sequence[int], root: int) -> None:
    """Every rank ends with its block of the root's vector."""
    bounds = bounds_of(counts)
    whole: list[Value] = list(range(bounds[-1]))
    start = [whole[:] if r == root else [None] * bounds[-1] for r in range(size)]
    memory, _ = run(programs(build, size, counts, root=root), start)
    for rank in range(size):
        block = slice(bounds[rank], bounds[rank + 1])
        if memory[rank][block] != whole[block]:
            raise ScheduleError(f"rank {rank} did not get its block")


def intervals(steps: list[Step]) -> list[list[Step]]:
    """Cut the steps of one rank at the syncs of its node."""
    rounds: list[list[Step]] = [[]]
    for step in steps:
        if step.kind == NODE_SYNC:
            rounds.append([])
        else:
            rounds[-1].append(step)
    return rounds


#: The steps of every rank (or of some), the length of their private vectors and, where positions
#: of the node's memory are no bytes, what says at which byte a position lies.
Operation = tuple[Sequence[list[Step]], int] | tuple[Sequence[list[Step]], int, Callable]


def check_races(operations: Sequence[Operation]) -> None:
    """Prove that no rank touches memory of the node that another writes between the same syncs.

    `operations` run one after the other. The last interval of one and the first of the next are one
    interval: nothing separates them. A race is between two ranks, so the steps of some ranks prove
    it for these.
    """
    spans: list[list[tuple[int, int, int, bool, Step]]] = [[]]
    ends = [0] * len(operations[0][0])
    for programs, n, *place in operations:
        counts = {sum(step.kind == NODE_SYNC for step in steps) for steps in programs}
        if len(counts) != 1:
            raise ScheduleError(f"the ranks pass different numbers of syncs: {sorted(counts)}")
        start = place[0] if place else int
        # Where one position begins, the one before it ends; but not at the end of a piece.
        width = start(1) - start(0)
        for rank, steps in enumerate(programs):
            for k, interval in enumerate(intervals(steps), ends[rank]):
                if k == len(spans):
                    spans.append([])
                for step in interval:
                    reads, write = reads_writes(step)
                    for span in (*reads, write or NOTHING):
                        if span[1] > span[0] >= n:
                            first = start(span[0] - n)
                            stop = first + (span[1] - span[0]) * width
                            spans[k].append((first, stop, rank, span is write, step))
            ends[rank] = k
    for k, touched in enumerate(spans):
        _check_interval(k, touched)


def _check_interval(k: int, touched: list[tuple[int, int, int, bool, Step]]) -> None:
    """Find two ranks that touch a byte between two syncs, one of which writes it."""
    touched.sort(key=lambda span: span[0])
    # Of all spans so far, of any kind and of writes: the one that reaches furthest, and the one of
    # another rank that does.
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
    """Execute the steps of one node's ranks; returns private vectors, shared memory and sums."""
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
