"""A board on which the ranks of a job tell how they are, without any MPI call.

One file, one record of fixed size per rank, written by its owner with pwrite and read by all with
pread. On one host it lies in /dev/shm and has no name any more once all ranks have opened it, so
that nothing is left behind however the job ends. On several hosts it lies in a folder that all
of them see, and is opened anew at each look, which is what makes network file systems look again.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import uuid
from operator import itemgetter
from pathlib import Path

from ..errors import ConfigError, MismatchError, shown
from .agreement.run_on_all import difference, run_on_all

RECORD = 1024
_MEMORY = Path("/dev/shm")


class Board:
    """The ranks' records. Collective over `comm`, which is used on entering only.

    Parameters
    ----------
    comm : MPI.Intracomm
    directory : path, optional
        A folder that all ranks see; None is /dev/shm on one host, else the current folder.

    Raises
    ------
    ConfigError
        On all ranks, when some of them cannot see the file.
    """

    def __init__(self, comm, directory: str | os.PathLike | None = None):
        self.rank, self.size = comm.rank, comm.size
        self.fd: int | None = None
        self.path = Path()
        self._named = False  # whether the file still has a name

        def facts() -> tuple:
            where = None if directory is None else str(_folder(directory))
            return (socket.gethostname(), _namespace()), where

        if run_on_all(comm, "watch", facts, _meets_in_memory) and self._open(comm, _MEMORY):
            self._unlink()
            return
        where = Path.cwd() if directory is None else Path(directory)
        if not self._open(comm, where):
            error = ConfigError(
                f"watch: not all ranks see a file that rank 0 makes in {where}; pass directory=, "
                "a folder that exists on a file system which all hosts share"
            )
            error.everywhere = True
            raise error

    def _open(self, comm, folder: Path) -> bool:
        """Rank 0 makes the file in its `folder`; whether all ranks can read it there."""
        size = RECORD * comm.size

        def make() -> str | None:
            if comm.rank:
                return None
            with contextlib.suppress(OSError):
                name = str(folder.absolute() / f".mpidist-watch-{uuid.uuid4().hex}")
                with open(name, "xb") as file:  # noqa: PTH123 - "x": never somebody else's file
                    os.chmod(name, 0o600)  # noqa: PTH101
                    file.write(bytes(size))
                return name
            return None

        def look() -> bool:
            with contextlib.suppress(OSError):
                if Path(name).stat().st_size == size:
                    # In memory it is kept open, for it loses its name as soon as all have it.
                    if folder == _MEMORY:
                        self.fd = os.open(name, os.O_RDWR | os.O_CLOEXEC)
                    return True
            return False

        name = run_on_all(comm, "watch: making the board", make, itemgetter(0))
        if name is None:
            return False
        self.path, self._named = Path(name), True
        if run_on_all(comm, "watch: finding the board", look, all):
            return True
        self.close()
        self._unlink()
        return False

    def write(self, record: dict) -> None:
        """Publish this rank's record."""
        text = json.dumps(record, separators=(",", ":")).encode()
        while len(text) > RECORD:
            # Only the two texts can be long; the shorter of them is worth more.
            longest = max((key for key in record if isinstance(record[key], str)),
                          key=lambda key: len(record[key]))  # fmt: skip
            record = {**record, longest: record[longest][: len(record[longest]) // 2]}
            text = json.dumps(record, separators=(",", ":")).encode()
        with self._file(os.O_WRONLY) as fd:
            os.pwrite(fd, text.ljust(RECORD, b"\0"), self.rank * RECORD)

    def read(self) -> list[dict | None]:
        """Return all ranks' records; None where none was written or it was torn."""
        with self._file(os.O_RDONLY) as fd:
            data = os.pread(fd, RECORD * self.size, 0)
        records: list[dict | None] = []
        for rank in range(self.size):
            try:
                text = data[rank * RECORD : (rank + 1) * RECORD].rstrip(b"\0")
                record = json.loads(text) if text else None
            except ValueError:
                record = None
            records.append(record if isinstance(record, dict) else None)
        return records

    @contextlib.contextmanager
    def _file(self, mode: int):
        if self.fd is not None:
            yield self.fd
            return
        fd = os.open(self.path, mode | os.O_CLOEXEC)
        try:
            yield fd
            if mode == os.O_WRONLY:
                os.fsync(fd)
        finally:
            os.close(fd)

    def close(self, *, last: bool = False) -> None:
        """Close the file; the `last` one removes a file that still has a name."""
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None
        if last and self._named:
            self.path.unlink(missing_ok=True)

    def _unlink(self) -> None:
        self._named = False
        if self.rank == 0:
            self.path.unlink(missing_ok=True)


def _folder(directory) -> Path:
    try:
        return Path(directory)
    except TypeError:
        raise ConfigError(f"watch: directory={shown(directory)}; expected a path or None") from None


def _meets_in_memory(everyone: list[tuple]) -> bool:
    """Whether all ranks are on one host, and no folder was given; of folders rank 0's counts."""
    folders = [folder for _, folder in everyone]
    if None in folders and (text := difference([{"directory": str(f)} for f in folders])):
        raise MismatchError(f"watch: {text}; all ranks or none give a folder")
    return folders[0] is None and len({place for place, _ in everyone}) == 1


def _namespace() -> str:
    """Which process numbers are valid here: two containers of one name have different ones."""
    try:
        return os.readlink("/proc/self/ns/pid")  # noqa: PTH115 - not a path, but a name
    except OSError:
        return "?"
