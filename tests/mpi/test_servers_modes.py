"""BSP, ASP and SSP keep their guarantees, compared with gradient descent in one process."""

import time

import numpy as np
import pytest

import mpidist as md

SHAPES = {"w": ((40, 7), "f4"), "b": ((7,), "f4"), "deep": ((3, 50, 4), "f8"), "s": ((), "f4")}


def arrays(seed):
    rng = np.random.default_rng(seed)
    return {n: np.asarray(rng.standard_normal(s), d) for n, (s, d) in SHAPES.items()}


def gradient(worker, clock):
    return arrays((worker, clock, 7))


def serial(parameters, optimizer, workers, clocks, samples):
    """The same training on one rank: the weighted mean of all gradients, once per clock."""
    state = optimizer.init(parameters)
    for clock in range(clocks):
        total = sum(samples(w, clock) for w in range(workers))
        mean = {
            n: sum(gradient(w, clock)[n] * (samples(w, clock) / total) for w in range(workers))
            for n in parameters
        }
        mean = {n: np.asarray(mean[n], parameters[n].dtype) for n in mean}
        optimizer.update(mean, state, parameters)
    return parameters


def samples(worker, clock):
    return 0 if (worker, clock) == (1, 2) else 3 * worker + clock + 1


def close(ours, expected, tolerance=1e-5):
    for name in expected:
        np.testing.assert_allclose(ours[name], expected[name], rtol=tolerance, atol=tolerance)


