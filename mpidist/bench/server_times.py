"""`mpidist bench ps`: what asynchrony is worth when steps take uneven time.

Each step of each worker takes t, or five t with probability 1/4 (it sleeps, so cores do not
matter). The speed-up of a mode over BSP is set against what a simulation of the same delays
promises when messages cost nothing.
"""

from __future__ import annotations

import time

import numpy as np

from ..optim import sgd
from ..servers.consistency import ASP, BSP, SSP, simulate
from ..servers.parameter_server import parameter_server


def delays(workers: int, steps: int, unit: float, seed: int = 0) -> np.ndarray:
    """Seconds of every step of every worker."""
    rng = np.random.default_rng(seed)
    return np.where(rng.random((workers, steps)) < 0.25, 5 * unit, unit)


def measure(
    comm, *, steps: int, unit: float, servers: int, staleness: int, seed: int
) -> list[dict]:
    """Return a row per mode: seconds, speed-up over BSP, the promised one. Collective."""
    workers = comm.size - servers
    sleep = delays(workers, steps, unit, seed)
    modes = {"BSP": BSP(), f"SSP({staleness})": SSP(staleness), "ASP": ASP()}
    rows: list[dict] = []
    for name, mode in modes.items():
        seconds = _run(comm, servers, mode, sleep)
        promised = simulate(sleep.tolist(), mode).seconds
        rows.append({"mode": name, "seconds": round(seconds, 3), "simulated": round(promised, 3)})
    for row in rows:
        row["speed_up"] = round(rows[0]["seconds"] / row["seconds"], 3)
        row["promised"] = round(rows[0]["simulated"] / row["simulated"], 3)
        row["share"] = round(row["speed_up"] / row["promised"], 3)
    return rows


def _run(comm, servers: int, mode, sleep: np.ndarray) -> float:
    parameters = {"w": np.zeros(1000, np.float32)}
    gradients = {"w": np.ones(1000, np.float32)}
    comm.Barrier()
    start = time.perf_counter()
    took = 0.0
    with parameter_server(
        comm, parameters, servers=servers, consistency=mode, optimizer=sgd(1e-3)
    ) as client:
        if client is not None:
            client.pull(out=parameters)
            start = time.perf_counter()
            for pause in sleep[comm.rank]:
                time.sleep(pause)
                client.push_pull(gradients, out=parameters, samples=1)
            took = time.perf_counter() - start
    return max(comm.allgather(took))
