"""Map a file into memory without keeping it open.

Before Python 3.13, `mmap.mmap` keeps a descriptor of the file as long as the memory is used, and
most systems allow only 1,024 descriptors for each process.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref

import numpy as np

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long,
)  # fmt: skip
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_FAILED = ctypes.c_void_p(-1).value


class _Mapping:
    """The mapping of a file, from which NumPy makes an array; unmapped with the last array."""

    def __init__(self, file: int, nbytes: int):
        access = mmap.PROT_READ | mmap.PROT_WRITE
        address = _libc.mmap(None, nbytes, access, mmap.MAP_SHARED, file, 0)
        if address == _FAILED:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        self.__array_interface__ = {
            "version": 3, "data": (address, False), "shape": (nbytes,), "typestr": "|u1",
        }  # fmt: skip
        # Not at exit, when other threads and MPI may still use the memory.
        weakref.finalize(self, _libc.munmap, address, nbytes).atexit = False


def mapped_file(file: int, nbytes: int) -> np.ndarray:
    """Return the first `nbytes` bytes of a file as an array, whose changes all processes see.

    The caller may close the descriptor `file`. Raises OSError if the file cannot be mapped.
    """
    return np.asarray(_Mapping(file, nbytes))
