"""The simulator against reality: fit at 2 ranks, predict, then measure on the shaped network.

Calls are made one after the other, in prediction and measurement alike, until a token bucket of
the network has long been emptied: the steady state. A block of calls is timed as a whole; the
slowest rank's time counts, and of several blocks the median.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from mpi4py import MPI

from ..collectives import cost
from ..collectives.allreduce import plan
from ..collectives.predict import predict as simulated
from ..testing.launch import find_launcher
from ..testing.network import ShapedNetwork, shaped_network

#: Bytes that a block of calls reduces at least: many times what a bucket holds.
BLOCK_BYTES = 8 << 20


def calls(nbytes: int) -> int:
    """Return how many calls make a block. Local."""
    return max(2, BLOCK_BYTES // nbytes)


def predict(network: cost.Network, size: int, ranks_per_node: int, nbytes: int, name: str) -> float:
    """Return the simulated seconds of one call in a block of them. Local."""
    return simulated(
        name,
        size,
        nbytes // 4,
        network=network,
        ranks_per_node=ranks_per_node,
        repeats=calls(nbytes),
    ).seconds


def measure(comm, nbytes: int, name: str, *, blocks: int = 3) -> float:
    """Return the seconds of one call in a block of them; float32, in place, from a plan.

    Collective over `comm`.
    """
    call = plan(comm, np.zeros(nbytes // 4, np.float32), algorithm=name)
    times = []
    # The first block makes connections and empties the buckets.
    for _ in range(blocks + 1):
        comm.Barrier()
        start = time.perf_counter()
        for _ in range(calls(nbytes)):
            call()
        times.append(comm.allreduce(time.perf_counter() - start, MPI.MAX))
    return float(np.median(times[1:])) / calls(nbytes)


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
        network = cost.load(file)
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
