"""All system calls with which a checkpoint store changes the disk; safe opening of files.

Since all these calls are in this module, a test can interrupt each of them. Names are relative to
the descriptor of an open folder (`root`, `folder` or `where`), and links are not followed.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np

#: The number of bytes that one checksum covers. Tests lower this number; readers take it from the
#: manifest.
BLOCK = 1 << 20
#: The number of blocks in one read or write.
GROUP = 4
#: For direct input and output, which bypasses the cache of the system, positions in files,
#: addresses in memory and numbers of bytes must be multiples of this number.
PAGE = 4096
_DIRECT = getattr(os, "O_DIRECT", 0)
#: The flags for all files. O_NONBLOCK is among them, because opening a FIFO would otherwise wait
#: for a writer that never comes.
_SAFE = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC

#: The functions that change the disk, in the order in which a save uses them.
CHANGES = (
    "make_root",
    "make_folder",
    "create",
    "open_or_create",
    "lock",
    "write_at",
    "sync",
    "rename",
    "remove_file",
    "remove_folder",
)


# ---------------------------------------------------------------------------------- changing


def make_root(path: str) -> None:
    """Make the store's own folder and its parents if they do not exist."""
    Path(path).mkdir(parents=True, exist_ok=True)


def make_folder(name: str, root: int) -> None:
    """Make a folder. Raises FileExistsError if the name exists."""
    os.mkdir(name, dir_fd=root)


def create(name: str, folder: int) -> int:
    """Create a file and return its descriptor. Raises FileExistsError."""
    return os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | _SAFE, 0o666, dir_fd=folder)


def open_or_create(name: str, folder: int) -> int:
    """Open a file for writing, or create it, and return its descriptor."""
    return os.open(name, os.O_RDWR | os.O_CREAT | _SAFE, 0o666, dir_fd=folder)


def lock(descriptor: int) -> bool:
    """Lock a file until it is closed or the process ends; return False if it is locked already."""
    with suppress(BlockingIOError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False


def is_locked(descriptor: int) -> bool:
    """Return whether another process holds the lock of an open file."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    return False


def write_at(descriptor: int, data, offset: int) -> None:
    """Write all of `data` at `offset`. Raises OSError."""
    view = memoryview(data).cast("B")
    while len(view):
        try:
            written = os.pwrite(descriptor, view, offset)
        except OSError as error:
            _to_cache(descriptor, error)
            continue
        if written == 0:
            raise OSError(errno.ENOSPC, "the file system takes no more bytes")
        view, offset = view[written:], offset + written


def begin_sync(descriptor: int, offset: int, count: int) -> None:
    """Ask the system to begin to write a range of a file to the disk, without waiting."""
    with suppress(OSError, AttributeError):  # macOS lacks posix_fadvise
        # Linux begins to write what nobody needs in the cache any more.
        os.posix_fadvise(descriptor, offset, count, os.POSIX_FADV_DONTNEED)


def sync(descriptor: int) -> None:
    """Wait until the bytes of a file, or the names in a folder, are on stable storage."""
    os.fsync(descriptor)


def rename(old: str, new: str, folder: int) -> None:
    """Rename a file or folder within `folder`; fails if `new` is a folder that is not empty."""
    os.rename(old, new, src_dir_fd=folder, dst_dir_fd=folder)


def remove_file(name: str, folder: int) -> None:
    """Remove a file, if it exists."""
    with suppress(FileNotFoundError):
        os.unlink(name, dir_fd=folder)


def remove_folder(name: str, root: int) -> bool:
    """Remove a folder, if it exists; return False if it is not empty and stays."""
    try:
        os.rmdir(name, dir_fd=root)
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTEMPTY, errno.EEXIST):
            raise
        return error.errno == errno.ENOENT
    return True


# -------------------------------------------------------------------- direct input and output


def set_direct_io(descriptor: int, on: bool) -> bool:
    """Switch on or off that a file bypasses the system's cache; return whether it does now."""
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    with suppress(OSError):
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | _DIRECT if on else flags & ~_DIRECT)
        return on and _DIRECT != 0
    return False


def _to_cache(descriptor: int, error: OSError) -> None:
    """Switch direct input and output off if they caused `error`; otherwise raise `error`."""
    if error.errno != errno.EINVAL or not fcntl.fcntl(descriptor, fcntl.F_GETFL) & _DIRECT:
        raise error
    set_direct_io(descriptor, False)


