"""Read a checkpoint without MPI: ``mpidist.load(path)``, and the checks of ``verify``.

Works where mpi4py is not installed: in a notebook, on a login node, in an evaluation job.
"""

from __future__ import annotations

import os
import sys

import numpy as np

from mpidist import events
from mpidist.checkpoint import steps
from mpidist.checkpoint.layout import dtype_of, tree
from mpidist.checkpoint.manifest import Damaged, Manifest
from mpidist.checkpoint.reader import opened
from mpidist.checkpoint.regions import whole
from mpidist.checkpoint.steps import Entry
from mpidist.checkpoint.wants import Want, wants_of
from mpidist.errors import CheckpointError, NoCheckpoint


def load(path, step: int | None = None) -> dict:
    """Read a checkpoint and return its state as nested dicts of NumPy arrays and extras. Local.

    Parameters
    ----------
    path : path-like
        Folder of a `CheckpointStore`.
    step : int, optional
        The step to read; None is the newest good one. Damaged ones are said on stderr and
        passed over.

    Raises
    ------
    NoCheckpoint
        When there is no checkpoint, or none that is good; says what was tried.
    CheckpointError
        When `step` was given and is damaged.
    """
    return load_step(path, step)[1]


def load_step(path, step: int | None = None) -> tuple[int, dict]:
    """Do as `load`, and return the step with the state. Local."""
    path = os.fspath(path)
    tried: list[str] = []
    for entry in steps.candidates(path, step):
        try:
            return entry.step, _whole_state(path, entry)
        except Damaged as damage:
            tried.append(note(path, entry, str(damage)))
    raise failure(path, step, tried)


def note(path: str, entry: Entry, reason: str) -> str:
    """Say once, on stderr and in the event log, that a step is passed over. Local."""
    text = f"{entry.name}: {reason}"
    events.emit("checkpoint_damaged", path=path, step=entry.step, reason=reason)
    print(f"mpidist: damaged checkpoint passed over: {path}/{text}", file=sys.stderr, flush=True)
    return text


def failure(path: str, step: int | None, tried: list[str]) -> CheckpointError:
    """Return the error for a store in which nothing that was tried is good. Local."""
    what = "; ".join(tried[:8]) + (f"; and {len(tried) - 8} more" if len(tried) > 8 else "")
    if step is not None:
        return CheckpointError(f"checkpoint of step {step} in {path} is damaged: {what}")
    return NoCheckpoint(f"no good checkpoint in {path}; tried {what}")


def _whole_state(path: str, entry: Entry) -> dict:
    manifest = steps.parse(steps.read_manifest(path, entry), entry)
    return tree(iter([*whole_arrays(path, entry, manifest), *manifest.extras]))


def whole_arrays(path: str, entry: Entry, manifest: Manifest) -> list[tuple[tuple, np.ndarray]]:
    """Read every array whole: (path of keys, array) pairs. Local. Raises Damaged."""
    found: list[tuple[tuple, np.ndarray]] = []
    wants: list[Want] = []
    for tensor in manifest.tensors:
        array = np.empty(tensor.shape, dtype_of(tensor.dtype))
        found.append((tensor.path, array))
        region = whole(tensor.shape)
        wants += wants_of(tensor, region, array.itemsize, array, manifest.block)
    with opened(path, entry, manifest) as reader:
        reader.read(wants)
    return found


def damages(path: str, entry: Entry, part: int = 0, parts: int = 1) -> tuple[list[str], int]:
    """Check all bytes of an entry: its damages, and the bytes looked at. Local.

    With `parts`, each file but the manifest is checked by one of them only.
    """
    try:
        manifest = steps.parse(steps.read_manifest(path, entry), entry)
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
