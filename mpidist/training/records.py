"""Have all ranks the same data? The form of a sample, and the bytes of the first and last good one.

Two records are enough to detect a wrong file, another order, or another seed. Of a source
that is a user's own the length alone is compared, unless it says ``remote = False``: its samples
may be costly, or to be read in one thread only.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..arrays import array_module
from ..data import Items, Stream
from ..runtime.agreement.mismatch import rank_list

#: Records that are tried from each end: the first ones may be bad.
TRIES = 4


class Content(NamedTuple):
    """What one rank knows of its data; None where it has not looked, or could not.

    `first` and `last`: number and digest of a record.
    """

    form: str | None = None
    first: tuple[int, str] | None = None
    last: tuple[int, str] | None = None


def content(source) -> Content:
    """Look at the first and the last good record of `source`."""
    if not readable(source):
        return Content()
    count = len(source)
    first = _good(source, range(min(count, TRIES)))
    last = _good(source, range(count - 1, max(-1, count - 1 - TRIES), -1))
    sample = first or last
    if sample is None:
        return Content()
    form = ", ".join(f"{array.dtype} {array.shape[1:]}" for array in sample[1])
    return Content(form, *((one and (one[0], digest_of(*one[1]))) for one in (first, last)))


def readable(source) -> bool:
    """Whether a record may be looked at beforehand, of a source and of one that it wraps.

    A source says so itself (``remote``); if not, those of mpidist are, but for streams, which would
    be drawn to their end.
    """
    while True:
        remote = getattr(source, "remote", None)
        if remote is not None:
            return not remote
        if not type(source).__module__.startswith("mpidist.") or isinstance(source, Stream):
            return isinstance(source, list | tuple)
        inner = source.items if isinstance(source, Items) else getattr(source, "source", None)
        if inner is None:
            return True
        source = inner


def _good(source, indices: Iterable[int]) -> tuple[int, tuple] | None:
    """Return the first record that can be read, and its number."""
    for index in indices:
        try:
            batch = source.take(np.array([index]))
        except (OSError, MemoryError):
            return None  # the source is away: the run waits for it
        except Exception:  # whatever a source says of a bad record
            continue
        return index, tuple(batch)
    return None


def digest_of(*arrays) -> str:
    """Return a digest over dtypes, shapes and bytes."""
    total = hashlib.blake2b(digest_size=8)
    for array in arrays:
        host: Any = array if array_module(array) is np else array.get()
        total.update(f"{host.dtype} {host.shape}\n".encode())
        plain = not host.dtype.hasobject
        total.update(
            np.ascontiguousarray(host).tobytes() if plain else repr(host.tolist()).encode()
        )
    return total.hexdigest()


def differing(contents: Sequence[Content]) -> str | None:
    """Say in what the ranks' data differ, None where nothing is known of it. Pure.

    Ranks that could not look say nothing, and ranks with another first good record neither: what is
    bad on one of them is told when it is used.
    """
    for field in Content._fields:
        groups: dict[Any, dict[Any, list[int]]] = {}
        for rank, one in enumerate(contents):
            value = getattr(one, field)
            if value is not None:
                where, what = (0, value) if field == "form" else value
                groups.setdefault(where, {}).setdefault(what, []).append(rank)
        for where, kinds in sorted(groups.items()):
            if len(kinds) > 1:
                return _told(field, where, kinds)
    return None


def _told(field: str, where: int, kinds: dict[str, list[int]]) -> str:
    few, *others = sorted(kinds.items(), key=lambda item: len(item[1]))
    rest = rank_list(sorted(rank for _, ranks in others for rank in ranks))
    if field == "form":
        verb = "has" if len(few[1]) == 1 else "have"
        return (
            f"data differs in dtypes or shapes: {rank_list(few[1])} {verb} samples of {few[0]}, "
            f"{rank_list(others[0][1])} {others[0][0]}; give all ranks the same data"
        )
    verb = "differs" if len(few[1]) == 1 else "differ"
    return (
        f"data differs: the {field} good record, number {where}, of {rank_list(few[1])} {verb} "
        f"from that of {rest}; give all ranks the same data (a source whose samples are to differ "
        "says so by an attribute remote = True)"
    )
