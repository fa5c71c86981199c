"""``mpidist simulate {allreduce,fit,measure}``: show messages and times of an algorithm.

``allreduce`` needs no MPI. ``fit`` runs on two ranks and writes the network parameters that
``allreduce --parameters`` reads.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from ..errors import ConfigError
from .start import start_ranks


def add_parser(commands) -> None:
    """Add the command ``mpidist simulate`` to the sub-parsers `commands` of ``mpidist``."""
    parser = commands.add_parser("simulate", help="messages and cost of an algorithm")
    what = parser.add_subparsers(dest="what", required=True, metavar="{allreduce,fit,measure}")
    one = what.add_parser("allreduce", help="messages and cost of one algorithm; needs no MPI")
    one.add_argument("--algorithm", default="ring", help="ring, tree, butterfly, ... (ring)")
    one.add_argument("--ranks", type=int, default=8, help="number of ranks (8)")
    one.add_argument("--nodes", type=int, help="number of nodes (as many as ranks)")
    one.add_argument("--bytes", type=int, default=1 << 20, help="bytes per rank (1 MiB)")
    one.add_argument("--repeats", type=int, default=1, help="number of allreduces in a row (1)")
    add_network(one)
    one.add_argument("--picture", metavar="FILE.png", help="draw the messages over time")
    fit = what.add_parser("fit", help="measure the parameters on 2 ranks, on two nodes or on one")
    fit.add_argument("--json", metavar="FILE", required=True, help="file to write or to complete")
    fit.add_argument("--sending-only", action="store_true", help="links limit only sending")
    measure = what.add_parser("measure", help="milliseconds per allreduce, if many run in a row")
    add_cases(measure)
    parser.set_defaults(command="simulate")


def add_network(parser) -> None:
    """Add the options that describe the network."""
    parser.add_argument("--parameters", metavar="FILE", help="parameters that fit has written")
    parser.add_argument("--alpha", type=float, help="latency in us (2)")
    parser.add_argument("--bandwidth", type=float, help="GB/s of a link (1)")
    parser.add_argument("--reduction", type=float, help="GB/s of adding (5)")


def add_cases(parser) -> None:
    """Add the options for the sizes and algorithms that are measured."""
    sizes, names = "65536,262144,1048576,4194304,16777216", "ring,butterfly,double_tree"
    parser.add_argument("--sizes", default=sizes, help="sizes in bytes, comma-separated")
    parser.add_argument("--algorithms", default=names, help=f"comma-separated ({names})")
    parser.add_argument("--blocks", type=int, default=3, help="blocks of calls that are timed (3)")


def run(args: argparse.Namespace) -> int:
    """Run the wanted sub-command. All ranks must call it for ``fit`` and ``measure``."""
    for name in ("ranks", "nodes", "bytes", "repeats", "alpha", "bandwidth", "reduction", "blocks"):
        value = getattr(args, name, None)
        if value is not None and value <= 0:
            raise ConfigError(f"--{name} {value}: expected more than 0")
    return {"allreduce": _allreduce, "fit": _fit, "measure": _measure}[args.what](args)


def _allreduce(args) -> int:
    from ..simulator import drawing
    from ..simulator.network_model import Problem
    from ..simulator.predict import predict
    from ..simulator.two_levels import builder

    _check_scheduled(args.algorithm)
    nodes = args.nodes or args.ranks
    if args.ranks % nodes:
        raise ConfigError(f"--ranks {args.ranks}: expected a multiple of --nodes {nodes}")
    if args.picture:
        drawing.check_picture(args.picture, args.ranks)
    network = network_of(args)
    per_node = args.ranks // nodes
    if args.ranks <= 64:
        print(f"{args.algorithm}, {args.ranks} ranks, a vector of {args.ranks} elements:")
        build = builder(args.algorithm, per_node)
        print(drawing.text(build, args.ranks, args.ranks) or "nothing is sent")
    n = max(1, args.bytes // 4)
    problem = Problem(args.ranks, n, 4, network, per_node, args.repeats)
    cost = predict(args.algorithm, problem)
    print(f"{args.bytes} bytes in {cost.rounds} rounds: {_time(cost.seconds)} (simulated)")
    print(
        f"the busiest rank sends {cost.messages} messages and {cost.bytes} bytes and reduces "
        f"{cost.reduced} bytes"
    )
    print(", ".join(f"{name} {value:.3g}" for name, value in network._asdict().items()))
    if args.picture:
        drawing.picture(args.picture, args.algorithm, problem)
        print(f"drawn: {args.picture}")
    return 0


def network_of(args: argparse.Namespace):
    """Return the network that the options of `add_network` describe."""
    from ..simulator.network_model import DEFAULT, load

    network = load(args.parameters) if args.parameters else DEFAULT
    if args.alpha:
        network = network._replace(latency=args.alpha * 1e-6)
    if args.bandwidth:
        network = network._replace(gap=1e-9 / args.bandwidth)
    if args.reduction:
        network = network._replace(reduction=1e-9 / args.reduction)
    return network


def _fit(args) -> int:
    from ..advice.fit import fit
    from ..simulator import network_model

    comm = start_ranks(os.environ)
    exists = Path(args.json).exists()
    network = network_model.load(args.json) if exists else network_model.DEFAULT
    found: dict = fit(comm)
    if "gap" in found:
        found["incoming"] = not args.sending_only
    if comm.rank == 0:
        from .bench.common import library

        network_model.save(args.json, network._replace(**found), mpi=library())
        for name, value in found.items():
            print(f"{name:>12} {value:.4g}")
    return 0


def _measure(args) -> int:
    from ..bench.steady_times import measure

    sizes, names = cases(args)
    comm = start_ranks(os.environ)
    for nbytes in sizes:
        for name in names:
            seconds = measure(comm, nbytes, name, blocks=args.blocks)
            if comm.rank == 0:
                print(f"{nbytes:>10} {name:>20} {seconds * 1e3:.4f}", flush=True)
    return 0


def cases(args) -> tuple[list[int], list[str]]:
    """Check the options that `add_cases` has added; return their sizes and algorithms."""
    names = args.algorithms.split(",")
    for name in names:
        _check_scheduled(name)
    return numbers_of(args.sizes, ",", "--sizes"), names


def numbers_of(text: str, separator: str, option: str) -> list[int]:
    """Return the whole numbers in the text of an option; raise ConfigError for any other text."""
    try:
        numbers = [int(word) for word in text.split(separator)]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1:
        raise ConfigError(
            f"{option} {text}: expected whole numbers above 0 with {separator!r} between"
        )
    return numbers


def _check_scheduled(name: str) -> None:
    """Raise ConfigError if the simulator does not know the messages of the algorithm `name`."""
    from ..collectives.schedules.algorithms import ALLREDUCE, check_name
    from ..simulator.two_levels import HIERARCHICAL

    check_name(name, ALLREDUCE)
    known = [*ALLREDUCE, HIERARCHICAL]
    if name not in known:
        raise ConfigError(f"{name} has no schedule; choose one of {', '.join(known)}")


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.3f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.1f} us"
