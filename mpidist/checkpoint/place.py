"""Where a store saves and restores, and how: what it keeps for as long as it is open."""

from __future__ import annotations

from typing import NamedTuple

from .histories import Line
from .storage.lock import RunLock
from .storage.retention import Keep


class WriteOptions(NamedTuple):
    """How shards are written: past the system's cache where it can be; with a SHA-256 of each."""

    direct: bool = True
    sha256: bool = False


class Place(NamedTuple):
    """The folder of a store, and what rank 0 asks about it.

    keep : what to remove after a commit.
    lock : taken by rank 0.
    line : where the store stands: which history a save is of.
    """

    path: str
    keep: Keep
    lock: RunLock
    line: Line
    how: WriteOptions
