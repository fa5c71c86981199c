"""If one rank gives a bad or different value for a parameter, every rank ends with one error.

The tests cover each parameter of parameter servers, guard, watch and check_replicas that
`inspect.signature` lists, so a new parameter without a case here fails.
"""

import inspect
import signal
import time

import numpy as np
import pytest

import mpidist as md
from mpidist.errors import ConfigError, MismatchError, MpidistError, ProtocolError, ReplicaError
from mpidist.servers.client import Client
from mpidist.servers.parameter_server import parameter_server

SGD = md.optim.sgd(1.0)
MODEL = {"x": np.zeros(6), "y": ((3, 2), "f4", "normal")}
BAD, OTHER = "bad", "other"

#: entry -> parameter -> (what rank 1 gives, is it bad or only another one, text, error) ...
GROUP = {
    "servers": [("two", BAD, "servers='two'"), (0, BAD, "servers=0"), (2, OTHER, "servers")],
    "placement": [(7, BAD, "placement is 7"), ("colocated", OTHER, "placement")],
    "checksums": [(1, BAD, "checksums=1"), (True, OTHER, "checksums")],
}
ADD = {
    "name": [(5, BAD, "name=5"), ("other", OTHER, "name")],
    "model": [
        ([1], BAD, "model 'm': got [1]"),
        ({"x": [1.0]}, BAD, "model 'm': 'x' is [1.0]"),
        ({"x": 1.0}, BAD, "model 'm': 'x': expected a NumPy"),
        ({"x": ((6,), "f8", None)}, BAD, "init is None"),
        ({"x": np.zeros(7)}, OTHER, "tensors x"),
        ({"z": np.zeros(6)}, OTHER, "tensors"),
    ],
    "optimizer": [
        ("sgd", BAD, "optimizer='sgd'"),
        (md.optim.sgd(0.5), OTHER, "optimizer lr differs: rank 1: 0.5, ranks 0,2: 1.0"),
        (md.optim.adam(1.0), OTHER, "optimizer name"),
        (md.optim.sgd(lambda step: 0.25), OTHER, "optimizer lr"),
    ],
    "consistency": [("bsp", BAD, "consistency is 'bsp'"), (md.ASP(), OTHER, "consistency")],
    "stale": [("keep", BAD, "give a policy, not its name"), (md.ScaleStale(4), BAD, "needs consi")],
    "update": [("sum", BAD, "update='sum'; give"), ("add", BAD, "update='add' and optimizer=")],
    "clip_norm": [(0, BAD, "clip_norm is 0"), (True, BAD, "clip_norm"), (2.0, OTHER, "clip_norm")],
    "nonfinite": [("keep", BAD, "nonfinite is 'keep'"), ("drop", OTHER, "nonfinite")],
    "server_device": [(7, BAD, "server_device=7"), ("gpu", OTHER, "server_device")],
    "seed": [("x", BAD, "seed='x'"), (10**5000, BAD, "seed="), (1, OTHER, "seed")],
    "global_batch": [(0, BAD, "global_batch is 0"), (64, OTHER, "global_batch")],
    "rows": [
        ("opne", BAD, "rows of 'x' is 'opne'"),
        ("open", BAD, "shape (6,) and rows open"),
        ("lazy", OTHER, "rows"),
    ],
    "cache_rows": [
        (0, BAD, "cache_rows is 0"),
        (2.5, BAD, "cache_rows is 2.5"),
        (10, OTHER, "cache_rows"),
        (md.RowCache(10, max_age=1), OTHER, "cache_rows"),
    ],
    "spread": [("cols", BAD, "spread of 'x' is 'cols'"), ("rows", OTHER, "spread")],
}
#: of md.parameter_server: those of the group and of add, under its own names
SERVERS = {
    **GROUP,
    **{name: cases for name, cases in ADD.items() if name not in ("name", "model")},
    "params": [([1], BAD, "got [1]"), ({"x": np.zeros(7)}, OTHER, "tensors x")],
    "on_pause": [(5, BAD, "on_pause=5")],
}
PULL = {
    "what": [(5, BAD, "what=5"), ([5], BAD, "no parameter 5"), ({"x": "ab"}, BAD, "rows of 'x'")],
    "out": [(5, BAD, "out=5"), ({"x": "ab"}, BAD, "pull 'x': out")],
}
PUSH = {
    "gradients": [
        (5, BAD, "gradients=5"),
        ({"x": "ab"}, BAD, "gradients"),
        ({"x": (1, 2, 3)}, BAD, "gradients"),
    ],
    "samples": [("x", BAD, "samples is 'x'"), (-1, BAD, "samples is -1"), (1.5, BAD, "samples")],
}
GUARD = {
    "state": [(5, BAD, "state=5"), ({}, OTHER, "state")],
    "store": [(5, BAD, "store=5")],
    "signals": [
        (5, BAD, "signals=5"),
        ((signal.SIGKILL,), BAD, "neither SIGKILL"),
        ((signal.SIGTERM,), OTHER, "signals"),
    ],
    "time_limit": [(-1, BAD, "time_limit=-1"), ("x", BAD, "time_limit='x'"), (5, OTHER, "time_")],
    "patience": [(0, BAD, "patience=0"), ("x", BAD, "patience='x'"), (5, OTHER, "patience")],
    "every": [(0, BAD, "every=0"), (None, BAD, "every=None"), (2, OTHER, "every")],
    "deciders": [(5, BAD, "deciders=5")],
}
WATCH = {
    "seconds": [(0, BAD, "seconds=0"), ("x", BAD, "seconds='x'"), (30, OTHER, "seconds")],
    "directory": [(5, BAD, "directory=5"), (".", OTHER, "directory")],
    "dumps": [(5, BAD, "dumps=5")],
}
REPLICAS = {
    "params": [
        ([1], BAD, "params: expected a mapping"),
        ({"x": np.ones(3)}, OTHER, "rank 1's 'x'"),
    ],
    "step": [("x", BAD, "step='x'"), (np.ones(2), BAD, "step=array([1., 1.])"), (4, OTHER, "step")],
}


