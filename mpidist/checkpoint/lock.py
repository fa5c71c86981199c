"""One job at a time saves into a folder of checkpoints.

Rank 0 holds a lock on ``.lock`` from its first save until the store is closed. The lock ends with
the process, whatever ends it, so a dead job never keeps the next one out. The file says who holds
it. Where a file system does not carry locks from host to host, two jobs may both believe that they
hold it: then the later one has written its name there, and the other one finds that before its
next commit and stops (a fence).
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from contextlib import suppress

from mpidist.checkpoint import files
from mpidist.errors import CheckpointError

NAME = ".lock"
_SIZE = 256

#: Descriptor, what it says, and how many stores of this process use it, by folder.
_held: dict[str, tuple[int, bytes, int]] = {}


class RunLock:
    """The right of this process to save into the folder `path`. Local; for rank 0."""

    def __init__(self, path: str):
        self.path = os.path.realpath(path)
        self._mine = False

    def take(self, root: int) -> None:
        """Take the lock of an open folder, once; CheckpointError where another job holds it."""
        if self._mine:
            return
        descriptor, text, users = _held.get(self.path) or (*self._take(root), 0)
        _held[self.path] = (descriptor, text, users + 1)
        self._mine = True

    def _take(self, root: int) -> tuple[int, bytes]:
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
                    return descriptor, text
            except BaseException:
                files.close(descriptor)
                raise
            files.close(descriptor)  # its holder has just removed it

    def check(self, root: int) -> None:
        """Raise CheckpointError if another job has taken the folder over meanwhile."""
        _, text, _ = _held[self.path]
        found = b""
        with suppress(OSError):
            found = files.read_small(NAME, root, _SIZE)
        if found != text:
            holder = b" ".join(found.split()[:-1]).decode(errors="replace") or "somebody"
            raise CheckpointError(
                f"{self.path} was taken over by {holder}; this job does not save there any more"
            )

    def release(self) -> None:
        """Give the right back; a second call does nothing."""
        if not self._mine:
            return
        self._mine = False
        descriptor, text, users = _held[self.path]
        if users > 1:  # replaced, never gone: the thread of another store may look
            _held[self.path] = (descriptor, text, users - 1)
            return
        del _held[self.path]
        with suppress(OSError), files.folder(self.path) as root:
            if files.read_small(NAME, root, _SIZE) == text:
                files.remove_file(NAME, root)
        files.close(descriptor)
