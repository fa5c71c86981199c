"""Every system call that changes the disk, and the safe opening of files that may be forged.

The writer calls these functions and no others, so that a test can kill the process, or refuse,
at each single one. Folders are held open and everything below is named relative to them, without
following links: a folder swapped for a link in between is not entered.
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

#: Bytes that one checksum covers. Lowered by tests; readers take it from the manifest.
BLOCK = 1 << 20
#: So many blocks are read or written at once.
GROUP = 4
#: Where and in what sizes bytes may pass the system's cache by, in files and in memory.
PAGE = 4096
_DIRECT = getattr(os, "O_DIRECT", 0)

#: The functions that change something, in the order a save uses them.
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
    """Make the store's own folder, and those above it, where missing."""
    Path(path).mkdir(parents=True, exist_ok=True)


def make_folder(name: str, root: int) -> None:
    """Make a folder that must not exist yet."""
    os.mkdir(name, dir_fd=root)


def create(name: str, folder: int) -> int:
    """Create a file that must not exist yet and return its descriptor."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.open(name, flags, 0o666, dir_fd=folder)


def open_or_create(name: str, folder: int) -> int:
    """Open a file for writing, made where it is missing, and return its descriptor."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    return os.open(name, flags, 0o666, dir_fd=folder)


def lock(descriptor: int) -> bool:
    """Lock a file until it is closed or its process ends; False where another holds it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def write_at(descriptor: int, data, offset: int) -> None:
    """Write all of `data` at `offset`. Raises OSError, also when the disk is full."""
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
    """Let the system begin to bring a range of a file to the disk, without waiting.

    A hint: Linux starts to write pages that it is told nobody needs.
    """
    if hasattr(os, "posix_fadvise"):
        with suppress(OSError):
            os.posix_fadvise(descriptor, offset, count, os.POSIX_FADV_DONTNEED)


def sync(descriptor: int) -> None:
    """Wait until a file's bytes, or a folder's names, are on stable storage."""
    os.fsync(descriptor)


def rename(old: str, new: str, folder: int) -> None:
    """Rename within one folder. A folder is never put over one that has entries."""
    os.rename(old, new, src_dir_fd=folder, dst_dir_fd=folder)


def remove_file(name: str, folder: int) -> None:
    """Remove a file. One that is gone already is no error."""
    try:
        os.unlink(name, dir_fd=folder)
    except FileNotFoundError:
        return


def remove_folder(name: str, root: int) -> bool:
    """Remove an empty folder. False where something is left in it."""
    try:
        os.rmdir(name, dir_fd=root)
    except FileNotFoundError:
        return True
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
            return False
        raise
    return True


# -------------------------------------------------------------------------- past the cache


def set_direct(descriptor: int, on: bool) -> bool:
    """Let what is read or written pass the system's cache by, or no longer.

    Returns whether it does. Many file systems refuse, some of them not before the first read or
    write: those go through the cache then.
    """
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | _DIRECT if on else flags & ~_DIRECT)
    except OSError:
        return False
    return on and _DIRECT != 0


def _to_cache(descriptor: int, error: OSError) -> None:
    """Let what may not pass the cache by go through it from now on; else raise `error`."""
    if error.errno != errno.EINVAL or not fcntl.fcntl(descriptor, fcntl.F_GETFL) & _DIRECT:
        raise error
    set_direct(descriptor, False)


def paged(count: int) -> np.ndarray:
    """Return memory for `count` bytes that begins with a page."""
    memory = np.empty(count + PAGE, np.uint8)
    skip = -memory.ctypes.data % PAGE
    return memory[skip : skip + count]


# ----------------------------------------------------------------------------------- reading


@contextmanager
def folder(name: str, root: int | None = None) -> Iterator[int]:
    """Hold a folder open. Below `root` a link in its place is refused."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
    descriptor = os.open(name, flags | (0 if root is None else os.O_NOFOLLOW), dir_fd=root)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def open_regular(name: str, where: int) -> tuple[int, int]:
    """Open a file for reading and return (descriptor, size).

    Raises OSError for links and for everything that is not a regular file. O_NONBLOCK, because
    opening a FIFO would wait for a writer that never comes.
    """
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = os.open(name, flags, dir_fd=where)
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", name)
    return descriptor, found.st_size


def open_for_lock(name: str, where: int) -> int:
    """Open an existing file, so that it can be locked. NFS wants it writable."""
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    return os.open(name, flags, dir_fd=where)


def read_at(descriptor: int, view: memoryview, offset: int, enough: int | None = None) -> int:
    """Fill `view` from `offset` on and return the bytes read, fewer only at the end.

    Also stops when `enough` are there: what passes the cache by is read in whole pages.
    """
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
    """Let the system begin to read a range of a file, without waiting: a hint."""
    if hasattr(os, "posix_fadvise"):
        with suppress(OSError):
            os.posix_fadvise(descriptor, offset, count, os.POSIX_FADV_WILLNEED)


def read_small(name: str, where: int, limit: int) -> bytes:
    """Return a whole regular file of at most `limit` bytes."""
    descriptor, size = open_regular(name, where)
    try:
        if size > limit:
            raise OSError(errno.EFBIG, f"{size} bytes, at most {limit} are allowed", name)
        buffer = bytearray(size)
        return bytes(buffer[: read_at(descriptor, memoryview(buffer), 0)])
    finally:
        os.close(descriptor)


def names(where: int) -> list[str]:
    """Return the names in an open folder, sorted."""
    return sorted(os.listdir(where))


def folders_and_files(where: int) -> tuple[list[str], list[str]]:
    """Return the names of the folders in an open folder, and all others.

    Most file systems tell them apart without being asked for each; links are no folders.
    """
    found: tuple[list[str], list[str]] = ([], [])
    with os.scandir(where) as entries:
        for entry in entries:
            found[not entry.is_dir(follow_symlinks=False)].append(entry.name)
    return found


def is_there(name: str, where: int) -> bool:
    """Whether an open folder holds this name, whatever it is."""
    try:
        os.stat(name, dir_fd=where, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


def is_same(descriptor: int, name: str, where: int) -> bool:
    """Whether an open file is still the one of that name."""
    try:
        found = os.stat(name, dir_fd=where, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return os.path.samestat(os.fstat(descriptor), found)


def total_size(where: int) -> int:
    """Return the bytes of all files in an open folder. What goes meanwhile has none."""
    total = 0
    with os.scandir(where) as entries:
        for entry in entries:
            with suppress(FileNotFoundError):
                total += entry.stat(follow_symlinks=False).st_size
    return total


def is_folder(name: str, root: int) -> bool:
    """Whether `name` is a real folder, not a link to one."""
    try:
        return stat.S_ISDIR(os.stat(name, dir_fd=root, follow_symlinks=False).st_mode)
    except OSError:
        return False


def close(descriptor: int) -> None:
    """Close a descriptor."""
    os.close(descriptor)


def size(descriptor: int) -> int:
    """Return the size of an open file in bytes."""
    return os.fstat(descriptor).st_size
