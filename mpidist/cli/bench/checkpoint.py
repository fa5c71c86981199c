"""``mpidist bench checkpoint``: time saves and restores, and compare them with plain files."""

from __future__ import annotations

from .common import check_folder, library, print_rows

HELP = "save, stall and restore against plain files"


def add_options(parser) -> None:
    """Add the options of ``mpidist bench checkpoint`` to its argument parser."""
    parser.add_argument("--size", type=float, default=64, help="MiB that are stored (64)")
    parser.add_argument("--rounds", type=int, default=5, help="interleaved rounds (5)")
    parser.add_argument("--folder", default=".", help="folder on the file system to measure (.)")
    parser.add_argument("--torch", action="store_true", help="also torch.distributed.checkpoint")


def run(comm, args) -> list[dict]:
    """Measure how long saves and restores take, print a table, and return its rows.

    Collective over `comm`.
    """
    from ...bench.checkpoint_times import measure

    check_folder(args.folder)
    rows = measure(comm, int(args.size * (1 << 20)), args.rounds, args.folder, args.torch)
    title = (
        f"{args.size:g} MiB, half replicated and half sharded, {comm.size} ranks, "
        f"{args.rounds} rounds, {library()}"
    )
    columns = (
        ("what", "what", ""), ("seconds", "median_s", ".4f"), ("beside", "beside", ""),
        ("seconds", "plain_s", ".4f"), ("ratio", "ratio", ".2f"), ("MB/s", "mb_per_s", ".0f"),
    )  # fmt: skip
    return print_rows(comm, title, columns, rows, width=14)
