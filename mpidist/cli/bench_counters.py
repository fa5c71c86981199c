"""``mpidist bench counters``: what counting messages and bytes costs."""

from __future__ import annotations

from .bench_common import head, library, say


def add_parser(what):
    """Add this command; return its parser. Local."""
    parser = what.add_parser("counters", help="what counting messages and bytes costs")
    parser.add_argument("--min", type=int, default=8, dest="low", help="smallest size in bytes (8)")
    parser.add_argument("--max", type=int, default=16 << 20, dest="high", help="largest (16 MiB)")
    parser.add_argument("--step", type=int, default=8, help="each size so many times the last (8)")
    parser.add_argument("--rounds", type=int, default=41, help="interleaved rounds (41)")
    return parser


def run(comm, args) -> list[dict]:
    """Measure and print. Collective over `comm`."""
    from ..cluster.bench_allreduce import sizes
    from ..cluster.bench_counters import measure

    columns = ("Size", "call(us)", "counting", "share(%)")
    title = f"counters, {comm.size} ranks, {args.rounds} rounds, {library()}"
    head(comm, title, columns, width=13, last="form")
    rows = []
    for size in sizes(args.low, args.high, args.step):
        for row in measure(comm, size, args.rounds):
            rows.append(row)
            say(
                comm,
                f"{row['bytes']:>13}{row['call_us']:>13.2f}{row['counting_us']:>13.3f}"
                f"{100 * row['share']:>13.3f}  {row['form']}",
            )
    return rows
