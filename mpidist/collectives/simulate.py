"""What a schedule costs, for any number of ranks, without running it; and a picture of it.

The model: a message of b bytes occupies the sender's port and the receiver's port for b * beta
seconds each and arrives alpha seconds after its last byte left; reducing b bytes occupies the
rank for b * gamma. Steps obey the same dependencies as in the executor, so segments overlap here
exactly where they may overlap there. (Hockney's model with ports and a reduction term; R124.)
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import NamedTuple

from .check import programs
from .schedule import COPY, RECV, SEND, Step, compile_steps, length


class Network(NamedTuple):
    """Seconds per message, per byte on a link, per byte reduced."""

    alpha: float = 2e-6
    beta: float = 1e-9
    gamma: float = 2e-10


#: A node's shared memory, roughly.
DEFAULT = Network()


class Cost(NamedTuple):
    """What the busiest rank does, and when the last one is done."""

    seconds: float
    rounds: int
    messages: int
    bytes: int
    reduced: int


class _Rank:
    def __init__(self, steps: list[Step]):
        self.compiled = compile_steps(steps)
        self.needs = self.compiled.needs.copy()
        self.ready_at = [0.0] * len(steps)
        self.send_port = self.receive_port = self.processor = self.end = 0.0


def simulate(build: Callable, size: int, n: int, *, itemsize: int = 4, network=DEFAULT) -> Cost:
    """Return the cost of an allreduce schedule ``build(size, rank, n, itemsize)``. Local."""
    plans = programs(lambda p, r, m: build(p, r, m, itemsize), size, n)
    seconds = run(plans, itemsize, network)
    sends = [[s for s in steps if s.kind == SEND] for steps in plans]
    reduced = max(
        (
            sum(length(s.target) for s in steps if s.kind not in (SEND, RECV, COPY))
            for steps in plans
        ),
        default=0,
    )
    return Cost(
        seconds,
        1 + max((s.round for steps in plans for s in steps), default=-1),
        max(len(s) for s in sends),
        max(sum(length(x.source) for x in s) for s in sends) * itemsize,
        reduced * itemsize,
    )


def run(plans: list[list[Step]], itemsize: int, network: Network) -> float:
    """Return the time at which the last rank has finished its steps. Local."""
    ranks = [_Rank(steps) for steps in plans]
    # The k-th send from a to b meets the k-th receive of b from a.
    posted: dict[tuple[int, int], list] = {}
    events: list[tuple[float, int, int, int]] = []
    order = 0

    def release(r: int, i: int, now: float) -> None:
        nonlocal order
        rank = ranks[r]
        rank.ready_at[i] = max(rank.ready_at[i], now)
        rank.needs[i] -= 1
        if not rank.needs[i]:
            order += 1
            heapq.heappush(events, (rank.ready_at[i], order, r, i))

    def finish(r: int, i: int, now: float) -> None:
        ranks[r].end = max(ranks[r].end, now)
        for k in ranks[r].compiled.dependents[i]:
            release(r, k, now)

    def meet(a: int, b: int) -> None:
        sends, receives = posted.setdefault((a, b), [[], []])
        while sends and receives:
            (s, start), (v, posted_at) = sends.pop(0), receives.pop(0)
            nbytes = length(plans[a][s].source) * itemsize
            sender, receiver = ranks[a], ranks[b]
            # Both ports carry the message at once, alpha apart.
            begin = max(start, posted_at - network.alpha, sender.send_port, receiver.receive_port)
            sender.send_port = receiver.receive_port = begin + nbytes * network.beta
            finish(a, s, sender.send_port)
            finish(b, v, sender.send_port + network.alpha)

    for r, rank in enumerate(ranks):
        for i, needs in enumerate(rank.needs):
            if not needs:
                rank.needs[i] = 1
                release(r, i, 0.0)
    while events:
        now, _, r, i = heapq.heappop(events)
        rank, step = ranks[r], plans[r][i]
        for k in rank.compiled.followers[i]:
            release(r, k, now)
        if step.kind == SEND:
            posted.setdefault((r, step.peer), [[], []])[0].append((i, now))
            meet(r, step.peer)
        elif step.kind == RECV:
            posted.setdefault((step.peer, r), [[], []])[1].append((i, now))
            meet(step.peer, r)
        else:
            cost = 0.0 if step.kind == COPY else network.gamma * length(step.target) * itemsize
            rank.processor = max(rank.processor, now) + cost
            finish(r, i, rank.processor)
    return max((rank.end for rank in ranks), default=0.0)


def picture(build: Callable, size: int, n: int, *, itemsize: int = 4) -> str:
    """Draw who sends what to whom, a line per round: ``0 -[0:2]-> 1``. Local."""
    plans = programs(lambda p, r, m: build(p, r, m, itemsize), size, n)
    rounds: dict[int, list[str]] = {}
    for rank, steps in enumerate(plans):
        for step in steps:
            if step.kind == SEND:
                a, b = step.source
                rounds.setdefault(step.round, []).append(f"{rank} -[{a}:{b}]-> {step.peer}")
    width = len(str(max(rounds, default=0)))
    return "\n".join(f"round {r:{width}d}   " + "   ".join(rounds[r]) for r in sorted(rounds))
