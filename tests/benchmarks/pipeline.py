"""Measure pipelines: schedules beside the simulator, and a model beside one rank.

    PYTHONPATH=tests mpirun -n 4 python -m benchmarks.pipeline schedules
    PYTHONPATH=tests mpirun -n 2 python -m benchmarks.pipeline speed
    PYTHONPATH=tests mpirun -n 2 python -m benchmarks.pipeline cuts
    PYTHONPATH=tests mpirun -n 4 python -m benchmarks.pipeline memory

Figures are medians over rounds, of the slowest rank. The layers of `schedules` sleep, so its ranks
may share cores. The other two need a free core for each rank.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import resource
import time
from pathlib import Path

import numpy as np
from mpi4py import MPI

import mpidist as md

MICROBATCHES = 16
#: Seconds of a forward pass of a stage; a backward pass takes twice as long.
FORWARD = 0.010
#: Bytes of an activation of a microbatch.
ACTIVATION = 100_000
#: The memory that `memory` grants to a rank, as a multiple of that of the plan's largest stage.
MOST_OF_PLAN = 1.2


class SleepingLayer:
    """Takes a known time, and nearly no processor."""

    def __init__(self, number: int, seconds: float):
        self.name, self.seconds = f"w{number}", seconds

    def shapes(self):
        return {self.name: (4, 4)}

    def forward(self, parameters, x):
        time.sleep(self.seconds)
        return x.copy(), None

    def backward_input(self, parameters, saved, dy):
        time.sleep(self.seconds)
        return dy.copy()

    def backward_weights(self, parameters, saved, dy, gradients, ready):
        time.sleep(self.seconds)
        gradients[self.name][...] = 0

    def backward(self, parameters, saved, dy, gradients, ready, first=False):
        self.backward_weights(parameters, saved, dy, gradients, ready)
        return self.backward_input(parameters, saved, dy)


class SleepingModel:
    def __init__(self, layers: int, seconds: float):
        self.layers = [SleepingLayer(number, seconds) for number in range(layers)]
        self.parameters = {layer.name: np.zeros((4, 4), "f4") for layer in self.layers}

    def loss(self, scores, labels):
        return np.zeros(1), np.zeros_like(scores)


def step_seconds(comm, stage, batch, rounds: int) -> float:
    """Return the median time of a step on the slowest rank. Collective."""
    stage.step(batch)
    times = []
    for _ in range(rounds):
        comm.Barrier()
        start = time.perf_counter()
        stage.step(batch)
        times.append(time.perf_counter() - start)
    return comm.allreduce(float(np.median(times)), MPI.MAX)


def schedules(comm, rounds: int) -> None:
    """Print the time of a step of each schedule, and what the simulator says."""
    p, m = comm.size, MICROBATCHES
    batch = np.zeros((4 * m, ACTIVATION // 16), "f4"), np.zeros(4 * m, int)
    found = {}
    for name, chunks in (("1f1b", 1), ("zero_bubble", 1), ("gpipe", 1), ("interleaved", 2)):
        layers, seconds = p * chunks, FORWARD / chunks
        grid = md.pipeline.plan_stages(
            layers, cuts=range(1, layers), ranks=p, microbatches=m, schedule=name, chunks=chunks
        )
        stage = md.Stage(comm, SleepingModel(layers, seconds), grid)
        found[name] = step_seconds(comm, stage, batch, rounds)
        stage.close()
        cost = md.pipeline.ChunkCost(seconds, 2 * seconds, ACTIVATION)
        lists = md.pipeline.action_lists(name, p, m, chunks)
        simulated = md.pipeline.simulate_actions(lists, [cost] * layers).seconds
        if comm.rank == 0:
            ratio = found[name] / simulated
            print(f"{name:12} {found[name]:.4f} s, simulated {simulated:.4f} s: {ratio:.3f}")
    if comm.rank == 0:
        print(f"zero_bubble over 1f1b: {found['zero_bubble'] / found['1f1b']:.3f}")


def _stage(comm, model, cuts):
    grid = md.pipeline.plan_stages(
        len(model.layers), cuts=cuts, ranks=comm.size, microbatches=MICROBATCHES
    )
    return md.Stage(comm, model, grid)


def _measured(comm, make, batch) -> list[int]:
    """Return the cuts that the partitioner chooses from measured times. Collective."""
    cuts = None
    if comm.rank == 0:
        n = len(batch[0]) // MICROBATCHES
        profile = md.pipeline.measure(make(), (batch[0][:n], batch[1][:n]))
        plan = md.pipeline.cut(profile, workers=comm.size, stages=comm.size, replication=False)
        cuts = np.cumsum([len(stage.nodes) for stage in plan.stages])[:-1].tolist()
    return comm.bcast(cuts)


def _data(inputs: int, samples: int = 1024):
    rng = np.random.default_rng(0)
    return rng.standard_normal((samples, inputs)).astype("f4"), rng.integers(0, 10, samples)


def speed(comm, rounds: int) -> None:
    """Print samples per second of all ranks, and of one rank while the others sleep."""
    sizes = [784] + [1024] * 6 + [10]

    def make():
        return md.models.mlp(sizes, seed=1)

    batch = _data(sizes[0])
    whole = _stage(MPI.COMM_SELF, make(), []) if comm.rank == 0 else None
    parts = _stage(comm, make(), _measured(comm, make, batch))
    ratios, rates = [], []
    for _ in range(rounds):
        together = step_seconds(comm, parts, batch, 3)
        alone = step_seconds(MPI.COMM_SELF, whole, batch, 3) if whole else None
        done = comm.Ibarrier()
        while not done.Test():
            time.sleep(0.01)
        if alone is not None:
            ratios.append(alone / together)
            rates.append((len(batch[0]) / together, len(batch[0]) / alone))
    if comm.rank == 0:
        many, one = np.median(rates, axis=0)
        print(
            f"{many:.0f} samples/s on {comm.size} ranks, {one:.0f} on one: {np.median(ratios):.2f}"
        )


def cuts(comm, rounds: int) -> None:
    """Print a step with measured cuts over a step with the same number of layers in each stage."""
    widths = np.geomspace(64, 2048, 13).round().astype(int).tolist()

    def make():
        return md.models.mlp(widths, seed=1)

    batch = _data(widths[0])
    count = len(make().layers)
    equal = [count * k // comm.size for k in range(1, comm.size)]
    chosen = _measured(comm, make, batch)
    stages = [_stage(comm, make(), each) for each in (equal, chosen)]
    times = np.array([[step_seconds(comm, one, batch, 3) for one in stages] for _ in range(rounds)])
    if comm.rank == 0:
        ratio = np.median(times[:, 0] / times[:, 1])
        print(f"cuts {equal} take {ratio:.2f} times as long as {chosen}")


def _resident(field: str) -> int:
    """Return VmRSS or VmHWM of this process, in bytes."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {field}")


