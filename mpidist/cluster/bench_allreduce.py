"""`mpidist bench allreduce`: every algorithm against the MPI library's own, in one run.

Rules: candidates and native take turns inside each round, in an order that changes from round to
round; the time of a call is that of the slowest rank, from a barrier; figures are medians over
rounds, and the ratio is the median of the rounds' ratios, so a machine that is busy for a while
slows down both. Native is taken in its better form (in place or not). Inputs are written anew in
every round, and results are checked off the clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from mpi4py import MPI

from ..collectives.allreduce import allreduce, plan
from ..errors import MpidistError


def sizes(low: int, high: int) -> list[int]:
    """Powers of two from `low` to `high` bytes. Local."""
    result = []
    size = low
    while size <= high:
        result.append(size)
        size *= 2
    return result


def calls_per_round(nbytes: int) -> int:
    """How many calls are timed together: many short ones, one long one. Local."""
    return 200 if nbytes <= 4096 else 20 if nbytes <= 128 << 10 else 3 if nbytes <= 2 << 20 else 1


def measure(comm, nbytes: int, algorithms: Sequence[str], rounds: int, dtype="f4") -> list[dict]:
    """Return a row per algorithm for vectors of `nbytes`. Collective over `comm`.

    Rows: bytes, algorithm, ranks, median_us, native_us, ratio (native over ours, median of the
    rounds), busbw (GB/s: bytes / time * 2(p-1)/p), as nccl-tests define it.
    """
    dtype = np.dtype(dtype)
    n = max(1, nbytes // dtype.itemsize)
    x, out = np.empty(n, dtype), np.empty(n, dtype)
    run: dict[str, Callable[[], object]] = {
        "native": lambda: comm.Allreduce(x, out),
        "native in place": lambda: comm.Allreduce(MPI.IN_PLACE, x),
    }
    bound = {}
    for name in algorithms:
        run[name] = partial(allreduce, comm, x, algorithm=name)
        bound[f"{name} plan"] = plan(comm, x, algorithm=name)
    run.update(bound)
    seconds = {name: np.empty(rounds) for name in run}
    names = list(run)
    repeat = calls_per_round(nbytes)
    rng = np.random.default_rng(0)
    for k in range(-1, rounds):  # round -1 warms up
        for index in rng.permutation(len(names)):
            name = names[index]
            # Zeros stay zeros however often they are summed in place; the last call is checked.
            x[:] = 0
            elapsed = _time(comm, run[name], repeat)
            if k >= 0:
                seconds[name][k] = elapsed
            x[:] = comm.rank + 1
            run[name]()
            _check(comm, name, out if name == "native" else x)
    # The slowest rank's time counts, round by round.
    for name in names:
        comm.Allreduce(MPI.IN_PLACE, seconds[name], MPI.MAX)
    better = min(("native", "native in place"), key=lambda name: np.median(seconds[name]))
    native = seconds[better]
    factor = 2 * (comm.size - 1) / comm.size
    rows = []
    for name in ["native", *[a for a in names if not a.startswith("native")]]:
        mine = native if name == "native" else seconds[name]
        median = float(np.median(mine))
        rows.append(
            {
                "bytes": n * dtype.itemsize,
                "algorithm": name,
                "ranks": comm.size,
                "median_us": round(median * 1e6, 3),
                "native_us": round(float(np.median(native)) * 1e6, 3),
                "ratio": round(float(np.median(native / mine)), 3),
                "extra_us": round(float(np.median(mine - native)) * 1e6, 3),
                "busbw": round(n * dtype.itemsize * factor / median / 1e9, 4),
            }
        )
    return rows


def _time(comm, call: Callable[[], object], repeat: int) -> float:
    comm.Barrier()
    start = time.perf_counter()
    for _ in range(repeat):
        call()
    return (time.perf_counter() - start) / repeat


def _check(comm, name: str, result: np.ndarray) -> None:
    expected = comm.size * (comm.size + 1) / 2
    if not (result == expected).all():
        raise MpidistError(f"bench: {name} gave {result[result != expected][0]}, not {expected}")
