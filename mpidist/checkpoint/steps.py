"""The folder of a store: which steps are there, newest first, and what one of them says it holds.

    PATH/step-000000001200/      one committed checkpoint, never changed again
    PATH/step-000000001200.1/    the same step saved once more: the higher number is the newer one
    PATH/.tmp-step-...           a save that has not been committed; no reader looks at it

Only names of these forms are ever looked at.
"""

from __future__ import annotations

import operator
import re
from typing import NamedTuple

from mpidist.checkpoint import files
from mpidist.checkpoint.manifest import (
    MAX_BYTES,
    NAME,
    Damaged,
    Manifest,
    decode,
    tables_of,
)
from mpidist.errors import ConfigError, NoCheckpoint, shown

_STEP = re.compile(r"step-([0-9]{12})(?:\.([1-9][0-9]{0,5}))?", re.ASCII)

MAX_STEP = 10**12 - 1


class Entry(NamedTuple):
    """One step folder. Entries sort by age."""

    step: int
    generation: int

    @property
    def name(self) -> str:
        """Name of the folder."""
        suffix = f".{self.generation}" if self.generation else ""
        return f"step-{self.step:012d}{suffix}"


def is_integer(value) -> bool:
    """Whether `value` is a whole number, of whatever type; a bool is none. Pure."""
    if isinstance(value, bool):
        return False
    try:
        operator.index(value)
    except TypeError:
        return False
    return True


def wanted(step, needed: bool = False) -> int | None:
    """Return a step that is possible, or None where none is `needed`; else ConfigError. Pure."""
    if step is None and not needed:
        return None
    if not is_integer(step) or not 0 <= operator.index(step) <= MAX_STEP:
        raise ConfigError(f"step={shown(step)}; expected an integer from 0 to {MAX_STEP}")
    return operator.index(step)


def folders(root: int) -> list[Entry]:
    """Return all step folders below an open folder, newest first, committed or not. Local."""
    found = []
    for name in files.names(root):
        match = _STEP.fullmatch(name)
        if match and files.is_folder(name, root):
            found.append(Entry(int(match[1]), int(match[2] or 0)))
    return sorted(found, reverse=True)


def committed(root: int) -> list[Entry]:
    """Return the step folders that hold a manifest, newest first. Local.

    A folder without one is what an interrupted removal leaves: no checkpoint, and no damage.
    """
    found = []
    for entry in folders(root):
        with files.folder(entry.name, root) as folder:
            if NAME in files.names(folder):
                found.append(entry)
    return found


def candidates(path: str, step: int | None) -> list[Entry]:
    """Return the committed entries to try, newest first. Local.

    Raises NoCheckpoint when there is none, naming the steps that are there.
    """
    try:
        with files.folder(path) as root:
            found = committed(root)
    except FileNotFoundError:
        raise NoCheckpoint(f"no checkpoint: {path} does not exist") from None
    except NotADirectoryError:
        raise NoCheckpoint(f"no checkpoint: {path} is not a folder") from None
    if not found:
        raise NoCheckpoint(f"no checkpoint: {path} holds no step-* folder with a {NAME}")
    if step is None:
        return found
    chosen = [entry for entry in found if entry.step == step]
    if not chosen:
        there = sorted({entry.step for entry in found})
        raise NoCheckpoint(f"no checkpoint of step {step} in {path}; steps there: {there}")
    return chosen


def all_steps(path: str) -> list[int]:
    """Return the committed steps, ascending; empty where there is no store. Local."""
    try:
        return sorted({entry.step for entry in candidates(path, None)})
    except NoCheckpoint:
        return []


def read_manifest(path: str, entry: Entry) -> bytes:
    """Return the checked bytes of an entry's manifest, its tables behind it. Local.

    The sizes of all shard files are compared as well: that is one stat each, and finds what is
    missing or cut short before any rank begins to read.
    """
    try:
        with files.folder(path) as root, files.folder(entry.name, root) as folder:
            data = files.read_small(NAME, folder, MAX_BYTES)
            parts = [files.read_small(table.name, folder, table.size) for table in tables_of(data)]
            data = b"".join([data, *parts])
            check_sizes(folder, parse(data, entry))
    except OSError as error:
        raise Damaged(f"{entry.name}: {error}") from error
    return data


def parse(data: bytes, entry: Entry) -> Manifest:
    """Return the manifest in `data`, which must be that of `entry`. Local."""
    manifest = decode(data)
    if manifest.step != entry.step:
        raise Damaged(f"{entry.name} holds the manifest of step {manifest.step}")
    return manifest


def check_sizes(folder: int, manifest: Manifest) -> None:
    """Raise Damaged unless every shard file is there, regular and of its size. Local."""
    for file in manifest.files:
        descriptor, size = open_shard(folder, file.name)
        files.close(descriptor)
        if size != file.size:
            raise Damaged(f"{file.name} has {size} bytes, the manifest says {file.size}")


def open_shard(folder: int, name: str) -> tuple[int, int]:
    """Open a shard for reading: (descriptor, size). Local. Raises Damaged where it cannot."""
    try:
        return files.open_regular(name, folder)
    except FileNotFoundError:
        raise Damaged(f"{name} is missing") from None
    except OSError as error:
        raise Damaged(f"{name} cannot be read: {error.strerror}") from error
