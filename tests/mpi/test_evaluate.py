"""Evaluation over ranks is that of one rank, to the last sample (R146)."""

import numpy as np
import pytest

import mpidist as md
from mpidist.training.summary import evaluate

RNG = np.random.default_rng(8)
INPUTS = RNG.standard_normal((1543, 12)).astype(np.float32)
LABELS = RNG.integers(0, 3, 1543)


@pytest.mark.ranks(1, 2, 3, 5, 8)
def test_uneven_parts_are_counted_exactly(comm):
    """R146: fewer samples than ranks, a last batch of one, parts of different length."""
    model = md.models.mlp([12, 16, 3], seed=7)
    right = model.predict(INPUTS).argmax(axis=1) == LABELS
    for n in (1, 2, 7, 256, 257, 1543):
        assert evaluate(comm, model, (INPUTS[:n], LABELS[:n])) == right[:n].sum() / n
