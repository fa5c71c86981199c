"""Distributed subgradient descent on real sparse data, as in Li et al., OSDI 2014 (R71).

Each worker has a part of the data. In each step a worker pulls the weights of the features in its
minibatch, computes their subgradient, and pushes only these rows.
"""

import numpy as np
import pytest

import mpidist as md
from mpidist.data import LibSVM
from mpidist.servers.protocol import HEADER_BYTES

FEATURES = 126
BATCH = 60  # of all workers together


def read_libsvm(path):
    """Labels -1 and 1, and per record its features (all values are 1)."""
    source = LibSVM(path)
    return 2 * source.labels - 1, np.split(source.columns, source.starts[1:-1])


def subgradient(weights, labels, records, rows):
    """Mean subgradient of the logistic loss log(1 + exp(-y w.x)), at `rows` only."""
    place = {int(row): i for i, row in enumerate(rows)}
    gradient = np.zeros(len(rows))
    for label, record in zip(labels, records, strict=True):
        at = [place[int(feature)] for feature in record]
        gradient[at] -= label / (1 + np.exp(label * weights[at].sum()))
    return gradient / max(1, len(labels))


def part(step, worker, workers, count):
    """Which records a worker uses in a step: a fixed order, the global batch cut in parts."""
    order = np.random.default_rng((5, step * BATCH // count)).permutation(count)
    start = step * BATCH % count
    return np.array_split(order[start : start + BATCH], workers)[worker]


def touched(records):
    return np.unique(np.concatenate([*records, np.empty(0, np.int64)])).astype(np.int64)


def serial(labels, records, steps):
    weights = np.zeros(FEATURES)
    rows = np.arange(FEATURES)
    for step in range(steps):
        mine = part(step, 0, 1, len(labels))
        weights -= 1.0 * subgradient(weights, labels[mine], [records[i] for i in mine], rows)
    return weights


@pytest.mark.covering
@pytest.mark.ranks(2, 5)
@pytest.mark.parametrize("mode", [md.BSP(), md.SSP(2), md.ASP()], ids=str)
def test_subgradient_descent_on_agaricus(comm, data_dir, mode):
    """R71, R6: partition, gradient, push, combine, pull; 0.99 accuracy on real data."""
    labels, records = read_libsvm(data_dir / "agaricus" / "agaricus.txt.train")
    steps = 200
    with md.ServerGroup(comm, servers=max(1, comm.size // 2)) as group:
        client = group.add(
            "logistic",
            {"w": ((FEATURES,), "f8")},
            consistency=mode,
            optimizer=md.optim.sgd(1.0),
            global_batch=BATCH,
        )
        if client is None:
            return
        moved, before = 0, client.stats["bytes_sent"]
        for step in range(steps):
            mine = part(step, group.workers.rank, group.workers.size, len(labels))
            batch = [records[i] for i in mine]
            rows = touched(batch)
            moved += len(rows)
            weights = client.pull({"w": rows})["w"]
            gradient = subgradient(weights, labels[mine], batch, rows)
            client.push({"w": (rows, gradient)}, samples=len(mine))
            client.clock()
        group.barrier()
        weights = client.pull()["w"]
        if comm.size == 2:
            # What travels is what the minibatch touches: per step three headers, and for each row
            # its number to pull, its number and its gradient to push. Then a barrier, and a pull of
            # it all.
            words = 3 * moved + 2 * 2 * steps
            sent = client.stats["bytes_sent"] - before
            assert sent == 8 * words + (3 * steps + 2) * HEADER_BYTES
    if mode.merges:
        np.testing.assert_allclose(weights, serial(labels, records, steps), atol=1e-9)
    labels, records = read_libsvm(data_dir / "agaricus" / "agaricus.txt.test")
    right = sum(y * weights[r].sum() > 0 for y, r in zip(labels, records, strict=True))
    assert right / len(labels) >= 0.99
