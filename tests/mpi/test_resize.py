"""md.train calls `on_resize` if it resumes on another number of ranks (R49, R119)."""

import numpy as np
import pytest

import mpidist as md
from mpidist import models, optim
from mpidist.training.exchanges.evaluation import parameters_digest

RNG = np.random.default_rng(3)
INPUTS = RNG.standard_normal((150, 12)).astype(np.float32)
TRAIN = (INPUTS, INPUTS[:, :3].argmax(axis=1).astype(np.int64))


def fit(comm, folder, **options):
    model = models.mlp([12, 16, 3], seed=7)
    facts = md.train(
        comm, model, TRAIN, optimizer=optim.sgd(0.05), global_batch=20, epochs=3, seed=1,
        checkpoint=folder, **options,
    )  # fmt: skip
    return model.parameters, facts


@pytest.mark.ranks(3)
def test_on_resize_is_told_the_ranks(comm, folder):
    """Fewer, then more, then as many: called where the number changed, and only there."""
    calls = []
    two = comm.Split(0 if comm.rank < 2 else 1)

    def told(old, new, run):
        calls.append((old, new, run.step))

    _, first = fit(comm, folder, stop_after=5, on_resize=told)
    if comm.rank < 2:
        fit(two, folder, stop_after=10, on_resize=told)
    comm.Barrier()
    _, grown = fit(comm, folder, stop_after=15, on_resize=told)
    _, last = fit(comm, folder, on_resize=told)
    md.free(two)
    two.Free()
    assert calls == [(3, 2, 5), (2, 3, 10)] if comm.rank < 2 else [(2, 3, 10)]
    assert (first.resizes, grown.resizes, last.resizes) == (0, 2, 2)
    assert (first.grown, grown.grown, last.grown) == (0, 1, 1)
    assert last.steps == 24, "the global batch is what it was"
    assert last.restarts == 0


@pytest.mark.ranks(2)
def test_on_resize_changes_the_learning_rate(comm, folder):
    """R119: what it sets is what the run goes on with."""
    alone = comm.Split(comm.rank)

    def faster(old, new, run):
        run.exchange.optimizer = optim.sgd(0.05 * new / old)

    results = {}
    for name, hook in (("plain", None), ("faster", faster)):
        path = f"{folder}/{name}"
        if comm.rank == 0:
            fit(alone, path, stop_after=10)
        comm.Barrier()
        results[name], _ = fit(comm, path, on_resize=hook)
    md.free(alone)
    alone.Free()
    assert parameters_digest(results["plain"]) != parameters_digest(results["faster"])
    assert len(set(comm.allgather(parameters_digest(results["faster"])))) == 1
