"""Read and verify a checkpoint without MPI: ``mpidist.load(path)``.

This works even where mpi4py is not installed, for example on a login node.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from numbers import Real
from typing import TypeVar

import numpy as np

from .. import events
from ..errors import CheckpointError, ConfigError, NoCheckpoint, shown
from . import histories
from .arguments import checked_path, checked_step, which
from .format.manifest import Damaged
from .format.regions import whole
from .format.state import named_dtype, tree
from .read.read_plan import Places, ReadItem
from .read.reader import open_reader
from .storage import steps
from .storage.steps import Entry

T = TypeVar("T")

#: If a running job has removed this many steps while a reader read them, the reader gives up.
_MOST_REMOVED = 100
#: `wait_for_step` lists the folder again after a pause; these are the first and the longest pause,
#: in seconds.
_PAUSES = 0.02, 1.0


def load(path, step: int | None = None, *, history: int | None = None) -> dict:
    """Read a checkpoint and return its state: nested dicts of NumPy arrays and plain values.

    The job that saves may still be running.

    Parameters
    ----------
    path : path-like
        Folder of a `CheckpointStore`.
    step : int, optional
        The step to read; None means the newest good step. Damaged steps are reported on stderr and
        skipped.
    history : int, optional
        The number of a history (series of saved steps); None means the newest history.

    Raises
    ------
    NoCheckpoint
        When no step can be read; the message names the steps that were tried.
    CheckpointError
        When `step` was given and is damaged.
    """
    return load_step(path, step, history)[1]


def load_step(path, step: int | None = None, history: int | None = None) -> tuple[int, dict]:
    """Read a checkpoint as `load` does, and return the tuple (step number, state)."""
    path = checked_path("path", path)
    entry, state = newest_good(path, **which(step, history), read=partial(_whole_state, path))
    return entry.step, state


def saved_extras(path) -> dict:
    """Return the extras (all values except arrays) of the newest step, or an empty dict."""
    path = checked_path("path", path)
    with suppress(NoCheckpoint, Damaged):
        entry = histories.first(path)
        if entry is not None:
            return tree(iter(steps.read_manifest(path, entry).extras))
    return {}


def wait_for_step(path, after: int | None = None, *, timeout: float | None = None) -> int:
    """Wait until a running job has saved another step, and return the number of this step.

    An evaluation program without MPI can call this function in a loop::

        step = None
        while True:
            step = md.wait_for_step("run/checkpoints", after=step)
            evaluate(md.load("run/checkpoints", step))

    Parameters
    ----------
    path : path-like
        Folder of a `CheckpointStore`, which need not exist yet.
    after : int, optional
        The step that the caller knows. The function returns as soon as the newest step is another
        one, which may have a lower number if the run went back. If `after` is None, it returns as
        soon as there is a step.
    timeout : float, optional
        Seconds to wait; None waits for ever.

    Raises
    ------
    NoCheckpoint
        When there is no other step within `timeout`.
    ConfigError
        When an argument is invalid.

    Notes
    -----
    A job with ``keep=1`` may remove the step before `load` reads it; `load` then raises
    NoCheckpoint.
    """
    path, after = checked_path("path", path), checked_step(after, name="after")
    if timeout is not None and not (isinstance(timeout, Real) and timeout >= 0):
        raise ConfigError(f"timeout={shown(timeout)}; expected seconds, 0 or more, or None")
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
    """Return the newest step folder that `read` finds undamaged, and the result of `read`.

    ``read(entry)`` must raise `Damaged` if the folder is damaged.
    """
    search = Search(path, step, history)
    while True:
        entry = search.next()
        try:
            return entry, read(entry)
        except Damaged as damage:
            search.pass_over(str(damage))


class Search:
    """The search for the newest good step of `path`, which begins with the newest step folder.

    Damaged step folders are added to the set ``bad``.
    """

    def __init__(self, path: str, step: int | None, history=None, first=None, bad=None):
        self._path, self._step, self._history = path, step, history
        self._first = first or partial(histories.first, path)
        self._bad = set() if bad is None else bad
        self._tried: dict[Entry, str] = {}
        self._removed = 0
        self._entry: Entry

    def next(self) -> Entry:
        """Return the newest step folder that is not skipped; CheckpointError if none is left."""
        entry = self._first(self._step, self._history, self._tried)
        if entry is None:
            raise _failure(self._path, self._step, list(self._tried.values()))
        self._entry = entry
        return entry

    def pass_over(self, reason: str, said: bool = False) -> None:
        """Skip the step folder that `next` returned last, since it is damaged.

        If `said` is true, the damage was reported already. Otherwise the text `reason` is reported
        on stderr and in the event log.
        """
        path, entry = self._path, self._entry
        if histories.is_gone(path, entry):
            self._removed = count_removed(path, self._removed)
            return
        self._bad.add(entry)
        self._tried[entry] = f"{entry.name}: {reason}"
        if not said:
            events.emit("checkpoint_damaged", path=path, step=entry.step, reason=reason)
            text = f"mpidist: damaged checkpoint passed over: {path}/{entry.name}: {reason}"
            print(text, file=sys.stderr, flush=True)


def count_removed(path: str, removed: int) -> int:
    """Return `removed` + 1, the number of saved steps that were removed while they were read.

    `removed` is their number so far. Raises CheckpointError if it is too high.
    """
    if removed == _MOST_REMOVED:
        raise CheckpointError(
            f"{removed} steps in {path} were removed while they were read; let the job that saves "
            "there keep more of them"
        )
    return removed + 1


def _failure(path: str, step: int | None, tried: list[str]) -> CheckpointError:
    """Return the error for a store in which all steps that were tried are damaged."""
    what = "; ".join(tried[:8]) + (f"; and {len(tried) - 8} more" if len(tried) > 8 else "")
    if step is not None:
        return CheckpointError(f"checkpoint of step {step} in {path} is damaged: {what}")
    return NoCheckpoint(f"no good checkpoint in {path}; tried {what}")


def _whole_state(path: str, entry: Entry) -> dict:
    """Read a step folder and return its state with whole arrays; raise Damaged if it is damaged."""
    manifest = steps.read_manifest(path, entry)
    arrays: dict[tuple, np.ndarray] = {}
    wants: list[ReadItem] = []
    places = Places(manifest)
    for number, tensor in enumerate(manifest.tensors):
        array = arrays[tensor.path] = np.empty(tensor.shape, named_dtype(tensor.dtype))
        wants += places.wants(number, whole(tensor.shape), array)
    with open_reader(path, entry, manifest) as reader:
        reader.read(wants)
    return tree(iter([*arrays.items(), *manifest.extras]))


def damages(path: str, entry: Entry, part: int = 0, parts: int = 1) -> tuple[list[str], int]:
    """Check all bytes of a step folder; return texts about damage, and the number of bytes checked.

    Only every `parts`-th file is checked, beginning with file number `part`.
    """
    try:
        manifest = steps.read_manifest(path, entry)
    except Damaged as damage:
        return [str(damage)], 0
    found, looked_at = [], 0
    for number in range(part, len(manifest.files), parts):
        try:
            # The read bypasses the cache of the operating system, which could hold good bytes
            # although the bytes on the disk are bad.
            with open_reader(path, entry, manifest, direct=True) as reader:
                reader.check_file(number)
        except Damaged as damage:
            found.append(str(damage))
        looked_at += manifest.files[number].size
    return found, looked_at
