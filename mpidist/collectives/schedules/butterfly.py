"""Butterflies: in round k every rank exchanges with the rank whose number differs in bit k.

    4 ranks    round 0   0<->1   2<->3        round 1   0<->2   1<->3

With L = log2 p, alpha the latency, and beta and gamma the time to send and to add one of N bytes:
recursive_doubling exchanges whole vectors: L alpha + L N beta + L N gamma, the least latency.
halving_doubling (Rabenseifner) exchanges halves, quarters, ... and adds, then walks back gathering:
2L alpha + 2(p-1)/p N beta + (p-1)/p N gamma: the bytes of the ring in 2 log2 p rounds.
`butterfly` picks: recursive doubling below `SHORT` bytes, halving and doubling above.

Both of a pair send at once. Over TCP a long message waits for an answer, and that queues behind the
long message that crosses it; so halves longer than `LONG` bytes go as many of `EAGER_BYTES`, which
wait for nothing, and are added while the next ones arrive.

p that is not a power of two: with r = p - 2^k, the first 2r ranks fold in pairs (odd gives its
vector to even), 2^k ranks do the work, and even hands the result back: two rounds more.
Thakur, Rabenseifner, Gropp, IJHPCA 19(1), 2005.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from ...partition import BlockPartition
from .protocol_limits import EAGER_BYTES, LONG, SHORT
from .schedule import Range, Step, combine, cut, length, recv, send


def recursive_doubling(size: int, rank: int, n: int) -> list[Step]:
    """Everyone exchanges everything, log2 p times."""
    return _folded(size, rank, n, doubling)


def halving_doubling(size: int, rank: int, n: int, *, itemsize: int = 4) -> list[Step]:
    """Recursive halving (reduce-scatter), then recursive doubling (allgather)."""
    return _folded(size, rank, n, partial(halving, itemsize=itemsize))


def butterfly(size: int, rank: int, n: int, *, itemsize: int = 4) -> list[Step]:
    """Pick by length: `recursive_doubling` for short vectors, `halving_doubling` for long ones."""
    if n * itemsize < SHORT or n < size:
        return recursive_doubling(size, rank, n)
    return halving_doubling(size, rank, n, itemsize=itemsize)


def _folded(size: int, rank: int, n: int, inner: Callable) -> list[Step]:
    """Run `inner` on the largest power of two of ranks, the others folded onto neighbours."""
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
        slot = (n, 2 * n)
        scratch = 2 * n
        steps = [recv(0, rank + 1, slot), combine(0, rank, rank + 1, slot, whole)]
    # Ranks of the inner butterfly: the even folded ones first, then the unfolded ones.
    members = [2 * i for i in range(rest)] + list(range(2 * rest, size))
    steps += inner(power, members.index(rank), n, members, scratch, 1)
    if rank < 2 * rest:
        steps.append(send(2 + 2 * power.bit_length(), rank + 1, whole))
    return steps


def doubling(size: int, me: int, n: int, members: list[int], scratch: int, first: int):
    """The inner part of `recursive_doubling`, on `size` members, a power of two."""
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
    """The inner part of `halving_doubling`, on `size` members, a power of two.

    With `neighbours_first` the distances are 1, 2, 4, ... in the halving as well, so that sums
    are those of neighbouring members, as `recursive_doubling` adds.
    """
    blocks = BlockPartition(n, size)
    levels = size.bit_length() - 1
    # On each level: the partner, the blocks that are kept, and those that it keeps.
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
        """Cut one half of level k: what the next level sends first comes first."""
        whole: Range = (blocks.start(of[0]), blocks.start(of[1]))
        if length(whole) * itemsize <= LONG:
            return [whole]
        # Partners differ in this level alone, so their parts lie alike in either half.
        shift = of[0] - halves[k][1][0]
        parts = [theirs for _, _, theirs in halves[k + 1 :]] + [kept]
        spans = [(blocks.start(a + shift), blocks.start(b + shift)) for a, b in parts]
        if backward:
            spans.reverse()
        return [
            piece
            for span in spans
            for piece in cut(span, -(-length(span) * itemsize // EAGER_BYTES))
        ]

    steps: list[Step] = []
    for k, (other, mine, theirs) in enumerate(halves):
        steps += [send(first + k, members[other], piece) for piece in messages(k, theirs)]
        move = scratch - blocks.start(mine[0])
        for home in messages(k, mine):
            slot = (home[0] + move, home[1] + move)
            steps.append(recv(first + k, members[other], slot))
            steps.append(combine(first + k, me, other, slot, home))
        scratch += blocks.start(mine[1]) - blocks.start(mine[0])
    for k in reversed(range(levels)):
        other, mine, theirs = halves[k]
        round = first + 2 * levels - 1 - k
        steps += [send(round, members[other], piece) for piece in messages(k, mine, True)]
        steps += [recv(round, members[other], piece) for piece in messages(k, theirs, True)]
    return steps
