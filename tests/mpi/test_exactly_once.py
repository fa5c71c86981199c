"""Issue 4, point 1: stops, other ranks, other batches; each record of an epoch exactly once."""

import numpy as np
import pytest

import mpidist as md
from mpidist import models, optim
from mpidist.errors import ConfigError

COUNT = 90
X = np.random.default_rng(0).standard_normal((COUNT, 4)).astype(np.float32)
Y = (X[:, 0] > 0).astype(np.int64)


def fit(comm, folder, **settings):
    settings.setdefault("epochs", 2)
    settings.setdefault("global_batch", 8)
    return md.train(
        comm, models.logistic(4, 2), settings.pop("data", (X, Y)), optimizer=optim.sgd(0.1),
        checkpoint=folder / "run", **settings,
    )  # fmt: skip


@pytest.mark.ranks(3)
def test_the_shuffle_is_part_of_the_checkpoint(comm, folder):
    """A run goes on in the order it began with, whatever is asked for or chosen later."""
    whole = fit(comm, folder / "whole", shuffle="bijection")
    other = fit(comm, folder / "other")
    assert whole.parameters_sha256 != other.parameters_sha256
    fit(comm, folder, shuffle="bijection", stop_after=7)
    state = md.load(folder / "run")
    assert state["run"]["shuffle"] == "bijection"
    assert fit(comm, folder).parameters_sha256 == whole.parameters_sha256
    with pytest.raises(ConfigError, match="shuffle is 'by size'"):
        fit(comm, folder / "bad", shuffle="by size")


@pytest.mark.ranks(2)
def test_a_checkpoint_without_the_name_was_permuted(comm, folder):
    """Runs of earlier versions keep their order."""
    whole = fit(comm, folder / "whole", shuffle="permutation")
    fit(comm, folder, stop_after=7)
    with md.CheckpointStore(comm, folder / "run") as store:
        step, state = store.restore()
        del state["run"]["shuffle"]
        store.save(step, state)
    assert fit(comm, folder, shuffle="bijection").parameters_sha256 == whole.parameters_sha256
