"""A remote file, once per node: fetched by one rank, into a folder that all ranks of it see.

    object store -> node 0: leader fetches | ranks 1 2 3 wait | all open the copy
                    node 1: leader fetches | ...

HTTP is Python's own; of the other protocols fsspec knows: s3, gs, ssh, memory, file, ...
"""

from __future__ import annotations

import hashlib
import os
import re
import socket
import stat
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from urllib.parse import urlsplit

from ... import events
from ...errors import ConfigError, MpidistError

#: Bytes per read.
_PIECE = 4 << 20
#: Seconds that a server of the web may be silent.
_SILENCE = 60.0


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
        Of the web, or what fsspec can open.
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
    return _copies(comm, [url], folder, ranks_per_node, tries, wait, bandwidth)[0]


def _copies(comm, urls, folder, ranks_per_node, *how) -> list[Path]:
    # Here, not above: a job file is read, and URLs are found in it, before MPI starts.
    from ...runtime.topology import node_once

    own = folder is None
    folder = _own_folder() if own else Path(folder)
    targets = [folder / cached_name(url) for url in urls]
    with node_once(comm, ranks_per_node=ranks_per_node) as first:
        if first and own:
            _make_own(folder)
        for url, target in zip(urls, targets, strict=True):
            if first and not _there(url, target):
                fetch(url, target, *how)
    return targets


def is_remote(settings: Mapping) -> bool:
    """Whether a value of a data table is a URL, or a list with one."""
    return any("://" in text for value in settings.values() for text in _texts(value))


def brought_here(comm, settings: Mapping, *, ranks_per_node: int | None = None) -> dict:
    """Return a data table with copies in place of its URLs. Collective over `comm`.

    Its key ``cache`` is the folder for them, by default one below the node's folder for temporary
    files, for this user alone. URLs may be patterns where the protocol can list.
    """
    table = dict(settings)
    cache = table.pop("cache", None)
    # One rank looks up patterns, for all must have the same files.
    found, problem = comm.bcast(_listed(table) if comm.rank == 0 else None)
    if problem:
        error = ConfigError(problem)
        error.everywhere = True
        raise error
    urls = [text for texts in found.values() for text in texts if "://" in text]
    copies = dict(zip(urls, map(str, _copies(comm, urls, cache, ranks_per_node)), strict=True))
    for key, texts in found.items():
        here = [copies.get(text, text) for text in texts]
        single = isinstance(table[key], str) and len(here) == 1
        table[key] = here[0] if single else here
    return table


def _listed(table: Mapping) -> tuple[dict[str, list[str]], str | None]:
    """Return the texts of each key with a URL, patterns looked up; and what went wrong."""
    found: dict[str, list[str]] = {}
    for key, value in table.items():
        texts = _texts(value)
        if not any("://" in text for text in texts):
            continue
        found[key] = []
        for text in texts:
            try:
                found[key] += _matching(text) if "://" in text else [text]
            except Exception as error:  # on one rank only: all must hear of it
                return {}, f"data: {key}: cannot look up {without_secrets(text)}: {error}"
    return found, None


def _matching(url: str) -> list[str]:
    if _of_the_web(url) or not set("*?[") & set(url):
        return [url]
    system, path = _fsspec().core.url_to_fs(url)
    names = sorted(system.unstrip_protocol(name) for name in system.glob(path))
    if not names:
        raise ConfigError("no file matches it")
    return names


def _texts(value) -> list[str]:
    values = value if isinstance(value, list | tuple) else [value]
    return [text for text in values if isinstance(text, str)]


def _own_folder() -> Path:
    return Path(tempfile.gettempdir()) / f"mpidist-data-{os.getuid()}"


def _make_own(folder: Path) -> None:
    """Make a folder where anybody may; refuse one into which others could have put something."""
    folder.mkdir(mode=0o700, exist_ok=True)
    facts = folder.lstat()
    if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.getuid() or facts.st_mode & 0o022:
        raise ConfigError(f"data: {folder} is not this user's alone; give a folder as cache=")


def cached_name(url: str) -> str:
    """Return the name of a copy: readable, and of its own for every URL."""
    name = PurePosixPath(url.partition("?")[0]).name or "data"
    readable = re.sub(r"[^A-Za-z0-9._-]", "_", name)[-100:]
    return f"{hashlib.sha256(url.encode()).hexdigest()[:16]}-{readable}"


def without_secrets(url: str) -> str:
    """Return a URL without what may be a password or a key."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def _there(url: str, target: Path) -> bool:
    """Whether there is a copy, as long as the original; if that can be asked."""
    if not target.exists():
        return False
    try:
        with _opened(url) as (_, size):
            return size is None or size == target.stat().st_size
    except Exception:
        return True


def fetch(
    url: str, target: Path, tries: int = 5, wait: float = 1.0, bandwidth: float | None = None
) -> None:
    """Fetch `url` to `target`, which is whole or not there."""
    if tries < 1:
        raise ConfigError(f"remote: tries is {tries}, expected 1 or more")
    target.parent.mkdir(parents=True, exist_ok=True)
    # Of its own, should the folder be on a disk that nodes share.
    partial = target.with_name(f"{target.name}.{socket.gethostname()}.{os.getpid()}.part")
    try:
        for number in range(1, tries + 1):
            try:
                _copy(url, partial, bandwidth)
                break
            except ConfigError:
                raise
            except Exception as error:
                said = " ".join(f"{type(error).__name__}: {error}".split())
                said = said.replace(url, without_secrets(url))
                events.emit("fetch_failed", url=without_secrets(url), number=number, error=said)
                if number == tries or _hopeless(error):
                    times = "once" if number == 1 else f"{number} times"
                    raise MpidistError(
                        f"cannot fetch {without_secrets(url)}: {said}; tried {times}"
                    ) from error
                time.sleep(wait * 2 ** (number - 1))
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)


def _hopeless(error: Exception) -> bool:
    """Whether it is the wrong URL, and not a bad moment."""
    if isinstance(error, urllib.error.HTTPError):
        return 400 <= error.code < 500 and error.code not in (408, 425, 429)
    return isinstance(error, FileNotFoundError | PermissionError)


def _copy(url: str, partial: Path, bandwidth: float | None) -> None:
    began, total = time.monotonic(), 0
    with _opened(url) as (source, expected), partial.open("wb") as file:
        while piece := source.read(_PIECE):
            file.write(piece)
            total += len(piece)
            if bandwidth is not None:
                time.sleep(max(0.0, began + total / bandwidth - time.monotonic()))
    if expected is not None and expected != total:
        raise OSError(f"{total} bytes came, expected {expected}")
    seconds = round(time.monotonic() - began, 3)
    events.emit("fetched", url=without_secrets(url), bytes=total, seconds=seconds)


@contextmanager
def _opened(url: str) -> Iterator[tuple]:
    """Open a URL; gives a file, and how long it says it is where its protocol knows."""
    if _of_the_web(url):
        with urllib.request.urlopen(url, timeout=_SILENCE) as answer:
            length = answer.headers.get("Content-Length")
            yield answer, None if length is None else int(length)
        return
    system, path = _fsspec().core.url_to_fs(url)
    with system.open(path, "rb") as file:
        yield file, system.info(path).get("size")


def _of_the_web(url: str) -> bool:
    return urlsplit(url).scheme in ("http", "https")


def _fsspec():
    try:
        import fsspec
    except ImportError:
        raise ConfigError(
            'remote data come through fsspec, not here: pip install "mpidist[data]"'
        ) from None
    return fsspec
