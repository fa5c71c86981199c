"""``mpidist bench ps``: what bounded staleness gains where steps are of uneven length."""

from __future__ import annotations

from ...errors import ConfigError
from .common import library, print_rows


def add_parser(what):
    """Add this command; return its parser."""
    parser = what.add_parser("ps", help="speed-up of SSP and ASP over BSP with uneven steps")
    parser.add_argument("--servers", type=int, default=1, help="ranks that serve (1)")
    parser.add_argument("--staleness", type=int, default=4, help="clocks that SSP allows (4)")
    parser.add_argument("--steps", type=int, default=100, help="steps of each worker (100)")
    parser.add_argument("--unit", type=float, default=0.02, help="seconds of a short step (0.02)")
    parser.add_argument("--seed", type=int, default=0, help="of the lengths of steps (0)")
    return parser


def run(comm, args) -> list[dict]:
    """Measure and print. Collective over `comm`."""
    from ...bench.server_times import measure

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
    title = (
        f"{workers} workers, {args.servers} servers, {args.steps} steps of {args.unit} s or 5 "
        f"times that with probability 1/4, {library()}"
    )
    columns = (
        ("mode", "mode", ""), ("seconds", "seconds", ".2f"), ("simulated", "simulated", ".2f"),
        ("speed-up", "speed_up", ".2f"), ("promised", "promised", ".2f"), ("share", "share", ".3f"),
    )  # fmt: skip
    print_rows(comm, title, columns, rows, width=11)
    return rows
