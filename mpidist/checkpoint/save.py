"""Save: describe, plan, write, commit.

    all ranks  describe their state  --gather-->  rank 0 plans, makes .tmp-step-<nonce>
    all ranks  <--scatter--  what each writes;  one shard file each: write, checksum, fsync
    all ranks  (file, checksums, offsets)  --gather-->  rank 0 writes the manifest, fsync,
               renames the folder to step-<number>, fsync, and only then removes old steps

The rename is the commit: before it no reader looks at the folder, after it all bytes have been
on stable storage for a while. If a file system loses or tears them nevertheless, the checksums
tell: safety rests on the digests, only durability rests on fsync and rename. Writing is free of
MPI, so `save_async` runs it in a thread and commits at the next call that all ranks make.
"""

from __future__ import annotations

import hashlib
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any

import h5py
import numpy as np

import mpidist
from mpidist import events
from mpidist.arrays import copy_into, host_empty, is_device
from mpidist.checkpoint import files, hdf5, manifest, retention, steps
from mpidist.checkpoint.layout import (
    Path,
    Shard,
    array_of,
    dtype_name,
    is_array,
    leaves,
    shape_of,
    to_json,
)
from mpidist.checkpoint.plan import Description, Leaf, agree, assign
from mpidist.checkpoint.regions import Flat, Region
from mpidist.checkpoint.steps import Entry
from mpidist.checkpoint.together import together
from mpidist.errors import CheckpointError

Written = tuple[manifest.File | None, list[int]]


def describe(state: Mapping) -> Description:
    """Say what `state` holds, without its numbers. Local."""
    found, extras = [], []
    for name, leaf in leaves(state):
        if isinstance(leaf, Shard) or is_array(leaf):
            region = leaf.region if isinstance(leaf, Shard) else None
            dtype = dtype_name(array_of(leaf).dtype)
            found.append(Leaf(name, dtype, shape_of(leaf), region))
        else:
            # An empty dict is a leaf: it has no entries that could keep its name.
            extras.append((name, {"dict": {}} if leaf == {} else to_json(leaf, name)))
    return Description(tuple(found), tuple(extras))


@dataclass
class _Leader:
    """What rank 0 keeps of a save that is under way."""

    root: int
    name: str
    owner: int
    tensors: list[Leaf]
    extras: list
    parts: list[list[hdf5.Part]]
    resources: ExitStack = field(default_factory=ExitStack)


class Save:
    """One save: made (collective), then written (local, in any thread), then finished (collective).

    Parameters
    ----------
    comm : communicator
        A private one.
    copy : bool
        Whether to copy this rank's part of the state now, so that it may change at once.
    """

    def __init__(self, comm, path: str, step: int, state: Mapping, copy: bool):
        self.comm, self.path, self.step = comm, path, step
        self.began = time.perf_counter()
        self.outcome: Written | Exception | None = None
        self._leader: _Leader | None = None
        self.name, self.parts = self._plan(state)
        try:
            named = dict(leaves(state))
            self._data = [_source(named[part.path], part.region, copy) for part in self.parts]
        except Exception as error:  # raised by finish(), where all ranks can raise it
            self.outcome = error

    def _plan(self, state: Mapping) -> tuple[str, list[hdf5.Part]]:
        comm, mine, problem = self.comm, None, None
        try:
            mine = describe(state)
        except Exception as error:
            problem = error
        # Most ranks hold the same as rank 0; those need not send their description.
        digest = None if mine is None else hashlib.sha256(repr(mine).encode()).digest()
        reference = comm.bcast(digest, root=0)

        def local():
            if problem is not None:
                raise problem
            return mine if comm.rank == 0 or digest != reference else None

        def decide(described):
            return self._open([one or described[0] for one in described])

        return together(comm, f"save of step {self.step}", local, decide, each=True)

    def _open(self, described: list[Description]) -> list[tuple[str, list[hdf5.Part]]]:
        """Rank 0: plan, and make the temporary folder. Returns what each rank writes, and where."""
        tensors, extras = agree(described)
        parts = assign(tensors, described)
        files.make_root(self.path)
        with ExitStack() as stack:
            root = stack.enter_context(files.folder(self.path))
            name = retention.temporary_name(self.step)
            files.make_folder(name, root)
            stack.callback(_discard, name, root)
            with files.folder(name, root) as folder:
                owner = retention.claim(folder)
            stack.callback(files.close, owner)
            retention.remove_dead(root)
            self._leader = _Leader(root, name, owner, tensors, extras, parts, stack.pop_all())
        return [(name, part) for part in parts]

    def write(self) -> None:
        """Write this rank's shard. Local, without MPI; what goes wrong is kept for `finish`."""
        if self.outcome is not None:
            return
        try:
            if self.parts:
                with files.folder(self.path) as root, files.folder(self.name, root) as folder:
                    name = f"shard-{self.comm.rank:05d}.h5"
                    self.outcome = write_shard(folder, name, self.parts, self._data)
            else:
                self.outcome = (None, [])
        except Exception as error:
            self.outcome = error
        self._data = []

    def finish(self, keep: int | None, bad: set[Entry]) -> None:
        """Commit, or remove everything again. Collective; raises on all ranks together."""

        def local():
            if isinstance(self.outcome, Exception):
                raise self.outcome
            if self.outcome is None:
                raise CheckpointError("writing was interrupted")
            return self.outcome

        try:
            nbytes = together(
                self.comm,
                f"save of step {self.step} to {self.path}",
                local,
                lambda written: self._commit(written, keep, bad),
            )
        finally:
            self.abandon()
        seconds = time.perf_counter() - self.began
        events.emit("checkpoint_saved", step=self.step, bytes=nbytes, seconds=round(seconds, 4))

    def abandon(self) -> None:
        """Give up what is held; an uncommitted folder is removed. Local, may be called twice."""
        if self._leader is not None:
            leader, self._leader = self._leader, None
            leader.resources.close()

    def _commit(self, written: Sequence[Written], keep: int | None, bad: set[Entry]) -> int:
        """Rank 0: write the manifest and rename the folder. Returns the bytes of all arrays."""
        leader = self._leader
        assert leader is not None  # made by _open on this rank
        record = _manifest(self.step, leader, written)
        data = manifest.encode(record)
        if len(data) > manifest.MAX_BYTES:
            raise CheckpointError(
                f"the manifest has {len(data)} bytes, at most {manifest.MAX_BYTES} are allowed; "
                "keep large lists as arrays, not as extras"
            )
        manifest.decode(data)  # what cannot be read back is not committed
        with files.folder(leader.name, leader.root) as folder:
            descriptor = files.create(manifest.NAME, folder)
            try:
                files.write_at(descriptor, data, 0)
                files.sync(descriptor)
            finally:
                files.close(descriptor)
            files.sync(folder)
            saved = _publish(leader.name, self.step, leader.root)
            files.sync(leader.root)
            # Only now, or a death just before the rename would leave a folder without an owner.
            with suppress(OSError):
                files.remove_file(retention.OWNER, folder)
        try:
            retention.remove_old(self.path, leader.root, keep, saved, bad)
        except OSError as error:  # the new step is safe; only space is lost
            events.emit("checkpoint_not_removed", path=self.path, reason=str(error))
            print(f"mpidist: old checkpoints in {self.path} stay: {error}", file=sys.stderr)
        return record.nbytes


