"""Read a checkpoint without MPI: ``mpidist.load(path)``, and the checks of ``verify``.

Works where mpi4py is not installed: in a notebook, on a login node, in an evaluation job.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TypeVar

import numpy as np

from .. import events
from ..errors import CheckpointError, NoCheckpoint
from . import histories
from .arguments import path_of, wanted, which
from .format.manifest import Damaged, Manifest
from .format.regions import whole
from .format.state import dtype_of, tree
from .read.read_plan import Places, ReadItem
from .read.reader import opened
from .storage import steps
from .storage.steps import Entry

T = TypeVar("T")

#: So many steps may be removed by a running job before a reader has one. Each is the newest then.
_MOST_REMOVED = 100
#: Seconds between two looks of `wait_for_step`: the first ones, and the later ones.
_PAUSES = 0.02, 1.0


def load(path, step: int | None = None, *, history: int | None = None) -> dict:
    """Read a checkpoint and return its state as nested dicts of NumPy arrays and extras.

    Parameters
    ----------
    path : path-like
        Folder of a `CheckpointStore`.
    step : int, optional
        The step to read; None is the newest good one. Damaged ones are said on stderr and
        passed over.
    history : int, optional
        Its number, for one that a run has left or set aside; None is the newest.

    Raises
    ------
    NoCheckpoint
        When there is no checkpoint, or none that is good; says what was tried.
    CheckpointError
        When `step` was given and is damaged.

    Notes
    -----
    The job that saves may go on. A step that it removes meanwhile is not damaged: the one that is
    newest by then is read.
    """
    return load_step(path, step, history)[1]


def load_step(path, step: int | None = None, history: int | None = None) -> tuple[int, dict]:
    """Do as `load`, and return the step with the state."""
    path = path_of("path", path)
    entry, state = newest_good(path, **which(step, history), read=partial(_whole_state, path))
    return entry.step, state


def wait_for_step(path, after: int | None = None, *, timeout: float | None = None) -> int:
    """Wait until a running job has saved another step, and return its number.

    For evaluators, without MPI::

        step = None
        while True:
            step = md.wait_for_step("run/checkpoints", after=step)
            evaluate(md.load("run/checkpoints", step))

    Parameters
    ----------
    path : path-like
        Folder of a `CheckpointStore`; it need not be there yet.
    after : int, optional
        The step that is known: the newest one is returned as soon as it is not this one. It is
        lower where the run went back. None takes what is there.
    timeout : float, optional
        Seconds to wait; None waits for ever.

    Raises
    ------
    NoCheckpoint
        When there is none within `timeout`.

    Notes
    -----
    A job with ``keep=1`` may remove the step before it is loaded, which is then NoCheckpoint.
    """
    path, after = path_of("path", path), wanted(after, name="after")
    end = math.inf if timeout is None else time.monotonic() + timeout
    pause, longest = _PAUSES
    while True:
        with suppress(NoCheckpoint):
            entry = histories.first(path)
            if entry is not None and entry.step != after:
                return entry.step
        if time.monotonic() + pause > end:
            known = "" if after is None else f" but {after}"
            raise NoCheckpoint(f"no checkpoint{known} in {path} within {timeout:g} s")
        time.sleep(pause)
        pause = min(2 * pause, longest)


def newest_good(
    path: str, step: int | None, history: int | None, read: Callable[[Entry], T]
) -> tuple[Entry, T]:
    """Return the newest entry that `read` can read, and what it returned.

    Damaged ones are said and passed over; what a running job removes meanwhile is none of those.
    """
    search = Search(path, step, history)
    while True:
        entry = search.next()
        try:
            return entry, read(entry)
        except Damaged as damage:
            search.pass_over(str(damage))


class Search:
    """The way from the newest step to the newest good one.

    Parameters
    ----------
    path : str
    step, history : int or None
    first : callable, optional
        As `histories.first` of the path: the newest entry that is none of those passed.
    bad : set of Entry, optional
        Gets the damaged ones.
    """

    def __init__(
        self, path: str, step: int | None, history: int | None = None, first=None, bad=None
    ):
        self._path, self._step, self._history = path, step, history
        self._first = first or partial(histories.first, path)
        self._bad = set() if bad is None else bad
        self._tried: dict[Entry, str] = {}
        self._removed = 0
        self._entry: Entry

    def next(self) -> Entry:
        """Return the newest entry that was not passed over. Raises where there is none left."""
        entry = self._first(self._step, self._history, self._tried)
        if entry is None:
            raise _failure(self._path, self._step, list(self._tried.values()))
        self._entry = entry
        return entry

    def pass_over(self, reason: str, said: bool = False) -> None:
        """Say that the entry is damaged, unless a running job has removed it, or it is `said`."""
        if histories.is_gone(self._path, self._entry):
            self._removed = count_removed(self._path, self._removed)
        else:
            self._bad.add(self._entry)
            self._tried[self._entry] = f"{self._entry.name}: {reason}"
            if not said:
                _note(self._path, self._entry, reason)


def count_removed(path: str, removed: int) -> int:
    """Return one more; raise CheckpointError where a reader never comes in time."""
    if removed == _MOST_REMOVED:
        raise CheckpointError(
            f"{removed} steps in {path} were removed while they were read; let the job that saves "
            "there keep more of them"
        )
    return removed + 1


def _note(path: str, entry: Entry, reason: str) -> None:
    """Say once, on stderr and in the event log, that a step is passed over."""
    events.emit("checkpoint_damaged", path=path, step=entry.step, reason=reason)
    text = f"mpidist: damaged checkpoint passed over: {path}/{entry.name}: {reason}"
    print(text, file=sys.stderr, flush=True)


def _failure(path: str, step: int | None, tried: list[str]) -> CheckpointError:
    """Return the error for a store in which nothing that was tried is good."""
    what = "; ".join(tried[:8]) + (f"; and {len(tried) - 8} more" if len(tried) > 8 else "")
    if step is not None:
        return CheckpointError(f"checkpoint of step {step} in {path} is damaged: {what}")
    return NoCheckpoint(f"no good checkpoint in {path}; tried {what}")


def _whole_state(path: str, entry: Entry) -> dict:
    manifest = steps.read_manifest(path, entry)
    return tree(iter([*whole_arrays(path, entry, manifest), *manifest.extras]))


def whole_arrays(path: str, entry: Entry, manifest: Manifest) -> list[tuple[tuple, np.ndarray]]:
    """Read every array whole: (path of keys, array) pairs. Raises Damaged."""
    found: list[tuple[tuple, np.ndarray]] = []
    wants: list[ReadItem] = []
    places = Places(manifest)
    for number, tensor in enumerate(manifest.tensors):
        array = np.empty(tensor.shape, dtype_of(tensor.dtype))
        found.append((tensor.path, array))
        wants += places.wants(number, whole(tensor.shape), array)
    with opened(path, entry, manifest) as reader:
        reader.read(wants)
    return found


def damages(path: str, entry: Entry, part: int = 0, parts: int = 1) -> tuple[list[str], int]:
    """Check all bytes of an entry: its damages, and the bytes looked at.

    With `parts`, each file but the manifest is checked by one of them only.
    """
    try:
        manifest = steps.read_manifest(path, entry)
    except Damaged as damage:
        return [str(damage)], 0
    found, looked_at = [], 0
    for number in range(part, len(manifest.files), parts):
        try:
            # From the disk: what the system still holds says nothing about that.
            with opened(path, entry, manifest, direct=True) as reader:
                reader.check_file(number)
        except Damaged as damage:
            found.append(str(damage))
        looked_at += manifest.files[number].size
    return found, looked_at
