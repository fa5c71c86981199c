"""One job at a time saves into a folder of checkpoints.

Rank 0 holds a lock on ``.lock`` from its first save until the store is closed. The lock ends with
the process, whatever ends it, so a dead job never keeps the next one out. The file says who holds
it. Where a file system does not carry locks from host to host, two jobs may both believe that they
hold it: then the later one has written its name there, and the other one finds that before its
next commit and stops (a fence).

The file also tells the folder from what is in its place when a disk is not mounted.
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from ...errors import CheckpointError, StorageError
from . import files

NAME = ".lock"
_SIZE = 256


class _Held(NamedTuple):
    """An open lock file, what it says, its file system, how many stores of this process use it."""

    descriptor: int
    text: bytes
    device: int
    users: int


_held: dict[str, _Held] = {}
_watched = False


class RunLock:
    """The right of this process to save into the folder `path`. For rank 0."""

    def __init__(self, path: str):
        self.path, self._key = path, os.path.realpath(path)
        self._mine = False

    def prepare(self) -> None:
        """Make the folder for the first save; later StorageError where it is gone.

        Made anew it would hide that earlier steps are lost, or lie under a disk that comes back.
        """
        if not self._mine:
            files.make_root(self.path)
        elif not Path(self.path).is_dir():
            raise StorageError(
                f"{self.path} is gone; put it back, or make an empty folder there to go on without "
                "the steps that it held"
            )

    def take(self, root: int) -> None:
        """Take the lock of an open folder, if it is not held; CheckpointError where it cannot be.

        Where the lock file is gone the folder was made anew, and so is the lock; but not on
        another file system: there the folder waits for one to be mounted again.
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
        _forget_in_children()
        now = time.strftime("%Y-%m-%d %H:%M:%S")
        who = f"process {os.getpid()} on {socket.gethostname()} since {now}"
        text = f"{who} {secrets.token_hex(8)}".encode().ljust(_SIZE - 1)[: _SIZE - 1] + b"\n"
        while True:
            descriptor = files.open_or_create(NAME, root)
            try:
                free = True
                with suppress(OSError):  # a file system without locks: the fence alone
                    free = files.lock(descriptor)
                if not free:
                    with suppress(FileNotFoundError):  # it has just been released
                        holder = b" ".join(files.read_small(NAME, root, _SIZE).split()[:-1])
                        raise CheckpointError(
                            f"{self.path} is in use by {holder.decode(errors='replace')}; "
                            "wait for that job or stop it, or save into another folder"
                        )
                elif files.is_same(descriptor, NAME, root):
                    files.write_at(descriptor, text, 0)
                    files.sync(descriptor)  # other hosts see it from now on
                    return _Held(descriptor, text, os.fstat(root).st_dev, 0)
            except BaseException:
                files.close(descriptor)
                raise
            files.close(descriptor)  # its holder has just removed it

    def check(self, root: int) -> None:
        """Raise CheckpointError if another job has taken the folder over meanwhile."""
        found = b""
        with suppress(OSError):
            found = files.read_small(NAME, root, _SIZE)
        if found != _held[self._key].text:
            holder = b" ".join(found.split()[:-1]).decode(errors="replace") or "somebody"
            raise CheckpointError(
                f"{self.path} was taken over by {holder}; this job does not save there any more"
            )

    def release(self) -> None:
        """Give the right back; a second call does nothing."""
        held = _held.get(self._key)
        mine, self._mine = self._mine, False
        if not mine or held is None:  # a child of the process that holds it
            return
        if held.users > 1:  # replaced, never gone: the thread of another store may look
            _held[self._key] = held._replace(users=held.users - 1)
            return
        del _held[self._key]
        with suppress(OSError), files.folder(self.path) as root:
            if files.read_small(NAME, root, _SIZE) == held.text:
                files.remove_file(NAME, root)
        files.close(held.descriptor)


def _forget_in_children() -> None:
    """Let a forked child close what it inherits, once: else the lock would live as long as it."""
    global _watched
    if not _watched:
        _watched = True
        os.register_at_fork(after_in_child=_forget)


def _forget() -> None:
    for held in _held.values():
        files.close(held.descriptor)
    _held.clear()