def _publish(name: str, step: int, root: int) -> Entry:
    """Rename a complete folder to the next free name of its step. Local."""
    taken = [entry.generation for entry in steps.folders(root) if entry.step == step]
    generation = max(taken, default=-1) + 1
    while True:
        entry = Entry(step, generation)
        try:
            files.rename(name, entry.name, root)
        except FileExistsError:
            generation += 1
        except OSError as error:
            if not files.is_folder(entry.name, root):
                raise CheckpointError(f"cannot commit {entry.name}: {error}") from error
            generation += 1
        else:
            return entry


def _discard(name: str, root: int) -> None:
    """Remove a temporary folder if it is still there. Local; else the next run does it."""
    with suppress(OSError):
        if files.is_folder(name, root):
            retention.remove(name, root)


def _manifest(step: int, leader: _Leader, written: Sequence[Written]) -> manifest.Manifest:
    listed: list[manifest.File] = []
    pieces: dict[Path, list[manifest.Piece]] = {leaf.path: [] for leaf in leader.tensors}
    for parts, (file, offsets) in zip(leader.parts, written, strict=True):
        for number, (part, offset) in enumerate(zip(parts, offsets, strict=True)):
            piece = manifest.Piece(len(listed), str(number), offset, part.region)
            pieces[part.path].append(piece)
        if file is not None:
            listed.append(file)
    tensors = tuple(
        manifest.Tensor(leaf.path, leaf.dtype, leaf.shape, tuple(pieces[leaf.path]))
        for leaf in leader.tensors
    )
    software = {
        "mpidist": mpidist.__version__,
        "numpy": np.__version__,
        "h5py": h5py.version.version,
        "hdf5": h5py.version.hdf5_version,
    }
    return manifest.Manifest(
        step,
        files.BLOCK,
        len(leader.parts),
        tuple(listed),
        tensors,
        tuple((path, value) for path, value in leader.extras),
        software,
    )


# ------------------------------------------------------------------------------ the shard file


def _source(leaf, region: Region, copy: bool) -> Callable[[], np.ndarray]:
    """Return a function that gives the bytes of a part: taken now with `copy`, else when called."""
    if copy:
        data = _bytes_of(leaf, region, copy=True)
        return lambda: data
    return lambda: _bytes_of(leaf, region, copy=False)


def _bytes_of(leaf, region: Region, copy: bool) -> np.ndarray:
    """Return the elements of `region` in C order as host bytes. Local."""
    array: Any = array_of(leaf)
    if isinstance(region, Flat) and not isinstance(leaf, Shard):
        stop = region.start + region.size
        # `flat` copies only the range, where reshape would copy all of a strided array.
        straight = array.flags.c_contiguous or is_device(array)
        array = (array.reshape(-1) if straight else array.flat)[region.start : stop]
    if is_device(array):
        host = host_empty(array.size, array.dtype, like=array)
        copy_into(host, array)
    else:
        host = np.array(array, order="C", copy=True) if copy else np.ascontiguousarray(array)
    return host.reshape(-1).view(np.uint8)


def write_shard(
    folder: int, name: str, parts: Sequence[hdf5.Part], data: Sequence[Callable[[], np.ndarray]]
) -> Written:
    """Write one shard file and wait until it is on stable storage. Local.

    Every block's checksum is that of the bytes in memory, taken just before they are written.
    Returns the file's record and the byte offset of each part.
    """
    layout = hdf5.plan(parts)
    digest, checksums, at = hashlib.sha256(), [], 0
    descriptor = files.create(name, folder)
    try:
        for block in _blocks(_runs(layout, data), files.BLOCK):
            digest.update(block)
            checksums.append(zlib.crc32(block))
            files.write_at(descriptor, block, at)
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
