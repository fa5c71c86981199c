"""Memory and wire of colocated servers under BSP (a sharded optimizer), and of replicas.

    mpirun -n 4 python tests/benchmarks/sharded_optimizer.py --only sharded|replicas

Rank 0 prints, for the rank with the most, the optimizer state, the peak
of memory above that before the run, and the bytes that it sends to other ranks in a step. With
replicas, the gradients go by the ring, because ranks of one node would else send nothing.
"""

from __future__ import annotations

import argparse
import resource
from collections.abc import Callable

import numpy as np
from mpi4py import MPI

import mpidist as md
from mpidist.runtime.context import of

MIB = 1 << 20


def peak() -> int:
    """Return the largest number of bytes that this process has used in memory so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def state_bytes(state) -> int:
    """Return the bytes of the arrays in nested dicts."""
    if isinstance(state, dict):
        return sum(map(state_bytes, state.values()))
    return state.nbytes


def replicas(comm: MPI.Comm, size: int, steps: int) -> tuple[int, int]:
    """Train with allreduce; return the bytes of optimizer state, and those sent in a step."""
    parameters = {"w": np.zeros(size, "f4")}
    gradients = {"w": np.ones(size, "f4")}
    optimizer = md.optim.adam(1e-3)
    state = optimizer.init(parameters)
    before = 0
    for step in range(steps + 1):
        if step == 1:  # the first step measures nothing: it makes the plans
            before = of(comm).counters.bytes_sent
        md.allreduce(comm, gradients["w"], op="mean", algorithm="ring")
        optimizer.update(gradients, state, parameters)
    return state_bytes(state), (of(comm).counters.bytes_sent - before) // steps


def sharded(comm: MPI.Comm, size: int, steps: int) -> tuple[int, int]:
    """Train with all ranks as servers and workers; return the same numbers."""
    parameters = {"w": np.zeros(size, "f4")}
    gradients = {"w": np.ones(size, "f4")}
    with md.ServerGroup(comm, servers="auto", placement="colocated") as group:
        client = group.add("m", parameters, optimizer=md.optim.adam(1e-3))
        assert client is not None
        client.push_pull(gradients, out=parameters)
        group.barrier()
        before = client.stats["bytes_sent"]
        for _ in range(steps):
            client.push_pull(gradients, out=parameters)
        group.barrier()
        # A rank sends a part of its push, and of its answers, to itself.
        mine = group.shards("m")["parameters"]
        own = 2 * sum(array.nbytes for _, _, array in mine)
        sent = (client.stats["bytes_sent"] - before) // steps - own
        held = group.shards("m")["optimizer"]
        state = sum(array.nbytes for slot in held.values() for _, _, array in slot)
    return state, sent


def measured(comm: MPI.Comm, run: Callable[[], tuple[int, int]]) -> dict[str, float]:
    """Return the largest numbers of all ranks, in MiB."""
    before = peak()
    state, sent = run()
    numbers = {"state": state, "memory": peak() - before, "sent": sent}
    return {name: comm.allreduce(n, MPI.MAX) / MIB for name, n in numbers.items()}


def main() -> None:
    """Measure one of the two: the peak of memory of a process never falls."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=64)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--only", choices=("sharded", "replicas"), required=True)
    given = parser.parse_args()
    comm, size = MPI.COMM_WORLD, given.mib * MIB // 4
    run = {"sharded": sharded, "replicas": replicas}[given.only]
    found = measured(comm, lambda: run(comm, size, given.steps))
    if comm.rank == 0:
        print(f"{given.only}, {comm.size} ranks, {given.mib} MiB of parameters, Adam:")
        for name, mib in found.items():
            print(f"  {name:8} {mib:8.1f} MiB")


if __name__ == "__main__":
    main()
