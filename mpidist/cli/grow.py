"""``mpidist grow CONTROL -n K``: continue the job of a running `mpidist launch` with more ranks.

The command writes a request into the control folder, and returns. `mpidist launch` then starts the
program again with K more ranks than before, and this new start continues the training run in place
of the old one.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from ..errors import ConfigError


def add_parser(commands) -> None:
    """Add the command ``mpidist grow`` to the sub-parsers `commands` of ``mpidist``."""
    about = "continue the job of a running mpidist launch with more ranks"
    add = commands.add_parser("grow", help=about, description=about).add_argument
    add("control", type=Path, metavar="CONTROL", help="control folder of the mpidist launch")
    add("-n", type=int, required=True, metavar="K", help="number of additional ranks")


def run(args: argparse.Namespace) -> int:
    """Request more ranks from a running `mpidist launch`, and return the exit code."""
    from ..supervisor.requests import request_growth

    try:
        request_growth(args.control, args.n)
    except OSError as error:
        raise ConfigError(f"mpidist grow: {error}") from None
    print(f"{args.control}: asked for {args.n} more; see the output of mpidist launch")
    return 0
