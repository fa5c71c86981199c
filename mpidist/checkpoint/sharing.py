"""What all ranks want alike, read once: each rank reads its part and passes it on.

    disk      | rank 0's part | rank 1's part | rank 2's part |      each byte is read by one rank
    ranks       every part goes from who read it to all others, once all parts are known to be good

Every rank makes the same wants of the same manifest, so that no rank has to tell what it reads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from mpidist.checkpoint.wants import Rows, Want
from mpidist.partition import BlockPartition

#: Targets of so many bytes travel as they lie; smaller ones together, in messages of that size.
_LARGE = 4 << 20
_MESSAGE = 1 << 30


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
            yield Want(want.file, want.offset + start, end - start, part, want.keep)
            start = end


def exchange(comm, dealt: Sequence[Sequence[Want]]) -> None:
    """Bring the targets of all wants to all ranks from those who have read them. Collective."""
    for root, wants in enumerate(dealt):
        for targets in _messages([want.target for want in wants if want.target is not None]):
            if len(targets) == 1 and targets[0].flags.c_contiguous:
                _broadcast(comm, targets[0].reshape(-1).view(np.uint8), root)
                continue
            joined = np.empty(sum(target.nbytes for target in targets), np.uint8)
            at = 0
            if comm.rank == root:
                for target in targets:
                    joined[at : at + target.nbytes].view(target.dtype)[...] = target.reshape(-1)
                    at += target.nbytes
            _broadcast(comm, joined, root)
            if comm.rank != root:
                for target in targets:
                    got = joined[at : at + target.nbytes].view(target.dtype)
                    target[...] = got.reshape(target.shape)
                    at += target.nbytes


def _messages(targets: Sequence[np.ndarray]) -> Iterator[list[np.ndarray]]:
    small: list[np.ndarray] = []
    held = 0
    for target in targets:
        if target.nbytes >= _LARGE:
            yield [target]
            continue
        small.append(target)
        held += target.nbytes
        if held >= _LARGE:
            yield small
            small, held = [], 0
    if small:
        yield small


def _broadcast(comm, data: np.ndarray, root: int) -> None:
    for start in range(0, len(data), _MESSAGE):
        comm.Bcast(data[start : start + _MESSAGE], root)
