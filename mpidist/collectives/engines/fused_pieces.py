"""A contiguous part of an arena, summed while the program goes on: the bucket of a gradient.

Between nodes of one rank it is an `iallreduce` of that part. Between nodes of several it is
`hierarchical`, cut at the places where it would have to wait:

    ready line   all ranks of the node have written the bucket -> owner adds its part of the slots
    lane         that part crosses the wire                    -> owner writes it into all slots
    done line    all owners are through                        -> the bucket is finished

Each line is a counter per rank in the arena, so buckets may overtake each other on the wire. A rank
that cannot go on writes `POISON` into its counters: nobody passes a line where one stands.
"""

from __future__ import annotations

import threading

from ...errors import ProtocolError
from ...partition import BlockPartition
from ...runtime.agreement.mismatch import Signature
from ...runtime.arena import Arena
from ...runtime.context import Context, of, running
from ..allreduce import TWO_HOP_RANKS, Handle, nonblocking
from ..plan import make
from ..schedules.algorithms import MEASURED, NATIVE, NODE
from .executor import Program, Run, heading
from .hierarchical import lane_steps, lanes_of, total_of
from .node_barrier import ORDERED
from .programs import halves_on_slots
from .reductions import resolve

#: The counter of a rank that has broken the bucket off.
POISON = -1


def can_overlap(arena: Arena, algorithm: str) -> bool:
    """Whether parts of `arena` can travel in the background.

    Within one node nothing travels: adding is work for the same cores, early or late.
    """
    alone = arena.topology.nodes == arena.topology.size
    if arena.topology.nodes == 1 or arena.comm.size == 1:
        return False
    return alone or algorithm not in (MEASURED, *NODE) or (arena.shared and ORDERED)


def bucket(arena: Arena, k: int, start: int, stop: int, algorithm: str = MEASURED):
    """Return a function that begins the sum of ``vectors[k][start:stop]``: a handle to `test`.

    Collective over the arena's communicator, here and at each call, in the same order. That of half
    precision takes a weight, for such values are scaled as they are added: in single.
    """
    by_lanes = arena.topology.nodes < arena.topology.size and algorithm in (MEASURED, *NODE)
    lines = arena.take_lines(2) if by_lanes else None
    vector = arena.vectors[k]
    if by_lanes and lines is not None and resolve("sum", vector.dtype).work == vector.dtype:
        return LaneBucket(of(arena.comm), arena, k, start, stop, lines).start
    context, part = of(arena.comm), vector[start:stop]
    if algorithm in (MEASURED, NATIVE, *NODE):
        algorithm = nonblocking(arena.comm.size)
    name = f"{arena.label} bucket {start}:{stop} of vector {k}"
    plan = make(context, part, "sum", algorithm, name).owned()
    arena.plans[name] = [plan]
    return lambda weight=None: Handle(context, plan, part, part, weight)


class LaneBucket:
    """One part of an arena on nodes of several ranks, ready to be summed step after step."""

    def __init__(self, context: Context, arena: Arena, k: int, start: int, stop: int, lines: int):
        topology = arena.topology
        slots = [slot[start:stop] for slot in arena.slots[k]]
        n, dtype = stop - start, slots[0].dtype
        reduction = resolve("sum", dtype)
        shape, extra = f"({start}:{stop})", f"bucket of {arena.label} vector {k}"
        self.signature = Signature("allreduce", dtype.name, shape, "sum", "hierarchical", extra)
        self.key, self.context = self.signature.key, context
        self.lines, self.line = arena.lines, lines
        self.mine = topology.local_rank
        self.others = [r for r in range(topology.local_size) if r != self.mine]
        self.count = 0
        lanes, lane = lanes_of(topology), topology.local_rank
        self.add, self.show = halves_on_slots(topology, slots, reduction.ufunc)
        self.program: Program | None = None
        if lane < lanes:
            first, last = BlockPartition(n, lanes).range(lane)
            self.part = slots[lane][first:last]
            name = "two_hop" if topology.nodes <= TWO_HOP_RANKS else None  # few rounds
            steps = lane_steps(topology, lane, last - first, dtype.itemsize, name)
            self.program = Program(context, steps, last - first, dtype, reduction.ufunc)
        self.counters = total_of(self.add, self.show, self.program)

    def start(self) -> LaneRun:
        """Begin; every rank's bucket is written. Collective."""
        try:
            return LaneRun(self)
        except ProtocolError:  # refused, so nothing was begun
            raise
        except BaseException as error:
            self.break_off(error)
            raise

    def break_off(self, error: BaseException, sequence: int | None = None) -> None:
        """Stop all ranks of the node at the next barrier of this bucket, and tell them why."""
        for line in (self.line, self.line + 8):
            self.lines[self.mine][line] = POISON
        self.context.break_off(error, sequence)

    def arrive(self, line: int) -> None:
        """Tell the node that this rank is at one of the two lines."""
        mine = self.lines[self.mine]
        mine[line + 1 + self.count % 2] = self.key
        mine[line] = self.count

    def everyone_at(self, line: int) -> bool:
        """Whether all ranks of the node are there, in this operation."""
        count, lines = self.count, self.lines
        for other in self.others:
            there = lines[other][line]
            if there < count:
                if there == POISON:
                    self.context.disagree()  # that rank has told why, or will in a moment
                return False
        for other in self.others:
            if lines[other][line + 1 + count % 2] != self.key:
                self.context.disagree()
        return True


class LaneRun:
    """One sum of a bucket under way; its stages as in the module's picture."""

    def __init__(self, bucket: LaneBucket):
        self.bucket, self.context = bucket, bucket.context
        self.tag = self.context.tag(self.context.begin(bucket.signature))
        self.header = heading(self.context, bucket.key)
        bucket.count += 1
        self.sequence = self.context.sequence
        self.lane: Run | None = None
        self.done = False
        self.error: BaseException | None = None
        self._mine = threading.Lock()
        self._stage = self._add
        bucket.arrive(bucket.line)
        running.append(self)

    def test(self) -> bool:
        """Make progress; true when the bucket holds the sum on this node.

        A thread that comes while another is in here learns only that it is not done.
        """
        if self.done or not self._mine.acquire(blocking=False):
            return self.done
        try:
            if self.error is not None:
                raise self.error
            while not self.done and self._stage():
                pass
        except BaseException as error:
            self._break_off(error)
            raise
        finally:
            self._mine.release()
        return self.done

    def _break_off(self, error: BaseException) -> None:
        if self.error is None:
            self.error = error
            self.bucket.break_off(error, self.sequence)
            running.remove(self)

    def wait(self) -> None:
        """Wait for the sum. Collective."""
        self.context.wait(self.test, self.sequence)

    def _add(self) -> bool:
        bucket = self.bucket
        if not bucket.everyone_at(bucket.line):
            return False
        bucket.add.compute(1)
        if bucket.program is not None:
            self.lane = Run(bucket.program, bucket.part, self.tag, self.header)
            self.lane.sequence = self.sequence
        self._stage = self._show
        return True

    def _show(self) -> bool:
        if self.lane is not None and not self.lane.test():
            return False
        self.bucket.show.compute(0)
        self.bucket.arrive(self.bucket.line + 8)
        self._stage = self._leave
        return True

    def _leave(self) -> bool:
        bucket = self.bucket
        if not bucket.everyone_at(bucket.line + 8):
            return False
        self.context.sent.add(bucket.counters)
        self.done = True
        running.remove(self)
        return False
