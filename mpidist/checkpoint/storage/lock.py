"""The lock that lets only one job at a time save into a folder of checkpoints.

Rank 0 holds a lock on the file ``.lock`` from its first save until the store is closed. The system
releases it when the process ends. If a file system does not share locks between hosts, two jobs can
hold the lock at once. Each job writes its process and host into the file, so the earlier job
notices this before it commits its next step, and raises an error.
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from contextlib import ExitStack, suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple

from ...errors import CheckpointError, StorageError
from . import files

NAME = ".lock"
_SIZE = 256


class _Held(NamedTuple):
    """A lock file that this process holds open, and how many of its stores use the lock."""

    descriptor: int
    text: bytes
    device: int
    users: int


_held: dict[str, _Held] = {}


class RunLock:
    """The lock of this process on the folder `path`. Only rank 0 takes the lock."""

    def __init__(self, path: str):
        self.path, self._key = path, os.path.realpath(path)
        self._mine = False

    def prepare(self) -> None:
        """Make the folder of the store before the first save.

        Raises StorageError if the folder is missing at a later save.
        """
        if not self._mine:
            files.make_root(self.path)
        # A new folder would hide the loss of earlier steps, or a disk that is not mounted.
        elif not Path(self.path).is_dir():
            raise StorageError(
                f"{self.path} is gone; put it back, or make an empty folder there to go on without "
                "the steps that it held"
            )

    def take(self, root: int) -> None:
        """Take the lock of an open folder, unless this process holds the lock already.

        Raises CheckpointError if another process holds the lock. Raises StorageError if the lock
        file is missing and the folder is on another file system than before: its disk is probably
        not mounted.
        """
        held = _held.get(self._key)
        if held is None:
            self._mine, held = False, self._acquired(root)
        elif NAME not in files.names(root):
            if held.device != os.fstat(root).st_dev:
                raise StorageError(
                    f"{self.path} is on another file system than it was; is its disk mounted?"
                )
            renewed = self._acquired(root)._replace(users=held.users)
            files.close(held.descriptor)
            held = renewed
        _held[self._key] = held._replace(users=held.users + (not self._mine))
        self._mine = True

    def _acquired(self, root: int) -> _Held:
        """Take the lock of an open folder. Raises CheckpointError."""
        _forget_in_children()
        now = time.strftime("%Y-%m-%d %H:%M:%S")
        who = f"process {os.getpid()} on {socket.gethostname()} since {now}"
        text = f"{who} {secrets.token_hex(8)}".encode().ljust(_SIZE - 1)[: _SIZE - 1] + b"\n"
        looks = 5
        while True:
            with ExitStack() as stack:  # closes the file, unless the lock is taken
                descriptor = files.open_or_create(NAME, root)
                stack.callback(files.close, descriptor)
                free = True
                with suppress(OSError):  # on a file system without locks, only `check` helps
                    free = files.lock(descriptor)
                if not free and looks:  # another process may be in `holder` for a moment
                    looks -= 1
                    time.sleep(0.01)
                elif not free:
                    with suppress(FileNotFoundError):  # another process has just removed the file
                        holder = _holder(files.read_small(NAME, root, _SIZE)) or "another process"
                        raise CheckpointError(
                            f"{self.path} is in use by {holder}; wait for that job or stop it, or "
                            "save into another folder"
                        )
                elif files.is_same(descriptor, NAME, root):
                    files.write_at(descriptor, text, 0)
                    files.sync(descriptor)  # other hosts see this process's name from now on
                    held = _Held(descriptor, text, os.fstat(root).st_dev, 0)
                    stack.pop_all()
                    return held

    def check(self, root: int) -> None:
        """Raise CheckpointError if another job has taken this process's lock."""
        found = b""
        with suppress(OSError):
            found = files.read_small(NAME, root, _SIZE)
        if found != _held[self._key].text:
            holder = _holder(found)
            what = f"was taken over by {holder}" if holder else "was removed, or taken over"
            raise CheckpointError(f"{self.path} {what}; this job does not save there any more")

    def release(self) -> None:
        """Release the lock, if this object still holds it."""
        held = _held.get(self._key)
        mine, self._mine = self._mine, False
        if not mine or held is None:  # a forked child does not hold the lock
            return
        if held.users > 1:  # the entry is replaced, not removed, because another thread may read it
            _held[self._key] = held._replace(users=held.users - 1)
            return
        del _held[self._key]
        with suppress(OSError), files.folder(self.path) as root:
            if files.read_small(NAME, root, _SIZE) == held.text:
                files.remove_file(NAME, root)
        files.close(held.descriptor)


def holder(path: str) -> str:
    """Return the process that holds the lock of the folder `path` as a text, or ""."""
    with suppress(OSError), files.folder(path) as root:
        descriptor, _ = files.open_regular(NAME, root)
        try:
            if files.is_locked(descriptor):
                return _holder(files.read_small(NAME, root, _SIZE)) or "another process"
        finally:
            files.close(descriptor)
    return ""


def _holder(text: bytes) -> str:
    """Return the process that holds a lock as a text, from the contents of the lock file."""
    return b" ".join(text.split()[:-1]).decode(errors="replace")


@cache
def _forget_in_children() -> None:
    """Make each forked child process close the lock files that it inherits."""
    os.register_at_fork(after_in_child=_forget)


def _forget() -> None:
    for held in _held.values():
        files.close(held.descriptor)
    _held.clear()
