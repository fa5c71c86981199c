"""If rank 1 passes a bad or different value to md.train, all ranks raise one error soon.

Every parameter of `md.train` has cases here. A new parameter without a case fails the first test.
"""

import dataclasses
import inspect
import re
import socket
import time
from types import SimpleNamespace

import numpy as np
import pytest
from mpi4py import MPI
from test_odd_arguments import ANYTHING

import mpidist as md
from mpidist import models, optim
from mpidist.data import Loading
from mpidist.errors import ConfigError, MismatchError, MpidistError
from mpidist.training import settings

RNG = np.random.default_rng(5)
INPUTS = RNG.standard_normal((40, 5)).astype(np.float32)
LABELS = (INPUTS[:, 0] > 0).astype(np.int64)
TRAIN = (INPUTS, LABELS)
ODD = 1


def mlp(*sizes):
    return models.mlp([*sizes], seed=3)


def fit(comm, **given):
    given = {"model": mlp(5, 2), "data": TRAIN, "optimizer": optim.sgd(0.1), "global_batch": 8,
             "steps": 2, **given}  # fmt: skip
    model, source = given.pop("model"), given.pop("data")
    return md.train(comm, model, source, **given)


def without(name):
    """A model that lacks a method."""
    whole = mlp(5, 2)
    names = {"parameters", "loss_and_gradients", "predict"} - {name}
    return SimpleNamespace(**{key: getattr(whole, key) for key in names})


class Named:
    """An optimizer of a user's own."""

    def __init__(self, lr):
        self.lr, self.rank = lr, MPI.COMM_WORLD.rank
        self._inner = optim.sgd(0.1)

    def init(self, parameters):
        return self._inner.init(parameters)

    def update(self, gradients, state, parameters):
        self._inner.update(gradients, state, parameters)


def changed(place, value, item=0):
    """The data with one number changed."""
    arrays = [array.copy() for array in TRAIN]
    arrays[item][place] = value
    return tuple(arrays)


def switched(first, second):
    """The parameters in another order."""
    model = mlp(5, 2)
    model.parameters = dict(reversed(model.parameters.items()))
    return model


def halves(model):
    model.parameters = {name: array.astype(np.float64) for name, array in model.parameters.items()}
    return model


#: What rank 1 is given, and a word that the error of all ranks has. Bad values: ConfigError.
BAD = {
    "model": [
        (None, "model is None"), (mlp, "model is the function mlp"), (models.mlp, "model is the"),
        (without("parameters"), "model is"), (without("loss_and_gradients"), "loss_and_gradients"),
        (SimpleNamespace(parameters={}, loss_and_gradients=print), "parameters are empty"),
        (SimpleNamespace(parameters={"w": [1.0]}, loss_and_gradients=print), "'w'"),
        (SimpleNamespace(parameters=3, loss_and_gradients=print), "expected a mapping"),
    ],
    "data": [
        (None, "data is NoneType"), ("train", "data is str"), ((INPUTS, LABELS[:9]), "equal first"),
        ({"x": INPUTS}, "data is dict"),
        ((INPUTS[:0], LABELS[:0]), "is the data set empty"), ((), "at least one array"),
    ],
    "optimizer": [
        ("sgd", "optimizer is 'sgd'"), (optim.sgd, "the function sgd"), (None, "optimizer is None"),
        (0.1, "optimizer is 0.1"), (Named, "the class Named"),
    ],
    "global_batch": [(0, ""), (-8, ""), ("8", ""), (2.5, ""), (2, ""), (None, "")],
    "epochs": [(1, "give one of the two")],
    "steps": [(0, ""), (-1, ""), (1.5, ""), ("2", ""), (float("nan"), ""), (True, ""),
              (None, "give one of the two")],
    "seed": [(-1, ""), ("x", ""), (None, "")],
    "shuffle": [("sorted", ""), (7, ""), (None, "")],
    "strategy": [
        ("all_reduce", "unknown strategy 'all_reduce'"), (3, "strategy is 3"),
        (md.AllReduce, "the class AllReduce"), (md.ParameterServer(3), "3 servers"),
    ],
    "test_data": [(3, "data is int"), ((INPUTS, LABELS[:9]), "equal first")],
    "checkpoint": [(3, "checkpoint is 3"), ("", "checkpoint=''"), (md.CheckpointStore, "class"),
                   ("s3://b/c", "address of 's3'")],
    "checkpoint_every": [(0, ""), (-1, ""), ("soon", ""), (1.5, "")],
    "resume": [("yes", ""), (None, ""), (2, ""), (True, "resume=True needs checkpoint")],
    "stop_after": [(0, ""), (-1, ""), ("1", ""), (1.5, "")],
    "microbatches": [(0, ""), (9, "more than the 8 samples"), ("4", "")],
    "check_replicas": [(0, ""), ("1", "")],
    "time_limit": [(0, ""), (-1, ""), ("soon", ""), (True, "")],
    "patience": [(0, ""), (1.5, "")],
    "max_bad": [(-0.1, ""), (2, ""), ("all", ""), (None, "")],
    "retry_bad": [(1, ""), (None, "")],
    "quarantine": [(3, "quarantine is 3")],
    "loading": [({"prefetch": 0}, "loading is"), (Loading, "loading is")],
    "callbacks": [(None, "callbacks is None"), (print, "for one"), ([3], r"callbacks\[0\] is 3"),
                  ("abc", "callbacks is 'abc'")],
    "on_resize": [(3, "on_resize is 3")],
    "watch_seconds": [(-1, ""), (None, ""), (float("inf"), "")],
    "elastic": [("yes", "expected True, False or md.Elastic"), (md.ParameterServer(), "expected")],
}  # fmt: skip

