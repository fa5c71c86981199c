"""Read sparse records in LibSVM's text format, as scikit-learn's `load_svmlight_file` does.

    1 3:0.5 10:1          label, then column:value, columns ascending
    2 qid:7 4:1   # note  a query number and a comment
    1,5,9 4:1             several labels, or none: with multilabel=True
                          empty lines and comments are not records

A line that is not a valid record counts as a bad record: `take` raises BadRecord for its number.

C.-C. Chang, C.-J. Lin, "LIBSVM: a library for support vector machines", ACM TIST 2(3), 2011.
"""

from __future__ import annotations

import bz2
import gzip
import io
import os
import zlib
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import BinaryIO

import numpy as np

from ...errors import BadRecord, ConfigError, in_one_line, shown
from ...registry import checked_whole
from ..sources import Source, check_indices

#: The largest valid column; and the largest number of columns of a dense sample (4 MiB) if the
#: argument `features` is not given.
_LAST, _WIDEST = (1 << 31) - 1, 1 << 20
#: The bytes that a word may have: all except white space, colons and the mark of a comment.
_ATOMS = bytes(set(range(256)) - set(b" \t\n\r\v\f:#"))


class LibSVM:
    """Records of a LibSVM file, held in memory as compressed sparse rows.

    Parameters
    ----------
    path : path-like
        A plain, gzip or bzip2 file.
    features : int, optional
        Number of columns of a dense sample, by default the largest column of the file plus one. A
        record with a column of number `features` or more is bad. Without `features`, `take` refuses
        more than 2^20 columns, because one wrong digit in the file could mean very large samples.
    classes : sequence of float, optional
        The label value of each class, in ascending order. With `classes`, `take` returns class
        numbers (int64, from 0) in place of label values.
    zero_based : bool or "auto"
        Whether the file counts columns from 0; this object always does. "auto" means False if the
        file has columns but no column 0, else True.
    multilabel : bool
        Whether a record may have any number of labels. `classes` is then by default all label
        values of the file.
    query_id : bool
        Whether to read the query numbers after ``qid:``. A record without one is then bad.

    Attributes
    ----------
    labels : array (n,)
        The label of each record, NaN for a bad record. With `multilabel`, the labels of all records
        one after the other.
    label_starts : array (n + 1,)
        The labels of record k are ``labels[label_starts[k]:label_starts[k + 1]]``, ascending.
    starts, columns, values : arrays
        The columns of record k are ``columns[starts[k]:starts[k + 1]]``, ascending, and its values
        are the same part of `values`.
    queries : array (n,) of int64
        The query number of each record, if `query_id` is True.
    zero_based : bool
        Whether the file counts columns from 0, as the caller said or as "auto" found.

    Raises
    ------
    ConfigError
        The file cannot be read or decompressed to its end.
    """

    def __init__(
        self,
        path: str | os.PathLike,
        features: int | None = None,
        classes=None,
        *,
        zero_based: bool | str = "auto",
        multilabel: bool = False,
        query_id: bool = False,
    ):
        if zero_based not in (True, False, "auto"):
            raise ConfigError(
                f"libsvm: zero_based is {shown(zero_based)}, expected true, false or 'auto'"
            )
        if features is not None:
            features = checked_whole("libsvm: features", features, 1)
        path = os.fspath(path)  # `open` would take a number for a file descriptor
        self.name, self._multilabel, self._query_id = str(path), multilabel, query_id
        self._bad: dict[int, str] = {}
        with _opened(path) as file:
            self._parse(file)
        self._check(zero_based, features)
        largest = int(self.columns.max(initial=0)) + 1
        self.features, self._given = largest if features is None else features, features is not None
        if classes is None and multilabel:
            classes = self.found_classes()
        self.classes = None if classes is None else np.asarray(classes, float)

    def _parse(self, file: BinaryIO) -> None:
        """Read all lines of the file; `_check` checks the columns afterwards."""
        labels, label_starts, queries = array("d"), array("q", [0]), array("q")
        columns, values, starts = array("q"), array("f"), array("q", [0])
        lines = array("q")
        for number, line in enumerate(file, 1):
            words = line.partition(b"#")[0].split()
            if not words:
                continue
            query = None
            try:
                if not self._multilabel:
                    labels.append(float(words.pop(0)))
                elif b":" not in words[0]:
                    labels.extend(sorted(map(float, words.pop(0).split(b","))))
                if words and words[0].startswith(b"qid"):
                    _, query = words.pop(0).split(b":", 1)
                if self._query_id:
                    if query is None:
                        raise ValueError("it has no qid")
                    queries.append(int(query))
                text = b" ".join(words)
                parts = text.replace(b":", b" ").split()
                # Each word is column:value if colons and spaces alternate, with bytes between them.
                marks = text.translate(None, _ATOMS)
                if marks != (b": " * len(words))[:-1] or len(parts) != 2 * len(words):
                    raise ValueError(f"{_odd(words)} is not column:value")
                columns.extend(map(int, parts[::2]))
                values.extend(map(float, parts[1::2]))
            except (ValueError, OverflowError) as error:
                self._bad[len(lines)] = in_one_line(f"line {number}: {error}")
                del columns[starts[-1] :], values[starts[-1] :], labels[label_starts[-1] :]
                del queries[len(lines) :]
                labels.extend([] if self._multilabel else [np.nan])
                queries.extend([0] * self._query_id)
            lines.append(number)
            starts.append(len(columns))
            label_starts.append(len(labels))
        self._lines = np.array(lines)
        self.labels, self.label_starts = np.array(labels), np.array(label_starts)
        self.columns, self.values, self.starts = map(np.array, (columns, values, starts))
        self.queries = np.array(queries) if self._query_id else None

    def _check(self, zero_based: bool | str, features: int | None) -> None:
        """Find the records with invalid columns, and renumber all columns from 0."""
        first = np.zeros(len(self.columns) + 1, bool)
        first[self.starts[:-1]] = True
        falls = self.columns[1:] <= self.columns[:-1]
        self._mark(1 + np.flatnonzero(falls & ~first[1:-1]), "columns do not ascend at column {}")
        lowest = 0 if zero_based else 1
        self._mark(np.flatnonzero(self.columns < lowest), f"column {{}} is below {lowest}")
        self._mark(np.flatnonzero(self.columns > _LAST), f"column {{}} is beyond {_LAST}")
        self._drop_bad()
        self.zero_based = not len(self.columns) or bool(self.columns.min() == 0)
        if zero_based != "auto":
            self.zero_based = bool(zero_based)
        base = int(not self.zero_based)
        self.columns -= base
        if features is not None:
            beyond = np.flatnonzero(self.columns >= features)
            self._mark(beyond, f"column {{}} is beyond the {features} features", base)
            self._drop_bad()

    def _mark(self, places: np.ndarray, reason: str, base: int = 0) -> None:
        """Mark as bad the records to which ``columns[places]`` belong; keep earlier marks."""
        owners = np.searchsorted(self.starts, places, side="right") - 1
        for record, first in zip(*np.unique(owners, return_index=True), strict=True):
            text = reason.format(self.columns[places[first]] + base)
            self._bad.setdefault(int(record), f"line {self._lines[record]}: {text}")

    def _drop_bad(self) -> None:
        """Remove the columns and labels of bad records."""
        if not self._bad:
            return
        bad = np.zeros(len(self), bool)
        bad[list(self._bad)] = True
        lengths = np.diff(self.starts)
        good = ~np.repeat(bad, lengths)
        self.columns, self.values = self.columns[good], self.values[good]
        self.starts = _starts(np.where(bad, 0, lengths))
        if self._multilabel:
            lengths = np.diff(self.label_starts)
            self.labels = self.labels[~np.repeat(bad, lengths)]
            self.label_starts = _starts(np.where(bad, 0, lengths))
        else:
            self.labels[bad] = np.nan

    def __len__(self) -> int:
        return len(self._lines)

    def found_classes(self) -> np.ndarray:
        """Return the different finite labels of the file, ascending."""
        return np.unique(self.labels[np.isfinite(self.labels)])

    def rows(self, indices) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the records at `indices` as compressed sparse rows (starts, columns, values).

        Record k of the result has ``columns[starts[k]:starts[k + 1]]``.
        """
        indices = np.asarray(indices, np.int64)
        check_indices(f"libsvm: {self.name}", indices, len(self))
        for index in indices:
            if int(index) in self._bad:
                raise BadRecord(int(index), self._bad[int(index)])
        starts, at = _places(self.starts, indices)
        return starts, self.columns[at], self.values[at]

    def check_width(self) -> None:
        """Raise ConfigError if `features` was not given and samples have over 2^20 columns."""
        if self._given or self.features <= _WIDEST:
            return
        last = int(np.argmax(self.columns))
        line = self._lines[np.searchsorted(self.starts, last, side="right") - 1]
        column = self.columns[last] + (not self.zero_based)
        raise ConfigError(
            f"libsvm: {self.name}: line {line} has column {column}, so a dense sample "
            f"would take {4 * self.features / 2**20:.0f} MiB; if that is right give "
            f"features={self.features}, else repair the line or give the number of columns"
        )

    def take(self, indices) -> tuple:
        """Return the records at `indices` as dense float32 (n, features), and their labels.

        The labels have the shape (n,); with `multilabel` they are uint8 (n, classes) of 0 and 1.
        With `query_id`, an array of query numbers (n,) comes before the labels.
        """
        self.check_width()
        indices = np.asarray(indices, np.int64)
        starts, columns, values = self.rows(indices)
        dense = np.zeros((len(indices), self.features), np.float32)
        dense[np.repeat(np.arange(len(indices)), np.diff(starts)), columns] = values
        queries = () if self.queries is None else (self.queries[indices],)
        return dense, *queries, self._labels(indices)

    def _labels(self, indices: np.ndarray) -> np.ndarray:
        starts, at = _places(self.label_starts, indices)
        labels = self.labels[at]
        if self.classes is None:
            return labels
        owners = np.repeat(np.arange(len(indices)), np.diff(starts))
        classes = np.searchsorted(self.classes, labels)
        padded = np.append(self.classes, np.nan)
        known = padded[classes] == labels
        if not known.all():
            wrong = int(np.flatnonzero(~known)[0])
            raise BadRecord(int(indices[owners[wrong]]), f"its label {labels[wrong]:g} is unknown")
        if not self._multilabel:
            return classes.astype(np.int64)
        marks = np.zeros((len(indices), len(self.classes)), np.uint8)
        marks[owners, classes] = 1
        return marks


def _odd(words: list[bytes]) -> str:
    """Return, as text, the first of `words` that does not have the form ``column:value``."""
    odd = (w for w in words if w.count(b":") != 1 or len(w.replace(b":", b" ").split()) != 2)
    return shown(next(odd).decode(errors="replace"))


def _starts(lengths: np.ndarray) -> np.ndarray:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])


def _places(starts: np.ndarray, indices) -> tuple[np.ndarray, np.ndarray]:
    """Return where the chosen records start if packed together, and the old index of each value."""
    indices = np.asarray(indices, np.int64)
    lengths = starts[indices + 1] - starts[indices]
    own = _starts(lengths)
    return own, np.repeat(starts[indices] - own[:-1], lengths) + np.arange(own[-1])


@contextmanager
def _opened(path: str | os.PathLike) -> Iterator[BinaryIO]:
    """Open a plain or compressed file for reading; turn errors into ConfigError."""
    try:
        with open(path, "rb") as raw:  # noqa: PTH123
            head = raw.peek(3)
            if head.startswith(b"\x1f\x8b"):
                # The BufferedReader splits lines in C.
                yield io.BufferedReader(gzip.GzipFile(fileobj=raw))  # type: ignore[arg-type]
            elif head.startswith(b"BZh"):
                yield io.BufferedReader(bz2.BZ2File(raw))  # type: ignore[arg-type]
            else:
                yield raw
    except (EOFError, OSError, zlib.error) as error:
        if isinstance(error, OSError) and error.strerror:
            raise ConfigError(f"libsvm: cannot read {path}: {error.strerror}") from None
        raise ConfigError(
            f"libsvm: {path}: damaged or truncated gzip or bzip2 ({error}); fetch it again"
        ) from None


def libsvm(
    path: str | os.PathLike,
    test_path: str | os.PathLike,
    features: int | None = None,
    zero_based: bool | str = "auto",
    multilabel: bool = False,
) -> tuple[Source, Source]:
    """Return (train, test) sources of dense samples; the classes are the training file's labels.

    If `zero_based` is "auto", the columns of both files count from 1 if neither has a column 0.
    """
    opened = partial(LibSVM, features=features, multilabel=multilabel)
    train, test = (opened(one, zero_based=zero_based) for one in (path, test_path))
    if train.zero_based != test.zero_based:
        train, test = (opened(one, zero_based=True) for one in (path, test_path))
    width = max(train.features, test.features) if features is None else features
    classes = train.found_classes()
    for source in (train, test):
        source.check_width()
        source.features, source.classes = width, classes
    return train, test
