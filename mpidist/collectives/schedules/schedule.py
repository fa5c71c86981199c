"""The steps of a collective: what one rank sends, receives, reduces and copies, and when.

A builder takes the problem (size, rank, counts, root, ...) and returns the list of `Step` of that
rank. Positions are elements of one address space: ``[0, n)`` is the user's vector, ``[n, ...)`` is
scratch that the executor allocates. The k-th send from a to b meets the k-th receive of b from a.

    send         source -> peer
    recv         target <- peer
    reduce       target = target op source
    reduce_left  target = source op target      (operand order fixes the bits, see `combine`)
    copy         target = source
    node_sync    a barrier of the ranks of this node, which share the memory from n on (`node`)
    finish       target is a final sum: a mean is divided here

Steps that touch overlapping ranges happen in list order; all others may overlap in time. So the
list *is* the dependency graph, and `compile_steps` writes it down.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

SEND, RECV, REDUCE, REDUCE_LEFT, COPY = "send", "recv", "reduce", "reduce_left", "copy"
NODE_SYNC, FINISH = "node_sync", "finish"

Range = tuple[int, int]
NOTHING: Range = (0, 0)


class Step(NamedTuple):
    """One action of one rank. `round` orders pictures and costs; the list order decides."""

    round: int
    kind: str
    peer: int
    source: Range
    target: Range


def send(round: int, peer: int, source: Range) -> Step:
    """Send `source` to `peer`."""
    return Step(round, SEND, peer, source, NOTHING)


def recv(round: int, peer: int, target: Range) -> Step:
    """Receive from `peer` into `target`."""
    return Step(round, RECV, peer, NOTHING, target)


def combine(round: int, rank: int, peer: int, source: Range, target: Range) -> Step:
    """Reduce what came from `peer` into `target`, the operand of the lower rank on the left.

    Two ranks that exchange and add both compute ``lower op higher``: the same bits on both, also
    where an operation depends on the order of its operands (signed zeros, NaN payloads).
    """
    return Step(round, REDUCE_LEFT if peer < rank else REDUCE, peer, source, target)


def copy(round: int, source: Range, target: Range) -> Step:
    """Copy `source` to `target` on this rank."""
    return Step(round, COPY, -1, source, target)


def length(span: Range) -> int:
    """Number of elements of a range."""
    return span[1] - span[0]


def cut(span: Range, pieces: int) -> list[Range]:
    """Cut a range into at most `pieces` non-empty ranges of nearly equal length."""
    count = length(span)
    pieces = min(pieces, count)
    if pieces <= 1:
        return [span]
    bounds = [span[0] + count * k // pieces for k in range(pieces + 1)]
    return list(itertools.pairwise(bounds))


def without_empty(steps: list[Step]) -> list[Step]:
    """Drop steps of no elements (n < p leaves empty chunks). Both ends drop the same ones."""
    return [step for step in steps if length(step.source) or length(step.target)]


def split_messages(steps: list[Step], limit: int) -> list[Step]:
    """Cut every send and receive into messages of at most `limit` elements."""
    result = []
    for step in steps:
        size = max(length(step.source), length(step.target))
        if step.kind not in (SEND, RECV) or size <= limit:
            result.append(step)
            continue
        pieces = -(-size // limit)
        if step.kind == SEND:
            result += [step._replace(source=part) for part in cut(step.source, pieces)]
        else:
            result += [step._replace(target=part) for part in cut(step.target, pieces)]
    return result


def extent(steps: list[Step], n: int) -> int:
    """Number of positions that the steps use: `n` plus the scratch they need."""
    return max(n, max((max(step.source[1], step.target[1]) for step in steps), default=0))


_MESSAGES = frozenset((SEND, RECV))
_READS = frozenset((SEND, REDUCE, REDUCE_LEFT, COPY))
_WRITES = frozenset((RECV, REDUCE, REDUCE_LEFT, COPY, FINISH, NODE_SYNC))


def reads_writes(step: Step) -> tuple[list[Range], Range | None]:
    """Ranges that a step reads, and the range that it writes."""
    if step.kind == SEND:
        return [step.source], None
    if step.kind == RECV:
        return [], step.target
    if step.kind == COPY:
        return [step.source], step.target
    if step.kind == FINISH:
        return [step.target], step.target
    return [step.source, step.target], step.target


class Compiled(NamedTuple):
    """A step list with its dependencies: `needs[i]` steps must finish before step i begins.

    `dependents[i]` are released when i has finished; `followers[i]` when i has begun (messages
    between the same two ranks match in posting order, so they are posted in list order).
    `first[i]` is 1 where i is the first message that is sent to its peer, or received from it.
    """

    steps: list[Step]
    needs: list[int]
    dependents: list[Sequence[int]]
    followers: list[Sequence[int]]
    first: bytearray


def compile_steps(steps: list[Step]) -> Compiled:
    """Turn list order into the fewest waits: overlapping ranges, and posting order per peer.

    Written for schedules of 300,000 steps (65,536 ranks in a ring): one pass, and no object where
    a step has nobody to release.
    """
    edges = {edge for s in steps for span in (s.source, s.target) for edge in span}
    index = {edge: i for i, edge in enumerate(sorted(edges))}
    writer = [-1] * len(index)
    readers: list = [None] * len(index)
    last_posted: dict[tuple[str, int], int] = {}
    needs = [0] * len(steps)
    dependents: list = [()] * len(steps)
    followers: list = [()] * len(steps)
    first = bytearray(len(steps))
    for i, step in enumerate(steps):
        _, kind, peer, source, target = step
        before: set[int] = set()
        if kind in _WRITES:
            atoms = range(index[target[0]], index[target[1]])
            for atom in atoms:
                before.add(writer[atom])
                if readers[atom] is not None:
                    before.update(readers[atom])
                    readers[atom] = None
                writer[atom] = i
        if kind in _READS:
            for atom in range(index[source[0]], index[source[1]]):
                # What this step has written itself it reads as well: it stands in no line.
                if writer[atom] != i:
                    before.add(writer[atom])
                    if readers[atom] is None:
                        readers[atom] = [i]
                    else:
                        readers[atom].append(i)
        before.discard(-1)
        for j in before:
            if dependents[j]:
                dependents[j].append(i)
            else:
                dependents[j] = [i]
        needs[i] = len(before)
        if kind in _MESSAGES:
            channel = (kind, peer)
            previous = last_posted.get(channel)
            if previous is None:
                first[i] = 1
            else:
                followers[previous] = (i,)
                needs[i] += 1
            last_posted[channel] = i
    return Compiled(steps, needs, dependents, followers, first)
