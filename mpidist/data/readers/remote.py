"""Fetch remote files: one rank of each node, the leader, makes a copy for all ranks of the node.

    object store -> node 0: leader fetches | ranks 1 2 3 wait | all open the copy
                    node 1: the same

HTTP and HTTPS use Python's own client. Other protocols (s3, gs, ssh, ...) use fsspec.
"""

from __future__ import annotations

import hashlib
import os
import re
import socket
import stat
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from urllib.parse import urlsplit

from ... import events
from ...errors import ConfigError, MpidistError

#: Bytes per read.
_PIECE = 4 << 20
#: If an HTTP server sends nothing for this many seconds, an error is raised.
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
    """Return the path of a copy of `url` in `folder`; fetch the file if there is no copy.

    Collective over `comm`.

    Parameters
    ----------
    comm : MPI.Intracomm
    url : str
        An HTTP address, or an address that fsspec can open.
    folder : path-like
        A folder on a disk of each node, with the same name on all nodes.
    tries, wait : number
        The largest number of attempts, and the seconds before the second one. Each later pause is
        twice as long as the one before.
    bandwidth : float, optional
        The largest number of bytes per second that each node fetches.
    ranks_per_node : int, optional
        For tests: simulated nodes of this many consecutive ranks, with a folder each.

    Raises
    ------
    MpidistError
        On all ranks, if a node could not fetch the file.
    """
    return _copies(comm, [url], folder, ranks_per_node, tries, wait, bandwidth)[0]


def _copies(comm, urls, folder, ranks_per_node, *how) -> list[Path]:
    # Not imported at the top, because `mpidist train` looks for URLs in a job file before MPI
    # starts.
    from ...runtime.topology import node_once

    own = folder is None
    folder = Path(tempfile.gettempdir(), f"mpidist-data-{os.getuid()}") if own else Path(folder)
    targets = [folder / cached_name(url) for url in urls]
    with node_once(comm, ranks_per_node=ranks_per_node) as first:
        if first and own:
            _make_own(folder)
        for url, target in zip(urls, targets, strict=True):
            if first and not _there(url, target):
                fetch(url, target, *how)
    return targets


def is_remote(settings: Mapping) -> bool:
    """Return whether a data source's settings name a remote file, a text with ``://``."""
    return any("://" in text for value in settings.values() for text in _texts(value))


def brought_here(comm, settings: Mapping, *, ranks_per_node: int | None = None) -> dict:
    """Fetch the files whose URLs are in a data source's settings; return settings with local paths.

    Collective over `comm`. The setting ``cache`` names the folder for the copies.
    """
    table = dict(settings)
    cache = table.pop("cache", None)
    # Only rank 0 looks up which files match a pattern, so that all ranks get the same files.
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
    """Return a dict of the URLs of each key (patterns replaced by matches), and an error text."""
    found: dict[str, list[str]] = {}
    for key, value in table.items():
        texts = _texts(value)
        if not any("://" in text for text in texts):
            continue
        found[key] = []
        for text in texts:
            try:
                found[key] += _matching(text) if "://" in text else [text]
            except Exception as error:  # only rank 0 has this error, so its text goes to all ranks
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


def _make_own(folder: Path) -> None:
    """Make this user's folder for copies; refuse a folder to which other users can write."""
    folder.mkdir(mode=0o700, exist_ok=True)
    facts = folder.lstat()
    if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.getuid() or facts.st_mode & 0o022:
        raise ConfigError(f"data: other users can write to {folder}; give another cache=")


def cached_name(url: str) -> str:
    """Return the file name of the copy of `url`: a digest of the URL, and a readable part of it."""
    name = PurePosixPath(url.partition("?")[0]).name or "data"
    readable = re.sub(r"[^A-Za-z0-9._-]", "_", name)[-100:]
    return f"{hashlib.sha256(url.encode()).hexdigest()[:16]}-{readable}"


def without_secrets(url: str) -> str:
    """Return a URL for messages, without the parts that may contain a password or a key."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def _there(url: str, target: Path) -> bool:
    """Return whether `target` exists, with the length of the original if that length is known."""
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
    """Fetch `url` to the file `target`, which appears only when it is complete."""
    if tries < 1:
        raise ConfigError(f"remote: tries is {tries}, expected 1 or more")
    target.parent.mkdir(parents=True, exist_ok=True)
    # The name of the temporary file has the host and the process, because nodes may share the
    # folder.
    partial = target.with_name(f"{target.name}.{socket.gethostname()}.{os.getpid()}.part")
    try:
        for number in range(1, tries + 1):
            try:
                _copy(url, partial, bandwidth)
                break
            except ConfigError:
                raise
            except Exception as error:
                public = without_secrets(url)
                text = " ".join(f"{type(error).__name__}: {error}".split()).replace(url, public)
                events.emit("fetch_failed", url=public, number=number, error=text)
                if number == tries or _hopeless(error):
                    times = "once" if number == 1 else f"{number} times"
                    raise MpidistError(f"cannot fetch {public}: {text}; tried {times}") from error
                time.sleep(wait * 2 ** (number - 1))
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)


def _hopeless(error: Exception) -> bool:
    """Return whether another attempt would be useless: the URL is wrong, or access is denied."""
    from urllib.error import HTTPError

    if isinstance(error, HTTPError):
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
    """Open a URL; yield a file, and its length or None if the protocol does not report it."""
    if _of_the_web(url):
        from urllib.request import urlopen  # this import takes 20 ms, and most runs do not need it

        with urlopen(url, timeout=_SILENCE) as answer:
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
            'remote data need fsspec, which is missing: pip install "mpidist[data]"'
        ) from None
    return fsspec
