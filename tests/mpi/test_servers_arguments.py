"""What a push or a group is given is checked before the first message; the group lives on."""

import numpy as np
import pytest

import mpidist as md
from mpidist.errors import ConfigError, MismatchError, MpidistError, ProtocolError

SGD = md.optim.sgd(1.0)
ONES = {"x": np.ones(6)}


def refused(work, kind, text):
    with pytest.raises(kind) as caught:
        work()
    assert text in str(caught.value)


@pytest.mark.ranks(3)
@pytest.mark.parametrize("samples", [float("nan"), 2**70, 2.5, -1, True, "8", 1 << 62])
def test_bad_samples_leave_nothing_behind(comm, samples):
    """The next pull works: no receive was posted, and no server has part of a push."""
    with md.parameter_server(comm, {"x": np.zeros(6)}, servers=1, optimizer=SGD) as client:
        if client is not None:
            for call in (client.push_pull, client.push):
                text = "expected a whole number, 0 or more"
                refused(lambda c=call: c(ONES, samples=samples), ConfigError, text)
            assert client.push_pull(ONES, samples=np.int64(3))["x"].tolist() == [-1.0] * 6


@pytest.mark.ranks(3)
def test_samples_of_some_workers_only(comm):
    """Without a number a push would weigh as one sample; that is refused, with the workers."""
    own = comm.Dup()

    def run():
        with md.parameter_server(own, {"x": np.zeros(6)}, optimizer=SGD) as client:
            client.push_pull(ONES, samples=64 if comm.rank else None)

    with pytest.raises(ProtocolError) as caught:
        run()
    assert "push to 'model' in clock 0: workers [0] gave no samples=" in str(caught.value)
    md.free(own)
    own.Free()


@pytest.mark.ranks(3)
def test_no_samples_count_with_and_without_numbers(comm):
    """A worker without gradients says 0, also where the others give no numbers."""
    with md.parameter_server(comm, {"x": np.zeros(6)}, optimizer=SGD) as client:
        if client is not None:
            got = client.push_pull(ONES, samples=0 if comm.rank else None)
            assert got["x"].tolist() == [-1.0] * 6


@pytest.mark.ranks(3)
@pytest.mark.parametrize("dtype", ["i4", "u8", "?", "c16"])
def test_no_pull_into_integers(comm, dtype):
    with md.parameter_server(comm, {"x": np.full(6, 0.5)}, optimizer=SGD) as client:
        if client is not None:
            out = {"x": np.zeros(6, dtype)}
            refused(lambda: client.pull(out=out), ConfigError, "give a floating-point array")
            refused(lambda: client.push_pull(ONES, out=out), ConfigError, "floating-point array")
            half = {"x": np.zeros(6, "f2")}
            assert client.pull(out=half)["x"].tolist() == [0.5] * 6


@pytest.mark.ranks(3)
@pytest.mark.parametrize("servers", [True, "1", 1.0, None])
def test_what_is_no_number_of_servers(comm, servers):
    refused(lambda: md.ServerGroup(comm, servers=servers), ConfigError, "expected how many")
    strategy = md.ParameterServer(servers=servers)
    refused(lambda: strategy.workers(3), ConfigError, "expected how many")


@pytest.mark.ranks(3)
def test_a_number_of_servers_from_numpy(comm):
    assert md.ParameterServer(servers=np.int64(1)).workers(3) == 2
    with md.parameter_server(comm, ONES, servers=np.int64(1), optimizer=SGD) as client:
        assert (client is None) == (comm.rank == 2)


@pytest.mark.ranks(3)
@pytest.mark.parametrize(
    ("odd", "text"),
    [
        (md.optim.sgd(0.5), "optimizer lr differs"),
        (md.optim.adam(1.0), "optimizer name differs"),
        (md.optim.sgd(lambda step: 0.5), "optimizer"),
    ],
)
@pytest.mark.parametrize("who", [0, 2])
def test_another_optimizer_on_one_rank(comm, odd, text, who):
    """On a worker or on the server: all ranks are told which setting and which rank."""
    optimizer = odd if comm.rank == who else SGD
    with md.ServerGroup(comm, servers=1) as group:
        refused(lambda: group.add("m", ONES, optimizer=optimizer), MismatchError, text)
        refused(
            lambda: group.add("m", ONES, optimizer=SGD, nonfinite="dorp"), ConfigError, "nonfinite"
        )
        group.add("m", ONES, optimizer=SGD)


@pytest.mark.ranks(3)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", ["f2", "f4", "f8"])
def test_a_push_that_is_not_finite_raises_on_its_worker(comm, value, dtype):
    """Nothing is sent, so the worker may push again; the others notice nothing."""
    start = {"x": np.zeros(6, dtype), "y": np.zeros(2, dtype)}
    with md.parameter_server(comm, start, optimizer=SGD) as client:
        if client is not None:
            good = {name: np.ones_like(array) for name, array in start.items()}
            bad = {"x": np.ones(6, dtype), "y": np.array([1, value], dtype)}
            if comm.rank == 1:
                for call in (client.push, client.push_pull):
                    refused(
                        lambda c=call: c(bad), MpidistError,
                        "gradient 'y' has 1 of 2 values that are not finite, the first at index 1",
                    )  # fmt: skip
            assert client.push_pull(good)["y"].tolist() == [-1.0] * 2


@pytest.mark.ranks(3)
def test_large_numbers_are_finite(comm):
    """Their sum is not; each of them is."""
    with md.parameter_server(comm, {"x": np.zeros(4, "f4")}, optimizer=SGD) as client:
        if client is not None:
            big = np.array([3e38, 3e38, -3e38, 1], "f4")
            assert client.push_pull({"x": big})["x"].tolist() == (-big).tolist()


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("dtype", "big"), [("f2", 70000), ("f2", 1e5), ("f4", -1e39)])
def test_a_gradient_that_is_infinite_in_the_dtype_of_the_parameters(comm, dtype, big):
    """The gradient is finite as it is given, and its message would not be."""
    with md.parameter_server(comm, {"x": np.zeros(4, dtype)}, optimizer=SGD) as client:
        if client is not None:
            gradient, bits = np.array([1, 1, big, 1]), 8 * int(dtype[1])
            with pytest.raises(MpidistError, match=f"1 of 4 .* index 2, as float{bits};"):
                client.push({"x": gradient})
            with pytest.raises(MpidistError, match="not finite"):
                client.repeat_push_pull({"x": gradient}, out={}, samples=None, known=())
            assert (client.push_pull({"x": np.ones(4)})["x"] == -1).all()


@pytest.mark.ranks(3)
@pytest.mark.parametrize("mode", [md.BSP(), md.SSP(0), md.ASP()], ids=str)
@pytest.mark.parametrize("samples", [None, 4])
def test_dropping_what_is_not_finite(comm, mode, samples):
    """Such a push counts 0 samples: the others' gradients are the step."""
    with md.parameter_server(
        comm, {"x": np.zeros(6)}, optimizer=SGD, consistency=mode, nonfinite="drop",
        global_batch=None if samples is None else 8,
    ) as client:  # fmt: skip
        if client is not None:
            for clock in range(4):
                bad = comm.rank == 1 and clock == 2
                client.push_pull({"x": np.full(6, np.nan if bad else 1.0)}, samples=samples)
            assert client.stats["nonfinite"] == (comm.rank == 1)
            client.group.barrier()
            # Under BSP the mean of the clock is that of the other one.
            expected = -4.0 if mode.merges else -3.5
            assert client.pull()["x"].tolist() == [expected] * 6
