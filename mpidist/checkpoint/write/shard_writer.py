"""What one rank writes: a snapshot of its parts, their bytes in an HDF5 file, and its table.

A shard is written once, front to back, by its one writer, and never changed. Its checksums are
those of the bytes in memory, taken just before they are written (`checksummed_write`). The table
follows when the shard is on stable storage and appears under its name when it is there itself:
whoever sees it sees a whole shard, without a message.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from ...arrays import copy_into, host_empty, is_device
from ...errors import CheckpointError, StorageError
from ..control import operation
from ..format import manifest
from ..format.state import array_of
from ..place import WriteOptions
from ..storage import files
from . import checksummed_write
from .work import Work

_ALIGN = 64
_MESSAGE = 1 << 30
#: Pieces of at most so many bytes go on their way together, so many bytes at once.
_SMALL, _TOGETHER = 16 << 10, 1 << 20


def shard_name(rank: int) -> str:
    """Return the name of the shard that `rank` writes."""
    return f"shard-{rank:05d}.h5"


def failed_name(rank: int) -> str:
    """Return the name of the mark that `rank` will not write its shard."""
    return f"shard-{rank:05d}.failed"


#: The elements of a piece, or, where that would be a copy, what gives them.
Elements = Any


class Memory:
    """Room for copies, used again by each save: fresh pages would cost more than the copying."""

    def __init__(self):
        self._memory = np.empty(0, np.uint8)

    def room(self, sizes: Sequence[int]) -> list[np.ndarray]:
        """Return byte arrays of `sizes`. What was there before is given up."""
        starts = list(accumulate((-(-size // _ALIGN) * _ALIGN for size in sizes), initial=0))
        if starts[-1] > len(self._memory):
            self._memory = np.empty(starts[-1], np.uint8)
        return [
            self._memory[start : start + size] for start, size in zip(starts, sizes, strict=False)
        ]


class WriteBuffers(NamedTuple):
    """A store's memory: for copies of the state, and for what other ranks send."""

    copies: Memory
    inbox: Memory


def copied(work: Work, arrays: Sequence, memory: Memory) -> list[Elements]:
    """Copy what this rank gives of its arrays; returns the bytes of each piece."""
    copies = memory.room(work.given_bytes)
    for given, copy in zip(in_place(work, arrays), copies, strict=True):
        view = given() if callable(given) else given  # a copy already where the array has strides
        copy_into(copy.view(view.dtype).reshape(view.shape), view)
    return copies  # type: ignore[return-value]


def in_place(work: Work, arrays: Sequence) -> list[Elements]:
    """Return the elements of each piece where they lie."""
    found: list[Elements] = []
    for place, cut in work.sources:
        leaf = arrays[place]
        array = leaf if type(leaf) is np.ndarray else array_of(leaf)
        if cut is None:
            found.append(array)
        elif array.flags.c_contiguous or is_device(array):
            found.append(array.reshape(-1)[slice(*cut)])
        else:
            # `flat` copies only the range, where reshape would copy all of a strided array.
            found.append(lambda array=array, cut=cut: array.flat[slice(*cut)])
    return found


def receive_buffers(work: Work, rank: int, inbox: Memory) -> list[np.ndarray]:
    """Return memory for each piece that `rank` writes for another."""
    sizes = zip(work.holders, work.written_bytes, strict=True)
    return inbox.room([nbytes for holder, nbytes in sizes if holder != rank])


