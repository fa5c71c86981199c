"""A few seconds of `make soak`: what a process holds stays the same (R41)."""

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.append(str(Path(__file__).parents[1] / "soak"))
import soak
from resources import grown

import mpidist as md


def check(comm, looks):
    found = grown(comm, looks)
    # Memory and objects: a short run has not come to rest, only much is too much.
    limits = {name: limit for name, (_, _, limit) in found.items()}
    limits.update(memory=4 << 20, objects=2000)
    assert {name: grew for name, (_, grew, _) in found.items() if grew >= limits[name]} == {}


@pytest.mark.ranks(3)
def test_allreduces(comm, monkeypatch):
    """R41: every algorithm, bound plans, arenas, in the background, on communicators that go."""
    monkeypatch.setattr("mpidist.collectives.plans.MAX_PLANS", 16)
    check(comm, soak.allreduces(comm, 1500))


@pytest.mark.ranks(2)
def test_saves_and_restores(comm, folder):
    """R41: stores opened and closed, saves at once and in the background."""
    check(comm, soak.checkpoints(comm, 40, folder))


@pytest.mark.ranks(1)
def test_a_store_forgets_steps_that_are_gone(comm, folder):
    """R41: what it knows of steps is as long as what it keeps."""
    with md.CheckpointStore(comm, folder, keep=2) as store:
        for step in range(8):
            store.save(step, {"w": np.ones(3)})
        store.restore()
        assert len(store._keep._good) <= 3
