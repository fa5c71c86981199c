"""Pushes and answers in pieces: the bits of whole messages, whatever the workers call."""

import time
from contextlib import contextmanager

import numpy as np
import pytest

import mpidist as md
from mpidist.errors import MpidistError, ProtocolError
from mpidist.servers import protocol
from mpidist.servers.layout.placement import place_tensors
from mpidist.servers.wire import node_share, wire_pieces
from mpidist.servers.wire.wire_pieces import WINDOW, cut_shard

OPTIMIZERS = {
    "sgd": md.optim.sgd(0.1, weight_decay=0.01),
    "momentum": md.optim.momentum(md.optim.step_decay(0.1, every=2, factor=0.5), 0.9),
    "adam": md.optim.adam(0.01),
    "adagrad": md.optim.adagrad(0.1),
    "ftrl": md.optim.ftrl(0.1),
}
SHAPES = {"a": (37, 5), "b": (3,), "c": (), "d": (301,), "e": (2, 2)}
STEPS = 6
SHARED = (512, 300, 16)  # limits with which pieces go through memory that the ranks share


@contextmanager
def pieces_of(nbytes, shared=False):
    """Pieces of so many bytes; a huge number means whole messages. Maybe in shared memory."""
    before = wire_pieces.PIECE_BYTES, wire_pieces.NODE_PIECE_BYTES
    wire_pieces.PIECE_BYTES = wire_pieces.NODE_PIECE_BYTES = nbytes
    node_share.enabled = shared
    try:
        yield
    finally:
        wire_pieces.PIECE_BYTES, wire_pieces.NODE_PIECE_BYTES = before
        node_share.enabled = True


def model(dtype="f4"):
    rng = np.random.default_rng(5)
    return {name: rng.standard_normal(shape).astype(dtype) for name, shape in SHAPES.items()}


def steps_of(client, seed, samples):
    """What a worker does in each clock: mostly push_pull, and now and then anything else."""
    me = client.group.workers.rank
    rng = np.random.default_rng((seed, me))
    out = model()
    client.pull(out=out)
    for step in range(STEPS if seed else 4):
        gradients = {n: rng.standard_normal(s).astype("f4") for n, s in SHAPES.items()}
        count = int(rng.integers(0, 4)) if samples else None
        kind = int(rng.integers(0, 9)) if seed else 0
        if kind <= 3:
            client.push_pull(gradients, out=out, samples=count)
        elif kind == 4:  # the answers are written over the gradients
            client.push_pull(gradients, out=gradients, samples=count)
            out = gradients
        elif kind == 5:
            some = {n: gradients[n] for n in ("a", "d")}
            client.push_pull(some, samples=count)
        elif kind == 6:
            rows = rng.integers(0, 37, 30)  # some of them twice
            client.push({"a": (rows, gradients["a"][rows])}, samples=count)
            client.clock()
            client.pull(out=out)
        elif kind == 7:
            client.clock()
            client.pull("d")
            client.pull(out=out)
        else:
            client.push(gradients, samples=count)
            client.clock()
            time.sleep(0.002 * me)
        if me == 1 and seed % 3 == 2 and step == STEPS // 2:
            client.close()
            return


def trained(comm, limit, seed, samples, optimizer, servers, placement="dedicated"):
    """The parameters and the optimizer's state on the servers in the end, as bytes."""
    found = {}
    with (
        pieces_of(limit, shared=limit in SHARED),
        md.ServerGroup(comm, servers=servers, placement=placement) as group,
    ):
        client = group.add("m", model(), optimizer=OPTIMIZERS[optimizer])
        if client is not None:
            steps_of(client, seed, samples)
        else:
            group.serve()
    if group.is_server:
        held = group.hosted("m")[1].shard.export()
        arrays = [*held["parameters"], *(t for s in held["optimizer"].values() for t in s)]
        found["arrays"] = [(name, start, array.tobytes()) for name, start, array in arrays]
        found["scalars"] = {name: leaf.tolist() for name, leaf in held["scalars"].items()}
        found["version"] = held["version"]
    return found


