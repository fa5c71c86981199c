"""The simulator for many ranks: it computes the times of all similar ranks at once.

The results are those of `simulate`, except for the last one or two bits.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from ..collectives.schedules.protocol_limits import LONG
from ..collectives.schedules.schedule import RECV, REDUCE, REDUCE_LEFT, SEND, compile_steps, length
from .network_model import Problem
from .rank_classes import Class


def run(classes: Sequence[Class], problem: Problem) -> float:
    """Return the mean seconds of an allreduce, from its start until the last rank is done."""
    machine = _Machine(problem)
    groups = [_Group(each) for each in classes]
    rounds = sorted({step.round for each in classes for step in each.steps})
    for _ in range(problem.repeats):
        for group in groups:
            group.begin(problem.network.call)
        for round in rounds:
            wires = _send_all(round, groups, machine)
            for group in groups:
                heard: list[np.ndarray] = []
                for i in group.others.get(round, ()):
                    group.receive_or_reduce(i, machine, wires, heard)
    return max((float(group.end.max()) for group in groups), default=0.0) / problem.repeats


class _Group:
    """The state of a class of ranks: for each step, the times at which the ranks may begin it."""

    def __init__(self, alike: Class):
        self.ranks, self.steps, self.peers = alike
        self.compiled = compile_steps(self.steps)
        self.sends: dict[int, list[int]] = defaultdict(list)
        self.others: dict[int, list[int]] = defaultdict(list)
        for i, step in enumerate(self.steps):
            (self.sends if step.kind == SEND else self.others)[step.round].append(i)
        self.end = np.zeros(len(self.ranks))

    def begin(self, call: float) -> None:
        self.end = self.end + call
        # Arrays are never written in place, so all steps can share this array.
        self.ready: list = [self.end] * len(self.steps)

    def take(self, i: int) -> np.ndarray:
        for k in self.compiled.followers[i]:
            self.ready[k] = np.maximum(self.ready[k], self.ready[i])
        ready, self.ready[i] = self.ready[i], None
        return ready

    def finish(self, i: int, now: np.ndarray) -> None:
        self.end = np.maximum(self.end, now)
        for k in self.compiled.dependents[i]:
            self.ready[k] = np.maximum(self.ready[k], now)

    def receive_or_reduce(self, i: int, machine, wires, heard: list) -> None:
        step, ready = self.steps[i], self.take(i)
        end = ready
        if step.kind == RECV:
            earlier = sum((self.peers[i] == peers for peers in heard), np.zeros(len(ready), int))
            heard.append(self.peers[i])
            arrival = wires.find(self.peers[i], self.ranks, earlier)
            end = np.maximum(np.maximum(machine.receiver[self.ranks], arrival), ready)
            end = end + machine.network.overhead
            machine.receiver[self.ranks] = end
        elif step.kind in (REDUCE, REDUCE_LEFT):
            begin = np.maximum(machine.processor[self.ranks], ready)
            nbytes = length(step.target) * machine.problem.itemsize
            end = begin + machine.network.reduction * nbytes
            machine.processor[self.ranks] = end
        self.finish(i, end)


class _Wires:
    """The arrival times of one round's messages; a message is found by its sender and receiver."""

    def __init__(self, size: int, sources, targets, arrivals):
        key = sources * size + targets
        order = np.argsort(key, kind="stable")
        self.size, self.keys, self.arrivals = size, key[order], arrivals[order]

    def find(self, sources, targets, earlier) -> np.ndarray:
        key = sources * self.size + targets
        return self.arrivals[np.searchsorted(self.keys, key) + earlier]


