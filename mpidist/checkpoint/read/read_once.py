"""Data that all ranks need are read once: each rank reads a part and sends it to the others.

    disk      | rank 0's part | rank 1's part | rank 2's part |      each byte is read by one rank
    ranks       every part goes from who read it to all others, while the next ones are read

Every rank makes the same wants of the same manifest, so that no rank has to tell what it reads.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate, zip_longest

import numpy as np

from ...partition import BlockPartition
from ...runtime.context import Context
from ..control import operation
from .read_plan import ReadItem, RowReadItem

#: Targets of so many bytes travel as they lie; smaller ones together, in messages of that size.
_LARGE = 4 << 20
_MESSAGE = 1 << 30
#: Messages that are under way at once.
_IN_FLIGHT = 32
#: Messages that can no longer end.
_abandoned: list = []
#: Seconds between two looks for what a rank or the disk has not brought yet.
_NAP = 0.0002


def partition_reads(wants: Sequence[ReadItem], block: int, ranks: int) -> list[list[ReadItem]]:
    """Cut `wants` into one list for each rank, of about equal bytes. The same on all ranks.

    Ranges are cut between two blocks, and small ones of one block stay together, so that hardly
    any block goes to two ranks.
    """
    bounds = BlockPartition(sum(want.count for want in wants), ranks).bounds()
    dealt: list[list[ReadItem]] = [[] for _ in range(ranks)]
    rank, done, last = 0, 0, (-1, -1)
    for want in sorted(wants, key=lambda want: (want.file, want.offset)):
        for part in _parts(want, [bound - done for bound in bounds[rank + 1 : -1]], block):
            if done >= bounds[rank + 1] and (part.file, part.offset // block) != last:
                rank = next(r for r in range(rank, ranks) if done < bounds[r + 1])
            dealt[rank].append(part)
            done += part.count
            last = (part.file, (part.offset + part.count - 1) // block)
    return dealt


def _parts(want: ReadItem, cuts: Sequence[int], block: int) -> Iterator[ReadItem]:
    """Cut a range of bytes at the first ends of blocks behind `cuts`; rows stay together."""
    if isinstance(want, RowReadItem) or want.target is None:
        yield want
        return
    start = 0
    for cut in [*cuts, want.count]:
        end = min(want.count, -(-(want.offset + cut) // block) * block - want.offset)
        if cut >= want.count:
            end = want.count
        if end > start:
            part = want.target[start:end]
            yield ReadItem(want.file, want.offset + start, end - start, part)
            start = end


#: A want and the array that it fills.
Part = tuple[ReadItem, np.ndarray]


def message_room() -> np.ndarray:
    """Return room for any message of small targets, unless blocks are larger than `_LARGE`."""
    return np.empty(2 * _LARGE, np.uint8)


class ReadAndBroadcast:
    """The data that all ranks need, and the part of them that this rank reads.

    Only `exchange` is collective. Every rank gives equal `wants`, for contiguous arrays. `room` is
    for messages; made here where it is too small, or none.
    """

    def __init__(self, wants: Sequence[ReadItem], block: int, rank: int, ranks: int, room=None):
        dealt = partition_reads(wants, block, ranks)
        self.mine = dealt[rank]
        given = [[(want, want.target) for want in one if want.target is not None] for one in dealt]
        large = [[part for part in one if _is_large(part[1])] for one in given]
        # From all ranks in turn: one that waits for another's bytes sends its own meanwhile.
        turns = zip_longest(*([(root, part) for part in one] for root, one in enumerate(large)))
        self._large = [item for turn in turns for item in turn if item is not None]
        self._small = [
            (root, message)
            for root, one in enumerate(given)
            for message in _joined([part for part in one if not _is_large(part[1])])
        ]
        most = max((_bytes(message) for _, message in self._small), default=0)
        self._room = np.empty(most, np.uint8) if room is None or len(room) < most else room

    def exchange(self, comm, over: Callable[[], bool]) -> None:
        """Bring every target to all ranks from the one that reads it, as it comes. Collective.

        `over` tells that this rank reads no more; what has not come by then is passed on as it is,
        so that nobody waits for it, and whoever was to read it says why.
        """
        if not (self._large or self._small):
            return

        def wait_for(root: int, parts: Sequence[Part]) -> None:
            # Asleep, for the threads that read have to share this core.
            while comm.rank == root and any(want.left for want, _ in parts) and not over():
                time.sleep(_NAP)

        under_way: list = []
        try:
            with operation(comm, "checkpoint parts to all ranks") as (context, _):
                for root, part in self._large:
                    wait_for(root, [part])
                    for piece in _pieces(part[1].reshape(-1).view(np.uint8)):
                        under_way.append(context.data.Ibcast(piece, root))
                        if len(under_way) == _IN_FLIGHT:
                            _end(context, under_way)
                _end(context, under_way)
                for root, message in self._small:
                    wait_for(root, message)
                    places = self._places([target for _, target in message])
                    if comm.rank == root:
                        for target, place in places:
                            np.copyto(place, target)
                    under_way.append(context.data.Ibcast(self._room[: _bytes(message)], root))
                    _end(context, under_way)
                    if comm.rank != root:
                        for target, place in places:
                            np.copyto(target, place)
        except BaseException:
            _abandoned.append(under_way)  # MPI may still write into these targets
            raise

    def _places(self, targets: Sequence[np.ndarray]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return small targets with their places in a message, one behind the other."""
        ends = accumulate(target.nbytes for target in targets)
        return [
            (t, self._room[end - t.nbytes : end].view(t.dtype).reshape(t.shape))
            for t, end in zip(targets, ends, strict=True)
        ]


def _end(context: Context, requests: list) -> None:
    """Wait for `requests`, asleep between two looks, and empty the list."""
    for request in requests:

        def look(request=request) -> bool:
            done = request.Test()
            if not done:
                time.sleep(_NAP)
            return done

        context.wait(look)
    requests.clear()


def _bytes(parts: Iterable[Part]) -> int:
    return sum(target.nbytes for _, target in parts)


def _is_large(target: np.ndarray) -> bool:
    return target.nbytes >= _LARGE and target.flags.c_contiguous


def _joined(parts: Sequence[Part]) -> Iterator[list[Part]]:
    """Put small targets together to messages of a little more than `_LARGE`."""
    message: list[Part] = []
    held = 0
    for part in parts:
        message.append(part)
        held += part[1].nbytes
        if held >= _LARGE:
            yield message
            message, held = [], 0
    if message:
        yield message


def _pieces(data: np.ndarray) -> Iterator[np.ndarray]:
    return (data[start : start + _MESSAGE] for start in range(0, len(data), _MESSAGE))
