"""A remote file, once per node: fetched by one rank, into a folder that all ranks of it see.

    object store -> node 0: leader fetches | ranks 1 2 3 wait | all open the copy
                    node 1: leader fetches | ...

fsspec knows the protocols: s3, gs, http, ssh, memory, file, ...
"""

from __future__ import annotations

import hashlib
import os
import time
from pathlib import Path, PurePosixPath

from mpidist import events
from mpidist.errors import ConfigError, MpidistError
from mpidist.topology import node_once

#: Bytes per read.
_PIECE = 4 << 20


def local_copy(
    comm,
    url: str,
    folder: str | os.PathLike,
    *,
    tries: int = 5,
    wait: float = 1.0,
    bandwidth: float | None = None,
    ranks_per_node: int | None = None,
) -> Path:
    """Return the path of a copy of `url` in `folder`, fetched if it is not there. Collective.

    Parameters
    ----------
    comm : MPI.Intracomm
    url : str
        What fsspec can open.
    folder : path-like
        On a disk of the node; the same name on all.
    tries : int
        How often to try, with `wait` seconds in between, twice as long each time.
    bandwidth : float, optional
        Most bytes per second for each node.
    ranks_per_node : int, optional
        Fake nodes, as in `Topology`; their folders must differ.

    Raises
    ------
    MpidistError
        On all ranks, when a node could not get it.
    """
    with node_once(comm, ranks_per_node=ranks_per_node) as first:
        target = Path(folder) / cached_name(url)
        if first and not target.exists():
            fetch(url, target, tries, wait, bandwidth)
    return target


def cached_name(url: str) -> str:
    """Return the name of a copy: readable, and of its own for every URL. Local."""
    name = PurePosixPath(url.partition("?")[0]).name or "data"
    return f"{hashlib.sha256(url.encode()).hexdigest()[:16]}-{name[-100:]}"


def fetch(
    url: str, target: Path, tries: int = 5, wait: float = 1.0, bandwidth: float | None = None
) -> None:
    """Fetch `url` to `target`, which is whole or not there. Local."""
    if tries < 1:
        raise ConfigError(f"remote: tries is {tries}, expected 1 or more")
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f"{target.name}.{os.getpid()}.part")
    try:
        for number in range(1, tries + 1):
            try:
                _copy(url, partial, bandwidth)
                break
            except ConfigError:
                raise
            except Exception as error:
                said = " ".join(f"{type(error).__name__}: {error}".split())
                events.emit("fetch_failed", url=url, number=number, error=said)
                if number == tries:
                    raise MpidistError(
                        f"cannot fetch {url}: {said}; tried {tries} times"
                    ) from error
                time.sleep(wait * 2 ** (number - 1))
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)


def _copy(url: str, partial: Path, bandwidth: float | None) -> None:
    try:
        import fsspec
    except ImportError:
        raise ConfigError(
            'remote data come through fsspec, not here: pip install "mpidist[data]"'
        ) from None
    began, total = time.monotonic(), 0
    with fsspec.open(url, "rb") as source, partial.open("wb") as file:
        while piece := source.read(_PIECE):
            file.write(piece)
            total += len(piece)
            if bandwidth is not None:
                time.sleep(max(0.0, began + total / bandwidth - time.monotonic()))
    expected = _size(fsspec, url)
    if expected is not None and expected != total:
        raise OSError(f"{total} bytes came, expected {expected}")
    events.emit("fetched", url=url, bytes=total, seconds=round(time.monotonic() - began, 3))


def _size(fsspec, url: str) -> int | None:
    """How long the file says it is, where its protocol knows."""
    system, path = fsspec.core.url_to_fs(url)
    return system.info(path).get("size")
