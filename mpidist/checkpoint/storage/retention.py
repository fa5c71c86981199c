"""What may be removed from a store: its old steps, and files of saves that were killed.

Only names that a save makes are touched, only inside folders that a save names, never through a
link, and a folder that holds anything else stays. Removing begins with the manifest: without it
the rest is no checkpoint any more, so an interrupted removal is not a damaged one.
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

#: A temporary folder that looks abandoned, but may be of another host, is left alone this long.
PATIENCE_SECONDS = 3600.0


def temporary_name(step: int, nonce: int) -> str:
    """Return the name of the folder of a save that is under way. Pure."""
    return f".tmp-step-{step:012d}-{nonce:016x}"


def claim(folder: int) -> int:
    """Mark an open temporary folder as owned by this process, until the descriptor is closed.

    The lock ends with the process, whatever ends it.
    """
    descriptor = files.create(OWNER, folder)
    try:
        with suppress(OSError):  # a file system without locks: then age alone tells
            files.lock(descriptor)
        files.write_at(descriptor, f"{socket.gethostname()} {os.getpid()}\n".encode(), 0)
    except BaseException:
        files.close(descriptor)
        raise
    return descriptor


def remove(name: str, root: int) -> bool:
    """Remove a folder of the store; return False if it holds files that no save made."""
    with files.folder(name, root) as folder:
        ours = [entry for entry in files.names(folder) if _OURS.fullmatch(entry)]
        for entry in sorted(ours, key=lambda entry: (entry != NAME, entry == OWNER, entry)):
            files.remove_file(entry, folder)
    return files.remove_folder(name, root)


def remove_dead(root: int) -> list[str]:
    """Remove temporary folders whose save has died; return their names."""
    removed = []
    for name in files.names(root):
        if _TEMPORARY.fullmatch(name) and files.is_folder(name, root):
            try:
                if _is_dead(name, root) and remove(name, root):
                    removed.append(name)
            except OSError:
                continue  # someone else is removing it, or it is not ours to remove
    return removed


def _is_dead(name: str, root: int) -> bool:
    """Whether nobody is writing into a temporary folder any more.

    The lock tells. But some cluster file systems keep locks to one host, so the lock of another
    host's owner, and a folder that has no owner yet, must in addition be old, by the clock of
    the file system itself.
    """
    with files.folder(name, root) as folder:
        try:
            descriptor = files.open_for_lock(OWNER, folder)
        except FileNotFoundError:
            return _age(folder, root) > PATIENCE_SECONDS
        try:
            mine = False
            with suppress(OSError):  # a file system without locks: age alone tells
                if not files.lock(descriptor):
                    return False
                host = os.pread(descriptor, 300, 0).split()[:1]
                mine = host == [socket.gethostname().encode()]
            return mine or _age(folder, root) > PATIENCE_SECONDS
        finally:
            files.close(descriptor)


def _age(folder: int, root: int) -> float:
    """Seconds between the last change of a folder and the last change of the store."""
    return os.fstat(root).st_mtime - os.fstat(folder).st_mtime


def stay(path: str, error: OSError) -> None:
    """Say that old checkpoints are left where they are."""
    events.emit("checkpoint_not_removed", path=path, reason=str(error))
    print(f"mpidist: old checkpoints in {path} stay: {error}", file=sys.stderr)


@dataclass
class Keep:
    """Which steps of the newest history's line stay; those of other histories all do.

    Attributes
    ----------
    newest : int or None
        So many good ones; None keeps all.
    every : int or None
        And all whose number is a multiple of this.
    bad : set of Entry
        Known as damaged: they do not count as kept, and go when they are older than all that are.
    verified : Entry or None
        The newest of which every byte was checked, or that was restored: it stays.
    others : bool
        Whether other histories stay.
    """

    newest: int | None
    every: int | None = None
    bad: set[Entry] = field(default_factory=set)
    verified: Entry | None = None
    others: bool = True
    _good: set[Entry] = field(default_factory=set)
    _removing: Worker | None = None

    def remove_aside(self, path: str, root: int, saved: Entry) -> None:
        """Do as `remove_old`, in a thread: a disk takes its time to free so much.

        Until `settle` nothing else may be asked of this object, and the store stays locked.
        """
        stack = ExitStack()
        own = stack.enter_context(files.folder(".", root))

        def work() -> None:
            with stack:
                self.remove_old(path, own, saved)

        self._removing = Worker(work, "mpidist-remove")
        try:
            self._removing.start()
        except RuntimeError:  # no more threads
            self._removing = None
            work()

    def settle(self) -> None:
        """Wait until nothing is being removed."""
        if self._removing is not None:
            self._removing.end()
            self._removing = None

    def remove_old(self, path: str, root: int, saved: Entry) -> None:
        """Remove what need not stay beside `saved`, which always does.

        So the last good checkpoint is never removed. Here a step counts as damaged if its
        manifest, its tables or the sizes of its files are wrong; a step is checked only once. If
        something cannot be removed, that is reported, and the save has still succeeded.
        """
        try:
            self._remove_old(path, root, saved)
        except OSError as error:
            stay(path, error)

    def _remove_old(self, path: str, root: int, saved: Entry) -> None:
        self._good.add(saved)
        listed = Histories(root)
        everything, line = listed.everything(), listed.line(saved.history)
        self._good.intersection_update(everything)  # a long run forgets what is gone
        self.bad.intersection_update(everything)
        self.bad.discard(saved)  # a damaged step of this name was removed, and the name is free
        old = [*self._old(path, [entry for entry in line if entry < saved], saved)]
        old += [] if self.others else set(everything).difference(line)
        for entry in dict.fromkeys(old):
            remove(entry.name, root)
        for mark in listed.idle_marks(saved.history):
            files.remove_file(mark.name, root)

    def _old(self, path: str, line: list[Entry], saved: Entry) -> Iterator[Entry]:
        """Yield what need not stay of a line, newest first, beside `saved`.

        Only as many are looked at as are to be kept. Of a step that is there twice, since a save
        was killed before it had removed the older one, that one goes.
        """
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
        if entry == self.verified:
            return True
        return self.every is not None and entry.step % self.every == 0 and entry not in self.bad

    def is_good(self, path: str, entry: Entry) -> bool:
        """Whether a step is not damaged, as far as its manifest and sizes tell."""
        if entry in self.bad:
            return False
        if entry not in self._good:
            try:
                steps.read_manifest(path, entry)
            except Damaged:
                return False
            except Unreadable:  # whole, for another installation: it counts
                return True
            self._good.add(entry)
        return True
