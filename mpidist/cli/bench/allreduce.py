"""``mpidist bench allreduce``: time allreduces of many sizes, and compare them with MPI's own."""

from __future__ import annotations

from contextlib import ExitStack

from ...errors import ConfigError
from . import choices
from .common import library, say

HELP = "every algorithm against native, 8 B to 64 MiB"
_COLUMNS = ("Latency(us)", "native(us)", "ratio", "low", "high", "limit", "algbw", "busbw")


def add_options(parser) -> None:
    """Add the options of ``mpidist bench allreduce`` to its argument parser."""
    add = parser.add_argument
    add("--min", type=int, dest="low", help="smallest size in bytes (8)")
    add("--max", type=int, default=64 << 20, dest="high", help="largest size in bytes (64 MiB)")
    add("--step", type=int, default=2, help="factor from one size to the next (2)")
    add("--algorithms", default="auto,ring", help="comma-separated (auto,ring)")
    add("--forms", default="call,plan,arena", help="calls; also nonblocking (call,plan,arena)")
    add("--rounds", type=int, default=21, help="interleaved rounds (21)")
    add("--dtype", default="f4", choices=["f4", "f8"], help="type of the elements (f4)")
    levels = ["funneled", "multiple"]
    add("--thread-level", choices=levels, default="multiple", help="requested from MPI (multiple)")
    add("--cold", action="store_true", help="use vectors that are not in the cache")
    add("--consistency", action="store_true", help="also MPI's pairs such as reduce + broadcast")
    add("--torch", action="store_true", help="also PyTorch over gloo, where installed")
    add("--wire", metavar="DEVICE", help="count the bytes that DEVICE, such as eth0, sends")
    choices.add_options(parser)


def prepare(args) -> None:
    """Check the options, and choose MPI's thread level before MPI_Init."""
    from ...collectives.schedules.algorithms import ALLREDUCE, check_name

    args.names, args.forms = _words(args.algorithms), _words(args.forms)
    for name in args.names:
        check_name(name, ALLREDUCE)
    if args.step < 2:
        raise ConfigError(f"--step {args.step}: expected 2 or more")
    if args.low is None:
        args.low = 128 << 10 if args.cold else 8
    if args.low > args.high:
        raise ConfigError(f"--min {args.low} is above --max {args.high}: no size is left")
    if args.thread_level == "funneled":
        # MPICH switches its fast on-node collectives off at THREAD_MULTIPLE.
        import mpi4py

        mpi4py.rc.thread_level = "funneled"
        from mpi4py import MPI  # noqa: F401


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def run(comm, args) -> list[dict]:
    """Measure allreduces of the sizes in `args`, print a table, and return its rows.

    Collective over `comm`.
    """
    if args.explain:
        return choices.print_choices(comm, args)
    from ...bench import report, torch_yardstick
    from ...bench.allreduce_times import check_forms, measure, size_range
    from ...collectives import selection

    selection.remember_in(comm, None)  # auto must measure again, and not use cached choices
    check_forms(args.forms, args.low, args.cold)
    with ExitStack() as stack:
        facts = {
            "mpi": library(),
            "dtype": args.dtype,
            "thread_level": args.thread_level,
            "vectors": "cold" if args.cold else "hot",
        }
        torch = None
        if args.torch:
            facts["torch"], torch = torch_yardstick.reducer(comm)
            stack.callback(torch_yardstick.leave)
        say(
            comm,
            f"# mpidist allreduce, {comm.size} ranks, {args.rounds} rounds, "
            + ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in facts.items()),
            f"# {'Size':<10}" + "".join(f"{name:>12}" for name in _COLUMNS) + "  algorithm",
        )
        rows: list[dict] = []
        options = {name: getattr(args, name) for name in ("forms", "cold", "consistency")}
        options |= {"torch": torch, "device": args.wire}
        for size in size_range(args.low, args.high, args.step):
            for row in measure(comm, size, args.names, args.rounds, args.dtype, **options):
                rows.append({**row, **facts})
                say(comm, _line(row))
        say(comm, *(f"# {line}" for line in report.lines(rows)))
    return rows


def _line(row: dict) -> str:
    numbers = [f"{row['median_us']:>12.2f}", f"{row['native_us']:>12.2f}"]
    for name in _COLUMNS[2:]:
        numbers.append(f"{row[name]:>12.3f}" if name in row else f"{'-':>12}")
    wire = f"  {row['wire_bytes']} bytes sent" if "wire_bytes" in row else ""
    return f"{row['bytes']:<12}{''.join(numbers)}  {row['algorithm']}{wire}"
