"""Check that all ranks have the same data: compare a sample's dtypes and shapes, and two records.

The bytes of the first and of the last good record are compared. Two records are enough to detect
that a rank has a wrong file, another order of the records, or another seed. If a source is a user's
own object, only its length is compared, because its samples may be expensive to read, or may have
to be read in one thread only. If a user's own source has the attribute ``remote = False``, its
records are compared too.
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

    A field is None if the rank could not or must not read its data.

    `form` is a text with the dtypes and shapes of the arrays of a sample. `first` and `last` are
    pairs: the number of the first or last good record, and a digest of its bytes.
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

    If the source has the attribute ``remote``, its records may be read if ``remote`` is false. A
    source without the attribute ``remote`` may be read if it is a list, a tuple or one of mpidist's
    sources. A `Stream` without it may not be read, because reading its last record would read the
    whole stream. If one of mpidist's sources wraps another source, its records may be read if those
    of the wrapped source may be read.
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
    """Return a text that says how the ranks' data differ, or None if they are equal.

    A rank that could not read its data is not compared. The first (or last) good records of two
    ranks are not compared if they have different numbers, because then a record is bad on only one
    of the ranks. A record that is bad on only one rank is reported later, when the run uses it.
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
