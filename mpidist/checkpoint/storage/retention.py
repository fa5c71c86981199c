"""Removal of old steps, and of the files of saves that were killed.

Only files and folders with names that a save uses are removed, and links are never followed. The
manifest is removed first: a folder without a manifest is not a checkpoint, so an interrupted
removal leaves no damaged checkpoint.
"""

from __future__ import annotations

import os
import re
import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field

from ... import events
from ..format.manifest import NAME, Damaged, Unreadable
from ..histories import Histories
from . import files, steps
from .steps import Entry
from .worker_thread import Worker

OWNER = "OWNER"
_OURS = re.compile(
    r"shard-[0-9]{5}\.(h5|table|json|part|failed)|MANIFEST\.json|OWNER|index(-[0-9a-f]{8}\.part|\.h5)",
    re.ASCII,
)
_TEMPORARY = re.compile(r"\.tmp-step-[0-9]{12}-[0-9a-f]{16}", re.ASCII)

#: Seconds that a temporary folder is kept if its owner may be a process on another host.
PATIENCE_SECONDS = 3600.0


def temporary_name(step: int, nonce: int) -> str:
    """Return the name of the temporary folder of a save; `nonce` is a random number."""
    return f".tmp-step-{step:012d}-{nonce:016x}"


def claim(folder: int) -> int:
    """Mark a temporary folder as used by this process, until the returned descriptor is closed."""
    with ExitStack() as stack:
        descriptor = files.create(OWNER, folder)
        stack.callback(files.close, descriptor)
        with suppress(OSError):  # a file system without locks: only the folder's age counts
            files.lock(descriptor)
        files.write_at(descriptor, f"{socket.gethostname()} {os.getpid()}\n".encode(), 0)
        stack.pop_all()
    return descriptor


def remove(name: str, root: int) -> bool:
    """Remove a step folder; return False if it stays because it holds other files."""
    with files.folder(name, root) as folder:
        ours = [entry for entry in files.names(folder) if _OURS.fullmatch(entry)]
        for entry in sorted(ours, key=lambda entry: (entry != NAME, entry == OWNER, entry)):
            files.remove_file(entry, folder)
    return files.remove_folder(name, root)


def remove_dead(root: int) -> list[str]:
    """Remove the temporary folders of saves whose process has ended; return their names."""
    removed = []
    for name in files.names(root):
        if _TEMPORARY.fullmatch(name) and files.is_folder(name, root):
            # An error is ignored: another process may be removing the folder, or the folder belongs
            # to another user.
            with suppress(OSError):
                if _is_dead(name, root) and remove(name, root):
                    removed.append(name)
    return removed


def _is_dead(name: str, root: int) -> bool:
    """Whether the process that owns a temporary folder (the file OWNER names it) has ended."""
    with files.folder(name, root) as folder:
        # The owner holds a lock on OWNER. Some file systems do not share locks between hosts, so
        # the folder of a process on another host must also be old.
        try:
            descriptor = files.open_for_lock(OWNER, folder)
        except FileNotFoundError:
            return _age(folder, root) > PATIENCE_SECONDS
        try:
            mine = False
            with suppress(OSError):  # a file system without locks: only the folder's age counts
                if not files.lock(descriptor):
                    return False
                host = os.pread(descriptor, 300, 0).split()[:1]
                mine = host == [socket.gethostname().encode()]
            return mine or _age(folder, root) > PATIENCE_SECONDS
        finally:
            files.close(descriptor)


def _age(folder: int, root: int) -> float:
    """Return the age of `folder` in seconds, by the clock of the file system."""
    return os.fstat(root).st_mtime - os.fstat(folder).st_mtime


def stay(path: str, error: OSError) -> None:
    """Report on stderr, and as an event, that old checkpoints could not be removed."""
    events.emit("checkpoint_not_removed", path=path, reason=str(error))
    print(f"mpidist: old checkpoints in {path} stay: {error}", file=sys.stderr)


@dataclass
class Keep:
    """Decides which saved steps of a store are kept, and removes all other steps.

    Attributes
    ----------
    newest : int or None
        How many undamaged steps of the newest history (series of saved steps) to keep. None keeps
        all.
    every : int or None
        Steps whose number is a multiple of this number are kept as well.
    bad : set of Entry
        Damaged steps. They are removed when they are older than all good steps that are kept.
    verified : Entry or None
        The newest step that was restored, or whose bytes were all checked. It is always kept.
    others : bool
        Whether the steps of other histories are kept.
    """

    newest: int | None
    every: int | None = None
    bad: set[Entry] = field(default_factory=set)
    verified: Entry | None = None
    others: bool = True
    _good: set[Entry] = field(default_factory=set)
    _removing: Worker | None = None

    def remove_aside(self, path: str, root: int, saved: Entry) -> None:
        """Call `remove_old` in a thread, since a disk needs time to free large files.

        The caller must keep the store locked, and call no other method, until it has called
        `settle`.
        """
        stack = ExitStack()
        own = stack.enter_context(files.folder(".", root))

        def work() -> None:
            with stack:
                self.remove_old(path, own, saved)

        self._removing = Worker(work, "mpidist-remove")
        try:
            self._removing.start()
        except RuntimeError:  # the system allows no more threads
            self._removing = None
            work()

    def settle(self) -> None:
        """Wait until the thread that `remove_aside` has started, if any, has ended."""
        if self._removing is not None:
            self._removing.end()
            self._removing = None

    def remove_old(self, path: str, root: int, saved: Entry) -> None:
        """Remove the old steps that are not needed any more, now that step `saved` is committed.

        `saved` itself is always kept, so the last good checkpoint is never removed.
        """
        self._good.add(saved)
        try:
            listed = Histories(root)
            everything, line = listed.everything(), listed.line(saved.history)
            self._good.intersection_update(everything)  # forget removed steps
            self.bad.intersection_update(everything)
            self.bad.discard(saved)  # a damaged folder of this name was removed
            old = [*self._old(path, [entry for entry in line if entry < saved], saved)]
            old += [] if self.others else set(everything).difference(line)
            for entry in dict.fromkeys(old):
                remove(entry.name, root)
            for mark in listed.idle_marks(saved.history):
                files.remove_file(mark.name, root)
        except OSError as error:
            stay(path, error)

    def _old(self, path: str, line: list[Entry], saved: Entry) -> Iterator[Entry]:
        """Yield the folders in `line` (newest first) that need not be kept after `saved`."""
        kept, damaged = [saved], list[Entry]()
        for entry in line:
            if entry[:2] == kept[-1][:2]:
                yield entry
            elif self.newest is None:
                return
            elif len(kept) == self.newest:
                if not self._is_special(entry):
                    yield entry
            elif self.is_good(path, entry):
                kept.append(entry)
            else:
                damaged.append(entry)
        for entry in {*damaged, *self.bad}:
            if entry < min(kept) and not self._is_special(entry):
                yield entry

    def _is_special(self, entry: Entry) -> bool:
        """Whether a step is kept although it is not among the newest good steps."""
        multiple = self.every is not None and entry.step % self.every == 0
        return entry == self.verified or (multiple and entry not in self.bad)

    def is_good(self, path: str, entry: Entry) -> bool:
        """Whether a step's manifest, the lists of its shards' parts, and its file sizes are right.

        A step in an unknown format counts as good.
        """
        if entry not in self._good | self.bad:
            try:
                steps.read_manifest(path, entry)
                self._good.add(entry)
            except Damaged:
                return False
            except Unreadable:  # another installation can read the step
                return True
        return entry not in self.bad
