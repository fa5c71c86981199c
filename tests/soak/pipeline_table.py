"""Pipelines on many grids: bits against allreduce, times against theory, plans against all others.

    mpirun -n 4 python tests/soak/pipeline_table.py bits      # also with -n 2 and -n 3
    python tests/soak/pipeline_table.py theory plans

`bits` trains LeNet and a perceptron for 30 steps in stages: LeNet at each of its 12 cuts, each
synchronous schedule, 2 to 4 stages, and grids of replicas. `theory` simulates each schedule on up
to 16 ranks with up to 64 microbatches. `plans` compares the plans of 500 random models for each
cost formula, with and without a limit of memory, with all possible plans. The exit code is 1 if
anything differs.
"""

import random
import sys
from pathlib import Path

import numpy as np

import mpidist as md
from mpidist.pipeline import (
    COSTS,
    SCHEDULES,
    ChunkCost,
    NoPartition,
    action_lists,
    cut,
    simulate_actions,
)

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))
from test_pipeline_partition import all_plans, random_profile
from test_pipeline_schedules import kept
from test_pipeline_schedules import theory as expected_seconds

RNG = np.random.default_rng(0)
MODELS = {
    "lenet": (lambda: md.models.lenet(seed=3), RNG.standard_normal((64, 1, 28, 28), "f4")),
    "mlp": (lambda: md.models.mlp([20, 32, 32, 32, 32, 10], seed=3),
            RNG.standard_normal((64, 20), "f4")),
}  # fmt: skip
LABELS = np.arange(64) % 10


def grids(ranks):
    """Yield (model, microbatches, strategy) for a number of ranks."""
    plain = "gpipe", "1f1b", "zero_bubble"
    cuts = {2: [5], 3: [3, 7], 4: [2, 4, 7]}[ranks]
    halves = {2: [3, 6, 8], 3: [1, 3, 5, 6, 8], 4: [1, 2, 3, 4, 5, 6, 7]}[ranks]
    for kind in MODELS:
        for each in [cuts] if ranks != 2 or kind == "mlp" else [[k] for k in range(1, 13)]:
            yield from ((kind, 8, md.Pipeline(cuts=each, schedule=name)) for name in plain)
        yield kind, 2 * ranks, md.Pipeline(cuts=halves, chunks=2, schedule="interleaved")
        if ranks == 4:
            yield from ((kind, 8, md.Pipeline(cuts=[5], schedule=name)) for name in plain)
            for name in plain[:2]:
                yield kind, 8, md.Pipeline(cuts=[5], replicas=[3, 1], schedule=name)


def bits() -> int:
    """Return how many grids have other parameters than allreduce on one rank."""
    from mpi4py import MPI

    comm, known, wrong, cases = MPI.COMM_WORLD, {}, 0, 0

    def train(on, kind, microbatches, strategy):
        make, inputs = MODELS[kind]
        return md.train(
            on, make(), (inputs, LABELS), optimizer=md.optim.momentum(0.05), global_batch=16,
            steps=30, seed=1, microbatches=microbatches, strategy=strategy,
        ).parameters_sha256  # fmt: skip

    for kind, microbatches, strategy in grids(comm.size):
        one = kind, microbatches
        if one not in known:
            known[one] = comm.bcast(None if comm.rank else train(MPI.COMM_SELF, *one, None))
        cases += 1
        if train(comm, *one, strategy) != known[one]:
            wrong += 1
            print(f"rank {comm.rank}: {kind} in {microbatches} microbatches differs: {strategy}")
    if comm.rank == 0:
        print(f"bits: {cases} grids on {comm.size} ranks, {wrong} differ", flush=True)
    return wrong


def theory() -> int:
    """Return how many schedules take another time, or keep other microbatches, than in theory."""
    wrong = cases = 0
    for name in SCHEDULES:
        for p in range(1, 17):
            for m in range(1, 65):
                for v in (2, 3, 4) if name == "interleaved" else (1,):
                    if name == "interleaved" and m % p:
                        continue
                    run = simulate_actions(
                        action_lists(name, p, m, v), [ChunkCost(1 / v, 2 / v)] * (p * v)
                    )
                    seconds = expected_seconds(name, p, m, v)
                    late = name != "zero_bubble" or m >= p
                    good = not late or abs(run.seconds / seconds - 1) < 1e-12
                    good = good and run.stash == [kept(name, p, m, v, s) for s in range(p)]
                    wrong += not good
                    cases += 1
    print(f"theory: {cases} schedules, {wrong} differ", flush=True)
    return wrong


def plans() -> int:
    """Return how many plans are not the best of all."""
    wrong = cases = 0
    for cost in COSTS:
        rng = random.Random(f"table {cost}")
        for trial in range(500):
            profile = random_profile(rng, 10 if trial % 10 == 0 else 7)
            workers = rng.randint(1, 4 if len(profile.layers) < 8 else 3)
            for memory in (None, 10 ** rng.uniform(6, 7.8)):
                every = [one[0] for one in all_plans(profile, workers, memory, True, cost, 1e9)]
                try:
                    found = cut(profile, workers=workers, memory=memory, cost=cost, bandwidth=1e9)
                    good = every and abs(found.bottleneck_seconds - min(every)) <= 1e-11
                except NoPartition:
                    good = not every
                wrong += not good
                cases += 1
    print(f"plans: {cases} models, {wrong} differ", flush=True)
    return wrong


if __name__ == "__main__":
    known = {each.__name__: each for each in (bits, theory, plans)}
    sys.exit(any([known[name]() for name in sys.argv[1:]]))
