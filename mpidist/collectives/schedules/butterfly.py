"""Butterfly: in round k, every rank exchanges data with the rank that differs from it in bit k.

    4 ranks    round 0   0<->1   2<->3        round 1   0<->2   1<->3

In the costs below, p is the number of ranks, L is log2 p, and N is the number of bytes of the
vector. alpha is the latency of a message, beta the time to send a byte, and gamma the time to add a
byte. `recursive_doubling` exchanges whole vectors, and costs L alpha + L N beta + L N gamma.
`halving_doubling` (Rabenseifner) first exchanges and adds halves, quarters and so on, and then
gathers the finished blocks in the reverse order. `halving_doubling` costs 2L alpha + 2(p-1)/p N
beta + (p-1)/p N gamma. `butterfly` chooses `recursive_doubling` for vectors below 8 KiB (`SHORT`),
and `halving_doubling` for longer vectors. If p is not a power of two, some ranks send their vectors
to a neighbour before the butterfly, and get the result from it afterwards. Thakur, Rabenseifner,
Gropp, IJHPCA 19(1), 2005.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from ...partition import BlockPartition
from .protocol_limits import EAGER_BYTES, LONG, SHORT
from .schedule import Range, Step, combine, length, recv, send, split_range


def recursive_doubling(size: int, rank: int, n: int) -> list[Step]:
    """Return steps in which a rank exchanges whole vectors, in each round with another rank."""
    return _folded(size, rank, n, doubling)


def halving_doubling(size: int, rank: int, n: int, *, itemsize: int = 4) -> list[Step]:
    """Return steps that exchange and add halves, quarters and so on, and then gather the sums."""
    return _folded(size, rank, n, partial(halving, itemsize=itemsize))


def butterfly(size: int, rank: int, n: int, *, itemsize: int = 4) -> list[Step]:
    """Return steps of `recursive_doubling` for short vectors, else of `halving_doubling`."""
    if n * itemsize < SHORT or n < size:
        return recursive_doubling(size, rank, n)
    return halving_doubling(size, rank, n, itemsize=itemsize)


def _folded(size: int, rank: int, n: int, inner: Callable) -> list[Step]:
    """Return the steps of the algorithm `inner` on 2^k ranks.

    Each of the other ranks first sends its vector to one of these 2^k ranks, and at the end
    receives the result from it.
    """
    power = 1 << (size.bit_length() - 1)
    rest = size - power
    whole: Range = (0, n)
    if not rest:
        return inner(power, rank, n, list(range(power)), n, 0)
    if rank < 2 * rest and rank % 2:
        last = 2 + 2 * power.bit_length()
        return [send(0, rank - 1, whole), recv(last, rank - 1, whole)]
    steps: list[Step] = []
    scratch = n
    if rank < 2 * rest:
        scratch = 2 * n
        slot = (n, scratch)
        steps = [recv(0, rank + 1, slot), combine(0, rank, rank + 1, slot, whole)]
    # The ranks that run the butterfly: first the even ranks of the pairs, then the ranks that are
    # in no pair.
    members = [2 * i for i in range(rest)] + list(range(2 * rest, size))
    steps += inner(power, members.index(rank), n, members, scratch, 1)
    if rank < 2 * rest:
        steps.append(send(2 + 2 * power.bit_length(), rank + 1, whole))
    return steps


def doubling(size: int, me: int, n: int, members: list[int], scratch: int, first: int):
    """Return the steps of `recursive_doubling` for `size` ranks; `size` must be a power of two.

    The ranks that take part are numbered from 0 to size - 1, and `me` is the number of this rank.
    ``members[k]`` is the rank that participant k has in the communicator. Scratch memory begins at
    position `scratch`, and `first` is the number of the first round.
    """
    steps: list[Step] = []
    whole: Range = (0, n)
    for k in range(size.bit_length() - 1):
        other = me ^ (1 << k)
        slot = (scratch, scratch + n)
        scratch += n
        steps += [
            send(first + k, members[other], whole),
            recv(first + k, members[other], slot),
            combine(first + k, me, other, slot, whole),
        ]
    return steps


def halving(
    size: int,
    me: int,
    n: int,
    members: list[int],
    scratch: int,
    first: int,
    *,
    neighbours_first: bool = False,
    itemsize: int = 4,
):
    """Return the steps of `halving_doubling` for `size` ranks; `size` must be a power of two.

    The ranks that take part are numbered from 0 to size - 1, and `me` is the number of this rank.
    ``members[k]`` is the rank that participant k has in the communicator. Scratch memory begins at
    position `scratch`, `first` is the number of the first round, and `itemsize` the number of bytes
    of an element. With `neighbours_first`, the order of the additions is that of
    `recursive_doubling`.
    """
    blocks = BlockPartition(n, size)
    levels = size.bit_length() - 1
    # For each level: the partner, the blocks that this rank keeps, and the blocks that the partner
    # keeps.
    halves: list[tuple[int, Range, Range]] = []
    kept: Range = (0, size)
    for k in range(levels):
        distance = 1 << k if neighbours_first else size >> (k + 1)
        middle = sum(kept) // 2
        mine, theirs = ((kept[0], middle), (middle, kept[1]))
        if me & distance:
            mine, theirs = theirs, mine
        halves.append((me ^ distance, mine, theirs))
        kept = mine

    def messages(k: int, of: Range, backward: bool = False) -> list[Range]:
        """Cut blocks into messages; the first messages hold the data that the next round sends."""
        whole: Range = (blocks.start(of[0]), blocks.start(of[1]))
        if length(whole) * itemsize <= LONG:
            return [whole]
        # The numbers of a rank and its partner differ only in the bit of this level, so both ranks
        # cut their halves at the same positions.
        shift = of[0] - halves[k][1][0]
        parts = [theirs for _, _, theirs in halves[k + 1 :]] + [kept]
        spans = [(blocks.start(a + shift), blocks.start(b + shift)) for a, b in parts]
        result: list[Range] = []
        for span in reversed(spans) if backward else spans:
            result += split_range(span, -(-length(span) * itemsize // EAGER_BYTES))
        return result

    steps: list[Step] = []
    for k, (other, mine, theirs) in enumerate(halves):
        steps += [send(first + k, members[other], piece) for piece in messages(k, theirs)]
        move = scratch - blocks.start(mine[0])
        for home in messages(k, mine):
            slot = (home[0] + move, home[1] + move)
            steps.append(recv(first + k, members[other], slot))
            steps.append(combine(first + k, me, other, slot, home))
        scratch = move + blocks.start(mine[1])
    for k in reversed(range(levels)):
        other, mine, theirs = halves[k]
        round = first + 2 * levels - 1 - k
        steps += [send(round, members[other], piece) for piece in messages(k, mine, True)]
        steps += [recv(round, members[other], piece) for piece in messages(k, theirs, True)]
    return steps
