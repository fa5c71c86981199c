"""With servers, bad input, failed ranks or a wrong order of calls raise on all ranks; no hang."""

import time

import numpy as np
import pytest
from mpi4py import MPI

import mpidist as md
from mpidist.servers import add_model, protocol

SGD = md.optim.sgd(1.0)


def raised(work, kind):
    """The message of the error that `work` must raise here."""
    with pytest.raises(kind) as info:
        work()
    return str(info.value)


@pytest.mark.ranks(1, 4)
def test_nobody_left_to_work(comm):
    """All servers and no workers is refused on all ranks, in one line."""

    def start():
        with md.parameter_server(comm, {"x": np.zeros(3)}, servers=comm.size, optimizer=SGD):
            pass

    text = raised(start, md.ConfigError)
    count, cure = "4 servers leave", "use at most 3"
    if comm.size == 1:
        count, cure = "1 server leaves", "start at least 2 ranks"
    assert text.startswith("ServerGroup: ")
    assert text.endswith(f": {count} 0 workers; {cure}")


@pytest.mark.ranks(3)
def test_bad_groups(comm):
    for servers, placement, text in [
        (0, "dedicated", "expected at least 1"),
        ([0, 7], "dedicated", "distinct ranks in 0..2"),
        ([1, 1], "colocated", "distinct ranks in 0..2"),
        (4, "colocated", "4 servers do not fit 3 ranks; use at most 3"),
        (1, "dedicate", "is not one of dedicated, colocated"),
    ]:
        got = raised(
            lambda s=servers, p=placement: md.ServerGroup(comm, servers=s, placement=p),
            md.ConfigError,
        )
        assert text in got
    text = raised(lambda: md.ServerGroup(comm, servers=1 + (comm.rank == 1)), md.MismatchError)
    assert "ServerGroup: servers differs: rank 1: 2, ranks 0,2: 1; " in text


@pytest.mark.ranks(3)
def test_bad_models(comm):
    """Whatever a model cannot be is refused on all ranks; the group goes on."""
    whole = type("Lars", (), {"init": dict, "update": dict, "elementwise": False})()
    bad = [
        ({"x": np.zeros(3, "i4")}, {}, "'x' is int32; servers keep float16, bfloat16, float32 and"),
        ({"x": np.zeros(3), "y": ((3,), "f4")}, {}, "give one form"),
        ({"x": ((3,), "f4", "normale")}, {}, "did you mean 'normal'"),
        ({"x": ((-3,), "f4")}, {}, "negative length"),
        ({"x": np.zeros(3)}, {"consistency": "bsp"}, "give BSP, SSP, DSSP, ASP or BackupWorkers"),
        ({"x": np.zeros(3)}, {"global_batch": 0}, "give an integer >= 1"),
        ({"x": np.zeros(3)}, {"optimizer": whole}, "needs whole tensors"),
        (
            {"x": np.zeros(3)},
            {"optimizer": md.optim.clipped(SGD, 1.0), "clip_norm": 2.0},
            "sgd clips gradients itself (clip_norm=1.0), expected one that does not clip",
        ),
    ]
    with md.ServerGroup(comm, servers=1) as group:
        for model, options, text in bad:
            assert text in raised(
                lambda m=model, o=options: group.add("m", m, **{"optimizer": SGD, **o}),
                md.ConfigError,
            )
        # Only one rank is wrong: the others say which one.
        one = {"x": np.zeros(3 + (comm.rank == 1))}
        assert "tensors x differs: rank 1: [[4], 'float64'], ranks 0,2: [[3], 'float64']" in raised(
            lambda: group.add("m", one, optimizer=SGD), md.MismatchError
        )
        odd = {"x": np.zeros(3, "i4" if comm.rank == 2 else "f4")}
        text = raised(lambda: group.add("m", odd, optimizer=SGD), md.ConfigError)
        assert "int32" in text
        assert text.startswith("add 'm': rank 2 of 3 (")
        client = group.add("m", {"x": np.zeros(3)}, optimizer=SGD)
        if client:
            assert client.pull()["x"].tolist() == [0, 0, 0]


