"""`mpidist bench ps`: compare asynchronous with synchronous workers if step times vary.

A step of a worker takes t seconds, or 5 t with probability 1/4. Workers sleep for the time of a
step instead of computing. The modes are BSP (all workers wait for each other in every step), SSP (a
worker may be some steps ahead) and ASP (no worker waits). Each speed-up over BSP is compared with
the speed-up in a simulation in which messages take no time.
"""

from __future__ import annotations

import time

import numpy as np

from ...optim import sgd
from ...servers.consistency import ASP, BSP, SSP, simulate
from ...servers.parameter_server import parameter_server


def delays(workers: int, steps: int, unit: float, seed: int = 0) -> np.ndarray:
    """Return the seconds of each step of each worker, as an array of shape (workers, steps).

    A step takes `unit` seconds, or five times as long with probability 1/4.
    """
    rng = np.random.default_rng(seed)
    return np.where(rng.random((workers, steps)) < 0.25, 5 * unit, unit)


def measure(
    comm, *, steps: int, unit: float, servers: int, staleness: int, seed: int
) -> list[dict]:
    """Return a row for each mode: its seconds, and its speed-up over BSP. Collective over `comm`.

    A row has the keys mode, seconds, simulated (seconds in the simulation), speed_up, promised (the
    speed-up in the simulation) and share (speed_up divided by promised).
    """
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
