"""A run makes few communicators, because MPI has a limited number of them."""

import numpy as np
import pytest
from mpi4py import MPI
from test_train import fit

import mpidist as md
from mpidist.runtime import failure
from mpidist.runtime.context import contexts, of
from mpidist.runtime.topology import topology_of


@pytest.mark.ranks(1, 3)
def test_one_topology_for_each_communicator(comm):
    """Whoever asks gets the one that the context keeps; `md.Topology` makes its own."""
    first = topology_of(comm)
    assert topology_of(comm) is first
    assert topology_of(of(comm), None) is first
    faked = topology_of(comm, 1)
    assert (faked.nodes, first.nodes) == (comm.size, 1)
    assert topology_of(comm, 1) is faked
    with md.Topology(comm) as own:
        assert own.intra_comm != first.intra_comm
    with md.Arena(comm, {"w": ((3,), "f4")}) as arena:
        assert arena.topology is first
    assert first.intra_comm.allreduce(1) == comm.size
    md.free(comm)
    assert comm.handle not in contexts


MAKERS = ("Dup", "Dup_with_info", "Idup", "Idup_with_info", "Clone", "Split", "Split_type",
          "Create", "Create_group")  # fmt: skip


def counting(made):
    """A communicator class that notes what is made of it, and of what was made of it."""

    def noted(name):
        def method(self, *args, **kwargs):
            made.append(name)
            return getattr(super(Counted, self), name)(*args, **kwargs)

        return method

    methods = {name: noted(name) for name in MAKERS if hasattr(MPI.Intracomm, name)}
    Counted = type("Counted", (MPI.Intracomm,), methods)
    return Counted


@pytest.mark.ranks(1, 3, further=(2,))
def test_a_run_with_a_store_makes_few_communicators(comm, folder):
    """At most four: two of the context, the ranks of a node, once per job the exit barrier."""
    made: list[str] = []
    exit_barrier = failure._exit_barrier != MPI.COMM_NULL
    counted = counting(made)(comm)
    fit(counted, checkpoint=folder / "store", checkpoint_every=3)
    expected = ["Idup", "Idup", "Split_type"]
    if not exit_barrier and comm.size == MPI.COMM_WORLD.size > 1:
        expected.append("Idup")
    assert sorted(made) == sorted(expected)


@pytest.mark.ranks(2)
def test_a_store_makes_none_of_its_own(comm, folder):
    made: list[str] = []
    counted = counting(made)(comm)
    of(counted)
    made.clear()
    with md.CheckpointStore(counted, folder, writers="node") as store:
        store.save(1, {"a": md.Shard(np.ones(1), (2,), comm.rank)})
        store.save_async(2, {"a": md.Shard(np.ones(1), (2,), comm.rank)})
        assert store.restore()[0] == 2
    assert made == ["Split_type"]  # the topology, which everything on this communicator shares
