"""Sparse logistic regression with FTRL on the mushrooms of UCI: which may be eaten?

    mpirun -n 4 python docs/examples/sparse_logistic_regression.py FOLDER

FOLDER has agaricus.txt.train and agaricus.txt.test, as XGBoost ships them: records in LibSVM's
format, with some of 126 features each. The servers hold one weight for each feature, and run FTRL,
which leaves most weights at exactly 0. In each step a worker pulls and pushes only the weights of
the features in its batch.
"""

import sys
from pathlib import Path

import numpy as np
from mpi4py import MPI

import mpidist as md

FEATURES = 126
STEPS, BATCH = 300, 120  # records per step of all workers together


def read(file):
    """Labels -1 and 1, and the features of each record; all values are 1."""
    source = md.data.LibSVM(file, features=FEATURES)
    return 2 * source.labels - 1, np.split(source.columns, source.starts[1:-1])


def gradient(weights, labels, records, rows):
    """The gradient of the mean logistic loss log(1 + exp(-y w.x)), at `rows` only."""
    result = np.zeros(len(rows))
    for label, record in zip(labels, records, strict=True):
        at = np.searchsorted(rows, record)
        result[at] -= label / (1 + np.exp(label * weights[at].sum()))
    return result / len(labels)


def main(comm, folder):
    """Train on all ranks; return (accuracy on the test records, nonzero weights) on workers."""
    with md.ServerGroup(comm, servers=1) as group:
        client = group.add(
            "mushrooms", {"w": ((FEATURES,), "f8")}, consistency=md.ASP(),
            optimizer=md.optim.ftrl(1.0, l1=0.3), global_batch=BATCH,
        )  # fmt: skip
        if client is None:
            return None
        workers = group.workers
        labels, records = read(Path(folder) / "agaricus.txt.train")
        mine = np.arange(workers.rank, len(labels), workers.size)
        rng = np.random.default_rng(workers.rank)
        for _ in range(STEPS):
            some = rng.choice(mine, BATCH // workers.size, replace=False)
            batch = [records[k] for k in some]
            rows = np.unique(np.concatenate(batch))
            weights = client.pull({"w": rows})["w"]
            pushed = gradient(weights, labels[some], batch, rows)
            client.push({"w": (rows, pushed)}, samples=len(some))
            client.clock()
        group.barrier()
        weights = client.pull()["w"]
        labels, records = read(Path(folder) / "agaricus.txt.test")
        right = [label * weights[record].sum() > 0
                 for label, record in zip(labels, records, strict=True)]  # fmt: skip
        return float(np.mean(right)), int(np.count_nonzero(weights))


if __name__ == "__main__":
    if len(sys.argv) != 2 or not (Path(sys.argv[1]) / "agaricus.txt.train").is_file():
        text = "FOLDER: give the folder that has agaricus.txt.train and agaricus.txt.test"
        sys.exit(text if MPI.COMM_WORLD.rank == 0 else 1)
    found = main(MPI.COMM_WORLD, sys.argv[1])
    if MPI.COMM_WORLD.rank == 0:
        print(f"test accuracy {found[0]:.4f}, {found[1]} of {FEATURES} weights are nonzero")
