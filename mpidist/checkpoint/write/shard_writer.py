"""Write the shard of a rank: an HDF5 file with parts of the state, and a table of these parts.

The table gets its final name only when the shard and the table are on stable storage. So a process
that sees the table can read the whole shard, without a message from the writer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from ...arrays import copy_into, host_empty, is_device
from ...errors import CheckpointError, StorageError
from ...runtime.elastic_requests import tester
from ..control import operation
from ..format import manifest
from ..format.state import array_of
from ..storage import files
from . import checksummed_write
from .rank_work import Work

_ALIGN = 64
_MESSAGE = 1 << 30
#: Pieces of at most `_SMALL` bytes are joined into arrays of about `_TOGETHER` bytes.
_SMALL, _TOGETHER = 16 << 10, 1 << 20


def shard_name(rank: int) -> str:
    """Return the name of the shard, the file with array data that `rank` writes."""
    return f"shard-{rank:05d}.h5"


def failed_name(rank: int) -> str:
    """Return the name of the file that shows that `rank` has failed to write its data."""
    return f"shard-{rank:05d}.failed"


#: The elements of a piece as an array, or, if they must be copied, a function that returns the
#: copy.
Elements = Any


# In new memory, page faults would take longer than the copying.
class Memory:
    """Buffers for the bytes of the arrays in a save; the next save uses the same buffers."""

    def __init__(self):
        self._memory = np.empty(0, np.uint8)

    def room(self, sizes: Sequence[int]) -> list[np.ndarray]:
        """Return a byte array for each of `sizes`, in memory that the next call uses again."""
        starts = list(accumulate((-(-size // _ALIGN) * _ALIGN for size in sizes), initial=0))
        if starts[-1] > len(self._memory):
            self._memory = np.empty(starts[-1], np.uint8)
        places = zip(starts, sizes, strict=False)
        return [self._memory[start : start + size] for start, size in places]


class WriteOptions(NamedTuple):
    """Whether a shard's bytes bypass the cache of the system, and whether it gets a SHA-256."""

    direct: bool = True
    sha256: bool = False


def copied(work: Work, views: Sequence[Elements], memory: Memory) -> list[Elements]:
    """Copy into `memory` the parts of arrays that this rank will save; return them as bytes."""
    copies = memory.room(work.given_bytes)
    for given, copy in zip(views, copies, strict=True):
        view = given() if callable(given) else given  # a function returns a copy already
        copy_into(copy.view(view.dtype).reshape(view.shape), view)
    return copies  # type: ignore[return-value]


def piece_views(work: Work, arrays: Sequence) -> list[Elements]:
    """Return the values of each part of `arrays` that this rank saves, as views.

    If a view is not possible, the result has a function that returns a copy.
    """
    found: list[Elements] = []
    for place, cut in work.sources:
        leaf = arrays[place]
        array = leaf if type(leaf) is np.ndarray else array_of(leaf)
        if cut is None:
            found.append(array)
        elif array.flags.c_contiguous or is_device(array):
            found.append(array.reshape(-1)[slice(*cut)])
        else:
            # `flat` copies only the range. For an array with strides, `reshape` would copy the
            # whole array.
            found.append(lambda array=array, cut=cut: array.flat[slice(*cut)])
    return found


def receive_buffers(work: Work, rank: int, inbox: Memory) -> list[np.ndarray]:
    """Return a buffer for each part of an array that `rank` receives and then writes to disk."""
    sizes = zip(work.holders, work.written_bytes, strict=True)
    return inbox.room([nbytes for holder, nbytes in sizes if holder != rank])


