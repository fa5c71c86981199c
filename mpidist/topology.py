"""Where the ranks are: nodes, their leaders, and one helper for work done once per node.

    rank        0 1 2 3   4 5 6 7        8 ranks on 2 nodes
    node        0 0 0 0   1 1 1 1
    local rank  0 1 2 3   0 1 2 3        the leader of a node is its lowest rank: 0 and 4

A node is a set of ranks that can share memory, as MPI sees it; tests and laptops can fake nodes
by cutting the ranks into groups. A "worker" or "server" is a role of one rank, never a machine.
"""

from __future__ import annotations

import operator
import socket
from contextlib import contextmanager

from mpi4py import MPI

from mpidist.errors import ConfigError, MismatchError, MpidistError
from mpidist.waiting import wait_until


class Topology:
    """The nodes of a communicator, and communicators within and between them.

    Collective over `comm`. Makes two communicators that `close` frees.

    Parameters
    ----------
    comm : MPI.Intracomm
    ranks_per_node : int, optional
        Fake nodes of that many consecutive ranks instead of the real ones. Equal on all ranks.

    Attributes
    ----------
    size, rank : int
    nodes : int
        How many nodes there are.
    node : int
        Mine. Nodes are numbered in the order of their leaders.
    node_of : tuple of int
        Rank -> node.
    hosts : tuple of str
        Node -> host name.
    leaders : tuple of int
        Node -> its lowest rank.
    ranks_per_node : int or None
        What was asked for.
    local_rank, local_size : int
        My place on my node, and how many ranks it has.
    single_host : bool
        One machine holds all ranks: what is measured there says nothing about a network.
    intra_comm : MPI.Intracomm
        The ranks of my node, in rank order.
    inter_comm : MPI.Intracomm
        The leaders, in node order; ``MPI.COMM_NULL`` on other ranks.
    """

    def __init__(self, comm: MPI.Comm, ranks_per_node: int | None = None):
        self.size, self.rank = comm.size, comm.rank
        group = _agreed(comm, ranks_per_node)
        self.faked, self.ranks_per_node = group is not None, group
        if group is None:
            self.intra_comm = comm.Split_type(MPI.COMM_TYPE_SHARED, comm.rank)
        else:
            self.intra_comm = comm.Split(comm.rank // group, comm.rank)
        leader = self.intra_comm.bcast(comm.rank, root=0)
        self.inter_comm = comm.Split(0 if leader == comm.rank else MPI.UNDEFINED, comm.rank)
        self._open = True

        everyone = comm.allgather((leader, socket.gethostname()))
        self.leaders = tuple(sorted({leader for leader, _ in everyone}))
        number = {leader: node for node, leader in enumerate(self.leaders)}
        self.node_of = tuple(number[leader] for leader, _ in everyone)
        self.hosts = tuple(everyone[leader][1] for leader in self.leaders)
        self.nodes = len(self.leaders)
        self.node = self.node_of[self.rank]
        self.local_rank, self.local_size = self.intra_comm.rank, self.intra_comm.size
        # Two machines of one name are two nodes to MPI; faked nodes are told apart by name only.
        self.single_host = len(set(self.hosts)) == 1 and (self.faked or self.nodes == 1)

    def members(self, node: int) -> tuple[int, ...]:
        """Return the ranks of `node`, ascending. Local."""
        return tuple(rank for rank, of in enumerate(self.node_of) if of == node)

    def describe(self) -> str:
        """Return one line: ``8 ranks on 2 hosts (n1, n2), 4 per host``. Local."""
        if self.faked:
            names = list(dict.fromkeys(self.hosts))
            where = f"{_count(len(names), 'host')} ({_some(names)}) as {_count(self.nodes, 'node')}"
            unit = "node"
        else:
            where = f"{_count(self.nodes, 'host')} ({_some(self.hosts)})"
            unit = "host"
        counts = [self.node_of.count(node) for node in range(self.nodes)]
        low, high = min(counts), max(counts)
        per = f", {low if low == high else f'{low} to {high}'} per {unit}" if self.nodes > 1 else ""
        return f"{_count(self.size, 'rank')} on {where}{per}"

    def close(self) -> None:
        """Free both communicators; a second call does nothing. Collective over `comm`."""
        if self._open and not MPI.Is_finalized():
            if self.inter_comm != MPI.COMM_NULL:
                self.inter_comm.Free()
            self.intra_comm.Free()
        self._open = False

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.close()


def _agreed(comm, ranks_per_node) -> int | None:
    """Check `ranks_per_node` on all ranks together, so that nobody is left alone in a split."""
    given = comm.allgather(repr(ranks_per_node))
    if len(set(given)) > 1:
        shown = ", ".join(f"rank {rank} {text}" for rank, text in enumerate(given[:8]))
        raise MismatchError(f"Topology: ranks_per_node differs: {shown}; pass one value everywhere")
    if ranks_per_node is None:
        return None
    try:
        number = operator.index(ranks_per_node)
    except TypeError:
        number = 0
    if number < 1:
        raise ConfigError(f"Topology: ranks_per_node={given[0]}; expected a whole number >= 1")
    return number


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _some(names) -> str:
    names = list(names)
    if len(names) > 4:
        names = [*names[:2], "...", names[-1]]
    return ", ".join(names)


@contextmanager
def node_once(comm: MPI.Intracomm, *, ranks_per_node: int | None = None):
    """Let one rank of each node do per-node work (download, unpack, compile) before the others.

    Collective over `comm`. The value of the ``with`` is True on each node's leader, which runs
    the body at once, and False elsewhere: those ranks enter the body when all leaders are
    through. Where a leader's body raises, that exception goes on there, and all other ranks raise
    MpidistError naming that rank, its host and what went wrong.

    >>> with md.node_once(comm) as first:
    ...     if first:
    ...         unpack()
    """
    with Topology(comm, ranks_per_node) as topology:
        first = topology.local_rank == 0
        failure = None
        if first:
            try:
                yield True
            except BaseException as error:
                failure = error
        failed = _outcomes(comm, failure)
    if failure is not None:
        raise failure
    if failed:
        raise _failed_elsewhere(failed)
    if not first:
        yield False


def _outcomes(comm, failure) -> list[tuple[int, str, str]]:
    """Wait for all leaders without burning the cores they work on; return who failed and how."""
    arrived = comm.Ibarrier()
    wait_until(arrived.Test)
    mine = None
    if failure is not None:
        text = " ".join(f"{type(failure).__name__}: {failure}".split())
        mine = (comm.rank, socket.gethostname(), text)
    return [entry for entry in comm.allgather(mine) if entry is not None]


def _failed_elsewhere(failed) -> MpidistError:
    rank, host, text = failed[0]
    more = f" (and on {len(failed) - 1} more)" if len(failed) > 1 else ""
    error = MpidistError(f"node_once: rank {rank} on {host}: {text}{more}")
    error.everywhere = True  # all ranks raise together; one of them speaks,
    error.consequence = True  # but the leader, who knows the cause, goes first
    return error