def forward_parts(
    comm, work: Work, data: Sequence[Elements], inbox: Sequence
) -> Callable[[], list[Elements]]:
    """Send what another rank writes, take in what this one writes for others. Collective.

    `inbox` is that of `receive_buffers`: a rank without memory raises there, where nobody waits
    for it. Returns a function of the elements of each piece that this rank writes. That raises what
    could not be sent: all messages are through by then, empty ones from there on, so that nobody
    waits for them.
    """
    problem: Exception | None = None
    written: list[Elements] = []
    with operation(comm, "checkpoint parts to their writers") as (context, tag):
        if work.to != comm.rank:
            for nbytes, elements in zip(work.given_bytes, data, strict=True):
                run = np.empty(0, np.uint8)
                if problem is None:
                    try:
                        run = _host_bytes(elements)
                    except Exception as error:
                        problem = error
                for start in range(0, nbytes, _MESSAGE):
                    part = run[start : start + _MESSAGE]
                    context.wait(context.data.Isend(part, work.to, tag).Test)
        else:
            own, foreign = iter(data), iter(inbox)
            written = [next(own if holder == comm.rank else foreign) for holder in work.holders]
            # Each rank sends in the order of the tensors, which is the order of what is written.
            for holder, room in zip(work.holders, written, strict=True):
                if holder != comm.rank:
                    for start in range(0, len(room), _MESSAGE):
                        part = room[start : start + _MESSAGE]
                        context.wait(context.data.Irecv(part, holder, tag).Test)

    def result() -> list[Elements]:
        if problem is not None:
            raise problem
        return written

    return result


def _host_bytes(elements: Elements) -> np.ndarray:
    """Return the elements of an array in C order as host bytes."""
    view = elements() if callable(elements) else elements
    if is_device(view):
        host = host_empty(view.size, view.dtype, like=view)
        copy_into(host, view)
    else:
        host = np.ascontiguousarray(view)
    return host.reshape(-1).view(np.uint8)


def write(folder: int, rank: int, work: Work, data: Sequence[Elements], how: WriteOptions) -> bytes:
    """Write a shard and its table and wait until both are on stable storage.

    Returns the head of the table.
    """
    name = shard_name(rank)
    file = write_shard(folder, name, work, data, how)
    head = manifest.encode_head(file, work.writes, work.numbers)
    if len(head) + len(work.numbers) > manifest.MAX_TABLES_BYTES:
        raise CheckpointError(f"{name} has {work.writes} pieces; save with more writers")
    partial = name.removesuffix(".h5") + ".part"
    put(folder, partial, head + work.numbers)
    files.rename(partial, manifest.table_name(name), folder)
    return head


def put(folder: int, name: str, data: bytes) -> None:
    """Write a small file and wait until it is on stable storage."""
    descriptor = files.create(name, folder)
    try:
        files.write_at(descriptor, data, 0)
        files.sync(descriptor)
    finally:
        files.close(descriptor)


def write_shard(
    folder: int, name: str, work: Work, data: Sequence[Elements], how: WriteOptions
) -> manifest.File:
    """Write one shard file; returns its record."""
    digest = hashlib.sha256() if how.sha256 else None
    descriptor = files.create(name, folder)
    try:
        checksums = checksummed_write.write(
            descriptor, _runs(work, data), work.size, how.direct, digest
        )
        files.sync(descriptor)
        size = files.size(descriptor)
    finally:
        files.close(descriptor)
    if size != work.size:
        raise StorageError(f"{name} has {size} bytes after writing {work.size}")
    return manifest.File(name, size, digest.hexdigest() if digest else None, checksums)


def _runs(work: Work, data: Sequence[Elements]) -> Iterator[np.ndarray]:
    """Yield all bytes of a file in order: small pieces together, zeros behind each."""
    before, after = work.around
    small, held = [before], len(before)
    for elements, nbytes, gap in zip(data, work.written_bytes, work.gaps, strict=True):
        if nbytes <= _SMALL and type(elements) is np.ndarray:
            small.append(elements.tobytes())
            held += nbytes
        else:
            yield np.frombuffer(b"".join(small), np.uint8)
            yield _host_bytes(elements)
            small, held = [], 0
        if gap:
            small.append(bytes(gap))
        if held > _TOGETHER:
            yield np.frombuffer(b"".join(small), np.uint8)
            small, held = [], 0
    yield np.frombuffer(b"".join([*small, after]), np.uint8)
