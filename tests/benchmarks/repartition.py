"""Time `group.repartition`: the shares of two servers change from 2/3 : 1/3 to 1/2 : 1/2 and back.

    mpirun -n 3 python -m benchmarks.repartition [--mib 64] [--rounds 9]

One worker and two servers on one node, float32 and Adam, so a model of 64 MiB is 192 MiB on the
servers. Prints the median, the first and the longest time, and whether a pull has the same bits.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import numpy as np
from mpi4py import MPI

import mpidist as md


def main() -> None:
    """Change shares forth and back, and print the times as one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--tensors", type=int, default=1)
    args = parser.parse_args()
    comm, times, same = MPI.COMM_WORLD, [], True
    size = (args.mib << 18) // args.tensors
    model = {f"w{k}": ((size,), "f4", "normal") for k in range(args.tensors)}
    with md.ServerGroup(comm, servers={comm.size - 2: 2, comm.size - 1: 1}) as group:
        client = group.add("m", model, optimizer=md.optim.adam(1e-3))
        if client is not None:
            gradient = {name: np.full(size, 1e-3, "f4") for name in model}
            before = {name: array.copy() for name, array in client.push_pull(gradient).items()}
            for number in range(2 * args.rounds):
                start = time.perf_counter()
                group.repartition(weights=[1, 1] if number % 2 == 0 else [2, 1])
                times.append(1000 * (time.perf_counter() - start))
                after = client.pull()
                same = same and all(np.array_equal(after[n], before[n]) for n in model)
    if comm.rank == 0:
        found = {
            "mib": args.mib,
            "ms to 1/2": round(statistics.median(times[::2]), 1),
            "ms back": round(statistics.median(times[1::2]), 1),
            "first": round(times[0], 1),
            "longest": round(max(times), 1),
            "same bits": same,
            "load": Path("/proc/loadavg").read_text().split()[0],
        }
        print(json.dumps(found))


if __name__ == "__main__":
    main()
