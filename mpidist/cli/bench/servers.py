"""``mpidist bench servers``: measure how long steps take, for several numbers of ranks."""

from __future__ import annotations

from ...errors import ConfigError
from .common import head, library, say

HELP = "steps of workers and servers, against plain messages and allreduce"
_BOTH = ("dedicated", "colocated")
_SIZES = [64 << 10, 1 << 20, 8 << 20]
_COLUMNS = ("Size", "workers", "servers", "ours(us)", "raw(us)", "raw/ours", "allred/ours",
            "step(ms)", "ideal", "speed-up", "share")  # fmt: skip


def add_options(parser) -> None:
    """Add the options of ``mpidist bench servers`` to its argument parser."""
    add = parser.add_argument
    add("--sweep", action="store_true", help="all numbers of workers and servers that fit")
    add("--bytes", type=int, nargs="+", default=_SIZES, dest="nbytes",
        help="sizes of the model (65536 1048576 8388608)")  # fmt: skip
    add("--workers", type=int, nargs="+", help="numbers of workers (sweep: 1, 2, 4, ...)")
    add("--servers", type=int, nargs="+", help="numbers of servers (sweep: 1, 2, 4, ...)")
    add("--placement", default="both", choices=("both", *_BOTH), help="where servers run (both)")
    add("--rounds", type=int, default=15, help="rounds of each case (15)")
    add("--compute", type=float, default=0.04,
        help="seconds that a step of all workers takes one worker (0.04)")  # fmt: skip
    add("--bound", type=float, default=0.5, help="warn above this share of communication (0.5)")
    add("--histogram", action="store_true", help="print how long the steps of each worker took")


def run(comm, args) -> list[dict]:
    """Measure the cases that `args` selects, print a table, and return its rows.

    Collective over `comm`.
    """
    from ...bench.server_group.server_sweep import measure, sweep_cases, sweep_lines
    from ...bench.server_group.step_histogram import histogram_lines

    if args.bound > 1:
        raise ConfigError(f"--bound {args.bound:g}: expected a share of at most 1")
    placements = _BOTH if args.placement == "both" else (args.placement,)
    workers, servers = args.workers, args.servers
    if not args.sweep:
        placements = placements[:1]
        servers = servers or [1]
        dedicated = placements[0] == "dedicated"
        workers = workers or [max(1, comm.size - (max(servers) if dedicated else 0))]
    cases = sweep_cases(comm.size, workers, servers, placements)
    title = (
        f"steps of workers and servers, {args.compute * 1e3:g} ms of computation in all, "
        f"{comm.size} ranks, {args.rounds} rounds, {library()}"
    )
    head(comm, title, _COLUMNS, width=12, last="placement")
    rows = []
    for nbytes in args.nbytes:
        for case in cases:
            row = measure(comm, nbytes, case, rounds=args.rounds, compute=args.compute)
            comm.Barrier()
            if row is not None:
                rows.append(row)
                say(comm, _line(row) + ("  !" if row["share"] > args.bound else ""))
                if args.histogram:
                    say(comm, *(f"#   {line}" for line in histogram_lines(row["histogram"])))
    if rows:
        say(comm, *(f"# {line}" for line in sweep_lines(rows, args.bound)))
    return rows


def _line(row: dict) -> str:
    beside = "-" if row["over_allreduce"] is None else f"{row['over_allreduce']:.3f}"
    numbers = [
        f"{row['bytes']}", f"{row['workers']}", f"{row['servers']}", f"{row['push_pull_us']:.1f}",
        f"{row['raw_us']:.1f}", f"{row['over_raw']:.3f}", beside,
        f"{row['step_us'] / 1e3:.2f}", f"{row['ideal']}", f"{row['speed_up']:.2f}",
        f"{row['share']:.3f}",
    ]  # fmt: skip
    return "".join(f"{number:>12}" for number in numbers) + f"  {row['placement']}"