#: What rank 1 is given instead, and who has what in the MismatchError of all ranks.
OTHER = {
    "model": [
        (mlp(5, 3), r"model.dense1.bias differs: rank 1 has \(3,\) float32, ranks 0,2 have \(2,\)"),
        (halves(mlp(5, 2)), "model.dense1.bias differs: rank 1 has .* float64"),
        (mlp(5, 4, 2), "rank 1 has"), (switched(1, 0), "order of model.parameters differs"),
        (without(""), "model differs: rank 1 has SimpleNamespace, ranks 0,2 have Network"),
    ],
    "data": [
        ((INPUTS[:39], LABELS[:39]), r"len\(data\) differs: rank 1 has 39, ranks 0,2 have 40"),
        ((INPUTS.astype(np.float64), LABELS), "rank 1 has samples of float64"),
        (changed((0, 4), 9.0), "first good record, number 0, of rank 1 differs from that of"),
        (changed(39, 1 - LABELS[39], 1), "last good record, number 39, of rank 1 differs"),
    ],
    "optimizer": [
        (optim.sgd(0.2), "optimizer.lr differs: rank 1 has 0.2, ranks 0,2 have 0.1"),
        (optim.sgd(0.1, weight_decay=0.1), "optimizer.weight_decay differs"),
        (optim.momentum(0.1), "optimizer differs: rank 1 has Optimizer momentum"),
        (optim.clipped(optim.sgd(0.1), 1.0), "clip_norm"),
        (optim.sgd(optim.cosine(0.1, 9)), "optimizer.lr"), (optim.sgd(lambda step: 0.1), "lr"),
        (Named(0.1), "optimizer differs: rank 1 has Named, ranks 0,2 have Optimizer sgd"),
    ],
    "global_batch": [(9, "global_batch differs: rank 1 has 9, ranks 0,2 have 8")],
    "epochs": [({"epochs": 2, "steps": None}, "epochs differs: rank 1 has 2, ranks 0,2 have None")],
    "steps": [(3, "steps differs: rank 1 has 3, ranks 0,2 have 2")],
    "seed": [(4, "seed differs: rank 1 has 4, ranks 0,2 have 0; give all ranks the same")],
    "shuffle": [(False, "shuffle differs: rank 1 has False, ranks 0,2 have True")],
    "strategy": [
        ("parameter_server", "strategy differs: rank 1 has ParameterServer, ranks 0,2 have AllR"),
    ],
    "test_data": [(TRAIN, "test_data differs: rank 1 has one, ranks 0,2 have none")],
    "checkpoint": [("/nowhere/b", "checkpoint differs: rank 1 has '/nowhere/b', ranks 0,2 have N")],
    "checkpoint_every": [(1, "checkpoint_every differs"), ("10m", "checkpoint_every differs")],
    "resume": [(False, "resume differs: rank 1 has False, ranks 0,2 have 'auto'")],
    "stop_after": [(1, "stop_after differs: rank 1 has 1, ranks 0,2 have None")],
    "microbatches": [(4, "microbatches differs")],
    "check_replicas": [(1, "check_replicas differs")],
    "time_limit": [(60, "time_limit differs"), ("auto", "time_limit differs")],
    "patience": [(5, "patience differs")],
    "max_bad": [(0.5, "max_bad differs: rank 1 has 0.5, ranks 0,2 have 0.001")],
    "retry_bad": [(True, "retry_bad differs")],
    "on_resize": [(print, "on_resize differs: rank 1 has one, ranks 0,2 have none")],
    "watch_seconds": [(0, "watch_seconds differs: rank 1 has 0, ranks 0,2 have 600")],
    "elastic": [(True, "elastic differs: rank 1 has True, ranks 0,2 have False")],
}  # fmt: skip

