"""``mpidist checkpoint list | show | verify | export | index``: read checkpoints without MPI.

The exit code is 0 if no checkpoint is damaged, 1 if a checkpoint is damaged, and 2 if there is no
checkpoint or an argument is invalid.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path

from ..errors import MpidistError, NoCheckpoint


def add_parser(subparsers) -> argparse.ArgumentParser:
    """Add the command to the subparsers of ``mpidist``."""
    parser = subparsers.add_parser(
        "checkpoint", help="list, show, verify, export or index checkpoints (no MPI needed)"
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    helps = {
        "list": "the steps of a store by history, newest last",
        "show": "the arrays and values of one step",
        "verify": "check every byte of all steps, or of one",
        "export": "write one step as one plain file: .h5, .npz or .safetensors",
        "index": "write index.h5, through which any HDF5 program can read the arrays of a step",
    }
    for name, text in helps.items():
        action = actions.add_parser(name, help=text, description=text)
        action.add_argument("path", metavar="PATH", help="folder of the store")
        if name == "export":
            action.add_argument("out", metavar="OUT", help="file to write")
        if name != "list":
            default = "all" if name == "verify" else "the newest good one"
            action.add_argument("--step", type=int, metavar="N", help=f"default: {default}")
            default = "all" if name == "verify" else "the newest"
            action.add_argument("--history", type=int, metavar="N", help=f"default: {default}")
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """Run the action that the arguments select, and return the exit code."""
    from ..checkpoint.arguments import checked_path, which

    try:
        args.path = checked_path("path", args.path)
        if args.action != "list":
            which(args.step, args.history)
        return _ACTIONS[args.action](args)
    except BrokenPipeError:  # of stdout
        raise
    except (MpidistError, OSError) as error:
        text = " ".join(str(error).split())
        inner = Path(args.path, "checkpoints")  # the store in the results of `mpidist train`
        if isinstance(error, NoCheckpoint) and any(inner.glob("step-*")):
            text += f"; did you mean {inner}?"
        print(f"mpidist: error: checkpoint {args.action}: {text}", file=sys.stderr)
        return error.exit_code if isinstance(error, MpidistError) else 2


def _list(args) -> int:
    from ..checkpoint import histories

    entries, listed = histories.everything(args.path)
    newest, begun, bad = entries[0].history, None, 0
    print(f"{'step':>12}  {'arrays':>7}  {'bytes':>15}  {'writers':>7}  state")
    for entry in reversed(entries):
        if entry.history != begun and newest:  # a single history needs no heading
            begun = entry.history
            print(f"{listed.beginning(begun)}{', the newest' if begun == newest else ''}:")
        line, damaged = _line(args.path, entry)
        bad += damaged
        if line:
            print(line)
    return 1 if bad else 0


def _line(path: str, entry) -> tuple[str, bool]:
    """Return a line about a saved step (empty if it was removed), and whether it is damaged."""
    from ..checkpoint import histories
    from ..checkpoint.format.manifest import Damaged
    from ..checkpoint.storage import steps

    try:
        found = steps.read_manifest(path, entry)
    except Damaged as damage:
        if histories.is_gone(path, entry):
            return "", False
        return f"{entry.step:>12}  {'-':>7}  {'-':>15}  {'-':>7}  damaged: {damage}", True
    return (
        f"{entry.step:>12}  {len(found.tensors):>7}  {found.nbytes:>15,}  "
        f"{found.writers:>7}  manifest and sizes good"
    ), False


def _show(args) -> int:
    import numpy as np

    from ..checkpoint import load
    from ..checkpoint.format.state import show
    from ..checkpoint.storage import steps

    read = partial(steps.read_manifest, args.path)
    entry, found = load.newest_good(args.path, args.step, args.history, read)
    software = " ".join(f"{name} {version}" for name, version in found.software.items())
    print(f"step {found.step}  {args.path}/{entry.name}")
    print(f"written by {found.writers} ranks  {found.nbytes:,} bytes of arrays  ({software})")
    width = max([len(show(t.path)) for t in found.tensors] + [5])
    print(f"{'array':<{width}}  {'dtype':<9}  {'shape':<18}  {'bytes':>14}  pieces")
    counts = np.bincount(found.rows[:, 0], minlength=len(found.tensors))
    for tensor, count in zip(found.tensors, counts, strict=True):
        print(
            f"{show(tensor.path):<{width}}  {tensor.dtype:<9}  {tensor.shape!s:<18}  "
            f"{tensor.nbytes:>14,}  {count}"
        )
    for path, value in found.extras:
        text = repr(value)
        print(f"{show(path)} = {text if len(text) <= 200 else text[:200] + ' ...'}")
    return 0


def _verify(args) -> int:
    from ..checkpoint import histories, load

    bad = 0
    entries, _ = histories.everything(args.path, args.step, args.history)
    for entry in reversed(entries):
        found, looked_at = load.damages(args.path, entry)
        if found and histories.is_gone(args.path, entry):
            continue  # the job that saves into the store has removed this step meanwhile
        bad += bool(found)
        verdict = f"damaged: {'; '.join(found)}" if found else f"good, {looked_at:,} bytes"
        of = f" of history {entry.history}" if entries[0].history else ""
        print(f"step {entry.step}{of}: {verdict}")
    return 1 if bad else 0


def _export(args) -> int:
    from ..checkpoint.export.plain_file import export_step

    step = export_step(args.path, Path(args.out), step=args.step, history=args.history)
    return _print_written(args.path, step, Path(args.out))


def _index(args) -> int:
    from .. import untrusted_hdf5
    from ..checkpoint.export.index import index

    if holes := untrusted_hdf5.known_holes():
        print(f"mpidist: {holes}", file=sys.stderr)
    return _print_written(args.path, *index(args.path, args.step, args.history))


def _print_written(path: str, step: int, out: Path) -> int:
    print(f"step {step} of {path} -> {out} ({out.stat().st_size:,} bytes)")
    return 0


_ACTIONS = {"list": _list, "show": _show, "verify": _verify, "export": _export, "index": _index}
