"""Measure, with two ranks, the parameters of a machine that the simulator needs.

The messages are sent by the code that runs mpidist's collectives, so the measured times include the
time that Python needs. Ranks on two nodes measure the network; ranks on one node measure its shared
memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from mpi4py import MPI

from ..collectives.allreduce import plan
from ..collectives.engines.executor import Program, Run
from ..collectives.schedules.schedule import Step, recv, send
from ..errors import ConfigError
from ..runtime.context import of
from ..runtime.polling import wait_until
from ..simulator.network_model import NetworkModel, Problem
from ..simulator.simulate import run

#: The lengths in bytes of the messages with which the link is measured. A pause before each message
#: refills the token bucket of the link.
LINK_SIZES = tuple(1 << k for k in range(12, 25))
PAUSE = 0.08
#: Bytes of the long messages that both ranks send at the same time.
CROSSING_SIZES = (4 << 20, 8 << 20)
_CHAIN = 50


def fit(comm, *, repeats: int = 5) -> dict[str, float]:
    """Measure how fast two ranks exchange messages; return parameters of `NetworkModel` by name.

    Collective over `comm`, which must have two ranks. On two nodes, the parameters of the network
    are measured; on one node, `node_latency` and `node_gap`.
    """
    if comm.size != 2:
        raise ConfigError(f"fit runs on 2 ranks, given {comm.size}; use mpirun -n 2")
    me = comm.rank
    hosts = comm.allgather(MPI.Get_processor_name())
    alike = hosts[0] == hosts[1]
    pause = 0.0 if alike else PAUSE

    def timed(steps: list[Step], size: int, pause: float = 0.0, count: int = repeats) -> float:
        return _median(comm, count, partial(_run, comm, steps, size, pause))

    chain = timed(_alternate(me, _CHAIN), 8) / _CHAIN
    # Both ranks send many messages at the same time, and each rank sends and receives one message
    # in turn. The time per message is then twice the overhead, and at most the time of `chain`.
    overhead = min(timed(_both_ways(me, _CHAIN), 8) / _CHAIN, chain) / 2
    latency = chain - 2 * overhead
    times = [timed(_answered(me, size), size, pause) for size in LINK_SIZES]
    if alike:
        return {"node_latency": latency, "node_gap": line(LINK_SIZES, times)[0]}
    gap, burst, peak = link(LINK_SIZES, times, 2 * chain)
    network = NetworkModel(latency=latency, gap=gap, overhead=overhead, burst=burst, peak=peak)
    crossed = [timed(_exchanges(me, size), size, count=3) / 4 for size in CROSSING_SIZES]
    call = plan(comm, np.zeros(1, np.float32), algorithm="recursive_doubling")
    called = _median(comm, repeats, lambda: _time(lambda: [call() for _ in range(_CHAIN)]))
    return {
        "latency": latency,
        "gap": gap,
        "overhead": overhead,
        "burst": burst,
        "peak": peak,
        "crossing": fit_crossing(CROSSING_SIZES, crossed, network),
        "reduction": _reduction(comm, repeats),
        "call": max(called / _CHAIN - chain, 0.0),
    }


def line(sizes, seconds) -> tuple[float, float]:
    """Return (slope, constant) of the line ``seconds = slope size + constant`` by least squares."""
    weight = 1 / np.asarray(seconds)
    columns = np.column_stack([sizes, np.ones(len(sizes))])
    slope, constant = np.linalg.lstsq(columns * weight[:, None], np.ones(len(sizes)), rcond=None)[0]
    return max(float(slope), 0.0), float(constant)


def link(sizes: Sequence[int], seconds: Sequence[float], base: float) -> tuple[float, float, float]:
    """Fit (gap, burst, peak) of a network link to the `seconds` of messages of `sizes` bytes.

    A message of b bytes takes a fixed time `base` and ``max(b * peak, (b - burst) * gap)`` seconds.
    Gap and peak are in seconds per byte, and burst is in bytes; `network_model` explains them.
    """
    x, y = np.asarray(sizes, float), np.asarray(seconds, float)
    beyond = np.maximum(y - base, 1e-9)
    long = x >= x[-1] / 8
    found = []
    for burst in (0.0, *np.geomspace(x[-1] / 64, x[-1] / 9, 100)):
        gap = float(np.median(beyond[long] / (x[long] - burst)))
        inside = (x <= burst / 2) & (x >= burst / 32)
        if burst and not inside.any():
            continue  # no message is short enough to show the speed within this burst
        peak = min(float(np.median(beyond[inside] / x[inside])), gap) if burst else 0.0
        fitted = base + np.maximum(x * peak, (x - burst) * gap)
        found.append((float(np.abs(np.log(fitted / y)).sum()), gap, float(burst), peak))
    return min(found)[1:]


def fit_crossing(sizes: Sequence[int], seconds: Sequence[float], network: NetworkModel) -> float:
    """Fit `NetworkModel.crossing`, how much opposite messages delay each other, to `seconds`."""

    def error(share: float) -> float:
        net = network._replace(crossing=share)
        simulated = [
            run([_exchanges(0, size), _exchanges(1, size)], Problem(2, size, 1, net)) / 4
            for size in sizes
        ]
        return float(np.square(np.divide(simulated, seconds) - 1).sum())

    return min((k / 50 for k in range(51)), key=error)


def _alternate(rank: int, count: int) -> list[Step]:
    whole = (0, 8)
    return [send(k, 1 - rank, whole) if k % 2 == rank else recv(k, 1 - rank, whole)
            for k in range(count)]  # fmt: skip


def _both_ways(rank: int, count: int) -> list[Step]:
    return [
        step
        for k in range(count)
        for step in (send(k, 1 - rank, (0, 8)), recv(k, 1 - rank, (8 + 8 * k, 16 + 8 * k)))
    ]


def _answered(rank: int, size: int) -> list[Step]:
    there, back = (0, size), (0, 8)
    if rank:
        return [recv(0, 0, there), send(1, 0, back)]
    return [send(0, 1, there), recv(1, 1, back)]


def _exchanges(rank: int, size: int) -> list[Step]:
    # Each exchange needs the data of the exchange before it, as the steps of an algorithm do.
    halves = [(0, size), (size, 2 * size)]
    return [
        step
        for k in range(4)
        for step in (send(k, 1 - rank, halves[k % 2]), recv(k, 1 - rank, halves[1 - k % 2]))
    ]


def _run(comm, steps: list[Step], size: int, pause: float = 0.0) -> float:
    program = Program(of(comm), steps, size, np.dtype(np.uint8), np.add)
    data = np.zeros(size, np.uint8)
    time.sleep(pause)
    comm.Barrier()
    return _time(lambda: wait_until(Run(program, data, 0, b"").test))


def _time(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _median(comm, repeats: int, measure: Callable[[], float]) -> float:
    """Return, on all ranks, the median of rank 0's measured times. Collective over `comm`."""
    measure()
    return comm.bcast(float(np.median([measure() for _ in range(repeats)])))


def _reduction(comm, repeats: int) -> float:
    """Return the seconds per byte of adding two vectors, while both ranks add at the same time."""
    times = []
    for size in (1 << 20, 4 << 20, 16 << 20):
        a, b = np.ones((2, size // 4), np.float32)
        add = partial(np.add, a, b, out=a)
        times.append(_median(comm, repeats, partial(_time, add)) / size)
    return float(np.median(times))
