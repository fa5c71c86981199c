"""Schedules of pipelines as data: a list of computations and messages for each rank.

A model is cut into chunks (groups of layers that follow each other); chunk c is on rank c mod p.
``F`` is the forward pass of a microbatch through a chunk, and ``B`` is the backward pass.
``zero_bubble`` splits a backward pass into ``I``, the gradient of the chunk's input, for which
another rank waits, and ``W``, the gradients of the chunk's weights. In this example (4 ranks, 5
microbatches; ``..`` is idle time), a backward pass takes twice as long as a forward pass:

    1f1b     F0 F1 F2 F3 .. .. .. .. .. .. B0 B0 F4 B1 B1 .. B2 B2 .. B3 B3 .. B4 B4
             .. F0 F1 F2 .. .. .. .. B0 B0 F3 B1 B1 F4 B2 B2 .. B3 B3 .. B4 B4 .. ..
             .. .. F0 F1 .. .. B0 B0 F2 B1 B1 F3 B2 B2 F4 B3 B3 .. B4 B4 .. .. .. ..
             .. .. .. F0 B0 B0 F1 B1 B1 F2 B2 B2 F3 B3 B3 F4 B4 B4 .. .. .. .. .. ..

    zero     F0 F1 F2 F3 .. .. .. I0 W0 F4 I1 W1 I2 W2 I3 W3 I4 W4
    bubble   .. F0 F1 F2 .. .. I0 F3 I1 W0 F4 I2 W1 I3 W2 I4 W3 W4
             .. .. F0 F1 .. I0 F2 I1 F3 I2 W0 F4 I3 W1 I4 W2 W3 W4
             .. .. .. F0 I0 F1 I1 F2 I2 F3 I3 W0 F4 I4 W1 W2 W3 W4

    gpipe         all forward passes, then all backward passes       Huang et al., NeurIPS 2019
    1f1b          p - s forward passes, then B and F alternately     Narayanan et al., SOSP 2019
    interleaved   1f1b with several chunks on each rank              Narayanan et al., SC 2021
    zero_bubble   W fills what would be idle time (ZB-H1)            Qi et al., ICLR 2024
    pipedream     the order of 1f1b; each microbatch is an update    Narayanan et al., SOSP 2019
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from ..errors import ConfigError
from ..registry import checked_whole, look_up

#: The kinds of actions. The action of a receive only begins the receive; the computation that needs
#: the data waits for its end. The action of a send only begins the send; no action waits for its
#: end.
F, B, I, W = "F", "B", "I", "W"  # noqa: E741 - the names in the papers
SEND_F, RECV_F, SEND_B, RECV_B = "SEND_F", "RECV_F", "SEND_B", "RECV_B"
COMPUTE = (F, B, I, W)
#: The update of a stage's parameters with "pipedream": all replicas of the stage do it together.
U = "U"
KINDS = (*COMPUTE, SEND_F, RECV_F, SEND_B, RECV_B)

#: A receive begins this number of computations before the computation that needs the data. With 2,
#: few buffers are needed: in 1f1b, one for the next forward and one for the next backward pass.
AHEAD = 2


class StageAction(NamedTuple):
    """One action of a rank: a computation, send, receive or update.

    `kind` is "F" (forward pass), "B" (backward pass), "I" or "W" (the parts of a backward pass for
    the input and for the weights), "SEND_F", "RECV_F", "SEND_B", "RECV_B" (messages of a forward or
    a backward pass), or "U" (update). `chunk` is the number of a group of consecutive layers, and
    `microbatch` the number of the microbatch.
    """

    kind: str
    chunk: int
    microbatch: int

    def __str__(self):
        return f"{self.kind}{self.chunk}.{self.microbatch}"


def action_lists(
    name: str, stages: int, microbatches: int, chunks: int = 1, ahead: int = AHEAD
) -> list[list[StageAction]]:
    """Return what each rank computes, sends and receives in a schedule: a list for each rank.

    Parameters
    ----------
    name : str
        "gpipe", "1f1b", "interleaved", "zero_bubble" or "pipedream".
    stages : int
        The number of ranks p.
    microbatches : int
        The number of microbatches of a step. For "pipedream", the number of microbatches that enter
        before the pipeline is emptied.
    chunks : int
        The number of chunks (groups of consecutive layers) of each rank. Only "interleaved" allows
        more than 1.
    ahead : int
        A rank begins to receive data `ahead` computations earlier than the computation that needs
        them.

    Raises
    ------
    ConfigError
        The name is unknown, a number is below 1, `chunks` is above 1 for another schedule than
        "interleaved", or the number of microbatches of "interleaved" is not a multiple of `stages`.
    """
    build = look_up(SCHEDULES, name, "schedule")
    checked_whole("stages", stages, 1)
    checked_whole("microbatches", microbatches, 1)
    checked_whole("chunks", chunks, 1)
    if chunks > 1 and build is not _interleaved:
        raise ConfigError(f"chunks={chunks}: schedule {name!r} has one chunk for each rank")
    lists = build(stages, microbatches, chunks)
    return [with_messages(computations, stages * chunks, ahead) for computations in lists]


def _gpipe(p: int, m: int, chunks: int) -> list[list[StageAction]]:
    # The backward passes come in the order of the forward passes, because the gradients are added
    # in this order.
    return [[StageAction(kind, s, i) for kind in (F, B) for i in range(m)] for s in range(p)]


def _1f1b(p: int, m: int, chunks: int) -> list[list[StageAction]]:
    lists = []
    for s in range(p):
        ahead = min(p - s - 1, m)
        order = [StageAction(F, s, i) for i in range(ahead)]
        for i in range(m):
            order += [StageAction(F, s, i + ahead)] if i + ahead < m else []
            order.append(StageAction(B, s, i))
        lists.append(order)
    return lists


def _interleaved(p: int, m: int, chunks: int) -> list[list[StageAction]]:
    if m % p:
        more = -(-m // p) * p
        raise ConfigError(
            f"microbatches={m}: the schedule 'interleaved' needs a multiple of the {p} stages; the "
            f"next one is {more}"
        )
    lists, total = [], chunks * m
    for s in range(p):
        ahead = min(total, 2 * (p - s - 1) + (chunks - 1) * p)
        order = []
        for k in range(total + ahead):
            if k < total:  # p microbatches go through a chunk, then the same ones through the next
                group, within = divmod(k, p * chunks)
                order.append(StageAction(F, within // p * p + s, group * p + k % p))
            if k >= ahead:
                group, within = divmod(k - ahead, p * chunks)
                chunk = chunks - 1 - within // p
                order.append(StageAction(B, chunk * p + s, group * p + (k - ahead) % p))
        lists.append(order)
    return lists


def _zero_bubble(p: int, m: int, chunks: int) -> list[list[StageAction]]:
    """Return the actions of all ranks in the schedule "zero_bubble"."""
    lists = []
    for s in range(p):
        ahead = min(p - s, m)
        order = [StageAction(F, s, i) for i in range(ahead)]
        for i in range(m):
            order.append(StageAction(I, s, i))
            order += [StageAction(W, s, i - s)] if i >= s else []
            order += [StageAction(F, s, i + ahead)] if i + ahead < m else []
        lists.append(order + [StageAction(W, s, i) for i in range(max(m - s, 0), m)])
    return lists


#: name -> function of (stages, microbatches, chunks) that returns the computations of each rank.
SCHEDULES: dict[str, Callable[[int, int, int], list[list[StageAction]]]] = {
    "gpipe": _gpipe,
    "1f1b": _1f1b,
    "interleaved": _interleaved,
    "zero_bubble": _zero_bubble,
    "pipedream": _1f1b,
}


def with_messages(order: list[StageAction], chunks: int, ahead: int = AHEAD) -> list[StageAction]:
    """Return a rank's computations (`order`), together with their sends and receives.

    `ahead` is a number of computations: a receive begins so many computations before the one that
    needs the data.
    """
    needs = {F: (RECV_F, 0), B: (RECV_B, chunks - 1), I: (RECV_B, chunks - 1)}
    gives = {F: (SEND_F, chunks - 1), B: (SEND_B, 0), I: (SEND_B, 0)}

    def receive(one: StageAction) -> list[StageAction]:
        kind, without = needs.get(one.kind, ("", one.chunk))
        return [] if one.chunk == without else [StageAction(kind, one.chunk, one.microbatch)]

    found = [each for one in order[:ahead] for each in receive(one)]
    for k, one in enumerate(order):
        found += receive(one) if not ahead else []
        found.append(one)
        kind, without = gives.get(one.kind, ("", one.chunk))
        if one.chunk != without:
            found.append(StageAction(kind, one.chunk, one.microbatch))
        if ahead and k + ahead < len(order):
            found += receive(order[k + ahead])
    return found
