"""What all ranks want alike, read once: each rank reads its part and passes it on.

    disk      | rank 0's part | rank 1's part | rank 2's part |      each byte is read by one rank
    ranks       every part goes from who read it to all others, once all parts are known to be good

Every rank makes the same wants of the same manifest, so that no rank has to tell what it reads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, zip_longest

import numpy as np

from mpidist.checkpoint.wants import Rows, Want
from mpidist.partition import BlockPartition

#: Targets of so many bytes travel as they lie; smaller ones together, in messages of that size.
_LARGE = 4 << 20
_MESSAGE = 1 << 30
#: Messages that are under way at once.
_IN_FLIGHT = 32


def deal(wants: Sequence[Want], block: int, ranks: int) -> list[list[Want]]:
    """Cut `wants` into one list for each rank, of about equal bytes. Local, the same on all ranks.

    Ranges are cut between two blocks, and small ones of one block stay together, so that hardly
    any block goes to two ranks.
    """
    bounds = BlockPartition(sum(want.count for want in wants), ranks).bounds()
    dealt: list[list[Want]] = [[] for _ in range(ranks)]
    rank, done, last = 0, 0, (-1, -1)
    for want in sorted(wants, key=lambda want: (want.file, want.offset)):
        for part in _parts(want, [bound - done for bound in bounds[rank + 1 : -1]], block):
            if done >= bounds[rank + 1] and (part.file, part.offset // block) != last:
                rank = next(r for r in range(rank, ranks) if done < bounds[r + 1])
            dealt[rank].append(part)
            done += part.count
            last = (part.file, (part.offset + part.count - 1) // block)
    return dealt


def _parts(want: Want, cuts: Sequence[int], block: int) -> Iterator[Want]:
    """Cut a range of bytes at the first ends of blocks behind `cuts`; rows stay together."""
    if isinstance(want, Rows) or want.target is None:
        yield want
        return
    start = 0
    for cut in [*cuts, want.count]:
        end = min(want.count, -(-(want.offset + cut) // block) * block - want.offset)
        if cut >= want.count:
            end = want.count
        if end > start:
            part = want.target[start:end]
            yield Want(want.file, want.offset + start, end - start, part)
            start = end


class Shared:
    """What all ranks want alike, and the part of it that this one reads. Local, but for `exchange`.

    Every rank gives equal `wants`, for contiguous arrays.
    """

    def __init__(self, wants: Sequence[Want], block: int, rank: int, ranks: int):
        dealt = deal(wants, block, ranks)
        self.mine = dealt[rank]
        targets = [[want.target for want in one if want.target is not None] for one in dealt]
        large = [[t for t in one if _is_large(t)] for one in targets]
        # From all ranks in turn: one that waits for another's bytes sends its own meanwhile.
        turns = zip_longest(*([(root, t) for t in one] for root, one in enumerate(large)))
        self._large = [item for turn in turns for item in turn if item is not None]
        self._small = [
            (root, message)
            for root, one in enumerate(targets)
            for message in _joined([t for t in one if not _is_large(t)])
        ]
        # Taken here, where a rank without memory can still tell the others.
        most = max((sum(t.nbytes for t in message) for _, message in self._small), default=0)
        self._room = np.empty(most, np.uint8)

    def exchange(self, comm) -> None:
        """Bring every target to all ranks from the one that has read it. Collective."""
        pieces = [
            (root, piece)
            for root, target in self._large
            for piece in _pieces(target.reshape(-1).view(np.uint8))
        ]
        for start in range(0, len(pieces), _IN_FLIGHT):
            under_way = pieces[start : start + _IN_FLIGHT]
            requests = [comm.Ibcast(piece, root) for root, piece in under_way]
            for request in requests:
                request.Wait()
        for root, message in self._small:
            self._together(comm, root, message)

    def _together(self, comm, root: int, message: Sequence[np.ndarray]) -> None:
        """Bring small targets to all ranks, one behind the other."""
        ends = list(accumulate(target.nbytes for target in message))
        places = [
            self._room[end - target.nbytes : end].view(target.dtype).reshape(target.shape)
            for target, end in zip(message, ends, strict=True)
        ]
        if comm.rank == root:
            for target, place in zip(message, places, strict=True):
                np.copyto(place, target)
        comm.Bcast(self._room[: ends[-1]], root)
        if comm.rank != root:
            for target, place in zip(message, places, strict=True):
                np.copyto(target, place)


def _is_large(target: np.ndarray) -> bool:
    return target.nbytes >= _LARGE and target.flags.c_contiguous


def _joined(targets: Sequence[np.ndarray]) -> Iterator[list[np.ndarray]]:
    """Put small targets together to messages of a little more than `_LARGE`. Local."""
    message: list[np.ndarray] = []
    held = 0
    for target in targets:
        message.append(target)
        held += target.nbytes
        if held >= _LARGE:
            yield message
            message, held = [], 0
    if message:
        yield message


def _pieces(data: np.ndarray) -> Iterator[np.ndarray]:
    return (data[start : start + _MESSAGE] for start in range(0, len(data), _MESSAGE))
