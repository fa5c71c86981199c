"""Measure what pipelines save by sums during backward passes, and by microbatches under way.

    PYTHONPATH=tests python -m benchmarks.pipeline_overlap net
    PYTHONPATH=tests mpirun -n 2 python -m benchmarks.pipeline_overlap sums
    PYTHONPATH=tests mpirun -n 2 python -m benchmarks.pipeline_overlap parts
    PYTHONPATH=tests mpirun -n 4 python -m benchmarks.pipeline_overlap pipedream

The layers sleep, so the ranks may share cores. In `sums`, two replicas of a stage are as on two
hosts: they send their sums in messages. `net` (as root) runs `sums` on two hosts with 1 Gbit/s
between them. `parts` sums 4 MiB in parts of several sizes, and prints the fastest times. In the
others, both ways take turns; the figures are medians over rounds, of the slowest rank.
"""

from __future__ import annotations

import argparse
import sys
import time

import numpy as np
from mpi4py import MPI
from onebox.network import shaped_network

import mpidist as md
from benchmarks.pipeline import ACTIVATION, FORWARD, MICROBATCHES, SleepingLayer, SleepingModel
from mpidist.collectives.engines.node_barrier import memory_of
from mpidist.collectives.engines.piecewise import PieceSum
from mpidist.pipeline.stages import stage_chunk, sum_parts
from mpidist.runtime.context import of

#: The layers of `sums`, and the rows of their parameters: 4 MiB each.
LAYERS, ROWS = 8, 1024


class LargeLayer(SleepingLayer):
    """Sleeps, and has many parameters, of which it says when their gradient is final."""

    def shapes(self):
        return {self.name: (ROWS, ROWS)}

    def backward_weights(self, parameters, saved, dy, gradients, ready):
        super().backward_weights(parameters, saved, dy, gradients, ready)
        ready(self.name)


def compared(comm, what: str, stages: dict, step, rounds: int) -> None:
    """Print the medians of the steps of two stages, and of their ratio. Collective."""
    times: dict = {name: [] for name in stages}
    for number in range(rounds + 1):
        for name, stage in stages.items():
            comm.Barrier()
            start = time.perf_counter()
            step(stage)
            seconds = comm.allreduce(time.perf_counter() - start, MPI.MAX)
            times[name] += [seconds] if number else []
    if comm.rank == 0:
        (first, a), (second, b) = times.items()
        told = f"{first} {np.median(a) * 1e3:.1f} ms, {second} {np.median(b) * 1e3:.1f} ms"
        print(f"{what}: {told}: {np.median(np.array(b) / a):.3f}")


def sums(comm, rounds: int) -> None:
    """Compare sums after the last backward pass with sums that begin in it."""
    batch = np.zeros((8, ACTIVATION // 16), "f4"), np.zeros(8, int)

    def is_sent(comm) -> bool:
        memory_of(of(comm), 1)
        return True

    stage_chunk.is_sent = is_sent
    stages = {}
    for name, least in (("after", 1 << 40), ("during", sum_parts.LEAST)):
        sum_parts.LEAST = least
        model = SleepingModel(0, 0.0)
        model.layers = [LargeLayer(number, FORWARD / 2) for number in range(LAYERS)]
        model.parameters = {layer.name: np.zeros((ROWS, ROWS), "f4") for layer in model.layers}
        grid = md.pipeline.plan_stages(LAYERS, cuts=[], ranks=comm.size, microbatches=4)
        stages[name] = md.Stage(comm, model, grid)
    compared(comm, "sums", stages, lambda stage: stage.step(batch), rounds)
    for stage in stages.values():
        stage.close()


def parts(comm, rounds: int) -> None:
    """Print the fastest time of a sum for each MiB, by the bytes of the parts that are sent."""
    memory_of(of(comm), 1)  # as on hosts of their own
    ways: dict[int, list[PieceSum]] = {}
    for size in (1 << 12, 1 << 14, 1 << 16, 1 << 18, 1 << 20, 1 << 22):
        several = min((1 << 22) // size, 64)
        ways[size] = [PieceSum(comm, size // 4, "f4", comm.size) for _ in range(several)]
        for one in ways[size]:
            one.prepare()
    fastest: dict[int, float] = {}
    for _ in range(rounds + 1):
        for size, several in ways.items():
            vector = np.ones(size // 4, "f4")
            comm.Barrier()
            start = time.perf_counter()
            for one in several:
                for _ in one.mine:
                    one.add(vector)
                one.begin()
                one.test()
            for one in several:
                one.finish(vector)
            seconds = (time.perf_counter() - start) / len(several) / size * (1 << 20)
            fastest[size] = min(fastest.get(size, seconds), seconds)
    for size, seconds in fastest.items():
        slowest = comm.allreduce(seconds, MPI.MAX)
        if comm.rank == 0:
            print(f"parts of {size >> 10} KiB: {slowest * 1e3:.1f} ms for each MiB")


def pipedream(comm, rounds: int) -> None:
    """Compare steps that empty the pipeline at their end with steps that do not."""
    p, m = comm.size, MICROBATCHES
    batch, stages = (np.zeros((4 * m, ACTIVATION // 16), "f4"), np.zeros(4 * m, int)), {}
    for name, flush in (("emptied", m), ("under way", None)):
        grid = md.pipeline.plan_stages(
            p, cuts=range(1, p), ranks=p, microbatches=m, schedule="pipedream", flush=flush
        )
        stages[name] = md.Stage(comm, SleepingModel(p, FORWARD), grid)
    compared(
        comm, "pipedream", stages, lambda stage: stage.step(batch, lambda *given: None), rounds
    )
    if comm.rank == 0:
        print(f"without messages: {(3 * m + p - 1) / (3 * (m + p - 1)):.3f}")
    for stage in stages.values():
        stage.drain()
        stage.close()


def net(comm, rounds: int) -> None:
    """Run `sums` on two hosts of one rank."""
    command = [sys.executable, "-m", "benchmarks.pipeline_overlap", "sums"]
    with shaped_network(hosts=2, rate="1gbit") as network:
        found = network.mpirun(1, [*command, "--rounds", str(rounds)])
        print(found.check().stdout, end="")


def main() -> None:
    what = {each.__name__: each for each in (net, sums, parts, pipedream)}
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=what)
    parser.add_argument("--rounds", type=int, default=7)
    given = parser.parse_args()
    what[given.what](MPI.COMM_WORLD, given.rounds)


if __name__ == "__main__":
    main()
