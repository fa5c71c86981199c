"""Take samples from a source that may have bad ones: the good ones, and which are not.

    take([4, 8, 15])  fails      take([4]) good, take([8]) fails, take([15]) good
                                 batch of 4 and 15, and BadRecord(8, reason)

A source knows best and raises `BadRecord`. Whatever else it raises is narrowed down to the record
by taking them one by one, which costs something in a batch with a bad record only.
"""

from __future__ import annotations

import traceback
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import numpy as np

from mpidist.data.sources import Source
from mpidist.errors import BadRecord, ConfigError


class Taken(NamedTuple):
    """The good samples of those asked for. Local.

    `kept` are their places among the indices that were asked for, ascending; `bad` are the others.
    """

    batch: tuple
    kept: np.ndarray
    bad: tuple[BadRecord, ...] = ()


class Careful:
    """Takes what is good of a source. Local; one thread at a time."""

    def __init__(self, source: Source):
        self.source = source
        self._form: list | None = None

    def take(self, indices: np.ndarray) -> Taken:
        """Return the good samples at `indices`.

        Raises what the source raises where no single record is to blame, and ConfigError where it
        returns another number of samples than it was asked for.
        """
        try:
            batch = self.source.take(indices)
        except Exception as error:
            return self._one_by_one(indices, error)
        return Taken(self._checked(batch, indices), np.arange(len(indices)))

    def together(self, indices: np.ndarray) -> tuple | None:
        """Return the samples at `indices`, or None where `take` has something to say about them."""
        try:
            return self._checked(self.source.take(indices), indices)
        except Exception:
            return None

    def _checked(self, batch: tuple, indices: np.ndarray) -> tuple:
        lengths = [len(array) for array in batch]
        if lengths != [len(indices)] * len(lengths):
            raise ConfigError(
                f"data: take of {len(indices)} indices returned arrays of {lengths} samples; "
                "expected one sample per index in each array"
            )
        if self._form is None:
            self._form = _form(batch)
        return batch

    def _one_by_one(self, indices: np.ndarray, error: Exception) -> Taken:
        singles: dict[int, tuple] = {}
        bad = []
        for place, index in enumerate(indices):
            try:
                singles[place] = self.source.take(indices[place : place + 1])
            except Exception as cause:
                bad.append(BadRecord(int(index), told(cause)))
        # Samples that can be taken, but not together: the ones of another form are to blame.
        form = self._form or _commonest(singles.values())
        for place, single in list(singles.items()):
            if form is not None and _form(single) != form:
                reason = f"has the form {_form(single)}, other samples {form}"
                bad.append(BadRecord(int(indices[place]), reason))
                del singles[place]
        if not bad:
            raise error
        kept = np.array(sorted(singles), np.int64)
        if len(kept):
            columns = zip(*(singles[place] for place in kept), strict=True)
            batch = tuple(np.concatenate(column) for column in columns)
        elif form is not None:
            batch = tuple(np.empty((0, *shape), dtype) for shape, dtype in form)
        else:
            batch = self.source.take(indices[:0])
        return Taken(batch, kept, tuple(bad))


def told(error: Exception) -> str:
    """Return one line about an exception: its text, and where it was raised. Local."""
    if isinstance(error, BadRecord):
        return error.reason
    last = traceback.extract_tb(error.__traceback__)[-1:]
    where = "".join(f" ({Path(frame.filename).name}:{frame.lineno})" for frame in last)
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text[:200] + where


def _form(batch: tuple) -> list:
    return [(array.shape[1:], array.dtype.str) for array in batch]


def _commonest(batches) -> list | None:
    counts = Counter(tuple(_form(batch)) for batch in batches)
    return list(counts.most_common(1)[0][0]) if counts else None
