"""``mpidist bench node``: time one rank's work in an allreduce on simulated nodes."""

from __future__ import annotations

from .common import head, say

HELP = "work of one rank of a large node; one process, the other ranks are faked"


def add_options(parser) -> None:
    """Add the options of ``mpidist bench node`` to its argument parser."""
    ranks, sizes = [2, 8, 32, 96, 256], [8, 1024, 512 << 10]
    add = parser.add_argument
    add("--ranks", type=int, nargs="+", default=ranks, help="ranks of the node (2 8 32 96 256)")
    add("--bytes", type=int, nargs="+", default=sizes, dest="nbytes", help="sizes (8 1024 524288)")
    add("--rounds", type=int, default=20, help="rounds, of which the fastest counts (20)")


def run(comm, args) -> list[dict]:
    """Measure one rank's work on rank 0 only, print a table, and return its rows."""
    from ...bench.node_times import measure

    columns = ("Ranks", "size", "us", "staging(MiB)")
    head(
        comm,
        f"one rank of a node, the other ranks are faked, {args.rounds} rounds",
        columns,
        width=13,
    )
    rows = []
    for ranks in args.ranks if comm.rank == 0 else ():
        for nbytes in args.nbytes:
            rows.append(row := measure(ranks, nbytes, args.rounds))
            mib = row["staging_bytes"] / 2**20
            say(comm, f"{ranks:>13}{row['bytes']:>13}{row['us']:>13.2f}{mib:>13.1f}  {row['form']}")
    return rows
