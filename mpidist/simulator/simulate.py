"""Simulate a schedule on the network of `network_model`, rank by rank, to find its cost.

A schedule is the list of steps (send, receive, add) of each rank. The steps have the same
dependencies as in a real run, so messages and additions overlap as in a real run. If several steps
need the same link, rank or processor, they use it one after the other, in the order of the
algorithm.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ..collectives.schedules.check import ScheduleError, programs
from ..collectives.schedules.protocol_limits import LONG
from ..collectives.schedules.schedule import (
    RECV,
    REDUCE,
    REDUCE_LEFT,
    SEND,
    Step,
    compile_steps,
    length,
)
from .network_model import Cost, Problem


class Sent(NamedTuple):
    """A simulated message: the times at which it begins to leave, has left, and has arrived."""

    source: int
    target: int
    nbytes: int
    begin: float
    left: float
    end: float


class Reduced(NamedTuple):
    """A simulated reduction, with its rank and the times at which it begins and ends."""

    rank: int
    begin: float
    end: float


def simulate(build: Callable, problem: Problem, trace: list | None = None) -> Cost:
    """Return the cost of an allreduce; ``build(size, rank, n, itemsize)`` returns a rank's steps.

    Each message and each reduction is appended to the list `trace`, as `Sent` or `Reduced`.
    """
    plans = programs(lambda p, r, m: build(p, r, m, problem.itemsize), problem.size, problem.n)
    return summary(plans, problem.itemsize, run(plans, problem, trace))


def summary(plans: Sequence[list[Step]], itemsize: int, seconds: float) -> Cost:
    """Return the `Cost` of an allreduce; `plans` has the list of steps of each rank."""
    sends = [[length(s.source) for s in steps if s.kind == SEND] for steps in plans]
    sums = [
        sum(length(s.target) for s in steps if s.kind in (REDUCE, REDUCE_LEFT)) for steps in plans
    ]
    return Cost(
        seconds,
        1 + max((s.round for steps in plans for s in steps), default=-1),
        max(map(len, sends), default=0),
        max(map(sum, sends), default=0) * itemsize,
        max(sums, default=0) * itemsize,
    )


def run(plans: Sequence[list[Step]], problem: Problem, trace: list | None = None) -> float:
    """Return the mean seconds of an allreduce, from its start until the last rank is done.

    `plans` has the list of steps of each rank. If all nodes do the same, as in a ring, `plans` may
    have the steps of the first node's ranks only.
    """
    machine = _Machine(problem, len(plans))
    ranks = [_Rank(steps) for steps in plans]
    rounds = sorted({step.round for steps in plans for step in steps})
    for _ in range(problem.repeats):
        for rank in ranks:
            rank.begin(problem.network.call)
        for round in rounds:
            _send_all(round, ranks, machine, trace)
            for r, rank in enumerate(ranks):
                for i in rank.others.get(round, ()):
                    _receive_or_reduce(r, i, rank, machine, trace)
    return max((rank.end for rank in ranks), default=0.0) / problem.repeats


class _Rank:
    """The steps of one rank, and the times at which each of them may begin."""

    def __init__(self, steps: list[Step]):
        self.compiled = compile_steps(steps)
        self.sends: dict[int, list[int]] = defaultdict(list)
        self.others: dict[int, list[int]] = defaultdict(list)
        for i, step in enumerate(steps):
            (self.sends if step.kind == SEND else self.others)[step.round].append(i)
        self.end = 0.0

    def begin(self, call: float) -> None:
        self.end += call
        self.ready = [self.end] * len(self.compiled.steps)
        self.needs = self.compiled.needs.copy()

    def take(self, i: int) -> float:
        """Return when step `i` begins, and let the steps that wait for its beginning begin."""
        if self.needs[i]:
            raise ScheduleError(f"{self.compiled.steps[i]} needs the data of a later step")
        for k in self.compiled.followers[i]:
            self._release(k, self.ready[i])
        return self.ready[i]

    def finish(self, i: int, now: float) -> None:
        self.end = max(self.end, now)
        for k in self.compiled.dependents[i]:
            self._release(k, now)

    def _release(self, k: int, now: float) -> None:
        self.needs[k] -= 1
        if now > self.ready[k]:
            self.ready[k] = now


class _Machine:
    """The times at which senders, links and processors become free, and messages arrive."""

    def __init__(self, problem: Problem, simulated: int):
        self.problem, self.network, self.simulated = problem, problem.network, simulated
        self.sender, self.receiver, self.processor = ([0.0] * simulated for _ in range(3))
        self.out: dict[int, float] = defaultdict(float)
        self.fast: dict[int, float] = defaultdict(float)
        self.into: dict[int, float] = defaultdict(float)
        self.arrived: dict[tuple[int, int], deque] = defaultdict(deque)
        self.crossed: dict[tuple[int, int], float] = {}

    def local(self, source: int, target: int) -> bool:
        """Whether two ranks are on one node."""
        return self.problem.node(source) == self.problem.node(target)

    def transmit(self, source: int, target: int, nbytes: int, ready: float):
        """Send a message; return when it starts, and when its last byte leaves and arrives."""
        net = self.network
        begin = max(self.sender[source], ready) + net.overhead
        self.sender[source] = begin
        if self.local(source, target):
            lane = -1 - source
            start, before = begin, self.out[lane]
            left = self.out[lane] = max(before, begin) + nbytes * net.node_gap
            arrival = left + net.node_latency
        else:
            node = self.problem.node(source)
            start, before = begin, self.out[node]
            if nbytes > LONG:
                start = max(begin, self.crossed.pop((source, target), 0.0))
            # `out` is the time at which the link would be free at its long-term rate. If the token
            # bucket is full, `out` is earlier than the start by the time of `burst` bytes; it is
            # never earlier than that.
            self.out[node] = max(before, start - net.burst * net.gap) + nbytes * net.gap
            self.fast[node] = max(self.fast[node], start) + nbytes * net.peak
            left = max(self.out[node], self.fast[node])
            if nbytes > LONG:
                self.crossed[target, source] = start + net.crossing * (left - start)
            node = self.problem.node(target % self.simulated)
            busy = nbytes * (net.gap if net.incoming else net.peak)
            arrival = self.into[node] = max(left + net.latency, self.into[node] + busy)
        self.arrived[self.seen(source, target)].append(arrival)
        return max(start, min(before, left)), left, arrival

    def seen(self, source: int, target: int) -> tuple[int, int]:
        """Return the two simulated ranks whose times are those of `source` and `target`."""
        here = target % self.simulated
        return (source - target + here) % self.problem.size, here


def _send_all(round: int, ranks, machine: _Machine, trace) -> None:
    """Send a round's messages: first the first message of each rank, then the second, and so on."""
    itemsize = machine.problem.itemsize
    sends = [
        (place, r, i, rank.compiled.steps[i].peer, length(rank.compiled.steps[i].source) * itemsize)
        for r, rank in enumerate(ranks)
        for place, i in enumerate(rank.sends.get(round, ()))
    ]
    machine.crossed.clear()
    for _, r, i, peer, nbytes in sorted(sends):
        begin, left, arrival = machine.transmit(r, peer, nbytes, ranks[r].take(i))
        ranks[r].finish(i, left)
        if trace is not None:
            trace.append(Sent(r, peer, nbytes, begin, left, arrival))


def _receive_or_reduce(r: int, i: int, rank: _Rank, machine: _Machine, trace):
    step, ready = rank.compiled.steps[i], rank.take(i)
    if step.kind == RECV:
        arrival = machine.arrived[step.peer, r].popleft()
        end = max(machine.receiver[r], arrival, ready) + machine.network.overhead
        machine.receiver[r] = end
    elif step.kind in (REDUCE, REDUCE_LEFT):
        begin = max(machine.processor[r], ready)
        nbytes = length(step.target) * machine.problem.itemsize
        end = begin + machine.network.reduction * nbytes
        machine.processor[r] = end
        if trace is not None:
            trace.append(Reduced(r, begin, end))
    else:
        end = ready
    rank.finish(i, end)