def forward_parts(
    comm, work: Work, data: Sequence[Elements], inbox: Sequence
) -> list[Elements] | Exception:
    """Send parts of arrays to the rank that writes them, and receive parts from others.

    Collective over `comm`. Returns an array for each part that this rank writes, or the exception
    if a part could not be sent.
    """
    problem: Exception | None = None
    written: list[Elements] = []
    with operation(comm, "checkpoint parts to their writers") as (context, tag):
        if work.to != comm.rank:
            for nbytes, elements in zip(work.given_bytes, data, strict=True):
                # After an error, empty messages are sent, so that no writing rank waits for ever.
                run = np.empty(0, np.uint8)
                if problem is None:
                    try:
                        run = _host_bytes(elements)
                    except Exception as error:
                        problem = error
                for start in range(0, nbytes, _MESSAGE):
                    part = run[start : start + _MESSAGE]
                    context.wait(tester(context.data.Isend(part, work.to, tag)))
        else:
            own, foreign = iter(data), iter(inbox)
            written = [next(own if holder == comm.rank else foreign) for holder in work.holders]
            # Each rank sends its pieces in the order of the tensors, and the pieces here are in
            # this order, so messages match.
            for holder, room in zip(work.holders, written, strict=True):
                if holder != comm.rank:
                    for start in range(0, len(room), _MESSAGE):
                        part = room[start : start + _MESSAGE]
                        context.wait(tester(context.data.Irecv(part, holder, tag)))
    return written if problem is None else problem


def _host_bytes(elements: Elements) -> np.ndarray:
    """Return the values of an array as bytes in host memory, in C order."""
    view = elements() if callable(elements) else elements
    if is_device(view):
        host = host_empty(view.size, view.dtype, like=view)
        copy_into(host, view)
    else:
        host = np.ascontiguousarray(view)
    return host.reshape(-1).view(np.uint8)


def write(folder: int, rank: int, work: Work, data: Sequence[Elements], how: WriteOptions) -> bytes:
    """Write a shard, and the table of its parts, to the disk; return the table's first line."""
    name, digest = shard_name(rank), hashlib.sha256() if how.sha256 else None
    with _created(folder, name) as descriptor:
        runs = _runs(work, data)
        checksums = checksummed_write.write(descriptor, runs, work.size, how.direct, digest)
        files.sync(descriptor)
        size = files.size(descriptor)  # the size on stable storage
    if size != work.size:
        raise StorageError(f"{name} has {size} bytes after writing {work.size}")
    file = manifest.File(name, size, digest.hexdigest() if digest else None, checksums)
    head = manifest.encode_head(file, work.writes, work.numbers)
    if len(head) + len(work.numbers) > manifest.MAX_TABLES_BYTES:
        raise CheckpointError(f"{name} has {work.writes} pieces; save with more writers")
    partial = name.removesuffix(".h5") + ".part"
    put(folder, partial, head + work.numbers)
    files.rename(partial, manifest.table_name(name), folder)
    return head


def put(folder: int, name: str, data: bytes) -> None:
    """Write a small file and wait until it is on stable storage."""
    with _created(folder, name) as descriptor:
        files.write_at(descriptor, data, 0)
        files.sync(descriptor)


@contextmanager
def _created(folder: int, name: str) -> Iterator[int]:
    """Create a file, and close it at the end of the ``with`` block."""
    descriptor = files.create(name, folder)
    try:
        yield descriptor
    finally:
        files.close(descriptor)


def _runs(work: Work, data: Sequence[Elements]) -> Iterator[np.ndarray]:
    """Yield all bytes of a shard file in order, as arrays."""
    before, after = work.around
    small = bytearray(before)
    for elements, nbytes, gap in zip(data, work.written_bytes, work.gaps, strict=True):
        if nbytes <= _SMALL and type(elements) is np.ndarray:
            small += elements.tobytes()
        else:
            yield np.frombuffer(small, np.uint8)
            yield _host_bytes(elements)
            small = bytearray()
        small += bytes(gap)
        if len(small) > _TOGETHER:
            yield np.frombuffer(small, np.uint8)
            small = bytearray()
    yield np.frombuffer(small + after, np.uint8)
