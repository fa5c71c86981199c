"""What one rank writes: a snapshot of its parts, their bytes in an HDF5 file, and its table.

A shard is written once, front to back, by its one writer, and never changed. Its checksums are
those of the bytes in memory, taken just before they are written (`behind`). The table follows when
the shard is on stable storage and appears under its name when it is there itself: whoever sees it
sees a whole shard, without a message.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from mpidist.arrays import copy_into, host_empty, is_device
from mpidist.checkpoint import behind, files, hdf5, manifest
from mpidist.checkpoint.layout import Shard, array_of
from mpidist.checkpoint.plan import Share
from mpidist.checkpoint.regions import Flat, Region
from mpidist.context import of
from mpidist.errors import CheckpointError, StorageError
from mpidist.mismatch import Signature

_ALIGN = 64
_MESSAGE = 1 << 30


def shard_name(rank: int) -> str:
    """Return the name of the shard that `rank` writes. Local."""
    return f"shard-{rank:05d}.h5"


def failed_name(rank: int) -> str:
    """Return the name of the mark that `rank` will not write its shard. Local."""
    return f"shard-{rank:05d}.failed"


Bytes = Callable[[], np.ndarray]


class Memory:
    """Room for copies, used again by each save: fresh pages would cost more than the copying."""

    def __init__(self):
        self._memory = np.empty(0, np.uint8)

    def room(self, sizes: Sequence[int]) -> list[np.ndarray]:
        """Return byte arrays of `sizes`. Local. What was there before is given up."""
        starts = list(accumulate((-(-size // _ALIGN) * _ALIGN for size in sizes), initial=0))
        if starts[-1] > len(self._memory):
            self._memory = np.empty(starts[-1], np.uint8)
        return [
            self._memory[start : start + size] for start, size in zip(starts, sizes, strict=False)
        ]


class How(NamedTuple):
    """How shards are written: past the system's cache where it can be; with a SHA-256 of each."""

    direct: bool = True
    sha256: bool = False


class Buffers(NamedTuple):
    """A store's memory: for copies of the state, and for what other ranks send."""

    copies: Memory
    inbox: Memory


def copied(parts: Sequence[hdf5.Part], named: Mapping, memory: Memory) -> list[Bytes]:
    """Copy `parts` of the leaves `named` by path; returns what gives the bytes of each. Local."""
    copies = memory.room([part.nbytes for part in parts])
    for part, copy in zip(parts, copies, strict=True):
        view = _view(named[part.path], part.region)  # a copy already where the array has strides
        copy_into(copy.view(view.dtype).reshape(view.shape), view)
    return [lambda copy=copy: copy for copy in copies]  # type: ignore[misc]


def in_place(parts: Sequence[hdf5.Part], named: Mapping) -> list[Bytes]:
    """Return what gives the bytes of each part where they lie, when it is called. Local."""
    return [
        lambda part=part: _host_bytes(_view(named[part.path], part.region))  # type: ignore[misc]
        for part in parts
    ]


def rooms(share: Share, rank: int, inbox: Memory) -> list[np.ndarray]:
    """Return memory for each part that `rank` writes for another. Local."""
    return inbox.room([part.nbytes for holder, part in share.writes if holder != rank])


def brought(
    comm, share: Share, data: Sequence[Bytes], inbox: Sequence
) -> Callable[[], list[Bytes]]:
    """Send what another rank writes, take in what this one writes for others. Collective.

    `inbox` is that of `rooms`: a rank without memory raises there, where nobody waits for it.
    Returns a function of what gives the bytes of each part that this rank writes. That raises what
    could not be sent: all messages are through by then, empty ones from there on, so that nobody
    waits for them.
    """
    context = of(comm)
    signature = Signature("checkpoint parts to their writers", "", "")
    tag = context.tag(context.begin(signature))
    try:
        problem, written = _forwarded(context, tag, share, data, inbox)
    except BaseException as error:
        context.break_off(error)
        raise
    context.under_way = False

    def result() -> list[Bytes]:
        if problem is not None:
            raise problem
        return written

    return result


