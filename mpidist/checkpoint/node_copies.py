"""The copy of a checkpoint that a node keeps, and the identity of the run that made the copy.

The copy (see `tiered`) is itself a checkpoint, of a state with these entries:

    arrays     the arrays that the ranks of the node hold whole
    pieces     for each rank, the arrays of its shards
    extras     the plain values of all ranks
    mark       the save that the copy belongs to, the number of ranks, and a digest for each rank
               of the arrays that it held

A run draws a random identity when it first uses the shared folder, and writes it there to the file
``.local``.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from ..errors import CheckpointError, NoCheckpoint
from . import histories
from .format.state import Shard, array_of, dtype_name, has_array, leaves, plain, shape_of, tree
from .storage import files, retention, steps
from .write.shard_writer import put

ID = ".local"
_ID = re.compile(rb"[0-9a-f]{32}\n")
_LAYOUT = "mark", "layout"


def identity(path: str, make: bool) -> str | None:
    """Return the run's identity, a random text, from a shared folder; with `make`, make one."""
    if not make and not Path(path).is_dir():
        return None
    with files.folder(path) as root:
        if ID not in files.names(root):
            if not make:
                return None
            _write(root)
        text = files.read_small(ID, root, 64)
    if not _ID.fullmatch(text):  # the identity becomes the name of a folder
        raise CheckpointError(
            f"{path}/{ID} is damaged; remove it to go on without the nodes' copies"
        )
    return text.decode().strip()


def rotate_id(path: str) -> None:
    """Remove the run's identity (a random text) from its folder; the next save makes another."""
    with files.folder(path) as root:
        files.remove_file(ID, root)
        files.sync(root)


def invalidate(path: str) -> None:
    """Invalidate the nodes' copies, because a run saves without making copies."""
    # Otherwise an old copy could later seem to be newer than the steps of this run.
    with suppress(OSError):
        if (Path(path) / ID).exists():
            rotate_id(path)


def _write(root: int) -> None:
    partial = f"{ID}-{secrets.token_hex(4)}"
    try:
        put(root, partial, secrets.token_hex(16).encode() + b"\n")
        files.rename(partial, ID, root)
        files.sync(root)
    except BaseException:
        files.remove_file(partial, root)
        raise


def arrays(state: Mapping, rank: int) -> dict:
    """Return nested dicts of the arrays in `state`, the state of `rank`.

    The entry ``arrays`` has the arrays that the rank holds whole. The entry ``pieces`` has, under
    the number of the rank, the arrays of its shards.
    """
    found = []
    for path, leaf in leaves(state):
        if isinstance(leaf, Shard):
            found.append((("pieces", str(rank), *path), leaf.array))
        elif has_array(leaf):
            found.append((("arrays", *path), leaf))
    # No entry "arrays" or "pieces" if it would be empty: it would collide with those of other
    # ranks.
    return tree(iter(found))


def extras(state: Mapping) -> list:
    """Return the values of a state that are not arrays, as pairs of a path of keys and a value."""
    return [(path, plain(leaf, path)) for path, leaf in leaves(state) if not has_array(leaf)]


def copy_record(comm, state: Mapping, extras: Mapping, name: str, history: int) -> dict:
    """Return the state that this rank saves in the copy on its node. Not collective.

    `extras` has all values, except arrays, from the states of all ranks. `name` is the name of the
    save, and `history` the number of its history (series of saved steps).
    """
    layout = {str(comm.rank): _layout(state)}
    mark = {"name": name, "history": history, "ranks": comm.size, "layout": layout}
    return {**arrays(state, comm.rank), "extras": tree(iter(extras.items())), "mark": mark}


def usable_steps(comm, path: str, step: int | None, like: Mapping) -> dict[int, tuple[int, str]]:
    """Return the steps whose copies on this node can fill `like`, this rank's state.

    The copies are in the folder `path`. If `step` is not None, only this step is looked up. Returns
    a dict: number of a step -> (number of its series of saved steps, name of its save).
    """
    layout, alike = _layout(like), not any(isinstance(leaf, Shard) for _, leaf in leaves(like))
    marks: dict[int, tuple[int, str]] = {}
    rank = str(comm.rank)
    with suppress(NoCheckpoint):
        newest = histories.first(path)
        assert newest is not None
        entries, _ = histories.everything(path, step, newest.history)
        for entry in reversed(entries):
            marks.pop(entry.step, None)
            with suppress(CheckpointError):  # the copy is damaged
                history, mark = _mark(path, entry)
                saved = {key[2]: text for key, text in mark.items() if key[:2] == _LAYOUT}
                same = mark.get(("mark", "ranks")) == comm.size
                if layout in saved.values() if alike else same and saved.get(rank) == layout:
                    marks[entry.step] = history, str(mark.get(("mark", "name")))
    return marks


def _mark(path: str, entry: steps.Entry) -> tuple[int, dict]:
    """Return the number of the shared folder's history to which a copy belongs, and its extras."""
    mark = dict(steps.read_manifest(path, entry).extras)
    history = mark.get(("mark", "history"), 0)
    return history if isinstance(history, int) else 0, mark


def remove_copies(path: str, newest: tuple[float, ...]) -> None:
    """Remove the copies of steps in a node's folder `path` that are not newer than `newest`.

    `newest` is a pair: the number of a history (series of saved steps), and that of a step.
    """
    with suppress(OSError):
        with files.folder(path) as root:
            for entry in histories.Histories(root).everything():
                is_old = True  # a damaged copy counts as old
                with suppress(CheckpointError):
                    is_old = (_mark(path, entry)[0], entry.step) <= newest
                if is_old:
                    retention.remove(entry.name, root)
            retention.remove_dead(root)
            left = histories.Histories(root)
            for one in () if left.own else left.marks.values():
                files.remove_file(one.name, root)
        Path(path).rmdir()


def _layout(state: Mapping) -> str:
    """Return a SHA-256 of the names, dtypes, shapes and index ranges of a rank's arrays."""
    facts = [
        (path, dtype_name(array_of(leaf).dtype), shape_of(leaf), getattr(leaf, "region", None))
        for path, leaf in leaves(state)
        if has_array(leaf)
    ]
    return hashlib.sha256(repr(facts).encode()).hexdigest()
