"""``mpidist bench loader``: measure how fast samples are read, and compare with a plain read."""

from __future__ import annotations

from .common import check_folder, library, print_rows

HELP = "reading HDF5 and TFRecord, against a plain sequential read"


def add_options(parser) -> None:
    """Add the options of ``mpidist bench loader`` to its argument parser."""
    parser.add_argument("--size", type=float, default=64, help="MiB of each file (64)")
    parser.add_argument("--rounds", type=int, default=9, help="interleaved rounds (9)")
    parser.add_argument("--unit", type=int, default=64, help="samples per batch of a rank (64)")
    parser.add_argument("--folder", default=".", help="folder on the file system to measure (.)")


def run(comm, args) -> list[dict]:
    """Measure how fast samples are read, print a table, and return its rows.

    Collective over `comm`.
    """
    from ...bench.loader_times import measure

    check_folder(args.folder)
    rows = measure(comm, int(args.size * (1 << 20)), args.rounds, args.folder, args.unit)
    title = (
        f"{args.size:g} MiB, batches of {args.unit} on each of {comm.size} ranks, "
        f"{args.rounds} rounds, {library()}"
    )
    columns = (
        ("source", "source", ""), ("order", "order", ""), ("pages", "pages", ""),
        ("samples/s", "samples_per_s", ".0f"), ("plain", "plain_samples_per_s", ".0f"),
        ("ratio", "ratio", ".2f"), ("low", "low", ".2f"), ("high", "high", ".2f"),
        ("cpu us", "cpu_us", ".2f"), ("plain", "plain_cpu_us", ".2f"),
    )  # fmt: skip
    return print_rows(comm, title, columns, rows, width=12)