def _forwarded(
    context, tag: int, share: Share, data: Sequence[Bytes], inbox: Sequence
) -> tuple[Exception | None, list[Bytes]]:
    comm = context.data
    problem: Exception | None = None
    if share.to != comm.rank:
        for part, give in zip(share.gives, data, strict=True):
            run = np.empty(0, np.uint8)
            if problem is None:
                try:
                    run = give()
                except Exception as error:
                    problem = error
            for start in range(0, part.nbytes, _MESSAGE):
                context.wait(comm.Isend(run[start : start + _MESSAGE], share.to, tag).Test)
        return problem, []
    own = iter(data)
    foreign = iter(inbox)
    written: list[Bytes] = []
    arriving: list[tuple[int, np.ndarray]] = []
    for holder, _ in share.writes:
        if holder == comm.rank:
            written.append(next(own))
        else:
            room = next(foreign)
            arriving.append((holder, room))
            written.append(lambda room=room: room)  # type: ignore[misc]
    # Each rank sends in the order of the tensors, which is the order of what is written.
    for holder, room in arriving:
        for start in range(0, len(room), _MESSAGE):
            context.wait(comm.Irecv(room[start : start + _MESSAGE], holder, tag).Test)
    return None, written


def _view(leaf, region: Region) -> Any:
    """Return the elements of `region`, on host or device; a view where the layout allows. Local."""
    array: Any = array_of(leaf)
    if isinstance(region, Flat) and not isinstance(leaf, Shard):
        stop = region.start + region.size
        # `flat` copies only the range, where reshape would copy all of a strided array.
        straight = array.flags.c_contiguous or is_device(array)
        return (array.reshape(-1) if straight else array.flat)[region.start : stop]
    return array if is_device(array) else np.asarray(array)


def _host_bytes(view) -> np.ndarray:
    """Return the elements of an array in C order as host bytes. Local."""
    if is_device(view):
        host = host_empty(view.size, view.dtype, like=view)
        copy_into(host, view)
    else:
        host = np.ascontiguousarray(view)
    return host.reshape(-1).view(np.uint8)


def write(
    folder: int, rank: int, parts: Sequence[hdf5.Part], data: Sequence[Bytes], how: How
) -> bytes:
    """Write a shard and its table and wait until both are on stable storage. Local.

    Returns the bytes of the table.
    """
    name = shard_name(rank)
    file, offsets = write_shard(folder, name, parts, data, how)
    pieces = ((part.path, at, part.region) for part, at in zip(parts, offsets, strict=True))
    table = manifest.encode_table(file, pieces)
    if len(table) > manifest.MAX_BYTES:
        raise CheckpointError(f"the table of {name} has {len(table)} bytes; save with more writers")
    partial = name.removesuffix(".h5") + ".part"
    put(folder, partial, table)
    files.rename(partial, manifest.table_name(name), folder)
    return table


def put(folder: int, name: str, data: bytes) -> None:
    """Write a small file and wait until it is on stable storage. Local."""
    descriptor = files.create(name, folder)
    try:
        files.write_at(descriptor, data, 0)
        files.sync(descriptor)
    finally:
        files.close(descriptor)


def write_shard(
    folder: int, name: str, parts: Sequence[hdf5.Part], data: Sequence[Bytes], how: How
) -> tuple[manifest.File, list[int]]:
    """Write one shard file; returns its record and the byte offset of each part. Local."""
    layout = hdf5.plan(parts)
    digest = hashlib.sha256() if how.sha256 else None
    descriptor = files.create(name, folder)
    try:
        runs = _runs(layout, data)
        checksums = behind.write(descriptor, runs, layout.size, how.direct, digest)
        files.sync(descriptor)
        size = files.size(descriptor)
    finally:
        files.close(descriptor)
    if size != layout.size:
        raise StorageError(f"{name} has {size} bytes after writing {layout.size}")
    told = digest.hexdigest() if digest else None
    return manifest.File(name, size, told, tuple(checksums)), layout.offsets


def _runs(layout: hdf5.Plan, data: Sequence[Callable]) -> Iterator[np.ndarray]:
    """Yield all bytes of a file in order: HDF5's own, the parts' data, zeros in between. Local."""
    sources: list[tuple[int, Any]] = [*layout.metadata, *zip(layout.offsets, data, strict=True)]
    at = 0
    for offset, source in sorted(sources, key=lambda item: item[0]):
        run = source() if callable(source) else np.frombuffer(source, np.uint8)
        if offset > at:
            yield np.zeros(offset - at, np.uint8)
        yield run
        at = offset + len(run)
    if at < layout.size:
        yield np.zeros(layout.size - at, np.uint8)