@pytest.mark.ranks(2, 5)
def test_a_model_that_does_not_fit_is_refused(comm, monkeypatch):
    """R12: numbers instead of an out-of-memory kill, before anything is allocated."""
    spec = {"embedding": ((10**9, 10**4), "f4", "normal")}
    with md.ServerGroup(comm, servers=1) as group:
        text = raised(lambda: group.add("big", spec, optimizer=md.optim.adam(0.1)), md.ConfigError)
        assert f"server ranks {comm.size - 1} on " in text
        assert "TiB with optimizer state and buffers" in text
        assert "available; use more servers" in text
        # A limit of our own, in bytes: 100 kB of parameters with momentum do not fit 400 kB.
        monkeypatch.setattr(add_model, "available_memory", lambda: 400_000)
        spec = {"x": ((12_500,), "f8")}
        assert "390.6 KiB are available" in raised(
            lambda: group.add("m", spec, optimizer=md.optim.momentum(0.1)), md.ConfigError
        )


@pytest.mark.ranks(3)
def test_wrong_calls_of_a_client(comm):
    params = {"w": np.zeros((6, 2)), "b": np.zeros(2)}
    with md.parameter_server(comm, params, optimizer=SGD, global_batch=4) as client:
        if client is not None:
            frozen = np.zeros((6, 2))
            frozen.flags.writeable = False
            wrong = [
                (lambda: client.pull("ww"), md.ConfigError, "no parameter 'ww'; did you mean 'w'"),
                (lambda: client.pull({"w": [6]}), md.ConfigError, "outside 0 ... 5"),
                (lambda: client.pull({"w": [0.5]}), md.ConfigError, "1-D integer array"),
                (lambda: client.pull(out={"w": frozen}), md.ConfigError, "read-only"),
                (lambda: client.pull(out={"b": np.zeros(3)}), md.ConfigError, "of shape (2,)"),
                (lambda: client.push({"b": np.zeros(3)}, samples=1), md.ConfigError, "(3,)"),
                (lambda: client.push(params), md.ConfigError, "give samples="),
                (lambda: client.push(params, samples=-1), md.ConfigError, "number, 0 or more"),
            ]
            for work, kind, text in wrong:
                assert text in raised(work, kind)
            for given, got in (([0.0, 0.0], "list"), (0.5, "float"), (([0], [0.0]), "list")):
                assert raised(lambda b=given: client.push({"b": b}, samples=1), md.ConfigError) == (
                    "push 'b': gradients: expected a NumPy, CuPy or DLPack array, got "
                    f"{got}; wrap it: numpy.asarray(x)"
                )
            assert "got a tuple of 3; expected an array, or (rows, values)" in raised(
                lambda: client.push({"b": (0, 1, 2)}, samples=1), md.ConfigError
            )
            client.push(params, samples=2)
            assert "second push in clock 0" in raised(
                lambda: client.push(params, samples=2), md.ProtocolError
            )
            client.clock()
            group = client.group
            assert "call group.pause(tag) on all workers first" in raised(
                lambda: group.add("late", params, optimizer=SGD), md.ProtocolError
            )
            client.close()
            client.close()
            for call in (client.pull, client.clock, lambda: client.push(params, samples=1)):
                assert raised(call, md.ProtocolError) == (
                    "client 'model' is closed; it was used after close()"
                )
    if client is not None:
        assert "closed" in raised(client.pull, md.ProtocolError)
        assert "closed" in raised(lambda: group.pause(1), md.ProtocolError)


