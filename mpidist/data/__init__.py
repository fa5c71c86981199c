"""Data sources, and the order in which a run uses their samples.

All ranks compute the same order (`Sampler`), and each rank takes its own part of each global batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from .. import imported
from ..registry import build
from .digits import digits
from .distortion import Distorted
from .loader import Loader, Loading
from .sampler import Position, Sampler
from .skip_bad import BadRecordFilter, Batch
from .sources import ArraySource, Derived, Items, Part, Source, Stream, as_source

if TYPE_CHECKING:
    from .readers.hdf5 import HDF5, hdf5
    from .readers.idx import idx
    from .readers.libsvm import LibSVM, libsvm
    from .readers.tfrecord import TFRecords
    from .readers.youtube8m import YouTube8M
    from .readers.youtube8m_frames import YouTube8MFrames, mean_frames, youtube8m
    from .source_table import SOURCES

_HOME = {
    "HDF5": "readers.hdf5",
    "hdf5": "readers.hdf5",
    "idx": "readers.idx",
    "LibSVM": "readers.libsvm",
    "libsvm": "readers.libsvm",
    "TFRecords": "readers.tfrecord",
    "YouTube8M": "readers.youtube8m",
    "YouTube8MFrames": "readers.youtube8m_frames",
    "mean_frames": "readers.youtube8m_frames",
    "youtube8m": "readers.youtube8m_frames",
    "SOURCES": "source_table",
}

__all__ = [
    "HDF5",
    "SOURCES",
    "ArraySource",
    "BadRecordFilter",
    "Batch",
    "Derived",
    "Distorted",
    "Items",
    "LibSVM",
    "Loader",
    "Loading",
    "Part",
    "Position",
    "Sampler",
    "Source",
    "Stream",
    "TFRecords",
    "YouTube8M",
    "YouTube8MFrames",
    "as_source",
    "digits",
    "from_settings",
    "hdf5",
    "idx",
    "libsvm",
    "mean_frames",
    "youtube8m",
]


def from_settings(name: str, settings: Mapping) -> tuple[Source, Source]:
    """Return the train and test source of the data set `name`, with the settings of a job file.

    Raises ConfigError for an unknown name or key, a missing key, and data that cannot be read.
    """
    from .source_table import SOURCES

    return build(SOURCES, name, settings, "data source")


def __getattr__(name: str) -> Any:
    return imported(globals(), name)


def __dir__():
    return sorted(__all__)
