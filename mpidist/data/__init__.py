"""Data sources, and the order in which a run goes through them.

Nothing here knows about MPI: every rank holds the same `Sampler` and takes its own part.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from mpidist.data.careful import Careful, Taken
from mpidist.data.digits import digits
from mpidist.data.distortion import Distorted
from mpidist.data.hdf5 import HDF5, hdf5
from mpidist.data.idx import idx
from mpidist.data.libsvm import LibSVM, libsvm
from mpidist.data.loader import Loader, Loading
from mpidist.data.sampler import Position, Sampler
from mpidist.data.sources import ArraySource, Derived, Items, Part, Source, Stream, as_source
from mpidist.data.tfrecord import TFRecords
from mpidist.data.youtube8m import YouTube8M
from mpidist.data.youtube8m_frames import YouTube8MFrames, mean_frames, youtube8m
from mpidist.tables import build

SOURCES: dict[str, Callable[..., tuple[Source, Source]]] = {
    "digits": digits,
    "idx": idx,
    "hdf5": hdf5,
    "libsvm": libsvm,
    "youtube8m": youtube8m,
}

__all__ = [
    "HDF5",
    "SOURCES",
    "ArraySource",
    "Careful",
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
    "Taken",
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
    """Return the (train, test) sources `name` as a job file describes them. Local.

    Raises ConfigError for an unknown name or key (with the nearest one), for a missing one, and
    for data that cannot be read.
    """
    return build(SOURCES, name, settings, "data source")
