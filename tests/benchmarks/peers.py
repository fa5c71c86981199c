"""Averages with peers and Hogwild: accuracy, spread, and updates per second.

PYTHONPATH=tests mpirun -n 8 python -m benchmarks.peers accuracy
PYTHONPATH=tests mpirun -n 2 python -m benchmarks.peers hogwild
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np
from mpi4py import MPI

import mpidist as md
from mpidist import data, models, optim
from mpidist.errors import ConfigError
from mpidist.peers.peer_plan import peer_plan

#: Features, and those of a sample that are not zero.
FEATURES, ACTIVE, SAMPLES = 10_000, 22, 4_000


class SparseRegression:
    """Logistic regression on samples with few features; its gradient is zero in all other rows."""

    def __init__(self):
        self.parameters = {"weight": np.zeros((FEATURES, 1), "f4")}
        self._last = np.zeros(0, np.int64)

    def loss_and_gradients(self, batch, gradients, ready=None) -> float:
        """Return the mean loss, and write the gradient: only rows of this and the last batch."""
        features, labels = batch
        weight, gradient = self.parameters["weight"][:, 0], gradients["weight"][:, 0]
        gradient[self._last] = 0
        self._last = features.reshape(-1)
        scores = weight[features].sum(axis=1)
        chances = 1 / (1 + np.exp(-scores))
        wrong = (chances - labels) / len(labels)
        np.add.at(gradient, self._last, np.repeat(wrong, ACTIVE).astype("f4"))
        return float(np.logaddexp(0, -scores * (2 * labels - 1)).mean())

    def predict(self, features):
        """Return a score for each of the two labels."""
        scores = self.parameters["weight"][features, 0].sum(axis=1)
        return np.stack([-scores, scores], axis=1)


def sparse_data():
    """Return samples whose label depends on the sum of hidden weights of their features."""
    rng = np.random.default_rng(3)
    features = rng.integers(0, FEATURES, (SAMPLES, ACTIVE))
    hidden = rng.standard_normal(FEATURES)
    return features, (hidden[features].sum(axis=1) > 0).astype(np.int64)


def hogwild(comm, repeats: int) -> None:
    """Compare the updates per second of all ranks with those of one rank."""
    found: dict[int, list[float]] = {1: [], comm.size: []}
    accuracy: dict[int, float] = {}
    source = sparse_data()
    for _ in range(repeats):
        for ranks in found:
            part = comm.Split(int(comm.rank >= ranks), comm.rank)
            if comm.rank < ranks:
                model = SparseRegression()
                began, seconds = [0.0], [0.0]

                def note(report, began=began, seconds=seconds):
                    now = time.perf_counter()
                    if report.step == 100:
                        began[0] = now
                    seconds[0] = now - began[0]

                # Each rank has one sample in a step, so a step is an update of each rank.
                result = md.train(
                    part, model, source, optimizer=optim.sgd(0.5 * ranks), global_batch=ranks,
                    steps=SAMPLES, strategy=md.Hogwild(), callbacks=[note], test_data=source,
                    watch_seconds=0,
                )  # fmt: skip
                slowest = part.allreduce(seconds[0], MPI.MAX)
                found[ranks].append(ranks * (SAMPLES - 100) / slowest)
                accuracy[ranks] = result.test_accuracy
                md.free(part)
            comm.Barrier()
            part.Free()
    if comm.rank == 0:
        for ranks, each in found.items():
            print(f"{ranks} ranks: {statistics.median(each):,.0f} updates/s, "
                  f"accuracy {accuracy[ranks]:.3f}")  # fmt: skip
        ratios = [many / one for one, many in zip(*found.values(), strict=True)]
        print(f"ratio: {statistics.median(ratios):.2f} (median of {repeats})")


def accuracy(comm, every: int, repeats: int) -> None:
    """Train digits on all ranks: synchronous, and with averages on each graph."""
    strategies: dict[str, object] = {"allreduce": md.AllReduce()}
    for graph in ("all", "ring", "butterfly", "halton"):
        try:
            peer_plan(graph, comm.size)
        except ConfigError as error:
            if comm.rank == 0:
                print(error)
            continue
        for name, mode in (("BSP", md.BSP()), ("SSP(2)", md.SSP(2)), ("ASP", md.ASP())):
            strategies[f"{graph}, {name}"] = md.PeerAverage(graph, every, mode)
    training, test = data.digits()
    for name, strategy in strategies.items():
        scores, apart = [], []
        for seed in range(repeats):
            model = models.mlp([64, 64, 10], seed=seed)
            result = md.train(
                comm, Flat(model), training, optimizer=optim.momentum(0.05), global_batch=64,
                epochs=20, seed=seed, strategy=strategy, test_data=test,
            )  # fmt: skip
            scores.append(result.test_accuracy)
            apart.append(result.peers["apart"] if result.peers else 0.0)
        if comm.rank == 0:
            print(f"{name:18} {statistics.median(scores):.4f}   apart {max(apart):.3f}", flush=True)


class Flat:
    """A model that gets images as vectors."""

    def __init__(self, model):
        self.model, self.parameters = model, model.parameters

    def loss_and_gradients(self, batch, gradients, ready=None):
        """Return the mean loss, and write the gradients."""
        images, labels = batch
        return self.model.loss_and_gradients((images.reshape(len(images), -1), labels), gradients)

    def predict(self, images):
        """Return the scores of the labels."""
        return self.model.predict(images.reshape(len(images), -1))


def main() -> None:
    """Run a comparison on all ranks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["accuracy", "hogwild"])
    parser.add_argument("--every", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args()
    if given.what == "hogwild":
        hogwild(MPI.COMM_WORLD, given.repeats)
    else:
        accuracy(MPI.COMM_WORLD, given.every, given.repeats)


if __name__ == "__main__":
    main()