class _Machine:
    """Arrays of the times at which senders, links, receivers and processors become free."""

    def __init__(self, problem: Problem):
        self.problem, self.network, size = problem, problem.network, problem.size
        self.sender, self.receiver, self.processor = (np.zeros(size) for _ in range(3))
        nodes = problem.node(size - 1) + 1
        # First the links of the nodes, and then a lane for each rank, for messages inside its node.
        self.out, self.fast = np.zeros(nodes + size), np.zeros(nodes + size)
        self.into = np.zeros(nodes)
        self.nodes = nodes

    def transmit(self, source, target, nbytes: int, ready, crossed) -> tuple:
        """Send messages that share no link; return the times when they start, leave and arrive."""
        net = self.network
        begin = np.maximum(self.sender[source], ready) + net.overhead
        self.sender[source] = begin
        start = np.maximum(begin, crossed)
        problem = self.problem
        local = problem.node(source) == problem.node(target)
        lane = np.where(local, self.nodes + source, problem.node(source))
        gap = np.where(local, net.node_gap, net.gap)
        slack = np.where(local, 0.0, net.burst * net.gap)
        self.out[lane] = np.maximum(self.out[lane], start - slack) + nbytes * gap
        peak = np.where(local, net.node_gap, net.peak)
        self.fast[lane] = np.maximum(self.fast[lane], start) + nbytes * peak
        left = np.maximum(self.out[lane], self.fast[lane])
        arrival = left + np.where(local, net.node_latency, net.latency)
        far = ~local
        node = problem.node(target[far])
        busy = nbytes * (net.gap if net.incoming else net.peak)
        arrival[far] = self.into[node] = np.maximum(arrival[far], self.into[node] + busy)
        return start, left, arrival


def _send_all(round: int, groups, machine: _Machine) -> _Wires:
    """Send a round's messages: the first message of each rank, then the second of each, etc."""
    itemsize = machine.problem.itemsize
    sends = [(group, group.sends.get(round, ())) for group in groups]
    most = max(len(steps) for _, steps in sends)
    done = []
    waits: dict[int, float] = {}
    for place in range(most):
        batch = [(group, steps[place]) for group, steps in sends if len(steps) > place]
        counts = [len(group.ranks) for group, _ in batch]
        sources = np.concatenate([group.ranks for group, _ in batch])
        targets = np.concatenate([group.peers[i] for group, i in batch])
        ready = np.concatenate([group.take(i) for group, i in batch])
        nbytes = [length(group.steps[i].source) * itemsize for group, i in batch]
        sizes = np.repeat(nbytes, counts)
        left, arrival = _in_turns(machine, sources, targets, sizes, ready, waits)
        done.append((sources, targets, arrival))
        for (group, i), now in zip(batch, np.split(left, np.cumsum(counts)[:-1]), strict=True):
            group.finish(i, now)
    if not done:
        return _Wires(1, *(np.zeros(0, int) for _ in range(3)))
    return _Wires(machine.problem.size, *map(np.concatenate, zip(*done, strict=True)))


def _in_turns(machine: _Machine, sources, targets, sizes, ready, waits) -> tuple:
    """Send messages in the order of their senders; messages that share no link are sent at once."""
    problem = machine.problem
    left, arrival = np.empty(len(sources)), np.empty(len(sources))
    order = np.argsort(sources, kind="stable")
    while order.size:
        s, t = sources[order], targets[order]
        local = problem.node(s) == problem.node(t)
        out = np.where(local, machine.nodes + s, problem.node(s))
        # A message inside a node enters no link, so it gets a number of its own.
        into = np.where(local, -1 - s, problem.node(t))
        pair = np.where(
            sizes[order] > LONG, np.minimum(s, t) * problem.size + np.maximum(s, t), -1 - s
        )
        free = _first(out) & _first(into) & _first(pair)
        now = order[free]
        for nbytes in np.unique(sizes[now]):
            chosen = now[sizes[now] == nbytes]
            s, t = sources[chosen], targets[chosen]
            crossed = np.zeros(len(chosen))
            if nbytes > LONG:
                # The time until which each message waits for a message that crosses it.
                pairs = (s * problem.size + t).tolist()
                crossed = np.array([waits.pop(pair, 0.0) for pair in pairs])
            start, left[chosen], arrival[chosen] = machine.transmit(
                s, t, int(nbytes), ready[chosen], crossed
            )
            if nbytes > LONG:
                until = start + machine.network.crossing * (left[chosen] - start)
                far = problem.node(s) != problem.node(t)
                waits.update(
                    zip((t * problem.size + s)[far].tolist(), until[far].tolist(), strict=True)
                )
        order = order[~free]
    return left, arrival


def _first(values: np.ndarray) -> np.ndarray:
    """Return, for each of `values`, whether no earlier value is equal to it."""
    result = np.zeros(len(values), bool)
    result[np.unique(values, return_index=True)[1]] = True
    return result
