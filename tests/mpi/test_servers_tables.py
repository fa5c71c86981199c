"""Models without an optimizer, and gradients that are clipped by a norm over all servers (R94)."""

import numpy as np
import pytest
from test_train import close, fit, serial

import mpidist as md
from mpidist.errors import ConfigError, MpidistError

SGD = md.optim.sgd(1.0)
ROLES = [{"servers": 1}, {"servers": 2}, {"servers": 3, "placement": "colocated"}]
SHAPES = {"a": ((40, 3), "f8"), "b": ((70_000,), "f8"), "c": ((), "f4")}


@pytest.mark.covering
@pytest.mark.ranks(4)
@pytest.mark.parametrize("roles", ROLES, ids=str)
@pytest.mark.parametrize("mode", [md.BSP(), md.ASP(), md.SSP(0)], ids=str)
def test_counters(comm, roles, mode):
    """Each push is added once and in full, whatever its samples, in whole and by rows."""
    for spread in ("ranges", "rows"):
        with md.parameter_server(
            comm, SHAPES, update="add", consistency=mode, spread={"a": spread}, **roles
        ) as client:
            if client is None:
                continue
            n, rank = client.group.workers.size, client.group.workers.rank
            whole = {name: np.full(shape, 1 + rank) for name, (shape, _) in SHAPES.items()}
            for step in range(4):
                client.push_pull(whole, samples=(None, 7, 0)[step % 3])  # 0 samples: nothing
            client.push_pull({"a": (np.array([39, 2, 2]), np.ones((3, 3)))})
            client.group.barrier()
            got, total = client.pull(), 3 * sum(range(1, n + 1))
            for name, array in got.items():
                expected = np.full(array.shape, total)
                if name == "a":
                    expected[2] += 2 * n
                    expected[39] += n
                assert (array == expected).all(), name
            client.group.barrier()


@pytest.mark.ranks(4)
@pytest.mark.parametrize("roles", ROLES, ids=str)
def test_tables(comm, roles):
    """The last worker of a clock wins, row by row; under ASP the last push that comes."""
    for rows, spread in (("dense", "ranges"), ("lazy", "rows")):
        with md.parameter_server(
            comm, SHAPES, update="assign", rows={"a": rows}, spread={"a": spread}, **roles
        ) as client:
            if client is None:
                continue
            n, rank = client.group.workers.size, client.group.workers.rank
            whole = {name: np.full(shape, 5 + rank) for name, (shape, _) in SHAPES.items()}
            got = client.push_pull(whole)
            assert all((array == 4 + n).all() for array in got.values())
            if rank == 0:  # others overwrite its rows, which are equal or not
                push = {"a": (np.array([7, 3, 3, 1]), np.arange(12.0).reshape(4, 3))}
            else:
                push = {"a": (np.array([1 + rank]), np.full((1, 3), -rank))}
            got = client.push_pull(push)["a"]
            expected = np.full((40, 3), 4.0 + n)
            expected[[7, 3, 1]] = [[0, 1, 2], [6, 7, 8], [9, 10, 11]]
            for other in range(1, n):
                expected[1 + other] = -other
            assert (got == expected).all()
            # Rows before and after a whole tensor; a worker without samples sets nothing.
            push = {"a": (np.array([5]), np.full((1, 3), 9.0))}
            if rank == 1:
                push = {"a": np.full((40, 3), 8.0)}
            got = client.push_pull(push, samples=int(rank < 2))["a"]
            assert (got[5] == (8 if n > 1 else 9)).all()
            assert (got[6] == (8 if n > 1 else 4 + n)).all()


@pytest.mark.ranks(2)
def test_what_tables_refuse(comm):
    for settings, text in (
        ({"update": "sum"}, "update='sum'; give 'add' or 'assign'"),
        ({"update": 3}, "update=3; give"),
        ({"update": "add", "optimizer": SGD}, "update='add' and optimizer="),
        ({"update": "add", "global_batch": 4}, "update='add' and global_batch=4"),
        ({"update": "add", "clip_norm": 4.0}, "update='add' and clip_norm=4.0"),
        ({"update": "assign", "rows": {"a": "open"}}, "update='assign' needs rows='dense' or"),
        ({}, "optimizer=None has no init and update"),
    ):
        with (
            pytest.raises(ConfigError, match=text),
            md.parameter_server(comm, {"a": ((4, 3), "f8")}, **settings),
        ):
            pass
    with md.parameter_server(comm, {"a": np.zeros((4, 3))}, update="add") as client:
        if client is not None:
            with pytest.raises(ConfigError, match="update='add' and no optimizer"):
                client.set_optimizer(SGD)
            client.consistency = md.ASP()


