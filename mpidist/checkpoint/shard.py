"""What one rank writes: a snapshot of its parts, their bytes in an HDF5 file, and its table.

A shard is written once, front to back, by its one writer, and never changed. Its checksums are
those of the bytes in memory, taken just before they are written. The table follows when the shard
is on stable storage and appears under its name when it is there itself: whoever sees it sees a
whole shard, without a message.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from mpidist.arrays import copy_into, host_empty, is_device
from mpidist.checkpoint import files, hdf5, manifest
from mpidist.checkpoint.layout import Shard, array_of
from mpidist.checkpoint.regions import Flat, Region
from mpidist.errors import CheckpointError

_ALIGN = 64


def shard_name(rank: int) -> str:
    """Return the name of the shard that `rank` writes. Local."""
    return f"shard-{rank:05d}.h5"


class Snapshots:
    """Memory for copies of the state, used again: fresh pages would cost more than the copying."""

    def __init__(self):
        self._memory = np.empty(0, np.uint8)

    def take(self, parts: Sequence[hdf5.Part], named: Mapping) -> list[Callable[[], np.ndarray]]:
        """Copy `parts` of the leaves `named` by path; returns what gives the bytes of each. Local.

        What was taken before is overwritten: one save at a time.
        """
        views = [_view(named[part.path], part.region) for part in parts]
        sizes = [-(-view.nbytes // _ALIGN) * _ALIGN for view in views]
        if sum(sizes) > len(self._memory):
            self._memory = np.empty(sum(sizes), np.uint8)
        copies, start = [], 0
        for view, size in zip(views, sizes, strict=True):
            copy = self._memory[start : start + view.nbytes]
            copy_into(copy.view(view.dtype).reshape(view.shape), view)
            copies.append(copy)
            start += size
        return [lambda copy=copy: copy for copy in copies]  # type: ignore[misc]


def in_place(parts: Sequence[hdf5.Part], named: Mapping) -> list[Callable[[], np.ndarray]]:
    """Return what gives the bytes of each part where they lie, when it is called. Local."""
    return [
        lambda part=part: _host_bytes(_view(named[part.path], part.region))  # type: ignore[misc]
        for part in parts
    ]


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
    folder: int, rank: int, parts: Sequence[hdf5.Part], data: Sequence[Callable[[], np.ndarray]]
) -> bytes:
    """Write a shard and its table and wait until both are on stable storage. Local.

    Returns the bytes of the table; without parts nothing is written.
    """
    if not parts:
        return b""
    name = shard_name(rank)
    file, offsets = write_shard(folder, name, parts, data)
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
    folder: int, name: str, parts: Sequence[hdf5.Part], data: Sequence[Callable[[], np.ndarray]]
) -> tuple[manifest.File, list[int]]:
    """Write one shard file; returns its record and the byte offset of each part. Local."""
    layout = hdf5.plan(parts)
    digest, checksums, at = hashlib.sha256(), [], 0
    descriptor = files.create(name, folder)
    try:
        for block in _blocks(_runs(layout, data), files.BLOCK):
            digest.update(block)
            checksums.append(zlib.crc32(block))
            files.write_at(descriptor, block, at)
            # The disk works on this block while the next one's digests are computed.
            files.begin_sync(descriptor, at, len(block))
            at += len(block)
        files.sync(descriptor)
        size = files.size(descriptor)
    finally:
        files.close(descriptor)
    if not size == at == layout.size:
        raise CheckpointError(f"{name} has {size} bytes after writing {at} of {layout.size}")
    return manifest.File(name, size, digest.hexdigest(), tuple(checksums)), layout.offsets


def _runs(layout: hdf5.Plan, data: Sequence[Callable]) -> Iterator[memoryview]:
    """Yield all bytes of a file in order: HDF5's own, the parts' data, zeros in between."""
    sources: list[tuple[int, Any]] = [*layout.metadata, *zip(layout.offsets, data, strict=True)]
    at = 0
    for offset, source in sorted(sources, key=lambda item: item[0]):
        run = memoryview(source() if callable(source) else source)
        if offset > at:
            yield memoryview(bytes(offset - at))
        yield run
        at = offset + len(run)
    if at < layout.size:
        yield memoryview(bytes(layout.size - at))


def _blocks(runs: Iterator[memoryview], block: int) -> Iterator[memoryview | bytearray]:
    """Cut and join runs to blocks. Long runs are passed on without a copy."""
    joined = bytearray()
    for run in runs:
        while len(run):
            if not joined and len(run) >= block:
                yield run[:block]
                run = run[block:]
                continue
            take = block - len(joined)
            joined += run[:take]
            run = run[take:]
            if len(joined) == block:
                yield joined
                joined = bytearray()
    if joined:
        yield joined
