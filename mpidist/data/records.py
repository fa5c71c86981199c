"""Check that all ranks have the same data: compare shapes and dtypes, and two records.

The bytes of the first and of the last good record are compared. This detects another file, another
order of the records, or another seed on a rank. Of a user's own source only the length is compared,
unless it has the attribute ``remote = False``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..arrays import array_module
from ..runtime.agreement.mismatch import rank_list
from .sources import Items, Stream

#: From each end of the data, this many records are tried, since some of them may be bad.
TRIES = 4


class Content(NamedTuple):
    """What one rank has read of its data before the run, to compare it with the other ranks.

    `form` is a text with the dtypes and shapes of a sample's arrays. `first` and `last` are pairs:
    the number of the first or last good record, and a digest of its bytes. A field is None if it
    was not read.
    """

    form: str | None = None
    first: tuple[int, str] | None = None
    last: tuple[int, str] | None = None


def content(source) -> Content:
    """Read the first and the last good record of `source`; return their numbers and digests."""
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
    """Return whether a record of `source` may be read before the run.

    A source with the attribute ``remote`` may be read if ``remote`` is false. Without this
    attribute, only lists, tuples and mpidist's own sources may be read. A `Stream` may not be read,
    because its last record can be read only after all others.
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
    """Return the number and the arrays of the first readable record among `indices`, or None."""
    for index in indices:
        try:
            batch = source.take(np.array([index]))
        except (OSError, MemoryError):
            return None  # the source is not available: the run waits for it
        except Exception:  # a source may raise anything for a bad record
            continue
        return index, tuple(batch)
    return None


def digest_of(*arrays) -> str:
    """Return a digest over the dtypes, shapes and bytes of all arrays."""
    total = hashlib.blake2b(digest_size=8)
    for array in arrays:
        host: Any = array if array_module(array) is np else array.get()
        total.update(f"{host.dtype} {host.shape}\n".encode())
        text = host.dtype.hasobject
        total.update(repr(host.tolist()).encode() if text else np.ascontiguousarray(host).tobytes())
    return total.hexdigest()


def differing(contents: Sequence[Content]) -> str | None:
    """Return a text that says how the ranks' data differ, or None if they are equal."""
    for field in Content._fields:
        groups: dict[Any, dict[Any, list[int]]] = {}
        for rank, one in enumerate(contents):
            value = getattr(one, field)
            if value is not None:
                where, what = (0, value) if field == "form" else value
                groups.setdefault(where, {}).setdefault(what, []).append(rank)
        for where, kinds in sorted(groups.items()):
            if len(kinds) > 1:
                return _difference(field, where, kinds)
    return None


def _difference(field: str, where: int, kinds: dict[str, list[int]]) -> str:
    (value, few), *others = sorted(kinds.items(), key=lambda item: len(item[1]))
    if field == "form":
        other, ranks = others[0]
        return (
            f"data differs in dtypes or shapes: {rank_list(few)} "
            f"{'has' if len(few) == 1 else 'have'} samples of {value}, {rank_list(ranks)} {other}; "
            "give all ranks the same data"
        )
    rest = rank_list(sorted(rank for _, ranks in others for rank in ranks))
    verb = "differs" if len(few) == 1 else "differ"
    return (
        f"data differs: the {field} good record, number {where}, of {rank_list(few)} {verb} "
        f"from that of {rest}; give all ranks the same data (set the attribute remote = True of a "
        "source whose samples differ on purpose)"
    )
