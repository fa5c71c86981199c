"""``mpidist bench ps``: compare asynchronous with synchronous workers if step times vary."""

from __future__ import annotations

from ...errors import ConfigError
from .common import library, print_rows

HELP = "speed-up of SSP and ASP over BSP with uneven steps"


def add_options(parser) -> None:
    """Add the options of ``mpidist bench ps`` to its argument parser."""
    parser.add_argument("--servers", type=int, default=1, help="ranks that serve (1)")
    parser.add_argument("--staleness", type=int, default=4, help="steps a worker may be ahead (4)")
    parser.add_argument("--steps", type=int, default=100, help="steps of each worker (100)")
    parser.add_argument("--unit", type=float, default=0.02, help="seconds of a short step (0.02)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random step times (0)")


def run(comm, args) -> list[dict]:
    """Measure how long steps take in each mode, print a table, and return its rows.

    Collective over `comm`.
    """
    from ...bench.server_group.server_times import measure

    workers = comm.size - args.servers
    servers = "1 server" if args.servers == 1 else f"{args.servers} servers"
    if workers < 2:
        raise ConfigError(
            f"{comm.size} ranks with {servers} leave fewer than 2 workers; start more"
        )
    names = ("steps", "unit", "servers", "staleness", "seed")
    rows = measure(comm, **{name: getattr(args, name) for name in names})
    title = (
        f"{workers} workers, {servers}, {args.steps} steps of {args.unit} s or 5 "
        f"times that with probability 1/4, {library()}"
    )
    columns = (
        ("mode", "mode", ""), ("seconds", "seconds", ".2f"), ("simulated", "simulated", ".2f"),
        ("speed-up", "speed_up", ".2f"), ("promised", "promised", ".2f"), ("share", "share", ".3f"),
    )  # fmt: skip
    return print_rows(comm, title, columns, rows, width=11)
