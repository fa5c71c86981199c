"""``mpidist bench checkpoint``: save, stall and restore against plain files."""

from __future__ import annotations

from .common import check_folder, head, library, say


def add_parser(what):
    """Add this command; return its parser. Local."""
    parser = what.add_parser("checkpoint", help="save, stall and restore against plain files")
    parser.add_argument("--size", type=float, default=64, help="MiB that are stored (64)")
    parser.add_argument("--rounds", type=int, default=5, help="interleaved rounds (5)")
    parser.add_argument("--folder", default=".", help="where, on the file system to measure (.)")
    parser.add_argument("--torch", action="store_true", help="beside torch.distributed.checkpoint")
    return parser


def run(comm, args) -> list[dict]:
    """Measure and print. Collective over `comm`."""
    from ...bench.checkpoint_times import measure

    check_folder(args.folder)
    rows = measure(comm, int(args.size * (1 << 20)), args.rounds, args.folder, args.torch)
    columns = ("what", "seconds", "beside", "seconds", "ratio", "MB/s")
    head(
        comm,
        f"{args.size:g} MiB, half replicated and half sharded, {comm.size} ranks, "
        f"{args.rounds} rounds, {library()}",
        columns,
        width=14,
    )
    for row in rows:
        say(
            comm,
            f"{row['what']:>14}{row['median_s']:>14.4f}{row['beside']:>14}{row['plain_s']:>14.4f}"
            f"{row['ratio']:>14.2f}{row['mb_per_s']:>14.0f}",
        )
    return rows