MAY_DIFFER = {"loading", "quarantine", "callbacks"}
PARAMETERS = inspect.signature(md.train).parameters
ALL = [
    pytest.param(name, value, match or name, kind, id=f"{name}-{kind.__name__[:3]}{number}")
    for kind, table in ((ConfigError, BAD), (MismatchError, OTHER))
    for name, cases in table.items()
    for number, (value, match) in enumerate(cases)
]


def test_every_parameter_has_a_case():
    """A new one is to be tried, as a bad value and as another one."""
    names = set(PARAMETERS) - {"comm"}  # which is what the others would hear it by
    assert set(BAD) == names
    assert set(OTHER) == names - MAY_DIFFER
    assert set(settings.MAY_DIFFER) == MAY_DIFFER | {"comm"}


def refused(comm, kind, match, odd, **even):
    """All ranks end with one error that is the same on all, within seconds."""
    began = time.monotonic()
    with pytest.raises(kind, match=match) as caught:
        fit(comm, **{**even, **(odd if comm.rank == ODD else {})})
    assert time.monotonic() - began < 10
    said = comm.allgather(str(caught.value))
    assert said == [said[0]] * comm.size
    assert "\n" not in said[0]
    assert isinstance(caught.value, MpidistError)
    assert caught.value.everywhere
    return said[0]


@pytest.mark.ranks(3)
@pytest.mark.parametrize(("name", "value", "match", "kind"), ALL)
def test_what_one_rank_is_given(comm, name, value, match, kind):
    odd = value if name == "epochs" and kind is MismatchError else {name: value}
    said = refused(comm, kind, match, odd)
    assert said.startswith("md.train: ")
    if kind is ConfigError:
        assert f"rank {ODD} of 3 ({socket.gethostname()})" in said
        assert name in said.replace("servers leave", "strategy")
    assert "rank 1" in said


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", sorted({*PARAMETERS} - {"comm", "data", "test_data"}))
def test_anything_in_place_of_an_argument(comm, name, folder, monkeypatch):
    """It is understood, or told in one line of ours; NumPy's words are not."""
    monkeypatch.chdir(folder)  # some of it is a path
    for kind, value in ANYTHING.items():
        said = ""
        try:
            fit(comm, **{"stop_after": 2, name: value})
        except MpidistError as error:
            said = str(error)
        assert "\n" not in said, kind


@pytest.mark.ranks(3)
def test_the_next_run_on_the_communicator_works(comm):
    """What was found before training leaves nothing behind."""
    expected = fit(comm).parameters_sha256
    for _ in range(3):
        refused(comm, ConfigError, "steps=0", {"steps": 0})
        refused(comm, MismatchError, "seed differs", {"seed": 3})
        assert fit(comm).parameters_sha256 == expected


#: (a strategy, one of its fields, another value)
STRATEGIES = [
    (md.AllReduce(), "algorithm", "ring"),
    (md.AllReduce(), "reproducible", True),
    (md.AllReduce(), "bucket_bytes", 4096),
    (md.AllReduce(), "overlap", False),
    (md.AllReduce(), "progress", "thread"),
    (md.AllReduce(), "accumulate", 2),
    (md.ParameterServer(1), "servers", 2),
    (md.ParameterServer({1: 1, 2: 2}), "servers", {1: 1, 2: 3}),
    (md.ParameterServer("auto", placement=[2]), "placement", "colocated"),
    (md.ParameterServer(1), "consistency", md.ASP()),
    (md.ParameterServer(1), "placement", "colocated"),
    (md.ParameterServer(1), "nonfinite", "drop"),
    (md.ParameterServer(1, md.ASP()), "stale", md.DropStale(3)),
    (md.ParameterServer(2), "replicas", 1),
    (md.ParameterServer(1, md.ASP()), "push_every", 2),
    (md.ParameterServer(1, md.ASP()), "pull_every", 2),
    (md.ParameterServer(1), "changes", {3: md.ASP()}),
    (md.ParameterServer(1), "rebalance", 9),
    (md.ParameterServer(1), "server_device", "gpu"),
    (md.ParameterServer(1), "checksums", True),
    (md.Pipeline(), "stages", 3),
    (md.Pipeline(cuts=[1, 2]), "cuts", [2, 3]),
    (md.Pipeline(stages=3), "replicas", [1, 1, 1]),
    (md.Pipeline(), "schedule", "gpipe"),
    (md.Pipeline(schedule="interleaved", chunks=2), "chunks", 1),
    (md.Pipeline(schedule="pipedream"), "flush", 2),
    (md.Pipeline(stages=1, split={"dense2": "rows"}), "split", {"dense2": "columns"}),
    (md.Pipeline(stages=1, split={"dense2": "rows"}, split_ranks=3), "split_ranks", 1),
    (md.PeerAverage(), "graph", "ring"),
    (md.PeerAverage(), "every", 3),
    (md.PeerAverage(), "consistency", md.ASP()),
]


