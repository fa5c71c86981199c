"""Binomial tree: in each round of a broadcast, twice as many ranks have the vector as before.

    broadcast from 0, 8 ranks          reduce to 0 is the same picture backwards
    round 0   0 -> 4
    round 1   0 -> 2   4 -> 6
    round 2   0 -> 1   2 -> 3   4 -> 5   6 -> 7

In the costs, p is the number of ranks, L is ceil(log2 p), and N is the number of bytes of the
vector. alpha is the latency of a message, beta the time to send a byte, and gamma the time to add a
byte. A broadcast costs L (alpha + N beta), and a reduce costs L N gamma more than a broadcast. An
allreduce is a reduce to rank 0 and then a broadcast from rank 0. Thakur, Rabenseifner, Gropp,
IJHPCA 19(1), 2005.
"""

from __future__ import annotations

from .schedule import Range, Step, combine, recv, send


def rounds(size: int) -> int:
    """Return the number of rounds of a broadcast or a reduce over p ranks: ceil(log2 p)."""
    return max(size - 1, 0).bit_length()


def broadcast(size: int, rank: int, n: int, *, root: int = 0, first_round: int = 0) -> list[Step]:
    """Return steps that give every rank the root's vector."""
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
    """Return steps that give the root the sum; other ranks' vectors then contain partial sums."""
    me = (rank - root) % size
    steps: list[Step] = []
    scratch = n
    for round in range(rounds(size)):
        distance = 1 << round
        if me % (2 * distance) == distance:
            steps.append(send(round, (me - distance + root) % size, (0, n)))
            break
        if me % (2 * distance) == 0 and me + distance < size:
            slot = (scratch, scratch + n)
            scratch += n
            # In this tree, the left operand comes from the lower *renumbered* rank, so the order of
            # operands does not depend on the root.
            steps.append(recv(round, (me + distance + root) % size, slot))
            steps.append(combine(round, 0, 1, slot, (0, n)))
    return steps


def allreduce(size: int, rank: int, n: int) -> list[Step]:
    """Return the steps of a reduce to rank 0 and a broadcast from rank 0."""
    return reduce(size, rank, n) + broadcast(size, rank, n, first_round=rounds(size))