def paged(count: int) -> np.ndarray:
    """Return an array of `count` bytes whose address is a multiple of 4096, the size of a page."""
    memory = np.empty(count + PAGE, np.uint8)
    skip = -memory.ctypes.data % PAGE
    return memory[skip : skip + count]


# ----------------------------------------------------------------------------------- reading


@contextmanager
def folder(name: str, root: int | None = None) -> Iterator[int]:
    """Open a folder, yield its descriptor, and close it at the end of the ``with`` block.

    If `root`, an open folder, is given, `name` is a name in it and must not be a link.
    """
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
    descriptor = os.open(name, flags | (0 if root is None else os.O_NOFOLLOW), dir_fd=root)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def open_regular(name: str, where: int) -> tuple[int, int]:
    """Open a regular file for reading; return (descriptor, size). Raises OSError."""
    descriptor = os.open(name, os.O_RDONLY | _SAFE, dir_fd=where)
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", name)
    return descriptor, found.st_size


def open_for_lock(name: str, where: int) -> int:
    """Open an existing file to lock it."""
    # Also for writing, since NFS cannot lock a file that is open only for reading.
    return os.open(name, os.O_RDWR | _SAFE, dir_fd=where)


def read_at(descriptor: int, view: memoryview, offset: int, enough: int | None = None) -> int:
    """Read from `offset` into `view`; return the number of bytes. Stop after `enough` bytes."""
    done = 0
    while done < (len(view) if enough is None else enough):
        try:
            count = os.preadv(descriptor, [view[done:]], offset + done)
        except OSError as error:
            _to_cache(descriptor, error)
            continue
        if count == 0:
            break
        done += count
    return done


def begin_read(descriptor: int, offset: int, count: int) -> None:
    """Ask the system to begin to read a range of a file into its cache, without waiting."""
    with suppress(OSError, AttributeError):  # macOS lacks posix_fadvise
        os.posix_fadvise(descriptor, offset, count, os.POSIX_FADV_WILLNEED)


def read_small(name: str, where: int, limit: int) -> bytes:
    """Return all bytes of a regular file. Raises OSError if they are too many."""
    descriptor, size = open_regular(name, where)
    with os.fdopen(descriptor, "rb") as file:
        if size > limit:
            raise OSError(errno.EFBIG, f"{size} bytes, at most {limit} are allowed", name)
        return file.read(size)


def names(where: int) -> list[str]:
    """Return the names in an open folder, sorted."""
    return sorted(os.listdir(where))


def folders_and_files(where: int) -> tuple[list[str], list[str]]:
    """Return the names of the folders in an open folder, and all other names (also links)."""
    found: tuple[list[str], list[str]] = ([], [])
    with os.scandir(where) as entries:
        for entry in entries:
            found[not entry.is_dir(follow_symlinks=False)].append(entry.name)
    return found


def is_there(name: str, where: int) -> bool:
    """Whether an open folder has an entry of this name, of any type."""
    with suppress(FileNotFoundError):
        os.stat(name, dir_fd=where, follow_symlinks=False)
        return True
    return False


def is_same(descriptor: int, name: str, where: int) -> bool:
    """Whether `name` in an open folder is the same file as the open `descriptor`."""
    with suppress(FileNotFoundError):
        found = os.stat(name, dir_fd=where, follow_symlinks=False)
        return os.path.samestat(os.fstat(descriptor), found)
    return False


def total_size(where: int) -> int:
    """Return the total size of all files in an open folder; skip files that vanish meanwhile."""
    total = 0
    with os.scandir(where) as entries:
        for entry in entries:
            with suppress(FileNotFoundError):
                total += entry.stat(follow_symlinks=False).st_size
    return total


def is_folder(name: str, root: int) -> bool:
    """Whether `name` in an open folder is a folder, and not a link to a folder."""
    with suppress(OSError):
        return stat.S_ISDIR(os.stat(name, dir_fd=root, follow_symlinks=False).st_mode)
    return False


def close(descriptor: int) -> None:
    """Close the open file or folder with this descriptor."""
    os.close(descriptor)


def size(descriptor: int) -> int:
    """Return the size of an open file in bytes."""
    return os.fstat(descriptor).st_size
