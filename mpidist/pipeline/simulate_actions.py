"""Estimate the time of a pipeline's computations and messages on a modelled network.

A rank does one action (computation or message) at a time, in the order of its list. A message is
sent as soon as its send and its receive have begun, and the links of sender and receiver are free.
`NetworkModel` gives the cost of a message.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ..errors import ConfigError
from ..simulator.network_model import NetworkModel
from .check_actions import check_actions, needed_before, receiver_of, sender_of, stash_of
from .pipeline_schedules import COMPUTE, RECV_B, RECV_F, SEND_B, SEND_F, B, F, I, StageAction, W

#: A network on which messages take no time.
NO_TIME = NetworkModel(latency=0.0, gap=0.0)


class ChunkCost(NamedTuple):
    """Seconds and bytes of one microbatch in one chunk (a group of consecutive layers of a rank).

    `backward` is the time of the whole backward pass. `input_share` is the fraction of this time in
    which the gradient of the input is computed. `output_bytes` bytes are sent to the next chunk,
    and the same number of bytes comes back as the gradient.
    """

    forward: float
    backward: float
    output_bytes: float = 0.0
    input_share: float = 0.5

    def seconds(self, kind: str) -> float:
        """Return the seconds of a computation.

        `kind` is F (forward pass), B (backward pass), I (only the gradient of the input) or W (only
        the gradients of the weights).
        """
        share = {B: 1.0, I: self.input_share, W: 1.0 - self.input_share}
        return self.forward if kind == F else self.backward * share[kind]


class Span(NamedTuple):
    """A computation of a rank, from the time `begin` to the time `end`, in seconds."""

    rank: int
    action: StageAction
    begin: float
    end: float


class SimulatedRun(NamedTuple):
    """The result of `simulate_actions`.

    Attributes
    ----------
    seconds : float
        The time from the beginning of the run to the end of the last computation.
    bubble : float
        The fraction of this time in which a rank is idle, as the mean over all ranks.
    stash : list of int
        For each rank, the largest number of (chunk, microbatch) pairs whose data the rank keeps at
        the same time. A chunk is a group of consecutive layers.
    spans : list of Span
        All computations, sorted by rank and then by time.
    """

    seconds: float
    bubble: float
    stash: list[int]
    spans: list[Span]


def simulate_actions(
    lists: Sequence[Sequence[StageAction]],
    costs: Sequence[ChunkCost],
    network: NetworkModel = NO_TIME,
) -> SimulatedRun:
    """Check the action lists of all ranks, and estimate how long their run takes.

    Parameters
    ----------
    lists : sequence of sequences of StageAction
        The actions of each rank in order, such as the result of `action_lists`.
    costs : sequence of ChunkCost
        One cost for each chunk (group of consecutive layers) of the model.
    network : NetworkModel
        The network between the ranks; each rank is on a node of its own.
    """
    check_actions(lists, chunks=len(costs))
    p = len(lists)
    return simulate_placed(lists, costs, network, lambda chunk, _: chunk % p)


def simulate_placed(
    lists: Sequence[Sequence[StageAction]],
    costs: Sequence[ChunkCost],
    network: NetworkModel,
    holder: Callable[[int, int], int],
) -> SimulatedRun:
    """Estimate the time of a pipeline as `simulate_actions` does, but do not check the actions.

    The stages may have several replicas.
    """
    for cost in costs:
        if not (all(0 <= value < math.inf for value in cost) and cost.input_share <= 1):
            raise ConfigError(f"{cost}: expected finite numbers >= 0, and an input_share up to 1")
    p = len(lists)
    at, now = [0] * p, [0.0] * p
    begun: dict[StageAction, float] = {}  # when a rank has come to a send or a receive
    arrived: dict[StageAction, float] = {}  # when the data of a receive are there
    done: dict[StageAction, float] = {}
    leaves, enters, spans = [0.0] * p, [0.0] * p, list[Span]()

    def transfer(receive: StageAction, rank: int) -> None:
        """If both the send and the receive of a message have begun, compute when it arrives."""
        send = sender_of(receive, p)[1]
        source = holder(send.chunk, send.microbatch)
        if receive in begun and send in begun:
            size = costs[min(send.chunk, receive.chunk)].output_bytes
            start = max(begun[receive], begun[send], leaves[source], enters[rank])
            leaves[source] = enters[rank] = start + size * network.gap
            arrived[receive] = leaves[source] + network.latency + network.overhead

    def next_time(rank: int) -> float | None:
        """Return when a rank's next computation or message may begin, or None if unknown."""
        one, when = lists[rank][at[rank]], now[rank]
        if one.kind in COMPUTE:
            for need in needed_before(one, len(costs)):
                if need.kind in (RECV_F, RECV_B):
                    if need not in arrived:
                        return None
                    when = max(when, arrived[need])
        return when

    while True:
        # The earliest action of all ranks comes first, so that messages use a link in the order in
        # which their sends and receives begin.
        ready = [
            (when, rank)
            for rank in range(p)
            if at[rank] < len(lists[rank]) and (when := next_time(rank)) is not None
        ]
        if not ready:
            break
        when, rank = min(ready)
        one = lists[rank][at[rank]]
        at[rank] += 1
        if one.kind in COMPUTE:
            now[rank] = done[one] = when + costs[one.chunk].seconds(one.kind)
            spans.append(Span(rank, one, when, now[rank]))
        elif one.kind in (SEND_F, SEND_B):
            now[rank] = begun[one] = when + network.overhead
            receive = receiver_of(one, p)[1]
            transfer(receive, holder(receive.chunk, receive.microbatch))
        else:
            begun[one] = when
            transfer(one, rank)
    seconds = max(now, default=0.0)
    busy = sum(span.end - span.begin for span in spans)
    bubble = 1 - busy / (seconds * p) if seconds else 0.0
    return SimulatedRun(
        seconds,
        bubble,
        [stash_of(each) for each in lists],
        sorted(spans, key=lambda s: (s.rank, s.begin)),
    )
