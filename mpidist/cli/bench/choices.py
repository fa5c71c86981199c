"""The options ``--explain`` and ``--advise`` of ``mpidist bench allreduce``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ...errors import ConfigError
from ...launch import claims
from .common import library, say


def add_options(parser) -> None:
    """Add ``--explain``, ``--advise`` and their options."""
    add = parser.add_argument_group("instead of the bench").add_argument
    add("--explain", action="store_true", help="what auto chooses, and why")
    add("--checkpoint", metavar="DIR", help="explain: begin with the choices in this checkpoint")
    add("--advise", action="store_true", help="try MPI's own algorithms; started without mpirun")
    add("--ranks", type=int, help="advise: ranks to start (all cores)")
    add("--launcher", help="advise: how to start ranks: 'mpirun -n 8 --hostfile h'")
    add("--out", default="mpi-advice", help="advise: folder to write the settings to")


def print_choices(comm, args) -> list[dict]:
    """Print which algorithm ``auto`` chooses for each size. Collective over `comm`."""
    from ...advice import explain
    from ...bench.allreduce_times import size_range
    from ...collectives import selection

    saved = explain.saved_table(args.checkpoint) if args.checkpoint else None
    sizes = size_range(args.low, args.high, args.step)
    rows, seconds = explain.explain(comm, sizes, args.dtype, saved)
    cache = selection.remembered(comm)
    fresh = sum(row["from"] == "measured" for row in rows)
    say(
        comm,
        f"# what auto chooses, {comm.size} ranks, {library()}, {args.dtype}, "
        f"thread level {args.thread_level}",
        f"# cluster {cache.fingerprint}, cache {cache.path or 'off'}; {fresh} of {len(rows)} size "
        f"classes measured now, in {seconds:.2f} s",
        *explain.explanation_lines(rows),
        f"# fingerprint {selection.table_fingerprint(selection.table(comm))} of all choices: runs "
        "with the same fingerprint add in the same order",
    )
    return rows


def print_advice(args, environ: Mapping[str, str]) -> list[dict]:
    """Start ranks, measure, and print the settings that make MPI's own allreduce faster here."""
    from ...advice import advise
    from ...bench.allreduce_times import size_range

    if claim := claims.claimed_size(environ):
        raise ConfigError(
            f"--advise was started by {claim.launcher}; start it without: it starts the ranks"
        )
    options = ["--step", str(args.step), "--rounds", str(args.rounds), "--dtype", args.dtype]
    options += ["--thread-level", args.thread_level]
    sizes = size_range(args.low, args.high, args.step)
    there = advise.site(args.ranks, args.launcher, options, sizes)
    library, out = advise.installed_mpi(), Path(args.out)
    rows = advise.advise(there, library, out, lambda line: print(line, flush=True))
    print("\n".join(advise.advice_lines(rows, out, library)), flush=True)
    return rows
