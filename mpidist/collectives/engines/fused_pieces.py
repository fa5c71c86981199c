"""Sum buckets (contiguous parts of an arena in shared memory) over the ranks while they compute.

If each node has one rank, a bucket is summed by an `iallreduce`. If nodes have several ranks, each
rank of a node owns one part of the bucket; a lane is the group of the ranks, one in each node, that
own the same part. The event left of an arrow starts the action on its right; the ready line and the
done line are barriers of the node:

    ready line   all ranks of the node have written the bucket -> owner adds its part of all vectors
    lane         the nodes sum this part by messages           -> owner copies it into all vectors
    done line    all owners have copied their parts            -> the bucket is finished
"""

from __future__ import annotations

import threading
from collections.abc import Iterator

from ...errors import ProtocolError
from ...runtime.agreement.mismatch import Signature
from ...runtime.context import Context, of, running
from ...runtime.node_memory.arena import Arena
from ..allreduce import TWO_HOP_RANKS, Handle, nonblocking
from ..plan import make_plan
from ..schedules.algorithms import MEASURED, NATIVE, NODE
from .executor import Run, heading
from .hierarchical import lane_program, total_of
from .node_barrier import ORDERED
from .programs import halves_on_slots
from .reductions import resolve


def can_overlap(arena: Arena, algorithm: str) -> bool:
    """Whether buckets (parts) of the tensors in `arena` can be summed while the program computes.

    The result is False if there is only one node.
    """
    topology = arena.topology
    if topology.nodes == 1:
        return False
    alone = topology.nodes == topology.size
    return alone or algorithm not in (MEASURED, *NODE) or (arena.shared and ORDERED)


def bucket(arena: Arena, k: int, start: int, stop: int, algorithm: str = MEASURED):
    """Return a function that begins to sum ``arena.vectors[k][start:stop]`` over all ranks.

    The returned function gives a handle, which waits for the sum. All ranks of the arena's
    communicator must call `bucket`, and later the returned function, in the same order. If the
    vectors have half precision, the returned function has an argument `weight`, by which it
    multiplies this rank's values before the sum.
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
    plan = make_plan(context, part, "sum", algorithm, name).owned()
    arena.plans[name] = [plan]
    return lambda weight=None: Handle(context, plan, part, part, weight)


class LaneBucket:
    """A prepared allreduce of one bucket, for jobs whose nodes have several ranks.

    A bucket is a contiguous part of an arena's tensors, which are in shared memory.
    """

    def __init__(self, context: Context, arena: Arena, k: int, start: int, stop: int, lines: int):
        topology = arena.topology
        slots = [slot[start:stop] for slot in arena.slots[k]]
        reduction = resolve("sum", slots[0].dtype)
        shape, extra = f"({start}:{stop})", f"bucket of {arena.label} vector {k}"
        dtype = reduction.dtype.name
        self.signature = Signature("allreduce", dtype, shape, "sum", "hierarchical", extra)
        self.key, self.context = self.signature.key, context
        self.lines, self.line = arena.lines, lines
        self.mine = topology.local_rank
        self.others = [r for r in range(topology.local_size) if r != self.mine]
        self.count = 0
        self.add, self.show = halves_on_slots(topology, slots, reduction.ufunc)
        name = "two_hop" if topology.nodes <= TWO_HOP_RANKS else None  # few rounds
        part, self.program = lane_program(context, topology, stop - start, reduction, name)
        self.part = slots[self.mine][part]
        self.counters = total_of(self.add, self.show, self.program)

    def start(self) -> LaneRun:
        """Begin to sum the bucket, into which this rank has written all its values. Collective."""
        try:
            return LaneRun(self)
        except ProtocolError:  # the operation has not begun
            raise
        except BaseException as error:
            self.break_off(error)
            raise

    def break_off(self, error: BaseException, sequence: int | None = None) -> None:
        """Stop all ranks of the node at the bucket's next barrier; send `error` to all ranks."""
        mine = self.lines[self.mine]
        for line in (self.line, self.line + 8):
            mine[line] = min(mine[line], ~mine[line])  # a second call changes nothing
        self.context.break_off(error, sequence)

    def arrive(self, line: int) -> None:
        """Record that this rank has reached the barrier whose counters are at index `line`."""
        mine = self.lines[self.mine]
        mine[line + 1 + self.count % 2] = self.key
        mine[line] = self.count

    def everyone_at(self, line: int) -> bool:
        """Whether all ranks of the node have reached a barrier; `line` is where its counters are.

        Raises an error if a rank of the node has failed.
        """
        count, lines = self.count, self.lines
        for other in self.others:
            there = lines[other][line]
            if there < count and ~there < count:
                if there < 0:
                    self.context.disagree()  # the rank that failed sends the reason
                return False
        for other in self.others:
            if lines[other][line + 1 + count % 2] != self.key:
                self.context.disagree()
        return True


class LaneRun:
    """An allreduce of one bucket that is in progress; `test` continues it.

    A bucket is a contiguous part of an arena's tensors, which are in shared memory.
    """

    def __init__(self, bucket: LaneBucket):
        self.bucket, self.context = bucket, bucket.context
        self.tag = self.context.tag(self.context.begin(bucket.signature))
        self.header = heading(self.context, bucket.key)
        bucket.count += 1
        self.sequence = self.context.sequence
        self.done = False
        self.error: BaseException | None = None
        self._mine = threading.Lock()
        self._stages = self._run()
        bucket.arrive(bucket.line)
        running.append(self)

    def test(self) -> bool:
        """Continue the allreduce; return whether all ranks of the node have its result.

        Returns False while another thread is in this method, unless the sum is complete.
        """
        if self.done or not self._mine.acquire(blocking=False):
            return self.done
        try:
            if self.error is not None:
                raise self.error
            next(self._stages, None)
        except BaseException as error:
            if self.error is None:
                self.error = error
                self.bucket.break_off(error, self.sequence)
                running.remove(self)
            raise
        finally:
            self._mine.release()
        return self.done

    def wait(self) -> None:
        """Wait until the allreduce of the bucket is finished. Collective."""
        self.context.wait(self.test, self.sequence)

    def _run(self) -> Iterator[None]:
        """Run all stages of the sum, as a generator that yields whenever a stage has to wait."""
        bucket = self.bucket
        while not bucket.everyone_at(bucket.line):
            yield
        bucket.add.compute(1)
        if bucket.program is not None:
            lane = Run(bucket.program, bucket.part, self.tag, self.header)
            lane.sequence = self.sequence
            while not lane.test():
                yield
        bucket.show.compute(0)
        bucket.arrive(bucket.line + 8)
        while not bucket.everyone_at(bucket.line + 8):
            yield
        self.context.sent.add(bucket.counters)
        self.done = True
        running.remove(self)
