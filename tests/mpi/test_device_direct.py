"""Device arrays are passed to MPI directly if a proof allows it, else through the host (R101).

The device is a stand-in (tests/unit/fake_cupy.py), which does its work only when the program waits
for it. A collective that passes memory to MPI too early thus sends old values, and the sums are
wrong.
"""

import sys
from pathlib import Path

import numpy as np
import pytest

import mpidist as md
from mpidist import arrays
from mpidist.collectives.schedules.algorithms import ALLREDUCE
from mpidist.peers.mixed_arrays import average_state

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))
import fake_cupy

SIZES = (2, 3, 5)
STAGING = {"get", "set", "alloc_pinned"}


@pytest.fixture(params=["direct", "staged"])
def device(comm, request, monkeypatch):
    """The stand-in for cupy, on an MPI that is proved to take its memory, or not."""
    direct = request.param == "direct"
    monkeypatch.setenv("MPIDIST_GPU_DIRECT", "1")
    monkeypatch.setattr(arrays, "_proved", lambda path: direct)
    with fake_cupy.installed() as module:
        module.direct = direct
        yield module
    arrays.set_direct(None)


def queued(device, values):
    """An array of the device whose last addition waits in the stream's queue."""
    x = device.asarray(values - 1)
    x += 1
    return x


def check_way(device, names):
    """Both ways were what the proof said: no staging copy where it is direct."""
    assert bool(STAGING & set(names)) is not device.direct


@pytest.mark.covering
@pytest.mark.ranks(*SIZES)
@pytest.mark.parametrize("algorithm", [*ALLREDUCE, "native", "auto"])
def test_allreduce(comm, device, algorithm):
    values = np.arange(1.0, 2001) + comm.rank
    expected = comm.size * np.arange(1.0, 2001) + sum(range(comm.size))
    md.allreduce(comm, device.asarray(values), algorithm=algorithm)  # the plan is made
    x = queued(device, values)
    fake_cupy.calls.clear()
    assert md.allreduce(comm, x, algorithm=algorithm) is x
    if algorithm != "auto":  # may have chosen the node's own memory, which is on the host
        check_way(device, fake_cupy.calls)
    np.testing.assert_array_equal(x.memory, expected)
    mean = queued(device, values)
    md.allreduce(comm, mean, "mean", algorithm=algorithm, weight=2.0)
    np.testing.assert_allclose(mean.memory, expected / comm.size, rtol=1e-12)
    handle = md.iallreduce(comm, x := queued(device, values), algorithm=algorithm)
    assert handle.wait() is x
    np.testing.assert_array_equal(x.memory, expected)


@pytest.mark.ranks(*SIZES)
def test_what_cannot_lie_where_it_is_goes_through_the_host(comm, device):
    """Strides, narrow floats, and operations that MPI would call back for with device pointers."""
    strided = fake_cupy.ndarray(np.ones((4000, 2))[:, 0])
    md.allreduce(comm, strided, algorithm="ring")
    assert (strided.memory == comm.size).all()
    half = queued(device, np.full(3000, 2, np.float16))
    md.allreduce(comm, half, algorithm="ring")
    assert (half.memory == 2 * comm.size).all()
    for op in ("max", np.hypot):
        x = queued(device, np.full(3000, 1.0 + comm.rank))
        fake_cupy.calls.clear()
        md.allreduce(comm, x, op, algorithm="native")
        assert STAGING & set(fake_cupy.calls)
        best = comm.size if op == "max" else np.sqrt(sum((1.0 + r) ** 2 for r in range(comm.size)))
        np.testing.assert_allclose(x.memory, best, rtol=1e-12)


@pytest.mark.ranks(2)
def test_one_array_on_the_host_and_one_on_the_device(comm, device):
    """`x` and `out` may be on both; also the arrays of a state that ranks average."""
    values, total = np.arange(300.0) + comm.rank, 2 * np.arange(300.0) + 1
    out = device.empty(300, np.float64)
    md.allreduce(comm, values, out=out)
    np.testing.assert_array_equal(out.memory, total)
    out = np.zeros(300)
    md.iallreduce(comm, queued(device, values), out=out).wait()
    np.testing.assert_array_equal(out, total)
    state = {"mean": {"w": device.asarray(values)}, "progress": np.array(float(comm.rank))}
    average_state(comm, state)
    arrays.synchronize(state["mean"]["w"])
    np.testing.assert_array_equal(state["mean"]["w"].memory, total / 2)
    assert state["progress"] == 0.5


@pytest.mark.ranks(2)
def test_a_plan_waits_for_the_stream_of_a_tensor_in_each_call(comm, device):
    """`from_dlpack` lets CuPy's stream wait for the stream of the tensor's library."""
    tensor = Tensor(np.full(300, comm.rank + 1.0))
    with md.plan(comm, tensor, algorithm="ring") as reduce:
        for _ in range(2):
            tensor.memory[...] = comm.rank + 1
            fake_cupy.calls.clear()
            assert reduce() is tensor
            assert fake_cupy.calls[0] == "from_dlpack"
            assert (tensor.memory == 3).all()


class Tensor:
    """A tensor of another library on the device."""

    def __init__(self, memory):
        self.memory = memory

    def __dlpack_device__(self):
        return (2, 0)

    def __dlpack__(self, **settings):
        raise AssertionError("the stand-in for cupy takes the memory itself")


@pytest.mark.ranks(*SIZES)
@pytest.mark.parametrize("algorithm", ["auto", "native"])
def test_the_other_collectives(comm, device, algorithm):
    p, rank = comm.size, comm.rank
    # Longer than what is packed with its header, on the host, in one short message.
    values = np.arange(1.0, 900 * p + 1).reshape(3 * p, 300)
    block = md.reduce_scatter(comm, queued(device, values + rank), algorithm=algorithm)
    total = p * values + sum(range(p))
    np.testing.assert_array_equal(block.memory, total[3 * rank : 3 * rank + 3])
    whole = md.allgather(comm, queued(device, block.memory.copy()), algorithm=algorithm)
    np.testing.assert_array_equal(whole.memory, total)
    x = queued(device, values * (rank + 1))
    md.broadcast(comm, x, root=p - 1, algorithm=algorithm)
    np.testing.assert_array_equal(x.memory, values * p)
    fake_cupy.calls.clear()
    reduced = md.reduce(comm, queued(device, values + rank), root=0, algorithm=algorithm)
    check_way(device, fake_cupy.calls)
    gathered = md.gather(comm, queued(device, values[:2] + rank), root=0, algorithm=algorithm)
    given = queued(device, values) if rank == 0 else None
    out = device.empty((3, 300), np.float64)
    md.scatter(comm, given, root=0, out=out, algorithm=algorithm)
    np.testing.assert_array_equal(out.memory, values[3 * rank : 3 * rank + 3])
    if rank == 0:
        np.testing.assert_array_equal(reduced.memory, total)
        np.testing.assert_array_equal(
            gathered.memory, np.concatenate([values[:2] + r for r in range(p)])
        )
