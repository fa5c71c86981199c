"""Topology and node_once on real and faked nodes; a leader's failure raises on all ranks."""

import os
import socket
import time

import numpy as np
import pytest
from mpi4py import MPI

import mpidist as md
from mpidist.errors import ConfigError, MismatchError, MpidistError

SIZES = (1, 2, 3, 5, 8)


@pytest.mark.ranks(*SIZES)
def test_one_host_is_one_node(comm):
    """R15, R64: a laptop is a single host, and says so."""
    with md.Topology(comm) as topology:
        assert (topology.size, topology.rank) == (comm.size, comm.rank)
        assert (topology.nodes, topology.node, topology.leaders) == (1, 0, (0,))
        assert topology.hosts == (socket.gethostname(),)
        assert topology.single_host
        assert (topology.local_rank, topology.local_size) == (comm.rank, comm.size)
        assert topology.node_of == (0,) * comm.size
        assert topology.members(0) == tuple(range(comm.size))
        assert topology.describe().startswith(f"{comm.size} rank")
        assert f"on 1 host ({socket.gethostname()})" in topology.describe()


@pytest.mark.ranks(*SIZES)
@pytest.mark.parametrize("per_node", [1, 2, 3, 20])
def test_faked_nodes(comm, per_node):
    """R64, R152: nodes, leaders and local ranks are consecutive groups; the last may be smaller."""
    with md.Topology(comm, ranks_per_node=per_node) as topology:
        nodes = -(-comm.size // per_node)
        assert topology.nodes == nodes
        assert topology.node_of == tuple(rank // per_node for rank in range(comm.size))
        assert topology.leaders == tuple(range(0, comm.size, per_node))
        assert topology.local_rank == comm.rank % per_node
        assert topology.local_size == len(topology.members(topology.node))
        assert topology.single_host
        assert topology.intra_comm.allreduce(1) == topology.local_size
        assert topology.intra_comm.rank == topology.local_rank
        if topology.local_rank == 0:
            assert topology.inter_comm.rank == topology.node
            assert topology.inter_comm.size == nodes
        else:
            assert topology.inter_comm == MPI.COMM_NULL
        assert f"as {nodes} node" in topology.describe()


@pytest.mark.ranks(1, 4)
def test_close_twice(comm):
    topology = md.Topology(comm, np.int64(2))
    topology.close()
    topology.close()
    assert topology.intra_comm == MPI.COMM_NULL


@pytest.mark.ranks(1, 3)
@pytest.mark.parametrize("bad", [0, -1, 2.5, "2"])
def test_bad_ranks_per_node_on_all_ranks(comm, bad):
    with pytest.raises(ConfigError, match=r"ranks_per_node=.*whole number"):
        md.Topology(comm, ranks_per_node=bad)


@pytest.mark.ranks(3)
def test_differing_ranks_per_node_is_told_to_all(comm):
    with pytest.raises(
        MismatchError, match="Topology: ranks_per_node differs: rank 2: 3, ranks 0,1: 2"
    ):
        md.Topology(comm, ranks_per_node=3 if comm.rank == 2 else 2)


@pytest.mark.ranks(*SIZES)
def test_node_once_leaders_first(comm, tmp_path):
    """R144: one rank per node unpacks, the others find it done."""
    folder = comm.bcast(str(tmp_path))
    with md.node_once(comm, ranks_per_node=2) as first:
        mine = os.path.join(folder, str(comm.rank // 2))  # noqa: PTH118
        if first:
            time.sleep(0.1)
            with open(mine, "x"):  # noqa: PTH123
                pass
        assert os.path.exists(mine)  # noqa: PTH110
    firsts = comm.allgather(first)
    assert firsts == [rank % 2 == 0 for rank in range(comm.size)]


@pytest.mark.ranks(*SIZES)
def test_node_once_failure_is_everybodys(comm):
    """R144, R97: the failing leader keeps its exception, the rest learn rank, host and cause."""
    failing = 2 if comm.size > 2 else 0
    ran = []
    # fmt: off
    with pytest.raises((MpidistError, FileNotFoundError)) as caught:  # noqa: PT012, SIM117
        with md.node_once(comm, ranks_per_node=2) as first:
            ran.append(first)
            if comm.rank == failing:
                raise FileNotFoundError("no data.tar\nin sight")
    if comm.rank == failing:
        assert isinstance(caught.value, FileNotFoundError)
    else:
        host = socket.gethostname()
        text = f"node_once: rank {failing} of {comm.size} ({host}): FileNotFoundError: "
        assert str(caught.value) == text + "no data.tar in sight"
        assert caught.value.everywhere
        assert ran == ([True] if comm.rank % 2 == 0 else [])
    assert comm.allreduce(1) == comm.size
