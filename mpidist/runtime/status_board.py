"""A file in which the ranks of a job publish their state, without any MPI call.

The file has one record of fixed size per rank. If all ranks are on one host, the file lies in
/dev/shm and never has a name, so nothing is left behind if the job is killed. If the ranks are on
several hosts, the file lies in a folder that all hosts share.
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
    """The status records of all ranks, in a file. Collective over `comm`.

    Parameters
    ----------
    comm : MPI.Intracomm
    directory : path, optional
        A folder that all ranks share. None means /dev/shm if all ranks are on one host, else the
        current folder.

    Raises
    ------
    ConfigError
        On all ranks, if some rank cannot find the file of the records, which rank 0 makes.
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
        """Make the file in `folder` on rank 0; return whether all ranks can read it there."""
        size = RECORD * comm.size

        def make() -> Path | None:
            with contextlib.suppress(OSError):
                if comm.rank == 0 and folder == _MEMORY:
                    self.fd = os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
                    os.pwrite(self.fd, bytes(size), 0)
                    return Path(f"/proc/{os.getpid()}/fd/{self.fd}")
                if comm.rank == 0:
                    path = folder.absolute() / f".mpidist-watch-{uuid.uuid4().hex}"
                    with path.open("xb") as file:  # "x" never opens the file of another program
                        path.chmod(0o600)
                        file.write(bytes(size))
                    return path
            return None

        def look() -> bool:
            with contextlib.suppress(OSError):
                if path.stat().st_size == size:
                    # A file in memory stays open, because its name is removed as soon as all ranks
                    # have it open.
                    if folder == _MEMORY and self.fd is None:
                        self.fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
                    return True
            return False

        path = run_on_all(comm, "watch: making the board", make, itemgetter(0))
        if path is None:
            self.close()
            return False
        self.path, self._named = path, folder != _MEMORY
        if run_on_all(comm, "watch: finding the board", look, all):
            return True
        self.close(last=self.rank == 0)
        return False

    def write(self, record: dict) -> None:
        """Publish `record` (JSON values) as the status of this rank."""
        while len(text := json.dumps(record, separators=(",", ":")).encode()) > RECORD:
            # Only the two texts of a record can be long. The longer text is cut, because the
            # shorter text is more useful.
            longest = max((key for key in record if isinstance(record[key], str)),
                          key=lambda key: len(record[key]))  # fmt: skip
            record = {**record, longest: record[longest][: len(record[longest]) // 2]}
        with self._file(os.O_WRONLY) as fd:
            os.pwrite(fd, text.ljust(RECORD, b"\0"), self.rank * RECORD)

    def read(self) -> list[dict | None]:
        """Return the records of all ranks; None for a rank without a complete record."""
        with self._file(os.O_RDONLY) as fd:
            data = os.pread(fd, RECORD * self.size, 0)
        return [_decoded(data[k * RECORD : (k + 1) * RECORD]) for k in range(self.size)]

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
        """Close the file; if `last` is true, also delete it.

        A file in /dev/shm was made without a name: it is deleted when all ranks have closed it.
        """
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None
        if last and self._named:
            self.path.unlink(missing_ok=True)


def _decoded(data: bytes) -> dict | None:
    """Decode a record; return None if the rank has written no record, or only a part of one."""
    with contextlib.suppress(ValueError):
        record = json.loads(data.rstrip(b"\0"))
        return record if isinstance(record, dict) else None
    return None


def _folder(directory) -> Path:
    try:
        return Path(directory)
    except TypeError:
        raise ConfigError(f"watch: directory={shown(directory)}; expected a path or None") from None


def _meets_in_memory(everyone: list[tuple]) -> bool:
    """Return whether the file can lie in /dev/shm: all ranks are on one host and pass no folder."""
    folders = [folder for _, folder in everyone]
    if None in folders and (text := difference([{"directory": str(f)} for f in folders])):
        raise MismatchError(f"watch: {text}; pass a folder on all ranks or on none")
    return folders[0] is None and len({place for place, _ in everyone}) == 1


def _namespace() -> str:
    """Return the name of the process namespace, which differs between containers of one host."""
    try:
        return os.readlink("/proc/self/ns/pid")  # noqa: PTH115 - not a path, but a name
    except OSError:
        return "?"