def cases(table, entry):
    """One test for each case; all parameters of `entry` must have one."""
    given = {name for name in inspect.signature(entry).parameters if name not in ("self", "comm")}
    assert given == set(table), f"parameters without a case, or of none: {given ^ set(table)}"
    return [
        pytest.param(name, *case, id=f"{name}-{kind}")
        for name, several in table.items()
        for case in several
        for kind in [case[1]]
    ]


def error_of(comm, work):
    """What `work` raises on this rank; it must do so on all of them, soon."""
    start = time.monotonic()
    with pytest.raises(MpidistError) as caught:
        work()
    assert time.monotonic() - start < 10
    everyone = comm.allgather(str(caught.value))
    assert len(everyone) == comm.size
    assert "\n" not in str(caught.value)
    return caught.value


def check(error, kind, text):
    """The error names the parameter, and rank 1."""
    if kind is BAD:
        assert isinstance(error, ConfigError)
        assert "rank 1" in str(error)
    else:
        assert isinstance(error, MismatchError)
        assert " differs: rank 1: " in str(error)
    assert text in str(error)


def usable(comm):
    """The communicator works as before."""
    assert md.allreduce(comm, np.ones(3)).tolist() == [comm.size] * 3


@pytest.mark.ranks(3)
@pytest.mark.parametrize(("name", "value", "kind", "text"), cases(GROUP, md.ServerGroup))
def test_server_group(comm, name, value, kind, text):
    wrong = {name: value} if comm.rank == 1 else {}
    check(error_of(comm, lambda: md.ServerGroup(comm, **wrong)), kind, text)
    usable(comm)


@pytest.mark.ranks(3)
@pytest.mark.parametrize(("name", "value", "kind", "text"), cases(ADD, md.ServerGroup.add))
def test_add(comm, name, value, kind, text):
    settings = {"name": "m", "model": MODEL["x"], "optimizer": SGD}
    settings["model"] = {"x": np.zeros(6)}
    wrong = {**settings, **({name: value} if comm.rank == 1 else {})}
    with md.ServerGroup(comm) as group:
        check(error_of(comm, lambda: group.add(**wrong)), kind, text)
        client = group.add(**settings)
        if client:
            assert client.pull()["x"].tolist() == [0] * 6
    usable(comm)


