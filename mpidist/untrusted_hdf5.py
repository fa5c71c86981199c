"""Open untrusted HDF5 files so that a program reads only numbers that are in the file itself.

In HDF5, a name in a file may be a link to another file, and the data of a dataset may lie in
another file such as /etc/passwd. A small file can declare a dataset of 35 TB, and a data type can
contain pointers. Arrays of numbers need none of these features, so this module refuses them:

    with untrusted_hdf5.open_untrusted(path) as file:
        images = untrusted_hdf5.checked_dataset(file, "train/images")    raises ConfigError

The parser of HDF5 itself has known vulnerabilities (`known_holes`). The only protection against
them is to compare a digest (such as SHA-256) of the file, before you open it, with a digest from a
source that you trust.
"""

from __future__ import annotations

import importlib
import os
import stat
from contextlib import suppress
from functools import cache
from math import prod

import h5py

from . import events
from .errors import ConfigError

#: Published vulnerabilities of HDF5, with which a crafted file can overwrite memory of the process,
#: and the version of HDF5 that fixes them.
_HOLES = (
    "CVE-2025-2308",
    "CVE-2025-2309",
    "CVE-2025-44904",
    "CVE-2026-17572",
    "CVE-2026-17573",
    "CVE-2026-26197",
    "CVE-2026-26199",
)
_MENDED = (2, 2, 0)

#: Filters of HDF5 and h5py, and the largest number of bytes that each can unpack from one stored
#: byte.
_FILTERS = {
    h5py.h5z.FILTER_DEFLATE: 1032,
    h5py.h5z.FILTER_SHUFFLE: 1,
    h5py.h5z.FILTER_FLETCHER32: 1,
    h5py.h5z.FILTER_SZIP: 1 << 14,
    h5py.h5z.FILTER_LZF: 88,
}
#: Filters of hdf5plugin, which unpack at most `_PLUGIN` bytes from one stored byte; no smaller
#: bound is known.
_PLUGINS = {
    307: "bzip2", 32001: "blosc", 32004: "lz4", 32008: "bitshuffle", 32013: "zfp", 32015: "zstd",
    32017: "sz", 32018: "fcidecomp", 32024: "sz3", 32026: "blosc2", 32028: "sperr", 32033: "htj2k",
}  # fmt: skip
_PLUGIN = 1 << 20


def open_untrusted(path, folder: int | None = None, *, follow: bool = False) -> h5py.File:
    """Open an HDF5 file for reading. The caller must close the file.

    Parameters
    ----------
    path : path-like
    folder : int, optional
        The descriptor of an open folder, to which `path` is relative.
    follow : bool
        Whether `path` itself may be a symbolic link.

    Raises
    ------
    ConfigError
        `path` is not a regular file, or not an HDF5 file.
    """
    _report_holes()
    try:
        descriptor = _open_regular(path, folder, follow)
    except OSError as error:
        raise ConfigError(f"{path} cannot be opened: {error.strerror}") from None
    try:
        # HDF5 gets the descriptor and not the path. So HDF5 opens the file that was checked, even
        # if another file now has that path.
        return h5py.File(f"/dev/fd/{descriptor}", "r", locking=False)
    except (OSError, RuntimeError, ValueError) as error:
        raise ConfigError(f"{path} is not an HDF5 file that can be read: {error}") from None
    finally:
        os.close(descriptor)


def _open_regular(path, folder: int | None, follow: bool) -> int:
    # Without O_NONBLOCK, opening a FIFO would wait for a writer that never comes.
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW)
    descriptor = os.open(path, flags, dir_fd=folder)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(0, "not a regular file")
    return descriptor


def checked_dataset(file: h5py.File, name: str, *, plugins: bool = False) -> h5py.Dataset:
    """Return the dataset `name` after a check that all its numbers are in `file` itself.

    Parameters
    ----------
    file : h5py.File
    name : str
        The path of the dataset inside the file, such as "train/images".
    plugins : bool
        Whether filters of the package hdf5plugin, if installed, may decompress the dataset. Pass
        True only for a file that the user of the program has chosen.

    Raises
    ------
    ConfigError
        Some numbers of the dataset are in another file, or a filter of the dataset is missing.
    """
    try:
        found = _walk(file, name)
        ratio = _ratio(found, name, plugins)
        reason = _objection(found, os.fstat(file.id.get_vfd_handle()).st_size, ratio)
    except ConfigError:
        raise
    except (OSError, RuntimeError, ValueError, TypeError, KeyError, OverflowError) as error:
        raise ConfigError(f"dataset {name!r} cannot be read: {error}") from None
    if reason:
        raise ConfigError(f"dataset {name!r} {reason}; only numbers in the file itself are read")
    return found


