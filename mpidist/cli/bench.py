"""``mpidist bench {allreduce,ps,checkpoint}``: measured figures, each beside its yardstick.

Each sub-command is a module here with ``add_parser(what)`` and ``run(comm, args)``, which prints
and returns its rows.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

from .. import launch
from ..errors import ConfigError
from . import bench_allreduce, bench_checkpoint, bench_servers

_MODULES = {
    "allreduce": bench_allreduce,
    "ps": bench_servers,
    "checkpoint": bench_checkpoint,
}
#: Options that count something.
_POSITIVE = ("low", "high", "rounds", "servers", "steps", "unit", "size")


def add_parser(commands) -> None:
    """Add this command to the argument parser. Local."""
    parser = commands.add_parser("bench", help="measure allreduce, servers or checkpoints")
    names = f"{{{','.join(_MODULES)}}}"
    what = parser.add_subparsers(dest="what", required=True, metavar=names)
    for module in _MODULES.values():
        each = module.add_parser(what)
        each.add_argument("--json", metavar="FILE", help="write the rows to FILE as well")


def run(args: argparse.Namespace) -> int:
    """Measure and print; collective over all ranks of the launch."""
    for name in _POSITIVE:
        value = getattr(args, name, None)
        if value is not None and value <= 0:
            option = {"low": "min", "high": "max"}.get(name, name)
            raise ConfigError(f"--{option} {value}: expected more than 0")
    module = _MODULES[args.what]
    if args.what == "allreduce":
        bench_allreduce.prepare(args)
    comm = launch.initialize(os.environ).COMM_WORLD
    launch.check_launch(comm, os.environ)
    rows = module.run(comm, args)
    if args.json and comm.rank == 0:
        Path(args.json).write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return 0
