"""`mpidist bench servers`: compare parameter servers with plain messages and with an allreduce.

In each round of a case, four operations are timed one after the other: a `push_pull`, in which
workers send gradients and get the new parameters; the same messages in plain mpi4py; an allreduce
of the gradients; and a whole step, in which a worker first sleeps for the time of its computation.
The time of a round is the time of its slowest worker. The ideal speed-up of n workers over one
worker is n.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import product
from typing import NamedTuple

import numpy as np
from mpi4py import MPI

from ...collectives.allreduce import plan
from ...errors import ConfigError
from ...optim import sgd
from ...runtime.context import free
from ...servers.group import ServerGroup
from .raw_exchange import RawExchange
from .step_histogram import step_histogram


class Case(NamedTuple):
    """The numbers of workers and of servers; "colocated" servers are workers as well."""

    workers: int
    servers: int
    placement: str

    @property
    def ranks(self) -> int:
        """The number of ranks that this case needs."""
        return self.workers + (self.servers if self.placement == "dedicated" else 0)


def sweep_cases(
    size: int,
    workers: Sequence[int] | None,
    servers: Sequence[int] | None,
    placements: Sequence[str],
) -> list[Case]:
    """Return the cases (numbers of workers and servers) that `size` ranks can run.

    `placements` has "dedicated" (a server is not a worker), "colocated" (a server is also a
    worker), or both. If `workers` (or `servers`) is None, the numbers 1, 2, 4 and so on are used.

    Raises
    ------
    ConfigError
        When `size` ranks can run none of the cases.
    """
    doubled = [1 << k for k in range(size.bit_length()) if 1 << k <= size]
    found = []
    for placement in placements:
        for n, k in product(workers or doubled, servers or doubled):
            case = Case(n, k, placement)
            together = placement == "colocated"
            if case.ranks > size or (together and (k > n or (servers is None and k != n))):
                continue
            found.append(case)
    if not found:
        asked = f"--workers {workers or 'any'} --servers {servers or 'any'}"
        raise ConfigError(
            f"{asked}: no case with {' or '.join(placements)} servers fits {size} "
            f"rank{'s' if size > 1 else ''}; start more ranks, or give smaller numbers"
        )
    return found


def measure(comm, nbytes: int, case: Case, *, rounds: int, compute: float) -> dict | None:
    """Measure one case (numbers of workers and servers). Collective over `comm`.

    Returns the row of the case on rank 0, and None on other ranks. The model has `nbytes` bytes,
    and each operation is timed `rounds` times. `compute` is the computing time of a whole step in
    seconds, which is divided among the workers.
    """
    part = comm.Split(0 if comm.rank < case.ranks else MPI.UNDEFINED)
    if part == MPI.COMM_NULL:
        return None
    n = max(1, nbytes // 4)
    mine = _run(part, n, case, rounds, compute / case.workers)
    everyone = part.gather(mine)
    free(part)
    part.Free()
    if everyone is None:
        return None
    seconds = np.array([times for times in everyone if times is not None])  # worker, kind, round
    return _row(4 * n, case, seconds, compute)


def _run(part, n: int, case: Case, rounds: int, share: float) -> np.ndarray | None:
    """Return this worker's seconds of the four operations of this module in each round."""
    seconds = np.zeros((4, rounds))
    raw_comm = part.Dup()
    with ServerGroup(part, servers=case.servers, placement=case.placement) as group:
        client = group.add("model", {"w": ((n,), "f4")}, optimizer=sgd(1e-3))
        raw = RawExchange(raw_comm, group.worker_ranks, group.server_ranks, n)

        def exchange_raw(_tag=None) -> None:
            raw_comm.Barrier()
            raw()

        if client is None:
            group.serve(exchange_raw)
        else:
            gradients, out = {"w": np.ones(n, np.float32)}, {"w": np.zeros(n, np.float32)}
            workers = group.workers
            assert workers is not None  # this rank is a worker
            summed = plan(workers, np.zeros(n, np.float32))

            def push_pull() -> None:
                client.push_pull(gradients, out=out, samples=1)

            def step() -> None:
                time.sleep(share)
                push_pull()

            client.pull(out=out)
            for k in range(-1, rounds):  # round -1 warms up
                times = [_timed(group.barrier, push_pull)]
                group.pause(k)
                times.append(_timed(raw_comm.Barrier, raw))
                times.append(_timed(group.barrier, summed))
                times.append(_timed(group.barrier, step))
                if k >= 0:
                    seconds[:, k] = times
            free(workers)  # frees the plans of this communicator
    raw_comm.Free()
    return None if client is None else seconds


def _timed(wait: Callable[[], object], call: Callable[[], object]) -> float:
    wait()
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _row(nbytes: int, case: Case, seconds: np.ndarray, compute: float) -> dict:
    exchange, raw, summed, step = seconds.max(axis=0)
    median = float(np.median(step))
    # With one worker there is no allreduce to compare with.
    beside = round(float(np.median(summed / exchange)), 3) if case.workers > 1 else None
    return {
        "bytes": nbytes,
        **case._asdict(),
        "push_pull_us": _us(exchange), "raw_us": _us(raw), "allreduce_us": _us(summed),
        "over_raw": round(float(np.median(raw / exchange)), 3),
        "over_allreduce": beside,
        "compute_us": round(compute / case.workers * 1e6, 2), "step_us": _us(step),
        "ideal": case.workers,
        "speed_up": round(compute / median, 3),
        "share": round(max(0.0, 1 - compute / case.workers / median), 3),
        "histogram": step_histogram(seconds[:, 3]),
    }  # fmt: skip


def _us(seconds: np.ndarray) -> float:
    return round(float(np.median(seconds)) * 1e6, 2)


def sweep_lines(rows: Sequence[dict], bound: float) -> list[str]:
    """Return lines of text: the best case for each size, and a warning about slow communication."""
    lines = []
    for nbytes in dict.fromkeys(row["bytes"] for row in rows):
        best = max((row for row in rows if row["bytes"] == nbytes), key=lambda r: r["speed_up"])
        lines.append(
            f"{nbytes} bytes: {_name(best)} are fastest, {best['speed_up']:.2f} times as fast as "
            f"one worker; ideal is {best['ideal']}"
        )
    over = [row for row in rows if row["share"] > bound]
    if over:
        worst = max(over, key=lambda row: row["share"])
        lines.append(
            f"warning: in {len(over)} of {len(rows)} cases communication takes more than "
            f"{bound:g} of a step (--bound); most with {worst['bytes']} bytes and {_name(worst)}: "
            f"{worst['share']:.2f}. More servers, larger batches or fewer workers would help"
        )
    return lines


def _name(row: dict) -> str:
    servers = f"{row['servers']} server{'s' if row['servers'] > 1 else ''}"
    workers = f"{row['workers']} worker{'s' if row['workers'] > 1 else ''}"
    return f"{workers} and {servers} ({row['placement']})"
