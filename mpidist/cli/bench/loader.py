"""``mpidist bench loader``: file sources against a plain read of the same bytes."""

from __future__ import annotations

from .common import check_folder, head, library, say


def add_parser(what):
    """Add this command; return its parser. Local."""
    parser = what.add_parser("loader", help="HDF5 and TFRecord against a plain sequential read")
    parser.add_argument("--size", type=float, default=64, help="MiB of each file (64)")
    parser.add_argument("--rounds", type=int, default=9, help="interleaved rounds (9)")
    parser.add_argument("--unit", type=int, default=64, help="samples per batch of a rank (64)")
    parser.add_argument("--folder", default=".", help="where, on the file system to measure (.)")
    return parser


def run(comm, args) -> list[dict]:
    """Measure and print. Collective over `comm`."""
    from ...bench.loader_times import measure

    check_folder(args.folder)
    rows = measure(comm, int(args.size * (1 << 20)), args.rounds, args.folder, args.unit)
    title = (
        f"{args.size:g} MiB, batches of {args.unit} on each of {comm.size} ranks, "
        f"{args.rounds} rounds, {library()}"
    )
    columns = (
        "source",
        "order",
        "pages",
        "samples/s",
        "plain",
        "ratio",
        "low",
        "high",
        "cpu us",
        "plain",
    )
    head(comm, title, columns, width=12)
    for row in rows:
        say(
            comm,
            f"{row['source']:>12}{row['order']:>12}{row['pages']:>12}{row['samples_per_s']:>12.0f}"
            f"{row['plain_samples_per_s']:>12.0f}{row['ratio']:>12.2f}{row['low']:>12.2f}"
            f"{row['high']:>12.2f}{row['cpu_us']:>12.2f}{row['plain_cpu_us']:>12.2f}",
        )
    return rows