@pytest.mark.covering
@pytest.mark.ranks(2, 4, further=(5,))
@pytest.mark.parametrize("optimizer", sorted(OPTIMIZERS))
def test_the_bits_of_whole_messages(comm, optimizer):
    """R19: parameters, state and scalars have the same bits, however the pushes travel."""
    samples = optimizer != "momentum"
    for servers in sorted({1, comm.size // 2, comm.size - 1}):
        whole = trained(comm, 1 << 40, 0, samples, optimizer, servers)
        for limit in (40, 512, 16):
            assert trained(comm, limit, 0, samples, optimizer, servers) == whole


@pytest.mark.covering
@pytest.mark.ranks(2, 4, further=(5,))
@pytest.mark.parametrize("seed", range(1, 7))
def test_any_calls_in_one_clock(comm, seed):
    """Pushes in pieces, whole pushes, rows, none, workers that leave: the same bits and no hang."""
    servers = 1 + seed % max(1, comm.size - 1)
    optimizer = sorted(OPTIMIZERS)[seed % 3]
    whole = trained(comm, 1 << 40, seed, True, optimizer, servers)
    for limit in (17, 300, 16):
        assert trained(comm, limit, seed, True, optimizer, servers) == whole


@pytest.mark.covering
@pytest.mark.ranks(1, 2, 5)
@pytest.mark.parametrize("seed", [0, 1, 3])
def test_colocated(comm, seed):
    """A rank that sends pieces to itself and to others."""
    for servers in sorted({1, comm.size}):
        whole = trained(comm, 1 << 40, seed, False, "adam", servers, "colocated")
        for limit in (17, 300):
            assert trained(comm, limit, seed, False, "adam", servers, "colocated") == whole


@pytest.mark.ranks(3)
@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", "bfloat16"])
def test_dtypes(comm, dtype):
    """Half precision is added in single precision, in pieces as in whole messages."""
    if dtype == "bfloat16":
        dtype = pytest.importorskip("ml_dtypes").bfloat16
    ends = []
    for limit, shared in ((1 << 40, False), (22, False), (20, True)):
        params = model(dtype)
        with (
            pieces_of(limit, shared),
            md.parameter_server(comm, params, optimizer=md.optim.sgd(0.3)) as client,
        ):
            if client is not None:
                rng = np.random.default_rng(client.group.workers.rank)
                for _ in range(3):
                    gradients = {
                        name: rng.standard_normal(shape).astype(dtype)
                        for name, shape in SHAPES.items()
                    }
                    client.push_pull(gradients, out=params, samples=3)
        ends.append({name: array.tobytes() for name, array in params.items()})
    assert ends[0] == ends[1] == ends[2]


def served_again(comm, consistency, fresh, odd):
    """Six steps of the same arrays, or of fresh copies; what the worker saw and counted."""
    seen = []
    gradients, out = model(), model()
    for name in gradients:
        gradients[name] = gradients[name].copy(order="C")
    with md.ServerGroup(comm, servers=2) as group:
        client = group.add("m", model(), optimizer=md.optim.momentum(0.1), consistency=consistency)
        if client is not None:
            rng = np.random.default_rng(group.workers.rank)
            for step in range(8):
                for name in gradients:
                    gradients[name][...] = rng.standard_normal(SHAPES[name])
                if odd and step == 3:
                    client.push({"a": gradients["a"]}, samples=2)
                    client.clock()
                if odd and step == 5:
                    client.clock()
                given = {n: g.copy() for n, g in gradients.items()} if fresh else gradients
                into = {n: o.copy() for n, o in out.items()} if fresh else out
                got = client.push_pull(given, out=into, samples=step)
                assert all(got[name] is into[name] for name in SHAPES)
                group.barrier()
                got = client.pull()
                seen.append([got[name].tobytes() for name in SHAPES])
            stats = client.stats
            sent, got = stats["messages_sent"], stats["bytes_received"]
            counts = [stats[key] for key in ("clocks", "gaps", "staleness", "versions")]
            seen.append([counts, sent, got][: 1 if node_share.enabled else None])
            assert (stats["shared_bytes"] > 0) == (node_share.enabled and not fresh)
            assert (client._bound is not None) or fresh
    return seen


@pytest.mark.ranks(3, further=(4,))
@pytest.mark.parametrize("consistency", [md.BSP(), md.SSP(0)], ids=str)
@pytest.mark.parametrize("odd", [False, True])
@pytest.mark.parametrize("shared", [False, True])
def test_the_same_arrays_again(comm, consistency, odd, shared):
    """What a client remembers of its arrays changes no value and no count."""
    with pieces_of(wire_pieces.PIECE_BYTES, shared):
        again, fresh = (served_again(comm, consistency, fresh, odd) for fresh in (False, True))
    assert again == fresh


@pytest.mark.ranks(2)
@pytest.mark.parametrize("drops", [False, True])
def test_the_same_arrays_with_other_values_or_forms(comm, drops):
    """NaN, read-only arrays, other shapes and wrong counts are found in arrays that are known."""
    with md.ServerGroup(comm, servers=1) as group:
        client = group.add(
            "m",
            {"x": np.zeros((2, 3), "f4"), "y": np.zeros(3)},
            optimizer=md.optim.sgd(1.0),
            nonfinite="drop" if drops else "raise",
        )
        if client is None:
            return
        g = {"x": np.ones((2, 3), "f4"), "y": np.ones(3)}
        out = {"x": np.zeros((2, 3), "f4"), "y": np.zeros(3)}
        for _ in range(3):
            client.push_pull(g, out=out)
        assert client._bound is not None
        assert client._bound.fits(g, out)
        for name, value in (("x", np.nan), ("y", np.inf), ("y", -np.inf)):
            g[name].flat[1] = value
            if drops:
                client.push_pull(g, out=out)
            else:
                with pytest.raises(MpidistError, match=f"gradient '{name}' has 1 of"):
                    client.push_pull(g, out=out)
            g[name].flat[1] = 1
        assert client.stats["nonfinite"] == 3 * drops
        assert (out["x"] == -3).all()
        g["x"][...] = 3e38  # finite, but its square is not
        client.push_pull(g, out=out)
        assert (out["x"] == np.float32(-3) - np.float32(3e38)).all()
        g["x"][...] = 1
        with pytest.raises(md.ConfigError, match="samples is -1"):
            client.push_pull(g, out=out, samples=-1)
        out["y"].flags.writeable = False
        with pytest.raises(md.ConfigError, match="read-only"):
            client.push_pull(g, out=out)
        out["y"].flags.writeable = True
        with pytest.raises(md.ConfigError, match="no parameter 'z'"):
            client.push_pull({**g, "z": g["y"]}, out=out)
        with pytest.raises(md.ConfigError, match="expected a mapping"):
            client.push_pull(None, out=out)
        client.push(g)
        with pytest.raises(ProtocolError, match="second push in clock"):
            client.push_pull(g, out=out)
        client.clock()
        client.push_pull(g, out=out)
        assert (out["y"] == -6).all()


@pytest.mark.ranks(3)
def test_arrays_that_are_copied(comm):
    """Fortran order, other dtypes, and arrays that overlap: the same values."""
    with (
        pieces_of(64),
        md.parameter_server(
            comm, {"x": np.zeros((8, 6)), "y": np.zeros((8, 6))}, optimizer=md.optim.sgd(1.0)
        ) as client,
    ):
        if client is None:
            return
        gradients = {"x": np.ones((6, 8), "f4").T, "y": np.full((8, 6), 2, "i4")}
        out = {"x": np.zeros((8, 6), "f4"), "y": np.zeros((6, 8)).T}
        client.push_pull(gradients, out=out)
        assert (out["x"] == -1).all()
        assert (out["y"] == -2).all()
        memory = np.ones(97)
        shifted = {"x": memory[:48].reshape(8, 6), "y": memory[49:].reshape(8, 6)}
        results = {"x": memory[1:49].reshape(8, 6), "y": memory[49:].reshape(8, 6)}
        client.push_pull(shifted, out=results)
        assert (results["x"] == -2).all()
        assert (results["y"] == -3).all()


@pytest.mark.ranks(2)
def test_gradients_with_gaps_and_of_two_tensors(comm):
    """Each second element of an array, and one array for two tensors, one of which it answers."""
    with (
        pieces_of(64),
        md.parameter_server(
            comm, {"x": np.zeros(500), "y": np.zeros(500)}, optimizer=md.optim.sgd(1.0)
        ) as client,
    ):
        if client is None:
            return
        spread = np.arange(2000.0)
        found = client.push_pull({"x": spread[:1000:2], "y": spread[1999:999:-2]})
        assert (found["x"] == -spread[:1000:2]).all()
        assert (found["y"] == -spread[1999:999:-2]).all()
        both, y = np.ones(500), np.zeros(500)
        client.push_pull({"x": both, "y": both}, out={"x": both, "y": y})
        assert (both == found["x"] - 1).all()
        assert (y == found["y"] - 1).all()


@pytest.mark.ranks(4)
def test_messages_and_memory(comm):
    """A message per piece, at most `WINDOW` pieces of memory per worker, and nothing left over."""
    limit, size = 1000, 3000
    params = {"w": np.zeros(size, "f4")}
    pieces = cut_shard(place_tensors({"w": ((size,), "f4")}, 1), 0, limit)
    with pieces_of(limit), md.ServerGroup(comm, servers=1) as group:
        client = group.add("m", {"w": ((size,), "f4")}, optimizer=md.optim.sgd(1.0))
        if client is None:
            group.serve()
        else:
            client.pull(out=params)
            group.barrier()
            before = client.stats
            for _ in range(5):
                client.push_pull({"w": np.ones(size, "f4")}, out=params)
            after = client.stats
            for way in ("sent", "received"):
                messages = after[f"messages_{way}"] - before[f"messages_{way}"]
                nbytes = after[f"bytes_{way}"] - before[f"bytes_{way}"]
                assert messages == 5 * (len(pieces) + 1)
                assert nbytes == 5 * (4 * size + protocol.HEADER_BYTES)
            assert client.versions == [5]
        link = group.link
        assert not link.receiving
        # Whole pushes would need 12,000 bytes of each worker. The pool rounds up to 4,096.
        assert {buffer.size for buffer in link.pool._idle} <= {4096}
        assert len(link.pool._idle) <= 3 * WINDOW + 6


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.ranks(4)
def test_a_pull_is_of_one_version(comm, shared):
    """R20: all pieces of an answer have the same updates, whoever is slow."""
    size = 2500
    with pieces_of(256, shared), md.ServerGroup(comm, servers=1) as group:
        client = group.add("m", {"x": ((size,), "f8")}, optimizer=md.optim.sgd(1.0))
        if client is None:
            return
        me = group.workers.rank
        for step in range(12):
            if (step + me) % 3 == 0:
                time.sleep(0.003)
            x = client.push_pull({"x": np.full(size, -1.0)})["x"]
            assert set(x) == {step + 1.0}
            if step % 4 == me:
                assert set(client.pull()["x"]) == {step + 1.0}


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.ranks(3)
def test_a_pause_between_pushes_in_pieces(comm, shared):
    """A server loads other values in a pause, and the pieces of later answers have them."""
    with pieces_of(64, shared), md.ServerGroup(comm, servers=1) as group:
        client = group.add("m", {"x": np.zeros(100)}, optimizer=md.optim.adam(0.5))
        if client is None:

            def reset(tag):
                saved = group.shards("m")
                for _, _, array in saved["parameters"]:
                    array[...] = 100.0 * tag
                group.load_shards("m", saved)

            group.serve(on_pause=reset)
            return
        for step in range(1, 4):
            client.push_pull({"x": np.zeros(100)})
            group.pause(step)
            assert (client.pull()["x"] == 100.0 * step).all()
            assert (client.push_pull({"x": np.zeros(100)})["x"] == 100.0 * step).all()


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.ranks(3)
def test_push_in_pieces_and_two_models(comm, shared):
    """Two models at once, one of them small and one asynchronous."""
    with pieces_of(128, shared), md.ServerGroup(comm, servers=1) as group:
        big = group.add("big", {"x": np.zeros(999)}, optimizer=md.optim.sgd(1.0))
        small = group.add("small", {"x": np.zeros(3)}, optimizer=md.optim.sgd(1.0))
        free = group.add(
            "free", {"x": np.zeros(500)}, optimizer=md.optim.sgd(1.0), consistency=md.ASP()
        )
        if big is not None:
            for step in range(5):
                assert (big.push_pull({"x": np.ones(999)})["x"] == -1 - step).all()
                free.push_pull({"x": np.ones(500)})
                assert (small.push_pull({"x": np.ones(3)})["x"] == -1 - step).all()
            group.barrier()
            assert (free.pull()["x"] == -5).all()


class Failing:
    """An optimizer that raises in the middle of its third update."""

    elementwise = True

    def __init__(self):
        self.calls = 0

    def init(self, parameters):
        return {}

    def update(self, gradients, state, parameters):
        self.calls += 1
        if self.calls == 17:
            raise FloatingPointError("the optimizer gave up")
        for name in parameters:
            parameters[name] -= gradients[name]


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.ranks(4)
@pytest.mark.parametrize("placement", ["dedicated", "colocated"])
def test_an_optimizer_that_raises_between_two_pieces(comm, own, placement, shared):
    """All ranks get the error, and none waits for the rest of the pieces."""
    start = time.monotonic()
    with (  # noqa: PT012
        pytest.raises((FloatingPointError, MpidistError), match="the optimizer gave up"),
        pieces_of(64, shared),
        md.parameter_server(
            own, {"x": np.zeros(50)}, servers=[3], optimizer=Failing(), placement=placement
        ) as client,
    ):
        while client is not None:
            client.push_pull({"x": np.ones(50)})
    assert time.monotonic() - start < 10


class Rebinding:
    """An optimizer that puts new arrays into its state."""

    elementwise = True

    def init(self, parameters):
        return {"v": {n: np.zeros_like(p) for n, p in parameters.items()}, "t": np.zeros(())}

    def update(self, gradients, state, parameters):
        state["t"] = state["t"] + 1
        for name in parameters:
            state["v"][name] = 0.5 * state["v"][name] + gradients[name]
            parameters[name] -= state["v"][name] / state["t"]


@pytest.mark.ranks(3)
def test_an_optimizer_that_makes_new_arrays(comm):
    """What it has made is not lost, also where whole updates come between."""
    ends = []
    for limit in (1 << 40, 64, 300):
        x = {"x": np.zeros(50)}
        with (
            pieces_of(limit, limit in SHARED),
            md.parameter_server(comm, x, optimizer=Rebinding()) as client,
        ):
            if client is not None:
                me = client.group.workers.rank
                for step in range(6):
                    gradients = {"x": np.arange(50.0) + me}
                    if step % 3 == 1:
                        client.push(gradients)
                        client.clock()
                        client.pull(out=x)
                    else:
                        client.push_pull(gradients, out=x)
        ends.append(x["x"].tolist())
    assert ends[0] == ends[1] == ends[2]


@pytest.mark.ranks(3)
def test_rows_beside_a_worker_without_samples(comm):
    """Rows that no push names stand still, though a worker sends pieces that count nothing."""
    ends = []
    for limit in (1 << 40, 64):
        with pieces_of(limit), md.ServerGroup(comm, servers=1) as group:
            client = group.add(
                "m", {"x": np.zeros((40, 3))}, optimizer=md.optim.adam(0.1), rows="lazy"
            )
            if client is None:
                continue
            full = {"x": np.ones((40, 3))}
            client.push_pull(full, samples=1)
            if group.workers.rank == 0:
                client.push_pull(full, samples=0)
            else:
                client.push_pull({"x": (np.array([7, 9]), np.ones((2, 3)))}, samples=1)
            assert client.versions == [2]
            ends.append(client.push_pull(full, samples=1)["x"])
            assert client.versions == [3]
    if ends:
        assert ends[0].tobytes() == ends[1].tobytes()


@pytest.mark.ranks(3)
def test_dealt_rows_in_the_same_arrays(comm):
    """The rows of a table are dealt to the servers, and each step has the arrays of the last."""
    table = np.arange(21.0).reshape(7, 3)
    with md.ServerGroup(comm, servers=2) as group:
        client = group.add("m", {"x": table}, optimizer=md.optim.sgd(1.0), spread="rows")
        if client is not None:
            gradients, out = {"x": table * 2}, {"x": np.zeros((7, 3))}
            for step in range(1, 5):
                client.push_pull(gradients, out=out)
                assert (out["x"] == table - step * table * 2).all()


class Counting:
    """An optimizer whose rate depends on how often it was called."""

    elementwise = True

    def __init__(self):
        self.calls = 0

    def init(self, parameters):
        return {}

    def update(self, gradients, state, parameters):
        self.calls += 1
        for name in parameters:
            parameters[name] -= gradients[name] / self.calls


@pytest.mark.ranks(3)
def test_an_optimizer_that_counts_its_calls(comm):
    """It gets one call for each update, so its gradients are sent in whole messages."""
    x = {"x": np.zeros(50)}
    with pieces_of(64), md.parameter_server(comm, x, optimizer=Counting()) as client:
        if client is not None:
            for _ in range(3):
                client.push_pull({"x": np.full(50, -6.0)}, out=x)
            assert x["x"].tolist() == [11.0] * 50


@pytest.mark.ranks(3)
def test_a_worker_that_never_comes(comm, own):
    """A rank in another call while the others' pieces wait: an error on all ranks, soon."""
    start = time.monotonic()
    with (  # noqa: PT012
        pytest.raises(MpidistError, match=r"same calls|gave up with"),
        pieces_of(64),
        md.parameter_server(own, {"x": np.zeros(50)}, optimizer=md.optim.sgd(1.0)) as client,
    ):
        if client is not None:
            client.push_pull({"x": np.ones(50)})
            if comm.rank == 1:
                md.allreduce(own, np.ones(1000))
            client.push_pull({"x": np.ones(50)})
    assert time.monotonic() - start < 10


@pytest.mark.ranks(3)
def test_workers_that_wait_for_each_other(comm, own):
    """Two models in opposite order, in pieces: the error says who waits for whom."""
    with (  # noqa: PT012
        pytest.raises(ProtocolError, match=r"wait for each other|gave up with"),
        pieces_of(64),
        md.ServerGroup(own, servers=1) as group,
    ):
        a, b = (group.add(name, {"x": np.zeros(50)}, optimizer=md.optim.sgd(1.0)) for name in "ab")
        if a is None:
            group.serve()
        first, second = (a, b) if comm.rank == 0 else (b, a)
        first.push_pull({"x": np.ones(50)})
        second.push_pull({"x": np.ones(50)})
