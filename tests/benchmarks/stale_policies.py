"""Train in one process with stale gradients of a worker that is 12 x slower: the policies compared.

    PYTHONPATH=tests python -m benchmarks.stale_policies

A server of the package gets the pushes of 8 simulated workers under ASP. Worker 0 takes 12 times as
long for a step, and has 4 times the samples; its gradients are about 80 updates old. Each worker
computes its gradients at the parameters that it has pulled.
"""

from __future__ import annotations

import argparse
import heapq
import time

import numpy as np

import mpidist as md
from mpidist import data, events, models, optim
from mpidist.servers.consistency import Apply
from mpidist.servers.layout.placement import place_tensors
from mpidist.servers.layout.routing import whole_parts
from mpidist.servers.model_facts import Request
from mpidist.servers.server import Hosted, Push
from mpidist.servers.shards import ServerShard

WORKERS, SLOWER, PUSHES, BATCH, MORE = 8, 12, 1500, 32, 4

POLICIES = {
    "keep": md.KeepStale(),
    "drop > 16": md.DropStale(16),
    "drop > 16, keep 128": md.DropStale(16, keep_if_samples=128),
    "scale, 8": md.ScaleStale(8),
    "compensated, 0.04": md.DelayCompensated(0.04),
    "compensated, 1": md.DelayCompensated(1.0),
    "momentum": md.MomentumCorrected(),
    "momentum, catch up": md.MomentumCorrected(catch_up=True),
}
#: Learning rate, momentum, global batch (a push of 32 samples weighs 32 / global batch).
SETTINGS = [(0.2, 0.0, 32), (0.02, 0.9, 32), (0.05, 0.9, 64), (0.2, 0.9, 352)]


def train(policy, rate: float, momentum: float, global_batch: int, seed: int) -> tuple[float, dict]:
    """Return the test accuracy, and what the server has counted."""
    training, test = (source.take(np.arange(len(source))) for source in data.digits())
    inputs, labels = training[0].reshape(len(training[0]), -1), training[1]
    model = models.mlp([64, 64, 10], seed=seed)
    optimizer = optim.momentum(rate, momentum) if momentum else optim.sgd(rate)
    layout = place_tensors({n: (p.shape, p.dtype) for n, p in model.parameters.items()}, 1)
    shard, parts = ServerShard(layout, 0, optimizer, {}, 0), whole_parts(layout, 0)
    for name, array in model.parameters.items():
        shard.parameters[name][...] = array.ravel()
    asked = Request("digits", {}, optimizer, md.ASP(), stale=policy, global_batch=global_batch)
    hosted, rng = Hosted(asked, shard, WORKERS), np.random.default_rng((seed, 1))
    gradients = {name: np.zeros_like(array) for name, array in model.parameters.items()}
    pulled: list[dict] = [{}] * WORKERS
    ends: list[tuple[float, int]] = []  # a heap of (when a worker is done, worker)

    def load(values) -> None:
        for name, array in model.parameters.items():
            array[...] = values[name].reshape(array.shape)

    def begin(worker: int, now: float) -> None:
        hosted.keep(worker, parts)
        pulled[worker] = {name: array.copy() for name, array in shard.parameters.items()}
        seconds = rng.lognormal(0, 0.1) * (SLOWER if worker == 0 else 1)
        heapq.heappush(ends, (now + seconds, worker))

    for worker in range(WORKERS):
        begin(worker, 0.0)
    with np.errstate(all="ignore"):  # where training fails
        for _ in range(PUSHES):
            now, worker = heapq.heappop(ends)
            chosen = rng.integers(0, len(labels), BATCH * (MORE if worker == 0 else 1))
            load(pulled[worker])
            model.loss_and_gradients((inputs[chosen], labels[chosen]), gradients)
            names = [layout.tensors[part.piece.tensor].name for part in parts]
            pieces = [(p, gradients[n].ravel().copy()) for p, n in zip(parts, names, strict=True)]
            push = Push(np.empty(0), pieces, len(chosen), hosted.pulled[worker])
            hosted.apply(Apply(0, ((worker, push),)), range(WORKERS))
            begin(worker, now)
        load(shard.parameters)
        right = model.predict(test[0].reshape(len(test[0]), -1)).argmax(1) == test[1]
    return float(right.mean()), hosted.facts()


def cost(policy, elements: int = 1 << 20, times: int = 15) -> float:
    """The median milliseconds of a pull and a push of so many float32, in the server alone."""
    layout = place_tensors({"w": ((elements,), "f4")}, 1)
    optimizer = optim.momentum(0.1) if policy.corrects else optim.sgd(0.1)
    shard, parts = ServerShard(layout, 0, optimizer, {}, 0), whole_parts(layout, 0)
    hosted = Hosted(Request("m", {}, optimizer, md.ASP(), stale=policy), shard, 1)
    gradient, seconds = np.ones(elements, "f4"), []
    for _ in range(times):
        start = time.perf_counter()
        hosted.keep(0, parts)
        push = Push(np.empty(0), [(parts[0], gradient)], 1, hosted.pulled[0])
        hosted.apply(Apply(0, ((0, push),)), [0])
        seconds.append(time.perf_counter() - start)
    return 1e3 * float(np.median(seconds))


def main() -> None:
    """Print a table: the mean accuracy of the seeds, and the cost of each policy."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    seeds = range(parser.parse_args().seeds)
    events.VERBOSITY = 0
    print(f"{'lr, momentum, global batch':28}" + "".join(f"{name:>21}" for name in POLICIES))
    for settings in SETTINGS:
        line = f"{', '.join(map(str, settings)):28}"
        for policy in POLICIES.values():
            if policy.corrects and not settings[1]:
                line += f"{'':21}"
                continue
            line += f"{np.mean([train(policy, *settings, seed)[0] for seed in seeds]):21.3f}"
        print(line, flush=True)
    costs = "".join(f"{cost(policy):21.2f}" for policy in POLICIES.values())
    print(f"{'ms for 4 MiB on the server':28}{costs}")


if __name__ == "__main__":
    main()
