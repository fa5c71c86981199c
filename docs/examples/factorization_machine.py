"""A factorization machine on rows: which pairs of features make a record positive?

    mpirun -n 4 python docs/examples/factorization_machine.py

A record has one feature of each of several fields (such as user, item, place). Its score is

    bias + sum of w[i] + sum over pairs of v[i] . v[j]          (Rendle, ICDM 2010)

The servers hold one table, whose row i has w[i] and the vector v[i]. In each step a worker pulls
and pushes only the rows of the features in its batch. Here the labels depend on pairs of features
alone, so a linear model (the same without v) learns nothing.
"""

import numpy as np
from mpi4py import MPI

import mpidist as md

FIELDS, VALUES, RANK = 3, 40, 4  # a feature for each value of each field
STEPS, BATCH = 400, 192


def records(rng, count):
    """The features of each record, and its label, -1 or 1."""
    hidden = np.random.default_rng(3).standard_normal((FIELDS * VALUES, 2))
    features = rng.integers(0, VALUES, (count, FIELDS)) + VALUES * np.arange(FIELDS)
    return features, np.where(pairs(hidden[features]) > 0, 1.0, -1.0)


def pairs(vectors):
    """The sum over all pairs of the products of vectors: half of (sum^2 - sum of squares)."""
    return 0.5 * (vectors.sum(axis=1) ** 2 - (vectors**2).sum(axis=1)).sum(axis=1)


def scores(rows, places):
    """The score of each record, of which `places` has the rows of its features."""
    own = rows[places]
    return own[:, :, 0].sum(axis=1) + pairs(own[:, :, 1:])


def gradient(rows, places, labels):
    """The gradient of the mean logistic loss with respect to the pulled rows."""
    slope = -labels / (1 + np.exp(labels * scores(rows, places))) / len(labels)
    vectors = rows[places][:, :, 1:]
    others = vectors.sum(axis=1, keepdims=True) - vectors
    each = np.concatenate([np.ones((*places.shape, 1)), others], axis=2) * slope[:, None, None]
    result = np.zeros_like(rows)
    np.add.at(result, places.ravel(), each.reshape(-1, rows.shape[1]))
    return result


def main(comm, linear=False):
    """Train on all ranks of `comm`; return the accuracy on new records, None on a server."""
    table = {"rows": ((FIELDS * VALUES, 1 + RANK), "f8", ("normal", 0.0 if linear else 0.2))}
    with md.ServerGroup(comm, servers=1) as group:
        client = group.add(
            "machine", table, consistency=md.SSP(2), optimizer=md.optim.adagrad(0.2),
            global_batch=BATCH,
        )  # fmt: skip
        if client is None:
            return None
        workers = group.workers
        features, labels = records(np.random.default_rng(workers.rank), 12_000 // workers.size)
        rng = np.random.default_rng((1, workers.rank))
        for _ in range(STEPS):
            some = rng.integers(0, len(labels), BATCH // workers.size)
            touched, places = np.unique(features[some], return_inverse=True)
            rows = client.pull({"rows": touched})["rows"]
            # Zero vectors stay zero, as each gradient is a sum of other vectors: a linear model.
            pushed = gradient(rows, places.reshape(len(some), FIELDS), labels[some])
            client.push({"rows": (touched, pushed)}, samples=len(some))
            client.clock()
        group.barrier()
        rows = client.pull()["rows"]
        features, labels = records(np.random.default_rng(99), 4000)
        return float(np.mean(scores(rows, features) * labels > 0))


if __name__ == "__main__":
    accuracy, beside = main(MPI.COMM_WORLD), main(MPI.COMM_WORLD, linear=True)
    if MPI.COMM_WORLD.rank == 0:
        print(f"accuracy on new records: {accuracy:.3f}; of a linear model: {beside:.3f}")
