"""The data sources that a job file can name.

To add one, write a function that returns a train and a test source, and add it to this module.
"""

from __future__ import annotations

from collections.abc import Callable

from .digits import digits
from .readers.hdf5 import hdf5
from .readers.idx import idx
from .readers.libsvm import libsvm
from .readers.youtube8m_frames import youtube8m
from .sources import Source

SOURCES: dict[str, Callable[..., tuple[Source, Source]]] = {
    "digits": digits,
    "idx": idx,
    "hdf5": hdf5,
    "libsvm": libsvm,
    "youtube8m": youtube8m,
}
