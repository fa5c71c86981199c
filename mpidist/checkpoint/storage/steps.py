"""The names of step folders, and functions that read and check their manifests.

    PATH/step-000000001200/        one committed checkpoint, never changed again
    PATH/step-000000001200.1/      the same step saved again; the higher number is the newer one
    PATH/step-000000001200-h2/     step 1200 of history 2; the two above are of history 0
    PATH/.tmp-step-...             a save that is not committed; readers ignore it

Folders with other names are ignored.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from ..format.decode import decode
from ..format.manifest import MAX_BYTES, NAME, Damaged, Manifest, tables_of
from . import files

#: The numbers of history and generation may have any number of digits. The next number is always
#: the largest existing number plus 1.
_STEP = re.compile(r"step-([0-9]{12})(?:-h([1-9][0-9]*))?(?:\.([1-9][0-9]*))?", re.ASCII)


class Entry(NamedTuple):
    """The numbers in the name of a step folder.

    Sorted entries are in the order of the folders' age, the oldest first. `generation` counts how
    often the step was saved again: 0 is the first save.
    """

    history: int
    step: int
    generation: int

    @property
    def name(self) -> str:
        """Name of the step folder, such as ``step-000000001200``."""
        history = f"-h{self.history}" if self.history else ""
        suffix = f".{self.generation}" if self.generation else ""
        return f"step-{self.step:012d}{history}{suffix}"


def entry_of(name: str) -> Entry | None:
    """Return the `Entry` of a folder from its name, or None if it is not a step folder."""
    match = _STEP.fullmatch(name)
    return match and Entry(int(match[2] or 0), int(match[1]), int(match[3] or 0))


def read_manifest(path: str, entry: Entry) -> Manifest:
    """Read, check and return a step folder's manifest, with the list of the parts in each shard.

    Raises Damaged if a file is missing, damaged or too short, and Unreadable for an unknown format.
    """
    try:
        with files.folder(path) as root, files.folder(entry.name, root) as folder:
            data = files.read_small(NAME, folder, MAX_BYTES)
            tables = [files.read_small(t.name, folder, t.size) for t in tables_of(data)]
            manifest = decode(data, tables)
            if manifest.step != entry.step:
                raise Damaged(f"{entry.name} holds the manifest of step {manifest.step}")
            for file in manifest.files:
                descriptor, size = open_shard(folder, file.name)
                files.close(descriptor)
                if size != file.size:
                    raise Damaged(f"{file.name} has {size} bytes, the manifest says {file.size}")
    except OSError as error:
        raise Damaged(f"{entry.name}: {error}") from error
    return manifest


def open_shard(folder: int, name: str) -> tuple[int, int]:
    """Open a shard file for reading; return (descriptor, size). Raises Damaged."""
    try:
        return files.open_regular(name, folder)
    except FileNotFoundError:
        raise Damaged(f"{name} is missing") from None
    except OSError as error:
        raise Damaged(f"{name} cannot be read: {error.strerror}") from error
