"""The folder of a store, and the objects that the open store needs to save and to restore."""

from __future__ import annotations

from typing import NamedTuple

from .histories import Line
from .storage.lock import RunLock
from .storage.retention import Keep
from .write.shard_writer import Memory, WriteOptions


class Place(NamedTuple):
    """The folder of a store, and the objects that saves and restores use with this folder.

    Only rank 0 uses `keep` (which steps stay after a save), `lock` (the lock of the folder) and
    `line` (which saved step the next saved step follows).
    """

    path: str
    keep: Keep
    lock: RunLock
    line: Line
    how: WriteOptions
    copies: Memory
    inbox: Memory
