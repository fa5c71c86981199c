"""``mpidist bench relaunch``: seconds from the kill of a rank to the next step; no mpirun."""

from __future__ import annotations


def add_parser(what):
    """Add this command; return its parser. Local."""
    parser = what.add_parser("relaunch", help="from a killed rank to the next step; no mpirun")
    parser.add_argument("--ranks", type=int, default=4, help="ranks (4)")
    parser.add_argument("--rounds", type=int, default=7, help="kills of each (7)")
    parser.add_argument("--torch", action="store_true", help="also torchrun with gloo")
    return parser


def run(args) -> list[dict]:
    """Measure and print. Local: this process starts the ranks."""
    from ..cluster.bench_relaunch import measure

    row = measure(args.ranks, args.rounds, args.torch)
    print(f"# from a killed rank to the next completed step, {args.ranks} ranks, seconds")
    for who in ("ours", "torch"):
        if who in row:
            each = row["seconds"][who]
            print(f"{who:>6} {row[who]:7.2f}   ({min(each):.2f} to {max(each):.2f})")
    if args.torch:
        print(f" ratio {row['ratio']:7.2f}   torchrun over mpidist launch, median of pairs")
    return [row]
