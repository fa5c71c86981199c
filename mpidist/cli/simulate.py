"""``mpidist simulate allreduce``: the map of an algorithm and its cost, without MPI."""

from __future__ import annotations

import argparse

from ..errors import ConfigError


def add_parser(commands) -> None:
    """Add this command to the argument parser. Local."""
    parser = commands.add_parser("simulate", help="who sends what, and what it costs")
    parser.add_argument("operation", choices=["allreduce"])
    parser.add_argument("--algorithm", default="ring", help="ring, tree, butterfly, ... (ring)")
    parser.add_argument("--ranks", type=int, default=8, help="number of ranks (8)")
    parser.add_argument("--bytes", type=int, default=1 << 20, help="bytes per rank (1 MiB)")
    parser.add_argument("--alpha", type=float, default=2.0, help="us per message (2)")
    parser.add_argument("--bandwidth", type=float, default=1.0, help="GB/s of a link (1)")
    parser.add_argument("--reduction", type=float, default=5.0, help="GB/s of adding (5)")
    parser.set_defaults(command="simulate")


def run(args: argparse.Namespace) -> int:
    """Print the map (of a short vector) and the cost. Local."""
    from ..collectives.algorithms import ALLREDUCE, check_name
    from ..collectives.simulate import Network, picture, simulate

    check_name(args.algorithm, ALLREDUCE)
    if args.algorithm not in ALLREDUCE:
        raise ConfigError(f"{args.algorithm} has no schedule; choose one of {', '.join(ALLREDUCE)}")
    for name in ("ranks", "bytes", "bandwidth", "reduction"):
        if getattr(args, name) <= 0:
            raise ConfigError(f"--{name} {getattr(args, name)}: expected more than 0")
    build = ALLREDUCE[args.algorithm]
    if args.ranks <= 64:
        print(f"{args.algorithm}, {args.ranks} ranks, a vector of {args.ranks} elements:")
        print(picture(build, args.ranks, args.ranks) or "nothing is sent")
    network = Network(args.alpha * 1e-6, 1e-9 / args.bandwidth, 1e-9 / args.reduction)
    cost = simulate(build, args.ranks, max(1, args.bytes // 4), network=network)
    print(f"{args.bytes} bytes in {cost.rounds} rounds: {_time(cost.seconds)} (simulated)")
    print(
        f"the busiest rank sends {cost.messages} messages and {cost.bytes} bytes and reduces "
        f"{cost.reduced} bytes; alpha {args.alpha} us, links {args.bandwidth} GB/s, adding "
        f"{args.reduction} GB/s"
    )
    return 0


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.3f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.1f} us"
