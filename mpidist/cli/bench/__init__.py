"""``mpidist bench WHAT``: benchmarks, each with a reference that is measured in the same run."""

from __future__ import annotations

import argparse
import json
import os
from functools import partial
from pathlib import Path
from typing import Any

from ...errors import ConfigError
from ...launch import binding, claims
from ..start import start_ranks
from . import allreduce, checkpoint, choices, loader, node, overlap, ps, servers, step

_MODULES: dict[str, Any] = {
    "allreduce": allreduce,
    "node": node,
    "servers": servers,
    "ps": ps,
    "checkpoint": checkpoint,
    "loader": loader,
    "overlap": overlap,
    "step": step,
}
#: Options whose values must be above 0.
_POSITIVE = (
    "low", "high", "rounds", "servers", "workers", "steps", "unit", "size", "ranks", "layers",
    "bucket_bytes", "nbytes", "compute", "bound",
)  # fmt: skip


def add_parser(commands) -> None:
    """Add the command ``mpidist bench`` to the sub-parsers `commands` of ``mpidist``."""
    parser = commands.add_parser("bench", help="measure allreduce, servers, checkpoints and more")
    names = f"{{{','.join(_MODULES)}}}"
    what = parser.add_subparsers(dest="what", required=True, metavar=names)
    for name, module in _MODULES.items():
        each = what.add_parser(name, help=module.HELP)
        module.add_options(each)
        each.add_argument("--json", metavar="FILE", help="write the rows to FILE as well")


def run(args: argparse.Namespace) -> int:
    """Run the benchmark that `args` names, print its results, and return the exit code.

    Collective over all ranks of the launch, except that ``--advise`` runs in one process.
    """
    for name in _POSITIVE:
        value = getattr(args, name, None)
        value = min(value, default=1) if isinstance(value, list) else value
        if value is not None and value <= 0:
            option = {"low": "min", "high": "max", "nbytes": "bytes"}.get(name, name)
            raise ConfigError(f"--{option} {value}: expected more than 0")
    if args.what == "allreduce":
        allreduce.prepare(args)
    alone = claims.claimed_size(os.environ) is None  # started without a launcher
    if alone:
        _check_file(args.json)
    if getattr(args, "advise", False):
        rows, first = choices.print_advice(args, os.environ), True
    else:
        comm = start_ranks(os.environ)
        if not alone:
            from ...runtime.agreement.run_on_all import run_on_all  # after MPI has begun

            mine = None if comm.rank else args.json
            run_on_all(comm, "bench: --json", partial(_check_file, mine))
        binding.check_binding(comm, os.environ)
        rows, first = _MODULES[args.what].run(comm, args), comm.rank == 0
    if args.json and first:
        Path(args.json).write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return 0


def _check_file(path: str | None) -> None:
    """Raise ConfigError if `path` cannot be written, before the benchmark runs for minutes."""
    if path and not (Path(path).parent.is_dir() and not Path(path).is_dir()):
        raise ConfigError(f"--json {path}: expected a file in a folder that exists")
