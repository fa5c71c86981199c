"""Data sources, and the order in which a run goes through them.

Nothing here knows about MPI: every rank holds the same `Sampler` and takes its own part.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from mpidist.data.digits import digits
from mpidist.data.distortion import Distorted
from mpidist.data.idx import idx
from mpidist.data.loader import Loading
from mpidist.data.sampler import Position, Sampler
from mpidist.data.sources import ArraySource, Source, as_source
from mpidist.tables import build

SOURCES: dict[str, Callable[..., tuple[Source, Source]]] = {"digits": digits, "idx": idx}

__all__ = [
    "SOURCES",
    "ArraySource",
    "Distorted",
    "Loading",
    "Position",
    "Sampler",
    "Source",
    "as_source",
    "digits",
    "from_settings",
    "idx",
]


def from_settings(name: str, settings: Mapping) -> tuple[Source, Source]:
    """Return the (train, test) sources `name` as a job file describes them. Local.

    Raises ConfigError for an unknown name or key (with the nearest one), for a missing one, and
    for data that cannot be read.
    """
    return build(SOURCES, name, settings, "data source")
