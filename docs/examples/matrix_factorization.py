"""Matrix factorization: predict ratings by the product of a user's and an item's vector.

    mpirun -n 4 python docs/examples/matrix_factorization.py

The servers hold two tables, with a row for each user and for each item. A worker has a part of the
ratings. In each step it pulls the rows of the users and items of a few ratings, computes their
gradients, and pushes these rows only. Under BSP each run has the same bits.
"""

import numpy as np
from mpi4py import MPI

import mpidist as md

USERS, ITEMS, RANK, NOISE = 300, 200, 4, 0.1
STEPS, BATCH = 600, 240  # ratings per step of all workers together


def ratings(rng, count):
    """Users, items and ratings, from vectors that nobody knows."""
    truth = np.random.default_rng(7)
    p, q = truth.standard_normal((USERS, RANK)), truth.standard_normal((ITEMS, RANK))
    users, items = rng.integers(0, USERS, count), rng.integers(0, ITEMS, count)
    exact = (p[users] * q[items]).sum(axis=1)
    return users, items, exact + NOISE * rng.standard_normal(count)


def gradients(rows, places, errors):
    """The gradient of the mean squared error with respect to the pulled rows of one table."""
    own, other = places
    gradient = np.zeros_like(rows[0])
    np.add.at(gradient, own, errors[:, None] * rows[1][other] / len(errors))
    return gradient


def main(comm):
    """Train on all ranks of `comm`; return the error on new ratings, None on a server."""
    tables = {
        "users": ((USERS, RANK), "f4", ("normal", 0.3)),
        "items": ((ITEMS, RANK), "f4", ("normal", 0.3)),
    }
    with md.ServerGroup(comm, servers=1) as group:
        client = group.add(
            "ratings", tables, consistency=md.BSP(), optimizer=md.optim.adagrad(0.5),
            global_batch=BATCH,
        )  # fmt: skip
        if client is None:
            return None
        workers = group.workers
        users, items, values = ratings(np.random.default_rng(workers.rank), 20_000 // workers.size)
        rng = np.random.default_rng((1, workers.rank))
        for step in range(STEPS):
            some = rng.integers(0, len(values), BATCH // workers.size)
            # Distinct rows, and for each rating the place of its row among them.
            my_users, at_user = np.unique(users[some], return_inverse=True)
            my_items, at_item = np.unique(items[some], return_inverse=True)
            pulled = client.pull({"users": my_users, "items": my_items})
            p, q = pulled["users"], pulled["items"]
            errors = (p[at_user] * q[at_item]).sum(axis=1) - values[some]
            client.push(
                {"users": (my_users, gradients((p, q), (at_user, at_item), errors)),
                 "items": (my_items, gradients((q, p), (at_item, at_user), errors))},
                samples=len(some),
            )  # fmt: skip
            client.clock()
            if workers.rank == 0 and step % 100 == 0:
                print(f"step {step:4}  error {np.sqrt(np.mean(errors**2)):.3f}", flush=True)
        group.barrier()
        learned = client.pull()
        users, items, values = ratings(np.random.default_rng(99), 5000)
        errors = (learned["users"][users] * learned["items"][items]).sum(axis=1) - values
        return float(np.sqrt(np.mean(errors**2)))


if __name__ == "__main__":
    error = main(MPI.COMM_WORLD)
    if MPI.COMM_WORLD.rank == 0:
        print(f"error on new ratings: {error:.3f}; the noise is {NOISE}")
