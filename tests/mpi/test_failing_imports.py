"""An import that fails on one rank only is one error on all ranks, also where it comes late."""

import sys

import numpy as np
import pytest
from test_train_disagreement import ODD, fit

import mpidist as md
from mpidist.errors import MpidistError

EXCHANGES = "mpidist.training.exchanges"


def hidden(monkeypatch, comm, *names):
    """Let the import of the first module fail on one rank; the others must be imported again."""
    if comm.rank == ODD:
        for name in names[1:]:
            monkeypatch.delitem(sys.modules, name, raising=False)
        monkeypatch.setitem(sys.modules, names[0], None)


@pytest.mark.ranks(2)
def test_modules_that_only_some_runs_use(comm, folder, monkeypatch):
    """Strategies, stores and elastic runs. The communicator stays usable, as nobody was late."""
    pipeline = {"strategy": md.Pipeline(cuts=[1]), "microbatches": 4}
    split = f"{EXCHANGES}.split_exchange"
    cases = [
        ({}, f"{EXCHANGES}.allreduce_exchange"),
        ({"microbatches": 4}, f"{EXCHANGES}.microbatch_exchange"),
        ({"strategy": md.ParameterServer()}, f"{EXCHANGES}.server_exchange"),
        ({"strategy": md.PeerAverage()}, f"{EXCHANGES}.peer_exchange"),
        ({"strategy": md.Hogwild()}, f"{EXCHANGES}.shared_parameters"),
        (pipeline, split),
        (pipeline, f"{EXCHANGES}.pipeline_exchange", split),
        (pipeline, f"{EXCHANGES}.pipelines.pipeline_choice", split),
        (pipeline, f"{EXCHANGES}.pipelines.pipeline_order"),
        ({"checkpoint": folder}, "mpidist.checkpoint.store"),
        ({"checkpoint": folder, "elastic": True}, "mpidist.checkpoint.memory_copies"),
        (
            {"checkpoint": folder, "elastic": True, "strategy": md.ParameterServer()},
            f"{EXCHANGES}.carried.carried_servers", f"{EXCHANGES}.carried.replicated_servers",
        ),
    ]  # fmt: skip
    for given, *names in cases:
        with monkeypatch.context() as patch:
            hidden(patch, comm, *names)
            with pytest.raises((ImportError, MpidistError), match=names[0]) as one:
                fit(comm, **given)
        assert isinstance(one.value, ImportError) == (comm.rank == ODD)
        assert md.allreduce(comm, np.ones(1))[0] == comm.size
    assert not any(folder.iterdir())