def _limited(nbytes: int):
    """Let this process allocate so many more bytes of memory; return the limit before."""
    before = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (_resident("VmData") + nbytes, before[1]))
    return before


def memory(comm, rounds: int) -> None:
    """Train under a limit of memory on each rank that the whole model does not fit into.

    The limit is `MOST_OF_PLAN` times the memory of the plan's largest stage. On one rank, the same
    model raises MemoryError.
    """
    widths = [1024] * 13
    pieces, samples = 8, 4096

    def make():
        return md.models.mlp(widths, seed=1)

    inputs, labels = _data(widths[0], samples)
    plan = None
    if comm.rank == 0:
        n = samples // pieces
        profile = md.pipeline.measure(make(), (inputs[:n], labels[:n]), repeats=1)
        # Sizes as measured, and the time of a layer by its parameters: the same cuts in each run.
        profile = md.pipeline.chain([
            dataclasses.replace(one, forward=one.parameter_bytes, backward=0.0)
            for one in profile.layers
        ])  # fmt: skip
        plan = md.pipeline.cut(profile, workers=comm.size, stages=comm.size, replication=False)
    plan = comm.bcast(plan)
    ends = np.cumsum([len(stage.nodes) for stage in plan.stages])[:-1].tolist()
    planned = max(stage.memory_bytes for stage in plan.stages)
    whole = sum(stage.parameter_bytes for stage in plan.stages)

    def train(on, cuts) -> int:
        """Return how much more memory a rank needs for two steps."""
        gc.collect()
        before = _limited(int(MOST_OF_PLAN * planned))
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # VmHWM begins anew
        start = _resident("VmRSS")
        try:
            model = make()
            grid = md.pipeline.plan_stages(
                len(model.layers), cuts=cuts, ranks=on.size, microbatches=pieces
            )
            stage, optimizer = md.Stage(on, model, grid), md.optim.sgd(0.1)
            state = optimizer.init(stage.parameters)
            for _ in range(2):
                stage.step((inputs, labels))
                optimizer.update(stage.gradients, state, stage.parameters)
            stage.close()
        finally:
            resource.setrlimit(resource.RLIMIT_DATA, before)
        return _resident("VmHWM") - start

    np.ones((512, 512), "f4") @ np.ones((512, 512), "f4")  # BLAS has its buffers from now on
    peaks = comm.gather(train(comm, ends))
    if comm.rank == 0:
        try:
            alone = f"{train(MPI.COMM_SELF, []) / 1e6:.0f} MB"
        except MemoryError:
            alone = "MemoryError"
        told = ", ".join(f"{peak / 1e6:.0f}" for peak in peaks)
        print(f"{whole / 1e6:.0f} MB of parameters, cuts {ends}: peaks {told} MB")
        print(f"limit {MOST_OF_PLAN * planned / 1e6:.0f} MB, the plan's {planned / 1e6:.0f} MB")
        print(f"peak over plan: {max(peaks) / planned:.2f}; on one rank: {alone}")
    comm.Barrier()


def main() -> None:
    what = {each.__name__: each for each in (schedules, speed, cuts, memory)}
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=what)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    what[given.what](MPI.COMM_WORLD, given.rounds)


if __name__ == "__main__":
    main()
