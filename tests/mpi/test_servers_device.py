"""Servers that update a model on a device: CuPy where a GPU is, and NumPy in its place."""

import numpy as np
import pytest

import mpidist as md
from mpidist import arrays
from mpidist.errors import ConfigError, MismatchError

OPTIMIZERS = {
    "sgd": md.optim.sgd(0.1, weight_decay=0.01),
    "momentum": md.optim.momentum(0.1, 0.9),
    "adam": md.optim.adam(0.01),
    "ftrl": md.optim.ftrl(0.1),
}
SHAPES = {"a": (37, 5), "b": (3,), "c": ()}


@pytest.fixture
def device(xp, monkeypatch):
    """A GPU, or copies in NumPy arrays that stand in for one."""
    if xp is np:
        monkeypatch.setattr(arrays, "to_device", lambda x, local_rank: np.array(x))
        monkeypatch.setattr(arrays, "load_cupy", lambda: None)
    return xp


def trained(comm, where, optimizer, mode, saves):
    """What servers hold in the end, and what a worker has seen."""
    rng = np.random.default_rng(3)
    model = {name: rng.standard_normal(shape).astype("f4") for name, shape in SHAPES.items()}
    seen, found = [], {}

    def again(_tag):
        saved = group.shards("m")
        for _, _, array in saved["parameters"]:
            array *= 0.5
        group.load_shards("m", saved)

    with md.ServerGroup(comm, servers=1) as group:
        client = group.add(
            "m", model, optimizer=OPTIMIZERS[optimizer], consistency=mode, rows={"a": "lazy"},
            server_device=where,
        )  # fmt: skip
        if client is None:
            group.serve(on_pause=again)
            held = group.shards("m")
            found = {name: array for name, _, array in held["parameters"]}
            for slot, arrays_ in held["optimizer"].items():
                found |= {f"{slot} {name}": array for name, _, array in arrays_}
            found |= {name: np.array(leaf) for name, leaf in held["scalars"].items()}
        else:
            out = {name: np.zeros_like(array) for name, array in model.items()}
            for step in range(6):
                gradients = {n: rng.standard_normal(s).astype("f4") for n, s in SHAPES.items()}
                if step == 2:
                    rows = np.array([3, 1, 30])
                    client.push({"a": (rows, gradients["a"][rows])})
                    client.clock()
                    client.pull(out=out)
                else:
                    client.push_pull(gradients, out=out)
                seen.append(np.concatenate([out[name].ravel() for name in SHAPES]))
                if step == 3 and saves:
                    group.pause("load")
    return found, seen


@pytest.mark.ranks(3, further=(2,))
@pytest.mark.parametrize("optimizer", sorted(OPTIMIZERS))
def test_a_device_gives_the_values_of_the_host(comm, device, optimizer):
    """Dense updates, rows, and values that are loaded in a pause."""
    mode = md.BSP() if comm.size == 3 or optimizer == "adam" else md.ASP()
    there = trained(comm, "gpu", optimizer, mode, True)
    here = trained(comm, "cpu", optimizer, mode, True)
    assert there[0].keys() == here[0].keys()
    for name, array in here[0].items():
        np.testing.assert_allclose(there[0][name], array, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(there[1], here[1], rtol=1e-5, atol=1e-6)


@pytest.mark.ranks(2)
def test_where_the_state_is(comm, device):
    """Parameters of a large model are on both, and the state is on the device."""
    size = 200_000
    with md.ServerGroup(comm, servers=1) as group:
        client = group.add(
            "m", {"x": np.zeros(size)}, optimizer=md.optim.momentum(1.0, 0.0), server_device="gpu"
        )
        if client is not None:
            gradients, out = {"x": np.ones(size)}, {"x": np.zeros(size)}
            for step in range(3):
                client.push_pull(gradients, out=out)
                assert (out["x"] == -1 - step).all()
    if group.is_server:
        shard = group.hosted("m")[1].shard
        assert isinstance(shard._on_device["x"], device.ndarray)
        assert isinstance(shard.state["velocity"]["x"], device.ndarray)
        assert isinstance(shard.parameters["x"], np.ndarray)
        assert isinstance(shard.export()["optimizer"]["velocity"][0][2], np.ndarray)


@pytest.mark.ranks(2)
def test_what_is_refused(comm, monkeypatch):
    """All ranks get one error: an unknown device, other devices, no GPU, open tables."""
    monkeypatch.setattr(arrays, "load_cupy", _no_gpu)
    cases = [
        ({"server_device": "tpu"}, ConfigError, "server_device='tpu'; give 'cpu' or 'gpu'"),
        ({"server_device": ["gpu"]}, ConfigError, "give 'cpu' or 'gpu'"),
        ({"server_device": ("cpu", "gpu")[comm.rank]}, (ConfigError, MismatchError), "gpu|GPU"),
        ({"server_device": "gpu"}, ConfigError, "no GPU to work on"),
    ]
    with md.ServerGroup(comm, servers=1) as group:
        for given, error, text in cases:
            with pytest.raises(error, match=text):
                group.add("m", {"x": ((4, 2), "f4")}, optimizer=md.optim.sgd(1.0), **given)
        model, given = {"x": ((None, 2), "f4")}, {"rows": "open", "server_device": "gpu"}
        with pytest.raises(ConfigError, match="not possible with open tables"):
            group.add("m", model, optimizer=md.optim.sgd(1.0), **given)
        with pytest.raises(ConfigError, match="server_device='tpu'; give 'cpu' or 'gpu'"):
            md.ParameterServer(server_device="tpu")


def _no_gpu():
    raise ConfigError("no GPU to work on (no device); install mpidist[cuda12]")