def test_every_field_of_a_strategy_has_a_case():
    kinds = md.AllReduce, md.ParameterServer, md.Pipeline, md.PeerAverage, md.Hogwild
    fields = {(kind, f.name) for kind in kinds for f in dataclasses.fields(kind)}
    assert {(type(even), field) for even, field, _ in STRATEGIES} == fields


@pytest.mark.ranks(3)
@pytest.mark.parametrize(("even", "field", "value"), STRATEGIES)
def test_another_field_of_the_strategy(comm, even, field, value):
    more = {}
    if isinstance(even, md.Pipeline):
        more = {"model": mlp(5, 8, 8, 8, 2), "microbatches": 6}
    odd = dataclasses.replace(even, **{field: value})
    if (type(even), field) == (md.ParameterServer, "replicas"):
        refused(comm, ConfigError, "replicas=1 needs elastic", {"strategy": odd}, strategy=even)
        return
    said = refused(
        comm, MismatchError, rf"strategy\.{field}", {"strategy": odd}, strategy=even, **more
    )
    assert re.search(rf"strategy\.{field}[^ ]* differs: rank 1 has ", said)


@pytest.mark.ranks(3)
def test_what_is_inside_of_settings(comm):
    ssp = md.ParameterServer(1, md.SSP(2)), md.ParameterServer(1, md.SSP(3))
    refused(comm, MismatchError, "strategy.consistency.staleness differs: rank 1 has 3, ranks 0,2",
            {"strategy": ssp[1]}, strategy=ssp[0])  # fmt: skip
    cosine = [optim.sgd(optim.cosine(0.1, steps)) for steps in (8, 9)]
    refused(comm, MismatchError, "optimizer.lr.steps differs: rank 1 has 9, ranks 0,2 have 8",
            {"optimizer": cosine[1]}, optimizer=cosine[0])  # fmt: skip
    own = [optim.sgd(lambda step, lr=lr: lr / (1 + step)) for lr in (0.1, 0.2)]
    refused(comm, MismatchError, "optimizer.lr, an update of 0 at steps 0, 1, 10, 100, 1000 diff",
            {"optimizer": own[1]}, optimizer=own[0])  # fmt: skip
    refused(comm, MismatchError, "optimizer.lr differs: rank 1 has 0.2, ranks 0,2 have 0.1",
            {"optimizer": Named(0.2)}, optimizer=Named(0.1))  # fmt: skip
    clipped = [optim.clipped(optim.adam(0.1), norm) for norm in (1.0, 2.0)]
    refused(comm, MismatchError, "optimizer.clip_norm differs: rank 1 has 2, ranks 0,2 have 1",
            {"optimizer": clipped[1]}, optimizer=clipped[0])  # fmt: skip


@pytest.mark.ranks(2)
def test_equal_in_other_words(comm):
    """Numbers of NumPy's, paths, words for strategies, functions of each rank's own."""
    odd = {"global_batch": np.int64(8), "max_bad": np.float32(0), "strategy": "allreduce",
           "data": list(TRAIN), "watch_seconds": 600, "seed": np.int32(0), "callbacks": [len],
           "loading": Loading(prefetch=False), "quarantine": "somewhere"}  # fmt: skip
    even = {"max_bad": 0, "callbacks": ()}
    fit(comm, **{**even, **(odd if comm.rank == ODD else {})})


@pytest.mark.ranks(3, further=(2,))
def test_words_for_strategies(comm):
    """They are those with their defaults."""
    expected = fit(comm).parameters_sha256
    assert fit(comm, strategy="allreduce").parameters_sha256 == expected
    result = fit(comm, strategy="parameter_server")
    assert result.workers == comm.size - 1
