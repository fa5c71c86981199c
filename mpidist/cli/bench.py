"""``mpidist bench {allreduce,ps,checkpoint}``: measured figures, each beside its yardstick."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

from .. import launch
from ..errors import ConfigError


def add_parser(commands) -> None:
    """Add this command to the argument parser. Local."""
    parser = commands.add_parser("bench", help="measure allreduce, servers or checkpoints")
    what = parser.add_subparsers(dest="what", required=True, metavar="{allreduce,ps,checkpoint}")
    reduce = what.add_parser("allreduce", help="every algorithm against native, 8 B to 64 MiB")
    reduce.add_argument("--min", type=int, default=8, dest="low", help="smallest size in bytes (8)")
    reduce.add_argument("--max", type=int, default=64 << 20, dest="high", help="largest (64 MiB)")
    reduce.add_argument("--algorithms", default="auto,ring", help="comma-separated (auto,ring)")
    reduce.add_argument("--rounds", type=int, default=21, help="interleaved rounds (21)")
    reduce.add_argument("--dtype", default="f4", choices=["f4", "f8"], help="elements (f4)")
    reduce.add_argument("--thread-level", choices=["funneled", "multiple"], default="multiple")
    servers = what.add_parser("ps", help="speed-up of SSP and ASP over BSP with uneven steps")
    servers.add_argument("--servers", type=int, default=1)
    servers.add_argument("--staleness", type=int, default=4)
    servers.add_argument("--steps", type=int, default=100)
    servers.add_argument("--unit", type=float, default=0.02, help="seconds of a short step (0.02)")
    servers.add_argument("--seed", type=int, default=0)
    saves = what.add_parser("checkpoint", help="save, stall and restore against plain files")
    saves.add_argument("--size", type=float, default=64, help="MiB that are stored (64)")
    saves.add_argument("--rounds", type=int, default=5, help="interleaved rounds (5)")
    saves.add_argument("--folder", default=".", help="where, on the file system to measure (.)")
    for each in (reduce, servers, saves):
        each.add_argument("--json", metavar="FILE", help="write the rows to FILE as well")


def run(args: argparse.Namespace) -> int:
    """Measure and print; collective over all ranks of the launch."""
    for name in ("low", "rounds", "servers", "steps", "unit", "size"):
        if getattr(args, name, 1) <= 0:
            raise ConfigError(f"--{name} {getattr(args, name)}: expected more than 0")
    names = [n.strip() for n in getattr(args, "algorithms", "").split(",") if n.strip()]
    if args.what == "allreduce":
        from ..collectives.algorithms import ALLREDUCE, check_name

        for name in names:
            check_name(name, ALLREDUCE)
        if args.thread_level == "funneled":
            # MPICH switches its fast on-node collectives off at THREAD_MULTIPLE.
            import mpi4py

            mpi4py.rc.thread_level = "funneled"
            from mpi4py import MPI  # noqa: F401
    MPI_ = launch.initialize(os.environ)
    comm = MPI_.COMM_WORLD
    launch.check_launch(comm, os.environ)
    if args.what == "allreduce":
        rows = _allreduce(comm, args, names)
    else:
        rows = (_servers if args.what == "ps" else _checkpoint)(comm, args)
    if args.json and comm.rank == 0:
        Path(args.json).write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return 0


def _allreduce(comm, args, names) -> list[dict]:
    from ..cluster.bench_allreduce import measure, sizes

    columns = ("Size", "Latency(us)", "native(us)", "ratio", "extra(us)", "busbw(GB/s)")
    _say(
        comm,
        f"# mpidist allreduce, {comm.size} ranks, {_library()}, {args.dtype}, "
        f"{args.rounds} rounds, thread level {args.thread_level}",
        "#" + "".join(f"{name:>12}" for name in columns)[1:] + "  algorithm",
    )
    rows: list[dict] = []
    for size in sizes(args.low, args.high):
        for row in measure(comm, size, names, args.rounds, args.dtype):
            rows.append(row)
            _say(
                comm,
                f"{row['bytes']:>12}{row['median_us']:>12.2f}{row['native_us']:>12.2f}"
                f"{row['ratio']:>12.3f}{row['extra_us']:>12.2f}{row['busbw']:>12.3f}"
                f"  {row['algorithm']}",
            )
    return rows


def _servers(comm, args) -> list[dict]:
    from ..cluster.bench_servers import measure

    workers = comm.size - args.servers
    if workers < 2:
        raise ConfigError(f"{comm.size} ranks with {args.servers} servers leave under 2 workers")
    rows = measure(
        comm,
        steps=args.steps,
        unit=args.unit,
        servers=args.servers,
        staleness=args.staleness,
        seed=args.seed,
    )
    columns = ("mode", "seconds", "simulated", "speed-up", "promised", "share")
    _say(
        comm,
        f"# {workers} workers, {args.servers} servers, {args.steps} steps of {args.unit} s or 5 "
        f"times that with probability 1/4, {_library()}",
        "#" + "".join(f"{name:>11}" for name in columns)[1:],
    )
    for row in rows:
        _say(
            comm,
            f"{row['mode']:>11}{row['seconds']:>11.2f}{row['simulated']:>11.2f}"
            f"{row['speed_up']:>11.2f}{row['promised']:>11.2f}{row['share']:>11.3f}",
        )
    return rows


def _checkpoint(comm, args) -> list[dict]:
    from ..cluster.bench_checkpoint import measure

    if not Path(args.folder).is_dir():
        raise ConfigError(f"--folder {args.folder}: no such folder; all ranks must see it")
    rows = measure(comm, int(args.size * (1 << 20)), args.rounds, args.folder)
    columns = ("what", "seconds", "plain(s)", "ratio", "MB/s")
    _say(
        comm,
        f"# {args.size:g} MiB, half replicated and half sharded, {comm.size} ranks, "
        f"{args.rounds} rounds, {_library()}",
        "#" + "".join(f"{name:>11}" for name in columns)[1:],
    )
    for row in rows:
        _say(
            comm,
            f"{row['what']:>11}{row['median_s']:>11.4f}{row['plain_s']:>11.4f}"
            f"{row['ratio']:>11.2f}{row['mb_per_s']:>11.0f}",
        )
    return rows


def _say(comm, *lines: str) -> None:
    if comm.rank == 0:
        print("\n".join(lines), flush=True)


def _library() -> str:
    from mpi4py import MPI

    return launch.mpi_name(MPI.Get_library_version())
