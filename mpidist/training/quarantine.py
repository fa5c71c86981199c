"""The list of bad records, which all ranks leave out; too many bad records stop the run.

    rank 0   take 4 5 6      good         | flag 0 |           receives: 8 is bad
    rank 1   take 7 8 9      8 is broken  | flag 1 |  agree    sends: 8, and why
                                    reduction of the step

A rank that finds a bad record continues with its other samples, and sets a flag, which is summed
over the ranks together with the gradients. If a flag is set, the ranks exchange the numbers of the
bad records, and correct the mean of the gradients for the missing samples. Later epochs do not read
the listed records. The workers of parameter servers exchange their bad records at each checkpoint
instead.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from .. import events
from ..errors import BadRecord, TooManyBadRecords
from ..runtime.agreement.run_on_all import run_on_all

#: The largest number of skipped records. It is limited because every checkpoint contains the list.
MOST = 100_000


class Verdict(NamedTuple):
    """The decision of all ranks after a step in which a rank had bad or late samples, or must stop.

    `lost` is the number of bad records in the step. `starved` says whether some rank still waits
    for its samples.
    """

    stop: bool = False
    lost: int = 0
    starved: bool = False


class Quarantine:
    """The bad records of one run.

    Parameters
    ----------
    comm : MPI.Comm
        The workers; None on a dedicated server.
    source : Source
        The source of the records. Its name in the list of bad records is its attribute `name`, or
        else the name of its type.
    max_bad : float
        The fraction of the records that may be bad.
    path : path-like, optional
        The file to which the list of bad records is written. Each line is a JSON object with
        source, index and reason.
    """

    def __init__(self, comm, source, max_bad: float, path=None):
        self.comm, self.count, self.max_bad = comm, len(source), max_bad
        self.source = str(getattr(source, "name", "") or type(source).__name__)
        self.allowed = min(int(max_bad * self.count), MOST)
        self.path = None if path is None else Path(path)
        self.known: dict[int, str] = {}
        self.skipped = 0
        self.found: list[tuple[int, str]] = []
        self.whole = 0  # how many of `found` belong to finished steps
        self._indices = np.empty(0, np.int64)

    def wanted(self, indices: np.ndarray) -> np.ndarray:
        """Return those of the records numbered `indices` that are not known to be bad."""
        return indices[~np.isin(indices, self._indices)] if len(self._indices) else indices

    def note(self, bad: Iterable[BadRecord]) -> None:
        """Store the bad records that this rank has found, until the ranks exchange them."""
        for record in bad:
            self.found.append((record.index, record.reason))
            events.emit("bad_record", source=self.source, index=record.index, reason=record.reason)

    def end_of_step(self) -> None:
        """Record that this step is done.

        If a rank dies and the next step is repeated, only the bad records of that step are found
        again.
        """
        self.whole = len(self.found)

    @property
    def full(self) -> bool:
        """Whether this rank knows of more bad records than `max_bad` allows."""
        # Between two agreements a worker may find the same record once in each epoch.
        new = {index for index, _ in self.found if index not in self.known}
        return len(self.known) + len(new) > self.allowed

    def agree(self, stop: bool = False, starved: bool = False) -> Verdict:
        """Exchange the bad records that each worker has found; decide how the run goes on.

        Collective over the workers. `stop` says whether this worker wants to stop, and `starved`
        whether it still waits for its samples.
        """
        mine = bool(stop), starved, self.found
        everyone = run_on_all(self.comm, "md.train: bad records", lambda: mine, list)
        stops, starving, records = zip(*everyone, strict=True)
        found = sorted(itertools.chain(*records))
        self.found, self.whole = [], 0
        if not any(starving):  # otherwise the step is repeated, and is counted later
            self.skipped += len(found)
        new = {index: reason for index, reason in found if index not in self.known}
        if new:
            self._learn(new)
            if self.comm.rank == 0:
                self._write(new, "a")
        return Verdict(any(stops), len(found), any(starving))

    def _learn(self, new: dict[int, str]) -> None:
        self.known.update(new)
        # The array is replaced by one assignment, because the loader's thread may read it at any
        # time.
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
            # The checkpoint and the events hold the list as well, so the run goes on.
            print(f"mpidist: cannot write {self.path}: {error.strerror}", file=sys.stderr)

    # -- checkpoints -------------------------------------------------------------------

    def facts(self) -> dict:
        """Return the list of bad records and the number of skipped samples, for a checkpoint."""
        bad = [[index, reason] for index, reason in sorted(self.known.items())]
        return {"bad": bad, "skipped": self.skipped}

    def restore(self, bad: Sequence, skipped: int, retry: bool) -> None:
        """Set the list of bad records to `bad` from a checkpoint; with `retry`, empty the list."""
        self.skipped = int(skipped)
        self.known.clear()
        self._learn({} if retry else {int(index): str(reason) for index, reason in bad})
        if self.comm is not None and self.comm.rank == 0 and (bad or self.skipped):
            # The file is replaced, because it must contain exactly the restored list. Bad records
            # that were found after the checkpoint will be found again.
            self._write(self.known, "w")

    def error(self, saved: str) -> TooManyBadRecords:
        """Return the error that ends a run with too many bad records."""
        records = tuple(sorted(self.known.items()))
        first = "; ".join(f"record {index}: {reason}" for index, reason in records[:3])
        where = f" (all of them in {self.path})" if self.path else ""
        return TooManyBadRecords(
            f"{len(records)} of the {self.count} records of {self.source} are bad, and "
            f"max_bad={self.max_bad:g} allows {self.allowed}{where}: {first}; {saved}. Mend the "
            "data and go on with retry_bad=True, or allow more",
            records,
        )
