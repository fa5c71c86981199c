"""Seconds from the kill of a server to the next answered push, in an elastic run with copies.

    mpirun --with-ft ulfm -n 4 python -m benchmarks.server_death [--mode bsp]

Two workers and two servers with ``replicas=1`` on one node. After step 30 the first worker kills
the last server, and notes when its next step is done, whose push the other server has answered.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import time
from pathlib import Path

import numpy as np
from mpi4py import MPI

import mpidist as md

_STEP = 30
_MODES = {"bsp": md.BSP(), "ssp": md.SSP(2), "asp": md.ASP()}


def main() -> None:
    """Train, kill a server, and print the longest step and the one after the kill."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mode", choices=_MODES, default="bsp")
    args = parser.parse_args()
    comm = MPI.COMM_WORLD
    rank, pids = comm.rank, comm.allgather(os.getpid())
    times: list[float] = []

    def note(report) -> None:
        times.append(time.perf_counter())
        if rank == 0 and report.step == _STEP:
            os.kill(pids[-1], signal.SIGKILL)

    rng = np.random.default_rng(0)
    data = rng.standard_normal((640, 100), "f4"), rng.integers(0, 10, 640)
    md.train(
        comm, md.models.mlp([100, 300, 10], seed=1), data, optimizer=md.optim.adam(1e-3),
        global_batch=64, steps=2 * _STEP, seed=1, callbacks=[note], elastic=True,
        strategy=md.ParameterServer(2, _MODES[args.mode], replicas=1),
    )  # fmt: skip
    if rank == 0:
        steps = np.diff(times) * 1000
        found = {
            "mode": args.mode,
            "ms from the kill": round(float(steps[_STEP - 1]), 1),
            "median step": round(float(np.median(steps)), 2),
            "longest other": round(float(np.delete(steps, _STEP - 1).max()), 1),
            "load": Path("/proc/loadavg").read_text().split()[0],
        }
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
