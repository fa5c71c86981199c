"""``mpidist bench allreduce --explain`` and ``--advise``: what auto chooses, what MPI should."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ...errors import ConfigError
from ...launch import claims
from .common import library, say


def add_options(parser) -> None:
    """Add both options and what belongs to them."""
    group = parser.add_argument_group("instead of the bench")
    group.add_argument("--explain", action="store_true", help="what auto chooses, and why")
    group.add_argument("--checkpoint", metavar="DIR", help="explain the table frozen in there")
    group.add_argument(
        "--advise", action="store_true", help="try MPI's own algorithms; started without mpirun"
    )
    group.add_argument("--ranks", type=int, help="advise: ranks to start (all cores)")
    group.add_argument("--launcher", help="advise: words to start with, 'mpirun -n 8 --hostfile h'")
    group.add_argument("--out", default="mpi-advice", help="advise: folder of the files written")


def print_choices(comm, args) -> list[dict]:
    """Print what ``auto`` chooses. Collective over `comm`."""
    from ...advice import explain
    from ...bench.allreduce_times import size_range
    from ...collectives import selection

    saved = explain.saved_table(args.checkpoint) if args.checkpoint else None
    rows, seconds = explain.explain(
        comm, size_range(args.low, args.high, args.step), args.dtype, saved
    )
    cache = selection.remembered(comm)
    fresh = sum(row["from"] == "measured" for row in rows)
    say(
        comm,
        f"# what auto chooses, {comm.size} ranks, {library()}, {args.dtype}, "
        f"thread level {args.thread_level}",
        f"# cluster {cache.fingerprint}, remembered {f'in {cache.path}' if cache.path else 'not'}; "
        f"{fresh} of {len(rows)} classes measured now, in {seconds:.2f} s",
        *explain.explanation_lines(rows),
        f"# table {selection.fingerprint(selection.table(comm))}: where it is equal, auto adds in "
        "the same order",
    )
    return rows


def print_advice(args, environ: Mapping[str, str]) -> list[dict]:
    """Print what would make MPI's own allreduce faster here. It starts the ranks itself."""
    from ...advice import advise
    from ...bench.allreduce_times import size_range

    if claim := claims.claimed_size(environ):
        raise ConfigError(
            f"--advise was started by {claim.launcher}; start it without: it starts the ranks"
        )
    options = ["--step", str(args.step), "--rounds", str(args.rounds), "--dtype", args.dtype]
    options += ["--thread-level", args.thread_level]
    there = advise.site(
        args.ranks, args.launcher, options, size_range(args.low, args.high, args.step)
    )
    library, out = advise.installed_mpi(), Path(args.out)
    rows = advise.advise(there, library, out, lambda line: print(line, flush=True))
    print("\n".join(advise.advice_lines(rows, out, library)), flush=True)
    return rows
