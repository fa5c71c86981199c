"""Take samples from a source with bad records: return good samples, and list the bad records.

    take([4, 8, 15])  fails      take([4]) good, take([8]) fails, take([15]) good
                                 batch of 4 and 15, and BadRecord(8, reason)

If a source raises an exception for a batch, its samples are taken one by one to find the bad
records. A source should raise `BadRecord` for a bad record, but any exception is handled. If
nothing can be read, because reading fails or memory is missing, no record counts as bad, and the
batch is tried again a few times.
"""

from __future__ import annotations

import itertools
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import numpy as np

from .. import events
from ..errors import BadRecord, ClosedError, ConfigError, SourceError
from .sources import Source

#: If all records raise one of these exceptions, the whole source is unavailable.
_WHOLE = (OSError, MemoryError, ConfigError)
#: How many times an unavailable source is tried, and the seconds to wait before the second try;
#: each later wait is twice as long.
TRIES, WAIT = 5, 1.0


class Batch(NamedTuple):
    """The good samples of a batch.

    `kept` has the positions of the good samples in the requested array of indices, ascending. `bad`
    has a `BadRecord` error for each bad record.
    """

    batch: tuple
    kept: np.ndarray
    bad: tuple[BadRecord, ...] = ()


class BadRecordFilter:
    """Takes samples from a source, and leaves out bad records.

    Only one thread at a time may call its methods. With `finite`, a sample with a NaN or an
    infinity counts as a bad record.
    """

    def __init__(self, source: Source, finite: bool = False):
        # A source with the attribute `finite` checks all numbers itself.
        self.source, self.finite = source, finite and not getattr(source, "finite", False)
        self._form: list | None = None

    def take(self, indices: np.ndarray) -> Batch:
        """Return the good samples at `indices`, and a list of the bad ones, as a `Batch`.

        Raises SourceError if no record could be read in several tries, and ConfigError if the
        source returned a wrong number of samples. Raises the exception of the source if each record
        alone can be read.
        """
        for number in range(1, TRIES + 1):
            try:
                batch = self.source.take(indices)
            except ClosedError:
                raise
            except Exception as error:
                singles, bad, cause = self._one_by_one(indices, error)
            else:
                whole = Batch(self._checked(batch, indices), np.arange(len(indices)))
                return self._finite(whole, indices)
            if singles or not self._gone(cause):
                return self._finite(self._joined(indices, singles, bad), indices)
            if isinstance(cause, ConfigError):
                raise cause
            name = getattr(self.source, "name", type(self.source).__name__)
            events.emit("source_failed", source=name, number=number, error=told(cause))
            if number < TRIES:
                time.sleep(WAIT * 2 ** (number - 1))
        raise SourceError(
            f"nothing of {name} can be read: {told(cause)}; tried {TRIES} times. No record was "
            "skipped for this: run again when the data can be read"
        ) from cause

    def together(self, indices: np.ndarray) -> tuple | None:
        """Return the samples at `indices` from one call of the source; None if not all are good."""
        try:
            batch = self._checked(self.source.take(indices), indices)
        except Exception:
            return None
        return batch if not self.finite or _finite(batch).all() else None

    def _checked(self, batch: tuple, indices: np.ndarray) -> tuple:
        if not isinstance(batch, tuple | list) or not all(hasattr(one, "shape") for one in batch):
            raise ConfigError(
                f"data: take of {type(self.source).__name__} returned {_shape_of(batch)}; expected "
                "a tuple of arrays with equal first axis"
            )
        lengths = [len(array) for array in batch]
        if lengths != [len(indices)] * len(lengths):
            raise ConfigError(
                f"data: take of {len(indices)} indices returned arrays of {lengths} samples; "
                "expected one sample per index in each array"
            )
        if self._form is None:
            self._form = _form(batch)
        return batch

    def _one_by_one(self, indices: np.ndarray, error: Exception):
        """Take samples one by one; return good ones, reasons for bad ones, the last exception."""
        singles: dict[int, tuple] = {}
        bad: dict[int, str] = {}
        cause: BaseException = error
        again: list[int] = []
        for place in itertools.chain(range(len(indices)), again):
            try:
                singles[place] = self.source.take(indices[place : place + 1])
                bad.pop(place, None)
            except Exception as caught:
                # A disk may become available again meanwhile, so the sample is tried once more at
                # the end.
                if place not in bad and isinstance(_root(caught), OSError | MemoryError):
                    again.append(place)
                bad[place], cause = told(caught), _root(caught)
        # Each sample in `singles` could be taken alone. If the shapes or dtypes of a sample differ
        # from those of most samples, it cannot be in the same batch as the others, and counts as
        # bad.
        form = self._form or _commonest(singles.values())
        for place, single in list(singles.items()):
            if form is not None and _form(single) != form:
                bad[place] = f"has the form {_form(single)}, other samples {form}"
                del singles[place]
        if not bad and not again:
            raise error
        return singles, bad, cause

    def _gone(self, cause: BaseException) -> bool:
        """Return whether the whole source fails, so that other records cannot be read either."""
        if not isinstance(cause, _WHOLE):
            return False
        for index in np.linspace(0, len(self.source) - 1, 5).astype(np.int64):
            try:
                batch = self.source.take(np.array([index]))
            except Exception as error:
                if not isinstance(_root(error), _WHOLE):
                    return False  # the source works: it has read this record and found it bad
            else:
                self._form = self._form or _form(batch)
                return False
        return True

    def _joined(self, indices: np.ndarray, singles: dict, bad: dict[int, str]) -> Batch:
        kept = np.array(sorted(singles), np.int64)
        if len(kept):
            columns = zip(*(singles[place] for place in kept), strict=True)
            batch = tuple(np.concatenate(column) for column in columns)
        elif self._form is not None:
            batch = tuple(np.empty((0, *shape), dtype) for shape, dtype in self._form)
        else:
            batch = self.source.take(indices[:0])
        records = (BadRecord(int(indices[place]), bad[place]) for place in sorted(bad))
        return Batch(batch, kept, tuple(records))

    def _finite(self, taken: Batch, indices: np.ndarray) -> Batch:
        """If `self.finite` is true, remove the samples that have a NaN or an infinity."""
        good = _finite(taken.batch) if self.finite and len(taken.kept) else np.True_
        if good.all():
            return taken
        bad = [
            BadRecord(int(indices[place]), "a number in it is not finite")
            for place in taken.kept[~good]
        ]
        batch = tuple(array[good] for array in taken.batch)
        return Batch(batch, taken.kept[good], (*taken.bad, *bad))