@pytest.mark.ranks(3)
@pytest.mark.parametrize(("name", "value", "kind", "text"), cases(SERVERS, parameter_server))
def test_parameter_server(comm, name, value, kind, text):
    own = comm.Dup()
    settings = {"params": {"x": np.zeros(6)}, "optimizer": SGD, "servers": [2]}
    wrong = {**settings, **({name: value} if comm.rank == 1 else {})}

    def run():
        with md.parameter_server(own, **wrong):
            pass

    error = error_of(comm, run)
    if name == "on_pause":  # found when the group is there: the others hear of it
        assert text in str(error)
        assert comm.rank == 1 or "rank 1 gave up with ConfigError" in str(error)
    else:
        check(error, kind, text)
    md.free(own)
    own.Free()


@pytest.mark.ranks(3)
@pytest.mark.parametrize(
    ("call", "name", "value", "text"),
    [
        pytest.param(call, *case.values[:2], case.values[3], id=f"{call}-{case.id}")
        for call, table in {
            "pull": PULL,
            "push": PUSH,
            "push_pull": {**PUSH, **PULL},
            "clock": {},
        }.items()
        for case in cases(table, getattr(Client, call))
    ],
)
def test_client(comm, call, name, value, text):
    """Refused before anything is sent: the call may be made again; else all ranks hear of it."""
    own = comm.Dup()
    good = {} if call == "pull" else {"gradients": {"x": np.ones(6)}}
    wrong = {**good, name: value}
    seen = []

    def run():
        with md.parameter_server(own, {"x": np.zeros(6)}, optimizer=SGD) as client:
            if comm.rank == 1:
                with pytest.raises(ConfigError) as caught:
                    getattr(client, call)(**wrong)
                seen.append(str(caught.value))
                getattr(client, call)(**good)
                client.pull() if call != "push" else client.clock()
                getattr(client, call)(**wrong)
            elif client is not None:
                for _ in range(10**6):
                    client.push_pull({"x": np.ones(6)})

    error = error_of(comm, run)
    assert text in str(error)
    if comm.rank == 1:
        assert isinstance(error, ConfigError)
        assert seen == [str(error)]
    else:
        assert str(error).startswith("parameter server: rank 1 gave up with ConfigError: ")
        assert isinstance(error, ProtocolError)
        assert error.secondary
    md.free(own)
    own.Free()


class Store:
    """Saves nothing."""

    def save(self, step, state):
        pass


@pytest.mark.ranks(3)
@pytest.mark.parametrize(("name", "value", "kind", "text"), cases(GUARD, md.guard))
def test_guard(comm, name, value, kind, text):
    wrong = {name: value} if comm.rank == 1 else {}
    check(error_of(comm, lambda: md.guard(comm, **wrong)), kind, text)
    for other in ({"store": Store()}, {"deciders": comm}):
        wrong = other if comm.rank == 1 else {}
        check(error_of(comm, lambda w=wrong: md.guard(comm, **w)), OTHER, next(iter(other)))
    usable(comm)
    with md.guard(comm, signals=()) as run:
        assert not run.should_stop(1)


@pytest.mark.ranks(3)
@pytest.mark.parametrize(("name", "value", "kind", "text"), cases(WATCH, md.watch))
def test_watch(comm, name, value, kind, text):
    wrong = {name: value} if comm.rank == 1 else {}
    check(error_of(comm, lambda: md.watch(comm, **wrong)), kind, text)
    usable(comm)


@pytest.mark.ranks(3)
@pytest.mark.parametrize(("name", "value", "kind", "text"), cases(REPLICAS, md.check_replicas))
def test_check_replicas(comm, name, value, kind, text):
    settings = {"params": {"x": np.zeros(3)}, "step": 3}
    wrong = {**settings, **({name: value} if comm.rank == 1 else {})}
    error = error_of(comm, lambda: md.check_replicas(comm, **wrong))
    if name == "params" and kind is OTHER:
        assert isinstance(error, ReplicaError)
        assert error.ranks == (1,)
        assert text in str(error)
    else:
        check(error, kind, text)
    usable(comm)


@pytest.mark.ranks(3)
def test_entering_a_guard_in_another_thread(comm):
    """What one rank's entry refuses all refuse."""
    import threading

    run = md.guard(comm, signals=())
    if comm.rank == 1:
        caught = []
        thread = threading.Thread(target=lambda: caught.append(error_of_entry(run)))
        thread.start()
        thread.join()
        text = caught[0]
    else:
        text = error_of_entry(run)
    assert "rank 1 of 3" in text
    assert "main thread" in text
    usable(comm)


def error_of_entry(run):
    with pytest.raises(ProtocolError) as caught:
        run.__enter__()
    return str(caught.value)
