"""Restore: find the newest step that is good for every rank, then fill every rank's arrays.

Rank 0 reads and checks the manifest and hands it to all; each rank reads for itself what it
needs, whatever the layout it was saved with. A step counts only if all ranks can read theirs. A
restore that finds nothing good leaves the caller's arrays as they were: they are copied first, or,
where memory is short, a step is read once to check and agree, and once more to fill.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from mpidist import events
from mpidist.arrays import copy_into, host_empty, is_device, is_writable
from mpidist.checkpoint import load, steps
from mpidist.checkpoint.backup import Backup, fits
from mpidist.checkpoint.layout import (
    Path,
    Shard,
    array_of,
    dtype_name,
    is_array,
    leaves,
    region_of,
    shape_of,
    show,
    tree,
)
from mpidist.checkpoint.manifest import Damaged, Manifest
from mpidist.checkpoint.reader import fill, opened
from mpidist.checkpoint.steps import Entry
from mpidist.checkpoint.together import everywhere, together
from mpidist.errors import CheckpointError, ForeignCheckpoint

_LISTED = 8


def restore(comm, path: str, like: Mapping | None, step: int | None, bad: set[Entry]):
    """Return (entry, state); see `CheckpointStore.restore`. Collective over `comm`.

    Entries found damaged are added to `bad` on every rank.
    """
    items = everywhere(comm, "restore", lambda: None if like is None else _wanted(like))
    entries = together(
        comm, f"restore from {path}", lambda: None, lambda _: steps.candidates(path, step)
    )
    backup = _backup(comm, items or [])
    tried: list[str] = []
    for entry in entries:
        reason, state = _attempt(comm, path, entry, items, backup)
        if reason is None:
            events.emit("checkpoint_restored", path=path, step=entry.step, ranks=comm.size)
            return entry, state
        bad.add(entry)
        tried.append(load.note(path, entry, reason) if comm.rank == 0 else reason)
    together(comm, "restore", lambda: None, lambda _: _raise(load.failure(path, step, tried)))
    raise AssertionError("not reached")


def _raise(error: Exception):
    raise error


def _wanted(like: Mapping) -> list:
    """Return the leaves to fill; raises CheckpointError for what cannot be. Local."""
    items = list(leaves(like))
    for path, leaf in items:
        if isinstance(leaf, Shard) or is_array(leaf):
            array = array_of(leaf)
            dtype_name(array.dtype)
            if not isinstance(leaf, np.generic) and not is_writable(array):
                raise CheckpointError(
                    f"{show(path)} is read-only and cannot be filled; pass a writable array"
                )
    return items


def _backup(comm, items) -> Backup | None:
    """Copy what will be overwritten, if there is memory for it on all ranks. Collective."""
    arrays = [
        array_of(leaf)
        for _, leaf in items
        if (isinstance(leaf, Shard) or is_array(leaf)) and not isinstance(leaf, np.generic)
    ]
    if not fits(comm, sum(array.nbytes for array in arrays)):
        return None
    return everywhere(comm, "restore", lambda: Backup(arrays))


def _attempt(comm, path: str, entry: Entry, items, backup: Backup | None) -> tuple[str | None, Any]:
    """Try one entry: (None, state), or (why it is damaged, None). Collective."""
    reason, data = together(comm, "restore", lambda: None, lambda _: _manifest(path, entry))
    if reason is not None:
        return reason, None
    found = everywhere(comm, "restore", lambda: steps.parse(data, entry))
    if items is not None:
        _same_model(comm, path, entry, found, items)
        if backup is None:
            reason = _agreed(comm, lambda: _read(path, entry, found, items, check=True))
            if reason is not None:
                return reason, None
    result: list = []
    work = _whole if items is None else _fill
    done = False
    try:
        reason = _agreed(comm, lambda: result.append(work(path, entry, found, items)))
        done = reason is None
    finally:
        if backup is not None and not done:
            backup.put_back()
    return reason, result[0] if done else None


def _manifest(path: str, entry: Entry) -> tuple[str | None, bytes | None]:
    """Rank 0: (None, manifest), or (why it is damaged, None). Local."""
    try:
        return None, steps.read_manifest(path, entry)
    except Damaged as damage:
        return str(damage), None


def _agreed(comm, work) -> str | None:
    """Run `work` everywhere; why the first rank found damage, or None if none did. Collective.

    Damage is an answer, on which all ranks go on to an older step; any other error ends the
    restore on all ranks.
    """

    def local() -> str | None:
        try:
            work()
        except Damaged as damage:
            return str(damage)
        return None

    def first(reasons: list) -> str | None:
        said = [f"rank {r}: {text}" for r, text in enumerate(reasons) if text]
        return said[0] if said else None

    return together(comm, "restore", local, first)


# ------------------------------------------------------------------------------ the same model


def _same_model(comm, path: str, entry: Entry, found: Manifest, items: list) -> None:
    """Raise CheckpointError on all ranks where `like` and the checkpoint differ. Collective."""
    tensors = {tensor.path: tensor for tensor in found.tensors}

    def local() -> tuple[list[str], bytes]:
        mine = {name for name, leaf in items if isinstance(leaf, Shard) or is_array(leaf)}
        present = np.packbits(np.array([tensor.path in mine for tensor in found.tensors], bool))
        return _differences(tensors, items, dict(found.extras)), present.tobytes()

    def decide(answers: list) -> None:
        masks = [np.frombuffer(mask, np.uint8) for _, mask in answers]
        seen = np.unpackbits(np.bitwise_or.reduce(masks), count=len(found.tensors))
        lines = list(dict.fromkeys(line for differs, _ in answers for line in differs))
        lines += [
            f"{show(tensor.path)} is in the checkpoint only"
            for tensor, there in zip(found.tensors, seen, strict=True)
            if not there
        ]
        if lines:
            more = f"; and {len(lines) - _LISTED} more" if len(lines) > _LISTED else ""
            raise ForeignCheckpoint(
                f"{path}/{entry.name} is of another model: {'; '.join(lines[:_LISTED])}{more}"
            )

    together(comm, "restore", local, decide)


def _differences(tensors: dict, items: list, extras: dict) -> list[str]:
    lines = []
    for path, leaf in items:
        name = show(path)
        if not (isinstance(leaf, Shard) or is_array(leaf)):
            if path in tensors:
                lines.append(f"{name} is an array in the checkpoint, {type(leaf).__name__} here")
        elif path in extras:
            lines.append(f"{name} is a plain value in the checkpoint, an array here")
        elif path not in tensors:
            lines.append(f"{name} is missing in the checkpoint")
        else:
            lines += _array_differences(name, tensors[path], leaf)
    return lines


def _array_differences(name: str, tensor, leaf) -> list[str]:
    lines = []
    if tensor.shape != shape_of(leaf):
        lines.append(f"{name} has shape {tensor.shape} in the checkpoint, {shape_of(leaf)} here")
    dtype = dtype_name(array_of(leaf).dtype)
    if tensor.dtype != dtype:
        lines.append(f"{name} has dtype {tensor.dtype} in the checkpoint, {dtype} here")
    return lines


# ------------------------------------------------------------------------------------- filling


def _whole(path: str, entry: Entry, found: Manifest, items: None) -> dict:
    return tree(iter([*load.whole_arrays(path, entry, found), *found.extras]))


def _fill(path: str, entry: Entry, found: Manifest, items: list) -> dict:
    """Fill the arrays of `items` and return the state that holds them. Local."""
    filled = _read(path, entry, found, items, check=False)
    saved = dict(found.extras)
    kept = [(p, leaf) for p, leaf in items if p not in filled and not _related(p, saved, filled)]
    return tree(iter([*filled.items(), *kept, *saved.items()]))


def _related(path: Path, saved: Mapping, filled: Mapping) -> bool:
    """Whether a saved leaf has this path, or lies above or below it."""
    return any(
        path[: len(other)] == other[: len(path)] for known in (saved, filled) for other in known
    )


def _read(path: str, entry: Entry, found: Manifest, items: list, check: bool) -> dict:
    """Fill every array leaf, or only check the bytes it would take. Local. Raises Damaged."""
    tensors = {tensor.path: tensor for tensor in found.tensors}
    filled: dict[Path, Any] = {}
    with opened(path, entry, found) as reader:
        for name, leaf in items:
            if not (isinstance(leaf, Shard) or is_array(leaf)):
                continue
            array, tensor, region = array_of(leaf), tensors[name], region_of(leaf)
            size = np.dtype(array.dtype).itemsize
            if check:
                fill(reader, tensor, region, size, None)
                continue
            host = array
            if is_device(array) or isinstance(leaf, np.generic):
                host = host_empty(array.size, array.dtype, like=array).reshape(array.shape)
            fill(reader, tensor, region, size, host)
            if is_device(array):
                copy_into(array, host)
            filled[name] = host[()] if isinstance(leaf, np.generic) else leaf
    return filled
