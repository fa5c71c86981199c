"""``mpidist bench node``: what more ranks on a node cost each of them."""

from __future__ import annotations

from .common import head, say


def add_parser(what):
    """Add this command; return its parser."""
    parser = what.add_parser(
        "node", help="what one rank of a large node does itself; one process, the others faked"
    )
    parser.add_argument(
        "--ranks", type=int, nargs="+", default=[2, 8, 32, 96, 256], help="(2 8 32 96 256)"
    )
    parser.add_argument(
        "--bytes", type=int, nargs="+", default=[8, 1024, 512 << 10], dest="nbytes",
        help="(8 1024 524288)",
    )  # fmt: skip
    parser.add_argument("--rounds", type=int, default=20, help="of which the least counts (20)")
    return parser


def run(comm, args) -> list[dict]:
    """Measure and print. Rank 0 does it."""
    from ...bench.node_times import measure

    columns = ("Ranks", "size", "us", "staging(MiB)")
    head(comm, f"one rank of a node, the others faked, {args.rounds} rounds", columns, width=13)
    rows = []
    for ranks in args.ranks if comm.rank == 0 else ():
        for nbytes in args.nbytes:
            row = measure(ranks, nbytes, args.rounds)
            rows.append(row)
            mib = row["staging_bytes"] / 2**20
            say(comm, f"{ranks:>13}{row['bytes']:>13}{row['us']:>13.2f}{mib:>13.1f}  {row['form']}")
    return rows
