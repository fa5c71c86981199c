"""Binomial tree: log2 p rounds, each doubling the ranks that know, or halving those that owe.

    broadcast from 0, 8 ranks          reduce to 0 is the same picture backwards
    round 0   0 -> 4
    round 1   0 -> 2   4 -> 6
    round 2   0 -> 1   2 -> 3   4 -> 5   6 -> 7

Cost of one direction: L (alpha + N beta), L = ceil(log2 p); reduce adds L N gamma. Allreduce is
reduce to 0 and broadcast from 0: 2L alpha + 2L N beta. Any p; best for short vectors and roots.
Ranks are renumbered so that the root is 0; see Thakur, Rabenseifner, Gropp, IJHPCA 19(1), 2005.
"""

from __future__ import annotations

from .schedule import Range, Step, combine, length, recv, send


def rounds(size: int) -> int:
    """Number of rounds of one direction: ceil(log2 p)."""
    return max(size - 1, 0).bit_length()


def broadcast(size: int, rank: int, n: int, *, root: int = 0, first_round: int = 0) -> list[Step]:
    """Every rank ends with the root's vector."""
    me = (rank - root) % size
    whole: Range = (0, n)
    steps: list[Step] = []
    for round in range(rounds(size)):
        distance = 1 << (rounds(size) - 1 - round)
        if me % (2 * distance) == 0 and me + distance < size:
            steps.append(send(first_round + round, (me + distance + root) % size, whole))
        elif me % (2 * distance) == distance:
            steps.append(recv(first_round + round, (me - distance + root) % size, whole))
    return steps


def reduce(size: int, rank: int, n: int, *, root: int = 0) -> list[Step]:
    """The root ends with the sum; the other ranks' vectors hold partial sums afterwards."""
    me = (rank - root) % size
    steps: list[Step] = []
    scratch = n
    for round in range(rounds(size)):
        distance = 1 << round
        if me % (2 * distance) == distance:
            steps.append(send(round, (me - distance + root) % size, (0, n)))
            break
        if me % (2 * distance) == 0 and me + distance < size:
            peer = (me + distance + root) % size
            slot = (scratch, scratch + n)
            scratch += n
            steps.append(recv(round, peer, slot))
            # The tree's left operand is the lower *renumbered* rank, whichever the root is.
            steps.append(combine(round, 0, 1, slot, (0, length(slot))))
    return steps


def allreduce(size: int, rank: int, n: int) -> list[Step]:
    """Reduce to rank 0, broadcast from rank 0."""
    return reduce(size, rank, n) + broadcast(size, rank, n, first_round=rounds(size))
