"""The states and folders for tests of copies on nodes, in which a folder stands for a node."""

import numpy as np

import mpidist as md
from mpidist.checkpoint import histories
from mpidist.checkpoint.write.save import Save


def state_of(comm, step):
    """Whole arrays, pieces of two kinds, and an extra that one rank alone knows."""
    w = np.arange(5000.0) * step
    box = md.Shard(
        np.full((2, 30), step + comm.rank, "f4"), (2 * comm.size, 30), (2 * comm.rank, 0)
    )
    flat = md.Shard(np.full(7, step - comm.rank, "f8"), (7 * comm.size,), 7 * comm.rank)
    more = {"seed": 3} if comm.rank == comm.size - 1 else {}
    return {"w": w, "n": np.int64(step), "own": {"box": box, "flat": flat}, "step": step, **more}


def blank(comm):
    state = state_of(comm, 0)
    for array in (state["w"], state["own"]["box"].array, state["own"]["flat"].array):
        array[...] = -1
    return state


def same(comm, found, step):
    want = state_of(comm, step)
    assert found["step"] == found["n"] == step
    assert found["seed"] == 3, "every rank gets all extras"
    assert found["w"].tobytes() == want["w"].tobytes()
    for name in ("box", "flat"):
        assert found["own"][name].array.tobytes() == want["own"][name].array.tobytes()


class Place:
    """A shared folder and two nodes with a folder each."""

    def __init__(self, comm, folder):
        self.comm, self.shared = comm, folder / "shared"
        self.nodes = [folder / "node0", folder / "node1"]
        self.mine = self.nodes[comm.rank * 2 // comm.size]

    def store(self, comm=None, **options):
        return md.TieredStore(comm or self.comm, self.shared, local=self.mine, **options)

    def copies(self):
        """The steps that each node holds."""
        return [sorted(int(p.name[5:17]) for p in node.glob("*/step-*")) for node in self.nodes]

    def killed_before_the_copy(self, step, monkeypatch, state=None):
        """What a job leaves that dies when its nodes hold `step` and the shared folder does not."""
        state = state_of(self.comm, step) if state is None else state
        with monkeypatch.context() as patch:
            patch.setattr(Save, "start", lambda self: None)
            store = self.store()
            store.restore(blank(self.comm))
            store.save(step, state)
            store.__exit__(KeyError, None, None)
        self.comm.Barrier()
        assert histories.all_steps(str(self.shared)) == [1]

    def alone(self, work):
        """Rank 0 does something to the files."""
        self.comm.Barrier()
        if self.comm.rank == 0:
            work()
        self.comm.Barrier()
