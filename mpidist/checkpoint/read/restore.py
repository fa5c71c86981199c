"""Restore: find the newest step that is good for every rank, then fill every rank's arrays.

Rank 0 reads and proves the manifest with its tables, and tells each rank where what it wants lies
(`shard_layouts`); each rank reads that for itself, whatever the layout it was saved with; what all
ranks need is read once and passed on (`read_once`). A step counts only if all ranks can read
theirs. Each block is checked before its bytes go where they belong, so arrays are filled in one
pass without a copy of anything; damage in a later block is answered by filling them all from an
older step.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from ... import events
from ...arrays import is_writable
from ...errors import CheckpointError, ForeignCheckpoint, MismatchError, MpidistError, NoCheckpoint
from ...runtime.agreement.mismatch import rank_list
from .. import histories, load
from ..control import run_on_all
from ..format import shard_layouts
from ..format.manifest import Damaged, Layout, Manifest
from ..format.state import Fact, Path, array_of, dtype_name, dtype_of, leaves, shape_of, show, tree
from ..storage import steps
from ..storage.steps import Entry
from ..storage.worker_thread import Beside
from .fill import Filling, batches, is_filled, is_whole, staged_bytes
from .reader import opened

_LISTED = 8
#: Bytes read over those of the state up to which nobody else is said to read the same.
_MOSTLY = 1.25


class Reading(NamedTuple):
    """How a store reads: comparing blocks with their checksums; passing the system's cache by."""

    verify: bool = True
    direct: bool = True


def restore(
    comm,
    path: str,
    like: Mapping | None,
    step: int | None,
    first: Callable[[Collection[Entry]], Entry | None],
    bad: set[Entry],
    how: Reading,
):
    """Return (entry, state); see `CheckpointStore.restore`. Collective over `comm`.

    Rank 0 asks `first` for the entry to try, giving those that were; it adds to `bad` what is found
    damaged.
    """
    items = run_on_all(comm, "restore", lambda: None if like is None else _wanted(like))
    tried: dict[Entry, str] = {}  # on rank 0
    entry: Entry | None = None
    reason, removed = "", 0

    def following(without: list[bool]) -> Entry:
        nonlocal removed
        for rank, one in enumerate(without):
            if one != without[0]:
                raise MismatchError(
                    f"like is None on rank {rank if one else 0} and a state on rank "
                    f"{0 if one else rank}; pass {{}} where no array is wanted"
                )
        if entry is not None and histories.is_gone(path, entry):
            removed = load.count_removed(path, removed)
        elif entry is not None:
            bad.add(entry)
            tried[entry] = load.note(path, entry, reason)
        found = first(tried)
        if found is None:
            raise load.failure(path, step, list(tried.values()))
        return found

    filled: list[Entry] = []  # parts of these may be in the caller's arrays
    try:
        while True:
            entry = run_on_all(comm, f"restore from {path}", lambda: items is None, following)
            damage, state = _attempt(comm, path, entry, items, how, filled)
            if damage is None:
                events.emit("checkpoint_restored", path=path, step=entry.step, ranks=comm.size)
                return entry, state
            reason = damage
    except MpidistError as error:
        if filled:
            raise spoiled(error) from error
        raise


def spoiled(error: MpidistError) -> MpidistError:
    """Return `error`, raised on all ranks, for arrays that may be filled in part. Local.

    Nobody may take it for that of an empty store, and go on with them.
    """
    kind = CheckpointError if isinstance(error, NoCheckpoint) else type(error)
    told = kind(f"{error}; arrays may hold parts of that now: set them anew before use")
    told.everywhere, told.secondary = True, error.secondary
    return told


def _wanted(like: Mapping) -> list:
    """Return the leaves to fill; raises CheckpointError for what cannot be. Local."""
    items = list(leaves(like))
    for path, leaf in items:
        if is_filled(leaf):
            array = array_of(leaf)
            dtype_name(array.dtype)
            if not isinstance(leaf, np.generic) and not is_writable(array):
                raise CheckpointError(
                    f"{show(path)} is read-only and cannot be filled; pass a writable array"
                )
    return items