@pytest.mark.covering
@pytest.mark.ranks(2, 3, 5, 8)
@pytest.mark.parametrize("make", [md.optim.sgd, md.optim.momentum, md.optim.adam])
@pytest.mark.parametrize("placement", ["dedicated", "colocated"])
def test_bsp_equals_serial(comm, make, placement):
    """R4, R5, R66: any number of servers and workers gives serial descent on the global batch."""
    for servers in {1, max(1, comm.size // 2), comm.size - (placement == "dedicated")}:
        params = arrays(0) if comm.rank == 0 else {n: np.zeros(*s) for n, s in SHAPES.items()}
        optimizer = make(0.1)
        with md.parameter_server(
            comm, params, servers=servers, optimizer=optimizer, placement=placement
        ) as client:
            if client is not None:
                me = client.group.workers.rank
                for clock in range(4):
                    client.pull(out=params)
                    client.push(gradient(me, clock), samples=samples(me, clock))
                    client.clock()
                client.pull(out=params)
                count = client.group.workers.size
                assert client.versions == [4] * servers
                assert set(client.gaps) == {0}
                close(params, serial(arrays(0), optimizer, count, 4, samples))


@pytest.mark.covering
@pytest.mark.ranks(3, 4, 8)
@pytest.mark.parametrize("global_batch", [None, 12])
def test_ssp_without_staleness_equals_bsp(comm, global_batch):
    """R68: SSP(0) takes the same path as BSP for plain descent, whoever is slow."""
    servers = 2 if comm.size > 3 else 1
    workers = comm.size - servers
    share = 12 if global_batch is None else 12 // workers
    params = arrays(0)
    with md.parameter_server(
        comm,
        params,
        servers=servers,
        consistency=md.SSP(0),
        optimizer=md.optim.sgd(0.1),
        global_batch=None if global_batch is None else share * workers,
    ) as client:
        if client is not None:
            me = client.group.workers.rank
            for clock in range(5):
                client.pull(out=params)
                if (clock + me) % workers == 0:
                    time.sleep(0.005)
                client.push(gradient(me, clock), samples=share)
                client.clock()
            client.pull(out=params)
            expected = serial(arrays(0), md.optim.sgd(0.1), workers, 5, lambda w, c: share)
            close(params, expected)
            # Worker order, not order of arrival: every run has the same bits.
            every = client.group.workers.allgather(params["w"].tobytes())
            assert len(set(every)) == 1


@pytest.mark.covering
@pytest.mark.ranks(2, 4, 7)
@pytest.mark.parametrize(
    "mode", [md.BSP(), md.SSP(0), md.SSP(2), md.ASP(), md.DSSP(1, 3), md.DSSP(0, 0)], ids=str
)
@pytest.mark.parametrize("placement", ["dedicated", "colocated"])
def test_every_push_counts_once(comm, mode, placement):
    """R66, R67, R68: exact sums whatever the order; the bound holds; uneven epochs end."""
    steps, size = 12, 50
    spec = {"x": ((size,), "f8"), "y": ((3, size), "f4", 1.0)}
    with md.ServerGroup(comm, servers=min(2, comm.size - 1), placement=placement) as group:
        client = group.add("m", spec, consistency=mode, optimizer=md.optim.sgd(1.0))
        if client is not None:
            me, workers = group.workers.rank, group.workers.size
            mine = steps + me  # uneven epochs
            for clock in range(mine):
                if clock % 2:
                    client.pull()
                if me == 0:
                    time.sleep(0.002)
                # Weight 1 / workers: integers stay integers.
                value = -float(workers * (clock + 1))
                client.push({"x": np.full(size, value), "y": np.full((3, size), value, "f4")})
                client.clock()
            bound = mode.bound
            assert bound is None or max(client.gaps) <= bound
            client.close()
            group.barrier()
    facts = [r["server"]["models"]["m"] for r in group.report()["ranks"] if r["server"]]
    for model in facts:
        pushes = sum(steps + w for w in range(len(group.worker_ranks)))
        assert sum(model["staleness"].values()) == pushes
        assert model["updates"] == (max(model["clocks"]) if mode.merges else pushes)
        assert mode.bound is None or max(model["gaps"]) <= mode.bound
        if mode.holds:
            assert set(model["staleness"]) <= set(range(len(group.worker_ranks)))


@pytest.mark.ranks(3, further=(6,))
@pytest.mark.parametrize("mode", [md.SSP(2), md.ASP(), md.DSSP(0, 2, "paper")], ids=str)
def test_sum_after_the_last_clock(comm, mode):
    """No push is lost: after all have finished, the parameters are the sum of all of them."""
    with md.parameter_server(
        comm, {"x": np.zeros(10)}, consistency=mode, optimizer=md.optim.sgd(1.0), global_batch=4
    ) as client:
        if client is not None:
            group, workers = client.group, client.group.workers.size
            for clock in range(9):
                client.push({"x": np.full(10, -4.0)}, samples=clock % 3)
                client.clock()
            client.pull()  # answered after this worker's own pushes
            group.barrier()
            np.testing.assert_array_equal(client.pull()["x"], 9.0 * workers)


@pytest.mark.ranks(5)
def test_only_the_fast_wait(comm):
    """R68, R39: with one slow worker SSP blocks the fast ones only, and says who waited."""
    params = {"x": np.zeros(4)}
    with md.parameter_server(
        comm, params, consistency=md.SSP(2), optimizer=md.optim.sgd(0.1)
    ) as client:
        if client is not None:
            workers, last = client.group.workers, 12
            me, entered = workers.rank, dict.fromkeys(range(1, workers.size), -1)
            for clock in range(last):
                client.pull(out=params)
                if me:
                    workers.send(clock, 0)
                else:
                    # Slow by order and not by the clock on the wall: the others are as far ahead
                    # as they may be, and about to ask for more.
                    for fast in entered:
                        while entered[fast] < min(clock + 2, last - 1):
                            entered[fast] = workers.recv(source=fast)
                    time.sleep(0.05)
                client.push({"x": np.ones(4)})
                client.clock()
            waits = workers.allgather(client.stats["waits"])
            # A server may lose its core between a pull and its answer, which counts as well.
            assert waits[0]["worker"] < 0.1  # of 0.6 s
            assert all(w["worker"] > 0.1 for w in waits[1:])
            assert max(client.gaps) == (0 if me == 0 else 2)


@pytest.mark.ranks(5)
def test_asp_never_waits_for_workers(comm):
    """R67, R21: a slow worker delays nobody; its gradients are old, and that is measured.

    Slow by order and not by the clock on the wall: its first step lasts until all else is done.
    """
    params = {"x": np.zeros(4)}
    with md.parameter_server(
        comm, params, consistency=md.ASP(), optimizer=md.optim.sgd(0.1)
    ) as client:
        if client is not None:
            workers = client.group.workers
            me, others = workers.rank, range(1, workers.size)
            for step in range(4 if me == 0 else 10):
                client.pull(out=params)
                if step == 0:
                    workers.Barrier()  # the slow one has the first parameters
                if (me, step) == (0, 0):
                    assert {workers.recv(source=other) for other in others} == {"through"}
                client.push_pull({"x": np.ones(4)}, out=params)
            if me:
                workers.send("through", 0)
            workers.Barrier()  # none is left alone where another one fails
            assert client.stats["waits"]["worker"] < 0.1
            if me == 0:
                assert max(client.stats["staleness"]) == 10 * len(others)