def _finite(batch: tuple) -> np.ndarray:
    """Return, for each sample, whether it has only finite numbers."""
    good = np.ones(len(batch[0]), bool)
    for array in batch:
        if array.dtype.kind in "fc" and not np.isfinite(array).all():
            good &= np.isfinite(array).reshape(len(array), -1).all(axis=1)
    return good


def _root(error: BaseException) -> BaseException:
    """Return the cause of `error` if `error` is a BadRecord with a cause, else `error` itself."""
    return (isinstance(error, BadRecord) and error.__cause__) or error


def told(error: Exception) -> str:
    """Return one line of text about an exception: its text, and where it was raised."""
    if isinstance(error, BadRecord):
        return error.reason
    last = traceback.extract_tb(error.__traceback__)[-1:]
    where = "".join(f" ({Path(frame.filename).name}:{frame.lineno})" for frame in last)
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text[:200] + where


def _shape_of(batch) -> str:
    if isinstance(batch, tuple | list):
        return f"a {type(batch).__name__} of {', '.join(type(one).__name__ for one in batch[:4])}"
    return type(batch).__name__


def _form(batch: tuple) -> list:
    return [(array.shape[1:], array.dtype.str) for array in batch]


def _commonest(batches) -> list | None:
    counts = Counter(tuple(_form(batch)) for batch in batches)
    return list(counts.most_common(1)[0][0]) if counts else None
