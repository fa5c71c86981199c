"""Bad records: left out by all ranks together, counted, listed, and within limits.

    rank 0   take 4 5 6      good         | flag 0 |           learns: 8 is bad
    rank 1   take 7 8 9      8 is broken  | flag 1 |  agree    tells: 8, and why
                                    reduction of the step

A rank that finds a bad record goes on with the rest of its samples, and raises the flag that rides
beside the gradients in every step. Only where the flag is up do the ranks talk: they tell each
other what they found, correct the mean for the samples that are missing, and know the list from
then on, so later epochs leave these records out before anybody has to look at them.

With servers the workers are at different clocks: each goes on with what is good, and they agree on
the list at checkpoints, where they meet anyway.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from .. import events
from ..errors import BadRecord, TooManyBadRecords
from ..runtime.agreement.run_on_all import run_on_all

#: However many records there are, no more are skipped: the list is part of every checkpoint.
MOST = 100_000


class Verdict(NamedTuple):
    """What the ranks agreed on after a step whose flag was up."""

    stop: bool = False
    lost: int = 0
    starved: bool = False


class Quarantine:
    """The bad records of one run. Equal on all workers.

    Parameters
    ----------
    comm : MPI.Comm
        The workers; None on a rank that only serves.
    source : Source
        Told in the list by its `name`, or else its type's.
    max_bad : float
        The share of them that may be bad.
    path : path-like, optional
        The list as a file of JSON lines: source, index, reason.
    """

    def __init__(self, comm, source, max_bad: float, path=None):
        self.comm, self.count, self.max_bad = comm, len(source), max_bad
        self.source = str(getattr(source, "name", "") or type(source).__name__)
        self.allowed = min(int(max_bad * self.count), MOST)
        self.path = None if path is None else Path(path)
        self.known: dict[int, str] = {}
        self.skipped = 0
        self.found: list[tuple[int, str]] = []
        self._indices = np.empty(0, np.int64)

    def wanted(self, indices: np.ndarray) -> np.ndarray:
        """Return `indices` without the records that are known to be bad."""
        if not len(self._indices):
            return indices
        return indices[~np.isin(indices, self._indices)]

    def note(self, bad: Iterable[BadRecord]) -> None:
        """Remember what this rank has found, until the ranks agree."""
        for record in bad:
            self.found.append((record.index, record.reason))
            events.emit("bad_record", source=self.source, index=record.index, reason=record.reason)

    @property
    def full(self) -> bool:
        """Whether there are more bad records than allowed, as far as this rank knows."""
        # Where no ranks agree for long, a worker finds the same records again in each epoch.
        new = {index for index, _ in self.found if index not in self.known}
        return len(self.known) + len(new) > self.allowed

    def agree(self, stop: bool = False, starved: bool = False) -> Verdict:
        """Tell the other workers what this one has found. Collective over the workers."""
        mine = bool(stop), starved, self.found
        everyone = run_on_all(self.comm, "md.train: bad records", lambda: mine, list)
        found = sorted(record for _, _, records in everyone for record in records)
        self.found = []
        if not any(starved for _, starved, _ in everyone):  # else the step is tried again
            self.skipped += len(found)
        new = {index: reason for index, reason in found if index not in self.known}
        if new:
            self._learn(new)
            if self.comm.rank == 0:
                self._write(new, "a")
        return Verdict(
            any(stop for stop, _, _ in everyone), len(found), any(s for _, s, _ in everyone)
        )

    def _learn(self, new: dict[int, str]) -> None:
        self.known.update(new)
        # One assignment: the loader's thread reads it meanwhile.
        self._indices = np.array(sorted(self.known), np.int64)

    def _write(self, records: dict[int, str], mode: str) -> None:
        if self.path is None:
            return
        lines = [
            json.dumps({"source": self.source, "index": index, "reason": reason}) + "\n"
            for index, reason in sorted(records.items())
        ]
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open(mode, encoding="utf-8") as file:
                file.writelines(lines)
        except OSError as error:
            # The list is in the checkpoint, and in the events: no reason to end a run.
            print(f"mpidist: cannot write {self.path}: {error.strerror}", file=sys.stderr)

    # -- checkpoints -------------------------------------------------------------------

    def facts(self) -> dict:
        """Return what a checkpoint keeps."""
        bad = [[index, reason] for index, reason in sorted(self.known.items())]
        return {"bad": bad, "skipped": self.skipped}

    def restore(self, bad: Sequence, skipped: int, retry: bool) -> None:
        """Take the list of a checkpoint; with `retry` its records are looked at again."""
        self.skipped = int(skipped)
        self.known.clear()
        self._learn({} if retry else {int(index): str(reason) for index, reason in bad})
        if self.comm is not None and self.comm.rank == 0 and (bad or self.skipped):
            # The file and the list are one: what was found after the checkpoint is found again.
            self._write(self.known, "w")

    def error(self, saved: str) -> TooManyBadRecords:
        """Return what ends a run with too many bad records."""
        records = tuple(sorted(self.known.items()))
        first = "; ".join(f"record {index}: {reason}" for index, reason in records[:3])
        where = f" (all of them in {self.path})" if self.path else ""
        return TooManyBadRecords(
            f"{len(records)} of the {self.count} records of {self.source} are bad, and "
            f"max_bad={self.max_bad:g} allows {self.allowed}{where}: {first}; {saved}. Mend the "
            "data and go on with retry_bad=True, or allow more",
            records,
        )