def damaged(kind):
    """A message that no server should accept."""
    buffer = np.zeros(protocol.HEADER_BYTES, np.uint8)
    header = protocol.Header(protocol.PULL, pull_words=protocol.ALL)
    if kind == "short":
        return buffer[:5]
    if kind == "clock":
        header = header._replace(clock=3)
    if kind == "model":
        header = header._replace(model=9)
    if kind == "rows":
        buffer = np.zeros(protocol.HEADER_BYTES + 24, np.uint8)
        header = header._replace(pull_words=3, total=buffer.size)
        buffer[-24:].view(np.int64)[:] = 0, 1, 10**6
    header.write(buffer)
    if kind in ("magic", "format"):
        buffer.view(np.int64)[["magic", "format"].index(kind)] = 7
    return buffer


@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("short", "5 bytes from rank 1 are no message"),
        ("magic", "unknown message from rank 1 (0x7)"),
        ("format", "rank 1 speaks message format 7, this rank 2"),
        ("clock", "worker 1 is at clock 3 of 'm', expected 0"),
        ("model", "no model 9 here"),
        ("rows", "asks for rows not held here"),
    ],
)
def test_an_unknown_message_ends_all_ranks(comm, kind, text):
    """A message nobody can read is a ProtocolError on both sides and on all other ranks."""
    start = time.monotonic()

    def run():
        with md.ServerGroup(comm, servers=2) as group:
            client = group.add("m", {"x": np.zeros((100, 2))}, optimizer=SGD)
            if client is None:
                group.serve()
            if comm.rank == 1:
                link = group.link
                tag = link.tag + protocol.TO_SERVER
                link.comm.Send([damaged(kind), MPI.BYTE], group.server_ranks[0], tag)
            for _ in range(10**6):
                client.push_pull({"x": np.ones((100, 2))})

    message = raised(run, md.ProtocolError)
    assert text in message
    assert comm.rank == 2 or message.startswith("parameter server: rank 2 gave up with Protocol")
    assert time.monotonic() - start < 60


@pytest.mark.ranks(4)
@pytest.mark.parametrize("placement", ["dedicated", "colocated"])
def test_an_exception_of_one_worker_reaches_all(comm, placement):
    """Nobody waits for a worker whose own code failed; that rank keeps its own exception."""

    def run():
        with md.parameter_server(
            comm, {"x": np.zeros(5)}, optimizer=SGD, placement=placement
        ) as client:
            if client is not None:
                for step in range(1000):
                    client.push_pull({"x": np.ones(5)})
                    if step == 3 and comm.rank == 1:
                        raise ZeroDivisionError("loss")

    if comm.rank == 1:
        assert raised(run, ZeroDivisionError) == "loss"
    else:
        text = raised(run, md.ProtocolError)
        assert text == "parameter server: rank 1 gave up with ZeroDivisionError: loss"


@pytest.mark.ranks(3)
def test_an_exception_in_an_optimizer_reaches_all(comm):
    """What fails on a server fails everywhere."""

    class Broken:
        elementwise = True

        def init(self, parameters):
            return {}

        def update(self, gradients, state, parameters):
            raise FloatingPointError("overflow")

    def run():
        with md.parameter_server(comm, {"x": np.zeros(5)}, optimizer=Broken()) as client:
            client.push_pull({"x": np.ones(5)})

    if comm.rank == 2:
        assert raised(run, FloatingPointError) == "overflow"
    else:
        assert "rank 2 gave up with FloatingPointError: overflow" in raised(run, md.ProtocolError)


@pytest.mark.ranks(3)
@pytest.mark.parametrize("who", ["workers", "server"])
def test_adding_a_model_on_some_ranks_only(comm, who):
    """Ranks that disagree on the order of calls get an error, not a hang."""

    def run():
        with md.ServerGroup(comm, servers=1) as group:
            client = group.add("m", {"x": np.zeros(5)}, optimizer=SGD)
            if (client is None) == (who == "server"):
                group.add("n", {"x": np.zeros(5)}, optimizer=SGD)
            elif client is not None:
                client.pull()

    text = raised(run, md.ProtocolError)
    assert "all ranks call add, in the same order" in text