def _attempt(
    comm, path: str, entry: Entry, items, how: Reading, begun: list[Entry]
) -> tuple[str | None, Any]:
    """Try one entry: (None, state), or (why it is damaged, None). Collective.

    It is added to `begun` before any array of `items` is changed.
    """
    known: list[Manifest] = []  # on rank 0

    def look(_) -> tuple[str | None, Any]:
        try:
            known.append(steps.read_manifest(path, entry))
        except Damaged as damage:
            return str(damage), None
        return None, (known[0].tensors, known[0].extras)

    reason, told = run_on_all(comm, "restore", lambda: None, look)
    if reason is not None:
        return reason, None
    tensors, extras = told
    if items is None:  # new arrays: nothing of anybody's is changed
        items = run_on_all(comm, "restore", lambda: _fresh(tensors))
        same = _Same({path for path, _ in items}, True, [len(items)])
        found = shard_layouts.everything(comm, known, tensors)
    else:
        same = _same_model(comm, f"{path}/{entry.name}", told, items)
        found = shard_layouts.wanted(comm, known, tensors, items)
        begun.append(entry)
    how = how._replace(direct=how.direct and same.alone)
    filled: dict[Path, Any] = {}
    for start, end in pairwise([0, *same.ends]):
        names = {tensor.path for tensor in tensors[start:end]}
        some = [(path, leaf) for path, leaf in items if path in names]
        common = same.common & names if comm.size > 1 else set()
        reason = _fill(comm, path, entry, found, some, common, how, filled)
        if reason is not None:
            return reason, None
    return None, run_on_all(comm, "restore", lambda: _state(extras, items, filled))


def _fill(
    comm, path: str, entry: Entry, found: Layout, items, common, how: Reading, filled: dict
) -> str | None:
    """Fill the leaves of `items`, and put them into `filled`; why not, if not. Collective."""
    filling = run_on_all(
        comm, "restore", lambda: Filling(found, items, common, comm.rank, comm.size)
    )

    def read() -> None:
        with opened(path, entry, found, *how) as reader:
            filling.read(reader, lambda: not reading.abandoned)

    # What one rank reads for all goes round while the rest is read. Damage is found on the way:
    # the others then have got it as well, and an older step fills all that it has changed.
    reading = Beside(read, "mpidist-restore", threaded=bool(common))
    with reading:
        filling.exchange(comm, reading.over)
    reason = _agreed(comm, reading.result)
    if reason is None:
        filled |= run_on_all(comm, "restore", filling.finish)
    return reason


def _agreed(comm, work) -> str | None:
    """Run `work` everywhere; why the first rank found damage, or None if none did. Collective.

    Damage is an answer, on which all ranks go on to an older step; any other error ends the
    restore on all ranks.
    """

    def local() -> str | None:
        try:
            work()
        except Damaged as damage:
            return f"rank {comm.rank}: {damage}"
        return None

    def first(reasons: list) -> str | None:
        return next((text for text in reasons if text), None)

    return run_on_all(comm, "restore", local, first, if_differs=True)


# ------------------------------------------------------------------------------ the same model


class _Same(NamedTuple):
    """What the ranks want together.

    common : leaves that all ranks want whole, so that each reads a part of them.
    alone : whether hardly any byte is read by two ranks.
    ends : behind which tensors a batch ends, where not all are filled at once.
    """

    common: set[Path]
    alone: bool
    ends: list[int]


