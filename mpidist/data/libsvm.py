"""Sparse records in LibSVM's text format: ``label column:value column:value ...`` per line.

Lines that are no record keep their number, so that an index means the same line for ever: they are
bad records, found out when they are asked for.

C.-C. Chang, C.-J. Lin, "LIBSVM: a library for support vector machines", ACM TIST 2(3), 2011.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from mpidist.data.sources import Source
from mpidist.errors import BadRecord, ConfigError

#: Columns that are believed of a file where nobody says how many there are; and of a dense sample,
#: which takes memory for each, 4 MiB at most.
_MOST, _WIDEST = 1 << 24, 1 << 20
#: Larger values are none: they are kept in single precision.
_LARGEST = float(np.finfo(np.float32).max)


class LibSVM:
    """Records of a LibSVM file, in memory as compressed rows. Local.

    Parameters
    ----------
    path : path-like
    features : int, optional
        Columns of a dense sample, records with others are bad; by default one more than the
        largest of the file. One wrong digit can make that very large: `take` refuses more than
        2^20 columns that nobody has said there are, `rows` does not need them.
    classes : sequence of float, optional
        Label values in the order of their classes, which `take` then returns as int64 from 0.

    Attributes
    ----------
    labels : array (n,)
    starts, columns, values : arrays
        Record k has ``columns[starts[k]:starts[k + 1]]``, ascending, and values likewise.
    """

    def __init__(self, path: str | os.PathLike, features: int | None = None, classes=None):
        self.name = str(path)
        try:
            lines = Path(path).read_text(encoding="ascii", errors="replace").splitlines()
        except OSError as error:
            raise ConfigError(f"libsvm: cannot read {path}: {error.strerror}") from None
        self.labels = np.full(len(lines), np.nan)
        self.starts = np.zeros(len(lines) + 1, np.int64)
        columns: list[int] = []
        values: list[float] = []
        self._bad: dict[int, str] = {}
        limit = _MOST if features is None else features
        for k, line in enumerate(lines):
            try:
                label, places, numbers = _record(line, limit)
            except ValueError as error:
                self._bad[k] = f"line {k + 1}: {error}"
            else:
                self.labels[k] = label
                columns += places
                values += numbers
            self.starts[k + 1] = len(columns)
        self.columns, self.values = np.array(columns, np.int64), np.array(values, np.float32)
        largest = int(self.columns.max(initial=-1)) + 1
        self.features, self._given = largest if features is None else features, features is not None
        self.classes = None if classes is None else np.asarray(classes, float)

    def __len__(self) -> int:
        return len(self.labels)

    def rows(self, indices) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return (starts, columns, values) of the records at `indices`, sparse as they are."""
        for index in indices:
            if int(index) in self._bad:
                raise BadRecord(int(index), self._bad[int(index)])
        indices = np.asarray(indices, np.int64)
        lengths = self.starts[indices + 1] - self.starts[indices]
        starts = np.concatenate([[0], np.cumsum(lengths)])
        at = np.repeat(self.starts[indices] - starts[:-1], lengths) + np.arange(starts[-1])
        return starts, self.columns[at], self.values[at]

    def check_width(self) -> None:
        """Raise ConfigError where a dense sample has more columns than are believed of a file."""
        if self._given or self.features <= _WIDEST:
            return
        last = int(np.argmax(self.columns))
        line = int(np.searchsorted(self.starts, last, side="right"))
        raise ConfigError(
            f"libsvm: {self.name}: line {line} has column {self.columns[last]}, so a dense sample "
            f"would take {4 * self.features / 2**20:.0f} MiB; if that is right give "
            f"features={self.features}, else mend the line or give the features that there are"
        )

    def take(self, indices) -> tuple:
        """Return (dense float32 (n, features), labels) of the records at `indices`."""
        self.check_width()
        indices = np.asarray(indices, np.int64)
        starts, columns, values = self.rows(indices)
        dense = np.zeros((len(indices), self.features), np.float32)
        dense[np.repeat(np.arange(len(indices)), np.diff(starts)), columns] = values
        labels = self.labels[indices]
        if self.classes is None:
            return dense, labels
        classes = np.searchsorted(self.classes, labels)
        known = self.classes[np.minimum(classes, len(self.classes) - 1)] == labels
        if not known.all():
            first = int(np.flatnonzero(~known)[0])
            raise BadRecord(int(indices[first]), f"its label {labels[first]:g} is no class")
        return dense, classes.astype(np.int64)


def _record(line: str, limit: int) -> tuple[float, list[int], list[float]]:
    words = line.partition("#")[0].split()
    if not words:
        raise ValueError("it is empty")
    label = float(words[0])
    columns, values = [], []
    for word in words[1:]:
        column, colon, value = word.partition(":")
        if not colon:
            raise ValueError(f"{word!r} is not column:value")
        columns.append(int(column))
        values.append(float(value))
    if any(b <= a for a, b in zip([-1, *columns], columns, strict=False)):
        raise ValueError("columns must ascend from 0")
    if columns and columns[-1] >= limit:
        raise ValueError(f"column {columns[-1]} is beyond the {limit} features")
    if not np.isfinite(label) or not (np.abs(values) <= _LARGEST).all():
        raise ValueError("a number is not finite")
    return label, columns, values


def libsvm(
    path: str | os.PathLike, test_path: str | os.PathLike, features: int | None = None
) -> tuple[Source, Source]:
    """Return (train, test), dense, with classes in the order of the training labels. Local."""
    train = LibSVM(path, features)
    classes = np.unique(train.labels[~np.isnan(train.labels)])
    test = LibSVM(test_path, features)
    width = max(train.features, test.features) if features is None else features
    for source in (train, test):
        source.check_width()
        source.features, source.classes = width, classes
    return train, test
