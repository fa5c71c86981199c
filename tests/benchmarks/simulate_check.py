"""Fit the simulator at 2 ranks, predict times, and compare them with times on the shaped network.

    PYTHONPATH=tests python -m benchmarks.simulate_check --rate 200mbit --layouts 4x2

In the prediction and in the measurement, the calls follow each other without a pause
(`bench/steady_times.py`).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from onebox.network import ShapedNetwork, shaped_network

from mpidist.bench.steady_times import calls
from mpidist.cli.simulate import add_cases, cases, numbers_of
from mpidist.errors import ConfigError
from mpidist.launch.launchers import find_launcher
from mpidist.simulator import network_model
from mpidist.simulator.network_model import Problem
from mpidist.simulator.predict import predict as simulated


def predict(
    network: network_model.NetworkModel, size: int, ranks_per_node: int, nbytes: int, name: str
) -> float:
    """Return the simulated seconds of one call in a block of them. Local."""
    problem = Problem(size, nbytes // 4, 4, network, ranks_per_node, calls(nbytes))
    return simulated(name, problem).seconds


def check(
    rate: str,
    layouts: Sequence[tuple[int, int]],
    sizes: Sequence[int],
    names: Sequence[str],
    *,
    blocks: int = 3,
    python: str | os.PathLike = sys.executable,
    say: Callable[[str], None] = print,
) -> list[dict]:
    """Fit, predict, measure on shaped networks; return the rows of the table. Local.

    Parameters
    ----------
    rate : str
        Speed of each host's link, in the words of tc(8).
    layouts : sequence of (hosts, ranks per host)
    python : path, optional
        The interpreter whose Open MPI is used: this one.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "parameters.json"
        # A single host with two ranks tells what messages inside a node cost.
        for hosts, ranks in [(2, 1), (1, 2)] if any(q > 1 for _, q in layouts) else [(2, 1)]:
            with shaped_network(hosts, rate) as net:
                _command(net, python, ranks, "fit", "--sending-only", "--json", str(file))
        network = network_model.load(file)
        say(
            "fitted at 2 ranks: "
            + json.dumps({k: f"{v:.3g}" for k, v in network._asdict().items()})
        )
        rows: list[dict] = [
            {
                "hosts": hosts,
                "ranks_per_host": q,
                "bytes": nbytes,
                "algorithm": name,
                "predicted_ms": predict(network, hosts * q, q, nbytes, name) * 1e3,
            }
            for hosts, q in layouts
            for nbytes in sizes
            for name in names
        ]
        say(f"predicted {len(rows)} cases; measuring")
        for hosts, q in layouts:
            mine = [row for row in rows if (row["hosts"], row["ranks_per_host"]) == (hosts, q)]
            with shaped_network(hosts, rate) as net:
                words = ["--sizes", ",".join(map(str, sizes)), "--algorithms", ",".join(names)]
                out = _command(net, python, q, "measure", *words, "--blocks", str(blocks))
            for row, line in zip(mine, out.splitlines(), strict=True):
                row["measured_ms"] = float(line.split()[-1])
                row["error"] = row["predicted_ms"] / row["measured_ms"] - 1
                say(
                    f"{hosts} x {q} {row['bytes']:>9} {row['algorithm']:>12}  predicted "
                    f"{row['predicted_ms']:8.2f} ms, measured {row['measured_ms']:8.2f} ms, "
                    f"{100 * row['error']:+6.1f} %"
                )
    return rows


def median_error(rows: Sequence[dict]) -> float:
    """Return the median of the errors' sizes. Local."""
    return float(np.median([abs(row["error"]) for row in rows]))


def _command(net: ShapedNetwork, python, ranks_per_host: int, *words: str) -> str:
    threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    program = [python, "-m", "mpidist", "simulate", *words]
    mpi = find_launcher(python)
    done = net.mpirun(ranks_per_host, program, env=threads, timeout=600, mpi=mpi)
    return done.check().stdout


def main(words: Sequence[str] | None = None) -> None:
    """Measure and print. Local: this process makes the hosts and starts the ranks."""
    parser = argparse.ArgumentParser("benchmarks.simulate_check", description=__doc__)
    parser.add_argument("--rate", default="1gbit", help="speed of a host's link (1gbit)")
    parser.add_argument("--layouts", default="3x1,4x1", help="HOSTSxRANKS, ... (3x1,4x1)")
    parser.add_argument("--json", metavar="FILE", help="write the rows to FILE as well")
    add_cases(parser)
    args = parser.parse_args(words)
    sizes, names = cases(args)
    layouts = []
    for word in args.layouts.split(","):
        pair = numbers_of(word, "x", "--layouts")
        if len(pair) != 2:
            raise ConfigError(f"--layouts {args.layouts}: expected HOSTSxRANKS, such as 3x1,4x2")
        layouts.append((pair[0], pair[1]))
    rows = check(args.rate, layouts, sizes, names, blocks=args.blocks)
    print(f"median error {100 * median_error(rows):.1f} %")
    if args.json:
        Path(args.json).write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