def clipped(gradients, norm):
    total = np.sqrt(sum(np.square(g, dtype="f8").sum() for g in gradients.values()))
    return {name: g * min(1.0, norm / total) for name, g in gradients.items()}


@pytest.mark.covering
@pytest.mark.ranks(4)
@pytest.mark.parametrize("roles", ROLES, ids=str)
@pytest.mark.parametrize("mode", [md.BSP(), md.ASP(), md.SSP(0), md.BackupWorkers(0)], ids=str)
def test_the_norm_is_over_all_servers(comm, roles, mode):
    """Of the mean gradient of a clock under BSP, of each push elsewhere; nobody's array changes."""
    shapes = {name: shape for name, (shape, _) in SHAPES.items()}
    n = comm.size - (0 if "placement" in roles else roles["servers"])
    every = [
        {
            name: np.random.default_rng((rank, 5)).standard_normal(shape)
            for name, shape in shapes.items()
        }
        for rank in range(n)
    ]
    mean = {name: sum(one[name] for one in every) / n for name in shapes}
    if mode.merges:
        expected = clipped(mean, 2.0)
    else:
        each = [clipped(one, 2.0) for one in every]
        expected = {name: sum(one[name] for one in each) / n for name in shapes}
    zeros = {name: (shape, "f8") for name, shape in shapes.items()}
    given = {"optimizer": SGD, "clip_norm": 2.0}
    if mode == md.SSP(0):
        given = {"optimizer": md.optim.clipped(SGD, 2.0)}
    with md.parameter_server(comm, zeros, consistency=mode, **given, **roles) as client:
        if client is not None:
            mine = every[client.group.workers.rank]
            before = {name: np.array(array) for name, array in mine.items()}
            for _ in range(3):
                client.push_pull(mine)
            small = {"a": (np.array([1]), np.full((1, 3), 1e-3))}  # it is not clipped
            client.push_pull(small)
            client.group.barrier()
            got = client.pull()
            expected["a"][1] += 1e-3 / 3
            for name, array in got.items():
                assert np.allclose(array, -3 * expected[name], rtol=1e-9, atol=1e-12), name
                assert (mine[name] == before[name]).all()
            client.group.barrier()


class Failing:
    """An optimizer that fails on one rank, in its third update."""

    elementwise, name, settings = True, "failing", {}

    def __init__(self, rank):
        self._rank, self._times = rank, 0

    def init(self, parameters):
        return {}

    def update(self, gradients, state, parameters):
        self._times += 1
        if self._times == 3 and self._rank == 3:
            raise ValueError("no third update here")


@pytest.mark.ranks(4)
def test_a_server_that_fails_ends_the_wait_for_its_norm(comm):
    own = comm.Dup()

    def train():
        with md.parameter_server(
            own, {"a": np.zeros(9)}, servers=2, optimizer=Failing(comm.rank), clip_norm=1.0
        ) as client:
            for _ in range(9 if client is not None else 0):
                client.push_pull({"a": np.ones(9)})

    with pytest.raises((MpidistError, ValueError), match="no third update"):
        train()
    md.free(own)
    own.Free()


@pytest.mark.ranks(3)
def test_training_with_a_clipped_optimizer(comm):
    """The key `clip_norm` of a job's optimizer; equal to serial training up to rounding."""
    optimizer = md.optim.clipped(md.optim.momentum(0.05), 0.3)
    for strategy in (md.ParameterServer(1), md.ParameterServer(2, placement="colocated")):
        found, _ = fit(comm, optimizer, strategy=strategy)
        if comm.rank < 2:  # a worker
            close(found, serial(optimizer))
