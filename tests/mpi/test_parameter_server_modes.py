"""What each mode promises, against serial descent."""

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
