"""A tagger: which of many entities are in a sample? Trained by servers, with one line of strategy.

    mpirun -n 4 python docs/examples/tagger.py

The model is that of YouTube-8M's videos (`md.models.tagger`), on samples that are made here: each
entity adds its own direction to the features, and most entities are rare. For the real files, give
`md.train` the source `md.data.youtube8m(...)` instead.
"""

import numpy as np
from mpi4py import MPI

import mpidist as md

FEATURES, ENTITIES = 64, 50


def samples(rng, count):
    """Features, and for each sample 0 or 1 for every entity; entity k is in 1 of k + 2 samples."""
    directions = np.random.default_rng(5).standard_normal((ENTITIES, FEATURES))
    labels = rng.random((count, ENTITIES)) < 1 / (2 + np.arange(ENTITIES))
    features = labels @ directions + 2.0 * rng.standard_normal((count, FEATURES))
    return features.astype(np.float32), labels.astype(np.float32)


def main(comm):
    """Train on all ranks of `comm`; return (hit at one, average precision) on new samples."""
    model = md.models.tagger(FEATURES, ENTITIES)
    md.train(
        comm, model, samples(np.random.default_rng(0), 6000), optimizer=md.optim.adam(0.02),
        global_batch=96, epochs=4,
        strategy=md.ParameterServer(servers=1, consistency=md.SSP(2)),
    )  # fmt: skip
    features, labels = samples(np.random.default_rng(1), 2000)
    scores = model.predict(features)
    return md.models.hit_at_one(scores, labels), md.models.gap(scores, labels)


if __name__ == "__main__":
    hit, gap = main(MPI.COMM_WORLD)
    if MPI.COMM_WORLD.rank == 0:
        print(f"hit at one {hit:.3f}, global average precision {gap:.3f}")