def _walk(file: h5py.File, name: str) -> h5py.Dataset:
    """Open the dataset `name` of a file; raise ConfigError if a link leads to it."""
    place = file
    for key in name.strip("/").split("/"):
        named = isinstance(place, h5py.Group) and key not in ("", ".")
        link = place.get(key, getlink=True) if named else None
        if link is None:
            raise ConfigError(f"there is no dataset {name!r}")
        if not isinstance(link, h5py.HardLink):
            raise ConfigError(f"{name!r} is a link to another place; name the dataset itself")
        place = place[key]
    if not isinstance(place, h5py.Dataset):
        raise ConfigError(f"{name!r} is not a dataset")
    return place


def _ratio(found: h5py.Dataset, name: str, plugins: bool) -> int:
    """Return how many bytes the filters of a dataset can make of one stored byte, at most.

    Raises ConfigError if a filter is not installed or not allowed.
    """
    settings, ratio = found.id.get_create_plist(), 1
    for number in range(settings.get_nfilters()):
        code = settings.get_filter(number)[0]
        known = _PLUGINS.get(code, "szip" if code == h5py.h5z.FILTER_SZIP else "")
        what = f"dataset {name!r} needs the filter {f'{known} ({code})' if known else code}"
        if code not in _FILTERS and not (plugins and known):
            raise ConfigError(f"{what}; only filters of HDF5 and h5py are allowed here")
        if not _decodes(code):
            cure = "pip install hdf5plugin" if known in _PLUGINS.values() else "use another HDF5"
            raise ConfigError(f"{what}, which is not installed: {cure}")
        ratio *= _FILTERS.get(code, _PLUGIN)
    return ratio


def _decodes(code: int) -> bool:
    """Return whether this process can decompress data of the filter `code`.

    The package hdf5plugin is imported if it has this filter.
    """
    if code in _PLUGINS and not h5py.h5z.filter_avail(code):
        with suppress(ImportError):
            importlib.import_module("hdf5plugin")
    enabled = h5py.h5z.FILTER_CONFIG_DECODE_ENABLED
    return h5py.h5z.filter_avail(code) and bool(h5py.h5z.get_filter_info(code) & enabled)


def _objection(found: h5py.Dataset, size: int, ratio: int) -> str | None:
    """Return why a dataset is refused, or None if it has plain numbers inside its file.

    `size` is the size of the file in bytes, and `ratio` the result of `_ratio`.
    """
    if found.is_virtual or found.external:
        return "lies in other files"
    plain = found.dtype.kind in "biufcS" and not h5py.check_enum_dtype(found.dtype)
    if found.shape is None or not plain:
        return f"is of type {found.dtype}"
    # HDF5 unpacks whole chunks, even if a chunk extends beyond the end of the array.
    chunks = found.chunks or (1,) * len(found.shape)
    whole = [-(-n // chunk) * chunk for n, chunk in zip(found.shape, chunks, strict=True)]
    declared = prod(whole) * found.id.get_type().get_size()
    stored = min(found.id.get_storage_size(), size)
    if found.chunks is None and found.id.get_offset() is not None:
        stored = min(stored, size - found.id.get_offset())
    if declared > stored * ratio:
        return f"declares {declared} bytes, but the file holds only {stored}"
    return None


def known_holes() -> str | None:
    """Return a text with the known vulnerabilities of this HDF5 library, or None if it has none."""
    if h5py.version.hdf5_version_tuple[:3] >= _MENDED:
        return None
    return (
        f"HDF5 {h5py.version.hdf5_version} can be made to overwrite memory by a crafted file "
        f"({', '.join(_HOLES)}; fixed in {'.'.join(map(str, _MENDED))}): check the digest "
        "of a file from an untrusted source before you open it"
    )


@cache
def _report_holes() -> None:
    """Write the known vulnerabilities to the event log, once in each process."""
    if known_holes():
        events.emit("hdf5_known_holes", version=h5py.version.hdf5_version, holes=list(_HOLES))
