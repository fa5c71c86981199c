"""Prove that the lists of actions (computations and messages) of a pipeline are right.

Nothing is computed or sent: the check plays through the lists of all ranks with the rules of MPI. A
message has arrived when the sender has begun the send and the receiver has begun the receive. A
chunk is a group of consecutive layers. For each boundary between two chunks and each direction, the
sends and the receives must begin in the same order.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from ..errors import ConfigError
from .pipeline_schedules import (
    COMPUTE,
    KINDS,
    RECV_B,
    RECV_F,
    SEND_B,
    SEND_F,
    B,
    F,
    I,
    StageAction,
    U,
    W,
)


class ActionFacts(NamedTuple):
    """What `check_actions` finds: how much data the ranks of a pipeline must keep.

    Attributes
    ----------
    stash : list of int
        For each rank, the largest number of (chunk, microbatch) pairs whose data the rank keeps at
        the same time. A chunk is a group of consecutive layers.
    versions : dict of (chunk, microbatch) -> int
        The number of updates before the forward pass of this chunk and microbatch, if the rank
        makes one after each backward pass. The backward pass of the pair must use the same weights
        as its forward pass.
    versions_kept : list of int
        For each rank, the largest number of versions of its weights that the rank needs at the same
        time.
    """

    stash: list[int]
    versions: dict[tuple[int, int], int]
    versions_kept: list[int]


def check_actions(
    lists: Sequence[Sequence[StageAction]], *, chunks: int | None = None, blocking: bool = False
) -> ActionFacts:
    """Check the action lists of a pipeline's ranks; return how much data the ranks must keep.

    In right lists, every microbatch goes once forward and once backward through every chunk (group
    of consecutive layers), each message has a sender and a receiver, and the ranks never wait for
    each other for ever.

    Parameters
    ----------
    lists : sequence of sequences of StageAction
        The actions of each rank in order, such as the result of `action_lists`.
    chunks : int, optional
        The number of chunks of the model; by default, the number of chunks in the lists.
    blocking : bool
        Whether a send or a receive stops its rank until the message has arrived, as blocking calls
        of MPI do. With blocking calls, only the schedule "gpipe" passes this check.

    Raises
    ------
    ConfigError
        The lists are wrong. The error text names the first wrong rank and action.
    """
    p = len(lists)
    count = 1 + max((one.chunk for each in lists for one in each), default=-1)
    chunks = count if chunks is None else chunks
    _check_complete(lists, p, chunks)
    _check_order_of_messages(lists, p)
    play_actions(lists, p, chunks, blocking)
    return ActionFacts(
        [stash_of(each) for each in lists],
        {key: version for each in lists for key, version in _versions(each).items()},
        [_versions_kept(each) for each in lists],
    )


def _check_complete(lists, p: int, chunks: int) -> None:
    microbatches = 1 + max((one.microbatch for each in lists for one in each), default=-1)
    for rank, each in enumerate(lists):
        counts = Counter(each)
        for one, times in counts.items():
            if one.kind not in KINDS or one.microbatch < 0:
                raise ConfigError(f"rank {rank}: {one}; expected one of {', '.join(KINDS)}, and a "
                                  "microbatch from 0 on")  # fmt: skip
            if times > 1:
                raise ConfigError(f"rank {rank}: {one} is in the list {times} times")
            if one.chunk % p != rank or not 0 <= one.chunk < chunks:
                raise ConfigError(f"rank {rank}: {one}, but this rank does not have the chunk")
        for chunk in range(rank, chunks, p):
            for i in range(microbatches):
                whole = counts[StageAction(B, chunk, i)]
                split = counts[StageAction(I, chunk, i)] + counts[StageAction(W, chunk, i)]
                if not counts[StageAction(F, chunk, i)] or (whole, split) not in ((1, 0), (0, 2)):
                    text = f"microbatch {i} does not go through chunk {chunk} once in each way"
                    raise ConfigError(f"rank {rank}: {text}")


def sender_of(one: StageAction, p: int) -> tuple[int, StageAction]:
    """Return the rank whose send belongs to the receive `one`, and this send."""
    kind, other = (SEND_F, one.chunk - 1) if one.kind == RECV_F else (SEND_B, one.chunk + 1)
    return other % p, StageAction(kind, other, one.microbatch)


def receiver_of(one: StageAction, p: int) -> tuple[int, StageAction]:
    """Return the rank whose receive belongs to the send `one`, and this receive."""
    kind, other = (RECV_F, one.chunk + 1) if one.kind == SEND_F else (RECV_B, one.chunk - 1)
    return other % p, StageAction(kind, other, one.microbatch)


def _check_order_of_messages(lists, p: int) -> None:
    sent, received = defaultdict(list), defaultdict(list)
    for each in lists:
        for one in each:
            if one.kind in (SEND_F, SEND_B):
                sent[one.kind, one.chunk].append(one)
            elif one.kind in (RECV_F, RECV_B):
                message = sender_of(one, p)[1]
                received[message.kind, message.chunk].append(message)
    for kind, chunk in {*sent, *received}:
        given, wanted = sent[kind, chunk], received[kind, chunk]
        for at in range(max(len(given), len(wanted))):
            a, b = (str(many[at]) if at < len(many) else "nothing" for many in (given, wanted))
            if a != b:
                raise ConfigError(f"rank {chunk % p} sends {a} where its receiver expects {b}")


def needed_before(one: StageAction, chunks: int) -> list[StageAction]:
    """Return the actions of a rank that must end before the action `one` of this rank begins."""
    kind, chunk, i = one
    if kind == F:
        return [StageAction(RECV_F, chunk, i)] if chunk else []
    if kind in (B, I):
        more = [StageAction(RECV_B, chunk, i)] if chunk < chunks - 1 else []
        return [StageAction(F, chunk, i), *more]
    return {W: [StageAction(I, chunk, i)], SEND_F: [StageAction(F, chunk, i)]}.get(kind, [])


def play_actions(lists, p: int, chunks: int, blocking: bool = False, replicas=None) -> None:
    """Raise ConfigError if a rank could never finish its computations and messages."""
    at, begun, moved = [0] * len(lists), set(), True
    split = {one[1:] for each in lists for one in each if one.kind == I}
    while moved:
        moved = False
        for rank, each in enumerate(lists):
            while at[rank] < len(each):
                one = each[at[rank]]
                begun.add(one)
                if not _may_end(one, p, chunks, begun, blocking, split, replicas):
                    if one.kind in COMPUTE:
                        begun.discard(one)
                    break
                at[rank] += 1
                moved = True
    for rank, each in enumerate(lists):
        if at[rank] < len(each):
            raise ConfigError(f"rank {rank} waits for ever at {each[at[rank]]}")


def _may_end(one, p, chunks, begun, blocking, split, replicas) -> bool:
    kind, chunk, i = one
    if kind == U:  # an update ends when all replicas of the stage have come to it
        r = replicas[chunk]
        first = i - i % r
        return all(StageAction(U, chunk, each) in begun for each in range(first, first + r))
    if kind in (RECV_F, RECV_B):
        return not blocking or sender_of(one, p)[1] in begun
    if kind in (SEND_F, SEND_B):
        made = StageAction(F if kind == SEND_F else I if (chunk, i) in split else B, chunk, i)
        if made not in begun:
            raise ConfigError(f"rank {chunk % p}: {one} comes before {made}")
        return not blocking or receiver_of(one, p)[1] in begun
    for need in needed_before(one, chunks):
        if need not in begun:
            if need.kind in COMPUTE:
                raise ConfigError(f"rank {chunk % p}: {one} comes before {need}")
            raise ConfigError(f"rank {chunk % p}: {one} has no {need} before it")
        if need.kind in (RECV_F, RECV_B) and sender_of(need, p)[1] not in begun:
            return False
    return True


def stash_of(each) -> int:
    """Return the largest number of microbatches whose data a rank keeps at the same time."""
    kept = most = 0
    for one in each:
        kept += (one.kind == F) - (one.kind in (B, W))
        most = max(most, kept)
    return most


def _versions(each) -> dict[tuple[int, int], int]:
    done, found = 0, {}
    for one in each:
        if one.kind == F:
            found[one.chunk, one.microbatch] = done
        done += one.kind in (B, W)
    return found


def _versions_kept(each) -> int:
    versions, newest, most = _versions(each), 0, 1
    held = Counter[int]()
    for one in each:
        if one.kind == F:
            held[versions[one.chunk, one.microbatch]] += 1
        elif one.kind in (B, W):
            held[versions[one.chunk, one.microbatch]] -= 1
            newest += 1
        most = max(most, len({version for version, n in held.items() if n} | {newest}))
    return most
