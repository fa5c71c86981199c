"""Tensors of bfloat16, which DLPack cannot exchange, in collectives, arena, servers and store."""

import ml_dtypes
import numpy as np
import pytest

import mpidist as md
from mpidist.arrays import as_array
from mpidist.collectives.engines.node_barrier import memory_of
from mpidist.gradients.exchange import Gradients
from mpidist.runtime.context import of

BF16 = np.dtype(ml_dtypes.bfloat16)
#: Sums of three of these are rounded otherwise when each partial sum is.
VALUES = np.array([1.0, 257.0, 1 / 3, 3.14159], np.float32)


def tensor(torch, values):
    return torch.from_numpy(np.array(values, np.float32)).to(torch.bfloat16)


def exact(values):
    """A sum in single, rounded once."""
    return np.sum([np.float32(v.astype(BF16)) for v in values], axis=0, dtype=np.float32)


@pytest.mark.ranks(2, 3)
def test_collectives(comm, torch):
    """Issue 10 point 10: in place, over the tensor's own memory."""
    everyone = [VALUES * (rank + 1) for rank in range(comm.size)]
    for op, total in (("sum", 1), ("mean", comm.size)):
        for algorithm in ("auto", "native", "ring", "node"):
            x = tensor(torch, everyone[comm.rank])
            assert md.allreduce(comm, x, op, algorithm=algorithm) is x
            expected = (exact(everyone) / np.float32(total)).astype(BF16)
            assert as_array(x).tobytes() == expected.tobytes()
    x = tensor(torch, everyone[comm.rank])
    md.broadcast(comm, x, root=1)
    assert as_array(x).tobytes() == everyone[1].astype(BF16).tobytes()
    whole = md.allgather(comm, tensor(torch, everyone[comm.rank]))
    assert whole.tobytes() == np.concatenate(everyone).astype(BF16).tobytes()
    whole = tensor(torch, np.concatenate(everyone)) if comm.rank == 1 else None
    block = md.scatter(comm, whole, root=1)
    assert block.tobytes() == everyone[comm.rank].astype(BF16).tobytes()


@pytest.mark.ranks(2, 3)
def test_arena(comm, torch):
    """Dtypes of torch are taken, and the name alone."""
    for kind in (torch.bfloat16, "bfloat16"):
        with md.Arena(comm, {"w": ((4,), kind), "b": ((2,), torch.float32)}) as arena:
            assert arena["w"].dtype == BF16
            arena["w"][...] = VALUES * (comm.rank + 1)
            md.allreduce(comm, arena)
            expected = exact([VALUES * (rank + 1) for rank in range(comm.size)]).astype(BF16)
            assert arena["w"].tobytes() == expected.tobytes()


@pytest.mark.ranks(3)
@pytest.mark.parametrize("ranks_per_node", [None, 1])
def test_gradients_are_scaled_in_single(comm, ranks_per_node):
    """A third has no bfloat16: the mean of equal gradients was 0.2 % too long."""
    if ranks_per_node:
        memory_of(of(comm), ranks_per_node)
    gradients = Gradients(comm, {"w": np.zeros(500, BF16)})
    for _ in range(3):
        gradients.begin(1 / 3)
        gradients.views["w"][...] = 127
        gradients.ready("w")
        gradients.reduce(comm.rank)
        assert (gradients.views["w"] == 127).all()
        assert gradients.extras[0] == 3
    gradients.close()


@pytest.mark.ranks(3)
def test_servers(comm, torch):
    """Pulled into a tensor, pushed from one; rounded once per update."""
    optimizer = md.optim.sgd(0.5)
    with md.ServerGroup(comm, servers=1) as group:
        client = group.add(
            "m", {"w": tensor(torch, VALUES)}, consistency=md.BSP(), optimizer=optimizer
        )
        if client is not None:
            out = tensor(torch, np.zeros(4))
            for _ in range(2):
                client.push({"w": tensor(torch, np.full(4, 2.0))}, samples=1)
                client.clock()
            client.pull(out={"w": out})
            expected = VALUES.astype(BF16)
            for _ in range(2):
                expected = (expected - BF16.type(1)).astype(BF16)
            assert as_array(out).tobytes() == expected.tobytes()


@pytest.mark.ranks(1, 2)
def test_store(comm, torch, folder):
    """Saved from tensors, restored into tensors, in place, bit for bit."""
    state = {"model": {"w": tensor(torch, VALUES), "step": 7}}
    with md.CheckpointStore(comm, folder) as store:
        store.save(1, state)
        like = {"model": {"w": tensor(torch, np.zeros(4)), "step": 0}}
        step, restored = store.restore(like=like)
        assert step == 1
        assert restored["model"]["step"] == 7
        assert as_array(like["model"]["w"]).tobytes() == VALUES.astype(BF16).tobytes()
    assert md.load(folder)["model"]["w"].dtype == BF16
