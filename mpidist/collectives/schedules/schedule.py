"""The steps of a collective: what one rank sends, receives, reduces and copies, and when.

A builder is a function that takes the problem (size, rank, counts, root, ...) and returns the list
of the steps of that rank. A step names elements by their position: positions ``[0, n)`` are the
user's vector, and positions from n on are scratch memory that the executor allocates. The k-th send
from rank a to rank b matches the k-th receive of rank b from rank a.

    send         source -> peer
    recv         target <- peer
    reduce       target = target op source
    reduce_left  target = source op target      (the bits depend on this order, see `combine`)
    copy         target = source
    node_sync    a barrier of the ranks of this node (in `node`, positions from n on are shared)
    finish       target is a final sum; for a mean, the executor divides it now

Steps that use the same elements run in the order of the list; other steps may run at the same time.
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
    """One action of one rank, such as a send or a sum.

    The attribute `round` only groups steps for drawings and for the simulator.
    """

    round: int
    kind: str
    peer: int
    source: Range
    target: Range


def send(round: int, peer: int, source: Range) -> Step:
    """Return a step that sends `source` to `peer`."""
    return Step(round, SEND, peer, source, NOTHING)


def recv(round: int, peer: int, target: Range) -> Step:
    """Return a step that receives from `peer` into `target`."""
    return Step(round, RECV, peer, NOTHING, target)


def combine(round: int, rank: int, peer: int, source: Range, target: Range) -> Step:
    """Return a step that reduces `source`, the data received from `peer`, into `target`.

    The left operand is the data of the lower rank, so that two ranks that exchange and add their
    data get the same bits.
    """
    return Step(round, REDUCE_LEFT if peer < rank else REDUCE, peer, source, target)


def copy(round: int, source: Range, target: Range) -> Step:
    """Return a step that copies `source` to `target` on this rank."""
    return Step(round, COPY, -1, source, target)


def node_sync(round: int) -> Step:
    """Return a step that is a barrier: it waits until all ranks of this node have reached it."""
    return Step(round, NODE_SYNC, -1, NOTHING, NOTHING)


def length(span: Range) -> int:
    """Return the number of positions in a range."""
    return span[1] - span[0]


def split_range(span: Range, pieces: int) -> list[Range]:
    """Cut a range into at most `pieces` non-empty ranges of nearly equal length."""
    count = length(span)
    pieces = min(pieces, count)
    if pieces <= 1:
        return [span]
    bounds = [span[0] + count * k // pieces for k in range(pieces + 1)]
    return list(itertools.pairwise(bounds))


def without_empty(steps: list[Step]) -> list[Step]:
    """Return `steps` without the steps that have no elements."""
    return [step for step in steps if length(step.source) or length(step.target)]


def split_messages(steps: list[Step], limit: int) -> list[Step]:
    """Return `steps` with every send and receive cut into messages of at most `limit` elements."""
    result = []
    for step in steps:
        pieces = -(-max(length(step.source), length(step.target)) // limit)
        if step.kind == SEND and pieces > 1:
            result += [step._replace(source=part) for part in split_range(step.source, pieces)]
        elif step.kind == RECV and pieces > 1:
            result += [step._replace(target=part) for part in split_range(step.target, pieces)]
        else:
            result.append(step)
    return result


def extent(steps: list[Step], n: int) -> int:
    """Return the length `n` of the vector plus that of the scratch memory that `steps` use."""
    return max(n, max((max(step.source[1], step.target[1]) for step in steps), default=0))


def intervals(steps: list[Step]) -> list[list[Step]]:
    """Split the steps of one rank into lists, at the barriers between the ranks of its node."""
    result: list[list[Step]] = [[]]
    for step in steps:
        if step.kind == NODE_SYNC:
            result.append([])
        else:
            result[-1].append(step)
    return result


_MESSAGES = frozenset((SEND, RECV))
_READS = frozenset((SEND, REDUCE, REDUCE_LEFT, COPY))
_WRITES = frozenset((RECV, REDUCE, REDUCE_LEFT, COPY, FINISH, NODE_SYNC))


class Compiled(NamedTuple):
    """A list of steps and their dependencies: step i must wait for `needs[i]` earlier steps.

    When step i has finished, each step in `dependents[i]` has one step fewer to wait for. When step
    i has begun, each step in `followers[i]` has one step fewer to wait for. `first[i]` is 1 if step
    i is the first send to its peer, or the first receive from it.
    """

    steps: list[Step]
    needs: list[int]
    dependents: list[Sequence[int]]
    followers: list[Sequence[int]]
    first: bytearray


def compile_steps(steps: list[Step]) -> Compiled:
    """Return `steps` together with the steps that each step must wait for."""
    edges = {edge for s in steps for span in (s.source, s.target) for edge in span}
    index = {edge: i for i, edge in enumerate(sorted(edges))}
    writer = [-1] * len(index)
    readers: list = [None] * len(index)
    last_posted: dict[tuple[str, int], int] = {}
    needs = [0] * len(steps)
    dependents: list = [()] * len(steps)
    followers: list = [()] * len(steps)
    first = bytearray(len(steps))
    for i, (_, kind, peer, source, target) in enumerate(steps):
        before: set[int] = set()
        if kind in _WRITES:
            for atom in range(index[target[0]], index[target[1]]):
                before.add(writer[atom])
                if readers[atom] is not None:
                    before.update(readers[atom])
                    readers[atom] = None
                writer[atom] = i
        if kind in _READS:
            for atom in range(index[source[0]], index[source[1]]):
                # A step that reads and writes the same elements need not wait for itself.
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
        # MPI matches the messages between two ranks in the order in which they are posted.
        if kind in _MESSAGES:
            previous = last_posted.get((kind, peer))
            if previous is None:
                first[i] = 1
            else:
                followers[previous] = (i,)
                needs[i] += 1
            last_posted[kind, peer] = i
    return Compiled(steps, needs, dependents, followers, first)
