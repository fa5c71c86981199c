"""What a node holds of a checkpoint, and the identity by which a run knows its own. See `tiered`.

A node's copy is a checkpoint of a state of its own:

    arrays     what the node's ranks have whole
    pieces     by rank, the arrays of its shards
    extras     those of all ranks
    mark       which save it is of, of how many ranks, and what each rank had

The identity is drawn when the shared folder is first used, and written into it as ``.local``: what
another run has left in a node's memory is never taken for this one's.
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

ID = ".local"
_ID = re.compile(rb"[0-9a-f]{32}\n")


def identity(path: str, make: bool) -> str | None:
    """Return the identity of a shared folder; one that has none gets it, or None."""
    if not make and not Path(path).is_dir():
        return None
    with files.folder(path) as root:
        if ID not in files.names(root):
            if not make:
                return None
            _write(root)
        text = files.read_small(ID, root, 64)
    if not _ID.fullmatch(text):  # it becomes the name of a folder
        raise CheckpointError(
            f"{path}/{ID} is damaged; remove it to go on without the nodes' copies"
        )
    return text.decode().strip()


def rotate_id(path: str) -> None:
    """Give a shared folder another identity, with the next save."""
    with files.folder(path) as root:
        files.remove_file(ID, root)
        files.sync(root)


def invalidate(path: str) -> None:
    """Forget what nodes hold for a shared folder that a run saves to without them.

    Its steps are of another history, whose number a copy may have or exceed.
    """
    with suppress(OSError):
        if (Path(path) / ID).exists():
            rotate_id(path)


def _write(root: int) -> None:
    descriptor = files.create(partial := f"{ID}-{secrets.token_hex(4)}", root)
    try:
        files.write_at(descriptor, secrets.token_hex(16).encode() + b"\n", 0)
        files.sync(descriptor)
        files.rename(partial, ID, root)
        files.sync(root)
    except BaseException:
        files.remove_file(partial, root)
        raise
    finally:
        files.close(descriptor)


def arrays(state: Mapping, rank: int) -> dict:
    """Return the arrays that a rank holds: whole ones, and its pieces by its number.

    What it has none of is not named: that would be an empty dict where other ranks have arrays.
    """
    found = []
    for path, leaf in leaves(state):
        if isinstance(leaf, Shard):
            found.append((("pieces", str(rank), *path), leaf.array))
        elif has_array(leaf):
            found.append((("arrays", *path), leaf))
    return tree(iter(found))


def extras(state: Mapping) -> list:
    """Return the leaves that are not arrays, as (path, value) pairs."""
    return [(path, plain(leaf, path)) for path, leaf in leaves(state) if not has_array(leaf)]


def union(answers: list[list]) -> list:
    """Return the extras of all ranks: equal where several have one, as the shared save saw."""
    return list({path: leaf for one in answers for path, leaf in one}.items())


def copy_record(state: Mapping, rank: int, name: str, history: int, ranks: int) -> dict:
    """Return the facts by which a copy is found again."""
    return {
        "name": name,
        "history": history,
        "ranks": ranks,
        "layout": {str(rank): _layout(state)},
    }


def usable_steps(
    path: str, step: int | None, like: Mapping, rank: int, ranks: int
) -> dict[int, tuple[int, str]]:
    """Return the steps of a node's folder that have all of `like` for this rank.

    With their history in the shared folder, and the name of their save. Of a step that is there
    twice only the newest counts.
    """
    layout = _layout(like)
    marks: dict[int, tuple[int, str]] = {}
    try:
        newest = histories.first(path)
        assert newest is not None
        entries, _ = histories.everything(path, step, newest.history)
    except NoCheckpoint:
        return {}
    for entry in reversed(entries):
        marks.pop(entry.step, None)
        with suppress(CheckpointError):  # damaged
            facts = _facts(path, entry)
            same = facts.get(("mark", "layout", str(rank))) == layout
            if same and facts.get(("mark", "ranks")) == ranks:
                marks[entry.step] = _history(facts), str(facts.get(("mark", "name")))
    return marks


def _facts(path: str, entry: steps.Entry) -> dict:
    return dict(steps.read_manifest(path, entry).extras)


def _history(facts: Mapping) -> int:
    """Return the history of the shared folder that a copy is of."""
    history = facts.get(("mark", "history"), 0)
    return history if isinstance(history, int) else 0


def remove(path: str, newest: tuple[int, int] | None = None) -> None:
    """Remove a node's steps, and its folder if nothing is left.

    Up to the (history, step) that is the `newest` in the shared folder, where that is given.
    """
    with suppress(OSError):
        with files.folder(path) as root:
            for entry in histories.Histories(root).everything():
                if newest is None or _is_in(path, entry, newest):
                    retention.remove(entry.name, root)
            retention.remove_dead(root)
            left = histories.Histories(root)
            for one in () if left.own else left.marks.values():
                files.remove_file(one.name, root)
        Path(path).rmdir()


def _is_in(path: str, entry: steps.Entry, newest: tuple[int, int]) -> bool:
    """Whether a copy is not newer than what the shared folder holds; nor a damaged one."""
    try:
        return (_history(_facts(path, entry)), entry.step) <= newest
    except CheckpointError:
        return True


def _layout(state: Mapping) -> str:
    """Return a digest of what a rank holds, without the numbers."""
    facts = [
        (path, dtype_name(array_of(leaf).dtype), shape_of(leaf), getattr(leaf, "region", None))
        for path, leaf in leaves(state)
        if has_array(leaf)
    ]
    return hashlib.sha256(repr(facts).encode()).hexdigest()
