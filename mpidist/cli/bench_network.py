"""``mpidist bench network``: the wire-limited figures, on networks made on this machine (root)."""

from __future__ import annotations

from collections.abc import Mapping

from .. import launch
from ..errors import ConfigError


def add_parser(what):
    """Add this command; return its parser. Local."""
    parser = what.add_parser("network", help="collectives against the wire; root, no mpirun")
    parser.add_argument(
        "--cases",
        default="ring,hierarchical,auto,nonblocking,overlap",
        help="comma-separated, also advise (ring,hierarchical,auto,nonblocking,overlap)",
    )
    return parser


def run(args, environ: Mapping[str, str]) -> list[dict]:
    """Measure and print. Local: this process makes the hosts and starts the ranks."""
    from ..cluster.bench_network import measure

    if claim := launch.claimed_size(environ):
        raise ConfigError(f"bench network was started by {claim.launcher}; start it without")

    names = [word.strip() for word in args.cases.split(",") if word.strip()]
    return measure(names, lambda line: print(line, flush=True))
