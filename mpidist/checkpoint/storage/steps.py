"""A step folder: its name, and what its manifest says it holds.

    PATH/step-000000001200/        one committed checkpoint, never changed again
    PATH/step-000000001200.1/      the same step saved once more: the higher number is the newer one
    PATH/step-000000001200-h2/     step 1200 of history 2; the others are of history 0
    PATH/.tmp-step-...             a save that has not been committed; no reader looks at it

Only names of these forms are ever looked at. Which of them go on from which: `histories`.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from ..format.decode import decode
from ..format.manifest import MAX_BYTES, NAME, Damaged, Manifest, tables_of
from . import files

#: A number of any length: one that is refused here would hide the next, which is counted from it.
_STEP = re.compile(r"step-([0-9]{12})(?:-h([1-9][0-9]*))?(?:\.([1-9][0-9]*))?", re.ASCII)

MAX_STEP = 10**12 - 1


class Entry(NamedTuple):
    """One step folder. Entries sort by age."""

    history: int
    step: int
    generation: int

    @property
    def name(self) -> str:
        """Name of the folder."""
        history = f"-h{self.history}" if self.history else ""
        suffix = f".{self.generation}" if self.generation else ""
        return f"step-{self.step:012d}{history}{suffix}"


def entry_of(name: str) -> Entry | None:
    """Return the entry of a folder's name, or None if the name is not that of a step. Pure."""
    match = _STEP.fullmatch(name)
    return match and Entry(int(match[2] or 0), int(match[1]), int(match[3] or 0))


def read_manifest(path: str, entry: Entry) -> Manifest:
    """Return the manifest of an entry, its tables read with it, and proved.

    The sizes of all shard files are compared as well: that is one stat each, and finds what is
    missing or cut short before any rank begins to read. Raises Damaged, Unreadable.
    """
    try:
        with files.folder(path) as root, files.folder(entry.name, root) as folder:
            data = files.read_small(NAME, folder, MAX_BYTES)
            tables = [files.read_small(t.name, folder, t.size) for t in tables_of(data)]
            manifest = decode(data, tables)
            if manifest.step != entry.step:
                raise Damaged(f"{entry.name} holds the manifest of step {manifest.step}")
            check_sizes(folder, manifest)
    except OSError as error:
        raise Damaged(f"{entry.name}: {error}") from error
    return manifest


def check_sizes(folder: int, manifest: Manifest) -> None:
    """Raise Damaged unless every shard file is there, regular and of its size."""
    for file in manifest.files:
        descriptor, size = open_shard(folder, file.name)
        files.close(descriptor)
        if size != file.size:
            raise Damaged(f"{file.name} has {size} bytes, the manifest says {file.size}")


def open_shard(folder: int, name: str) -> tuple[int, int]:
    """Open a shard for reading: (descriptor, size). Raises Damaged where it cannot."""
    try:
        return files.open_regular(name, folder)
    except FileNotFoundError:
        raise Damaged(f"{name} is missing") from None
    except OSError as error:
        raise Damaged(f"{name} cannot be read: {error.strerror}") from error