def _same_model(comm, name: str, found: tuple, items: list) -> _Same:
    """Raise CheckpointError on all ranks where `like` and the checkpoint differ. Collective.

    `found` are the tensors and extras of the checkpoint `name`.
    """
    listed, extras = found
    tensors = {tensor.path: tensor for tensor in listed}

    def local() -> tuple[list[str], bytes, bytes, int, bytes]:
        mine = {name: leaf for name, leaf in items if is_filled(leaf)}
        present = [tensor.path in mine for tensor in listed]
        whole = [tensor.path in mine and is_whole(mine[tensor.path]) for tensor in listed]
        cut = sum(array_of(leaf).nbytes for leaf in mine.values() if not is_whole(leaf))
        differs = _differences(tensors, items, dict(extras))
        staged = staged_bytes([mine.get(tensor.path) for tensor in listed])
        return differs, _packed(present), _packed(whole), cut, staged.tobytes()

    def decide(answers: list) -> tuple[list[int], bool, list[int]]:
        differs, present, whole, cut, staged = zip(*answers, strict=True)
        seen = _bits(present, len(listed)).sum(axis=0)
        lines = [
            f"{line} {'here' if len(ranks) == len(answers) else f'on {rank_list(ranks)}'}"
            for line, ranks in _tellers(differs).items()
        ]
        lines += [
            f"{show(tensor.path)} is in the checkpoint only"
            for tensor, there in zip(listed, seen, strict=True)
            if not there
        ]
        if lines:
            more = f"; and {len(lines) - _LISTED} more" if len(lines) > _LISTED else ""
            raise ForeignCheckpoint(
                f"{name} is of another model: {'; '.join(lines[:_LISTED])}{more}"
            )
        takers = _bits(whole, len(listed)).sum(axis=0)
        common = [int(count) == len(answers) for count in takers]
        read = sum(cut) + sum(
            tensor.nbytes * (1 if shared else int(count))
            for tensor, shared, count in zip(listed, common, takers, strict=True)
        )
        most = np.zeros(len(listed), np.int64)
        for sizes in filter(None, staged):
            np.maximum(most, np.frombuffer(sizes, np.int64), out=most)
        alone = read <= _MOSTLY * sum(tensor.nbytes for tensor in listed)
        return np.flatnonzero(common).tolist(), alone, batches(most.tolist())

    common, alone, ends = run_on_all(comm, "restore", local, decide)
    return _Same({listed[number].path for number in common}, alone, ends)


def _tellers(told: Sequence[list[str]]) -> dict[str, list[int]]:
    """Return line -> the ranks that told it. Pure."""
    ranks: dict[str, list[int]] = {}
    for rank, lines in enumerate(told):
        for line in lines:
            ranks.setdefault(line, []).append(rank)
    return ranks


def _packed(flags: Sequence[bool]) -> bytes:
    """Return a mask of bits; a checkpoint without arrays has none. Local."""
    return np.packbits(np.array(flags, bool)).tobytes()


def _bits(masks: Sequence[bytes], count: int) -> np.ndarray:
    """Return packed masks of `count` bits as rows of an array. Local."""
    return np.array([np.unpackbits(np.frombuffer(m, np.uint8), count=count) for m in masks])


def _differences(tensors: dict, items: list, extras: dict) -> list[str]:
    """Say what of this rank is not as it was saved; "here", or the ranks, come behind. Local."""
    lines = []
    for path, leaf in items:
        name = show(path)
        if not is_filled(leaf):
            if path in tensors:
                lines.append(f"{name} is an array in the checkpoint, {type(leaf).__name__}")
        elif path in extras:
            lines.append(f"{name} is a plain value in the checkpoint, an array")
        elif path not in tensors:
            lines.append(f"{name} is missing in the checkpoint, an array")
        else:
            lines += _array_differences(name, tensors[path], leaf)
    return lines


def _array_differences(name: str, tensor, leaf) -> list[str]:
    lines = []
    if tensor.shape != shape_of(leaf):
        lines.append(f"{name} has shape {tensor.shape} in the checkpoint, {shape_of(leaf)}")
    dtype = dtype_name(array_of(leaf).dtype)
    if tensor.dtype != dtype:
        lines.append(f"{name} has dtype {tensor.dtype} in the checkpoint, {dtype}")
    return lines


# ------------------------------------------------------------------------------------- filling


def _fresh(tensors: Sequence[Fact]) -> list[tuple[Path, np.ndarray]]:
    return [(tensor.path, np.empty(tensor.shape, dtype_of(tensor.dtype))) for tensor in tensors]


def _state(extras, items: list, filled: dict[Path, Any]) -> dict:
    """Return the state that holds the arrays that were filled. Local."""
    saved = dict(extras)
    kept = [(p, leaf) for p, leaf in items if p not in filled and not _related(p, saved, filled)]
    return tree(iter([*filled.items(), *kept, *saved.items()]))


def _related(path: Path, saved: Mapping, filled: Mapping) -> bool:
    """Whether a saved leaf has this path, or lies above or below it."""
    return any(
        path[: len(other)] == other[: len(path)] for known in (saved, filled) for other in known
    )
