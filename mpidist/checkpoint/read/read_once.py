"""Each rank reads a part of the data that all ranks need, and broadcasts this part.

    disk      | rank 0's part | rank 1's part | rank 2's part |      one rank reads each byte
    ranks       each rank broadcasts its part, while the ranks read their next parts

A read item is a range of bytes of a file, and the array that it fills. Every rank makes the same
read items from the same manifest, so the ranks need not tell each other which bytes they read.
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

#: A target of at least `_LARGE` bytes is sent from its own memory, in messages of at most
#: `_MESSAGE` bytes. Smaller targets are joined to messages of about `_LARGE` bytes.
_LARGE = 4 << 20
_MESSAGE = 1 << 30
#: The largest number of messages that are being sent at the same time.
_IN_FLIGHT = 32
#: The MPI requests of failed exchanges, with their buffers. They are kept, because MPI may still
#: use the buffers.
_abandoned: list = []
#: Seconds between two tests of a request or of a read.
_NAP = 0.0002


def partition_reads(wants: Sequence[ReadItem], block: int, ranks: int) -> list[list[ReadItem]]:
    """Divide the requests to read into one list per rank, of about equal bytes."""
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
    """Cut the bytes of `want` into parts: after each position in `cuts`, at a block boundary."""
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


def message_room() -> np.ndarray:
    """Return a buffer of 8 MiB for one message that holds several small arrays."""
    return np.empty(2 * _LARGE, np.uint8)


class ReadAndBroadcast:
    """Divides data that all ranks need among the ranks; each rank reads and broadcasts a part.

    The list `wants` says which bytes of files they need, and must be equal on all ranks.
    """

    def __init__(self, wants: Sequence[ReadItem], block: int, rank: int, ranks: int, room=None):
        dealt = partition_reads(wants, block, ranks)
        self.mine = dealt[rank]
        # The ranks take turns as roots of the broadcasts, so that a rank can send its own bytes
        # while it waits for the bytes of another rank.
        turns = zip_longest(*([item for item in one if _is_large(item)] for one in dealt))
        self._large = [(root, item) for turn in turns for root, item in enumerate(turn) if item]
        self._small = [
            (root, message)
            for root, one in enumerate(dealt)
            for message in _joined([item for item in one if not _is_large(item)])
        ]
        most = max((_bytes(message) for _, message in self._small), default=0)
        self._room = np.empty(most, np.uint8) if room is None or len(room) < most else room

    def exchange(self, comm, over: Callable[[], bool]) -> None:
        """Broadcast every array to be filled, as soon as it is read, from the rank that reads it.

        Collective. ``over()`` returns whether this rank has stopped reading. If it has stopped
        early, the caller must report why.
        """
        if not (self._large or self._small):
            return

        # A rank that has stopped early broadcasts its arrays as they are, so that no rank waits for
        # ever.
        def wait_for(root: int, items: Sequence[ReadItem]) -> None:
            # The rank sleeps, because the threads that read may need this core.
            while comm.rank == root and any(item.left for item in items) and not over():
                time.sleep(_NAP)

        under_way: list = []
        try:
            with operation(comm, "checkpoint parts to all ranks") as (context, _):
                for root, item in self._large:
                    wait_for(root, [item])
                    for piece in _pieces(item.target.reshape(-1).view(np.uint8)):
                        under_way.append(context.data.Ibcast(piece, root))
                        if len(under_way) == _IN_FLIGHT:
                            _end(context, under_way)
                _end(context, under_way)
                for root, message in self._small:
                    wait_for(root, message)
                    places = self._places([item.target for item in message])
                    if comm.rank == root:
                        for target, place in places:
                            np.copyto(place, target)
                    under_way.append(context.data.Ibcast(self._room[: _bytes(message)], root))
                    _end(context, under_way)
                    if comm.rank != root:
                        for target, place in places:
                            np.copyto(target, place)
        except BaseException:
            _abandoned.append(under_way)  # MPI may still write into the arrays of these requests
            raise

    def _places(self, targets: Sequence[np.ndarray]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return, for each small array, a pair: the array, and its part of the message buffer."""
        ends = accumulate(target.nbytes for target in targets)
        return [
            (t, self._room[end - t.nbytes : end].view(t.dtype).reshape(t.shape))
            for t, end in zip(targets, ends, strict=True)
        ]


def _end(context: Context, requests: list) -> None:
    """Wait until all MPI `requests` are complete, and empty the list; sleep between two tests."""
    for request in requests:

        def look(request=request) -> bool:
            done = request.Test()
            if not done:
                time.sleep(_NAP)
            return done

        context.wait(look)
    requests.clear()


def _bytes(items: Iterable[ReadItem]) -> int:
    return sum(item.target.nbytes for item in items)


def _is_large(item: ReadItem) -> bool:
    return item.target.nbytes >= _LARGE and item.target.flags.c_contiguous


def _joined(items: Sequence[ReadItem]) -> Iterator[list[ReadItem]]:
    """Divide items with small arrays into groups of about 4 MiB, to be sent as one message each."""
    message, held = list[ReadItem](), 0
    for item in items:
        message.append(item)
        held += item.target.nbytes
        if held >= _LARGE:
            yield message
            message, held = [], 0
    if message:
        yield message


def _pieces(data: np.ndarray) -> Iterator[np.ndarray]:
    return (data[start : start + _MESSAGE] for start in range(0, len(data), _MESSAGE))
