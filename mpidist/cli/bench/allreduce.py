"""``mpidist bench allreduce``: OSU's two columns, our ratios beside them, losing cases below."""

from __future__ import annotations

from contextlib import ExitStack

from ...errors import ConfigError
from . import choices
from .common import library, say

_COLUMNS = ("Latency(us)", "native(us)", "ratio", "low", "high", "limit", "algbw", "busbw")


def add_parser(what):
    """Add this command; return its parser."""
    parser = what.add_parser("allreduce", help="every algorithm against native, 8 B to 64 MiB")
    parser.add_argument("--min", type=int, dest="low", help="smallest size in bytes (8)")
    parser.add_argument("--max", type=int, default=64 << 20, dest="high", help="largest (64 MiB)")
    parser.add_argument("--step", type=int, default=2, help="each size so many times the last (2)")
    parser.add_argument("--algorithms", default="auto,ring", help="comma-separated (auto,ring)")
    parser.add_argument(
        "--forms", default="call,plan,arena", help="also nonblocking (call,plan,arena)"
    )
    parser.add_argument("--rounds", type=int, default=21, help="interleaved rounds (21)")
    parser.add_argument("--dtype", default="f4", choices=["f4", "f8"], help="elements (f4)")
    parser.add_argument(
        "--thread-level", choices=["funneled", "multiple"], default="multiple",
        help="which MPI is asked for",
    )  # fmt: skip
    parser.add_argument(
        "--cold", action="store_true", help="vectors take turns, twice the last-level cache full"
    )
    parser.add_argument(
        "--consistency", action="store_true", help="also MPI's compositions that do the same"
    )
    parser.add_argument("--torch", action="store_true", help="also torch gloo, where installed")
    parser.add_argument("--wire", metavar="DEVICE", help="count what DEVICE sends, such as eth0")
    choices.add_options(parser)
    return parser


def prepare(args) -> None:
    """Check the names and set the thread level. Comes before MPI begins."""
    from ...collectives.schedules.algorithms import ALLREDUCE, check_name

    args.names, args.forms = _words(args.algorithms), _words(args.forms)
    for name in args.names:
        check_name(name, ALLREDUCE)
    if args.step < 2:
        raise ConfigError(f"--step {args.step}: expected 2 or more")
    if args.low is None:
        args.low = 128 << 10 if args.cold else 8
    if args.thread_level == "funneled":
        # MPICH switches its fast on-node collectives off at THREAD_MULTIPLE.
        import mpi4py

        mpi4py.rc.thread_level = "funneled"
        from mpi4py import MPI  # noqa: F401


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def run(comm, args) -> list[dict]:
    """Measure and print. Collective over `comm`."""
    if args.explain:
        return choices.print_choices(comm, args)
    from ...bench import report
    from ...bench.allreduce_times import check_forms, measure, size_range
    from ...collectives import selection

    selection.remember_in(comm, None)  # auto shows what it can do, not what it once saw
    check_forms(args.forms, args.low, args.cold)
    with ExitStack() as stack:
        version, torch = _torch(comm, stack) if args.torch else ("", None)
        facts = {
            "mpi": library(),
            "dtype": args.dtype,
            "thread_level": args.thread_level,
            "vectors": "cold" if args.cold else "hot",
            **({"torch": version} if version else {}),
        }
        say(
            comm,
            f"# mpidist allreduce, {comm.size} ranks, {args.rounds} rounds, "
            + ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in facts.items()),
            f"# {'Size':<10}" + "".join(f"{name:>12}" for name in _COLUMNS) + "  algorithm",
        )
        rows: list[dict] = []
        for size in size_range(args.low, args.high, args.step):
            for row in measure(
                comm,
                size,
                args.names,
                args.rounds,
                args.dtype,
                forms=args.forms,
                cold=args.cold,
                consistency=args.consistency,
                torch=torch,
                device=args.wire,
            ):
                rows.append({**row, **facts})
                say(comm, _line(row))
        say(comm, *(f"# {line}" for line in report.lines(rows)))
    return rows


def _torch(comm, stack: ExitStack):
    from ...bench import torch_yardstick

    found = torch_yardstick.reducer(comm)
    stack.callback(torch_yardstick.leave)
    return found


def _line(row: dict) -> str:
    numbers = [f"{row['median_us']:>12.2f}", f"{row['native_us']:>12.2f}"]
    for name in ("ratio", "low", "high", "limit", "algbw", "busbw"):
        numbers.append(f"{row[name]:>12.3f}" if name in row else f"{'-':>12}")
    wire = f"  {row['wire_bytes']} bytes sent" if "wire_bytes" in row else ""
    return f"{row['bytes']:<12}{''.join(numbers)}  {row['algorithm']}{wire}"
