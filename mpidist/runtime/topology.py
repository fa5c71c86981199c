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

import numpy as np
from mpi4py import MPI

from ..errors import ConfigError, shown
from .agreement.run_on_all import run_on_all, same_on_all
from .context import Context, of

_RECORD = np.dtype([("leader", "i8"), ("host", "S256")])
#: Tells the making of the leaders' communicator from others that a program may make meanwhile.
_LEADERS = 71


class Topology:
    """The nodes of a communicator, and communicators within and between them.

    Collective over `comm`. Makes a communicator, and another on first use, that `close` frees.

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
    """

    def __init__(self, comm: MPI.Comm, ranks_per_node: int | None = None):
        context = of(comm)
        self.size, self.rank = comm.size, comm.rank
        number = _agreed(comm, "Topology", ranks_per_node)
        self.faked, self.ranks_per_node = number is not None, number
        # MPI has no polled split. This one blocks, and all ranks are here: they have agreed on it.
        if number is None:
            self.intra_comm = comm.Split_type(MPI.COMM_TYPE_SHARED, comm.rank)
        else:
            self.intra_comm = comm.Split(comm.rank // number, comm.rank)
        self._comm, self._inter_comm = comm, MPI.COMM_NULL
        self._open = True

        leaders, hosts = _everyone(context, _leader(comm, self.intra_comm))
        self.leaders = tuple(sorted(set(leaders)))
        node_of = {leader: node for node, leader in enumerate(self.leaders)}
        self.node_of = tuple(node_of[leader] for leader in leaders)
        self.hosts = tuple(hosts[leader] for leader in self.leaders)
        self.nodes = len(self.leaders)
        self.node = self.node_of[self.rank]
        self.local_rank, self.local_size = self.intra_comm.rank, self.intra_comm.size
        # Two machines of one name are two nodes to MPI; faked nodes are told apart by name only.
        self.single_host = len(set(self.hosts)) == 1 and (self.faked or self.nodes == 1)

    def __repr__(self):
        here = f"rank {self.rank} is local rank {self.local_rank} of node {self.node}"
        return f"<Topology: {self.describe()}; {here}{'' if self._open else '; closed'}>"

    @property
    def inter_comm(self) -> MPI.Comm:
        """The leaders, in node order; ``MPI.COMM_NULL`` on other ranks.

        Made on first use, which is collective over the leaders.
        """
        if self._open and self.local_rank == 0 and self._inter_comm == MPI.COMM_NULL:
            everyone = self._comm.Get_group()
            leaders = everyone.Incl(self.leaders)
            self._inter_comm = self._comm.Create_group(leaders, _LEADERS)  # type: ignore
            leaders.Free()
            everyone.Free()
        return self._inter_comm

    def members(self, node: int) -> tuple[int, ...]:
        """Return the ranks of `node`, ascending."""
        return tuple(rank for rank, of in enumerate(self.node_of) if of == node)

    def describe(self) -> str:
        """Return one line: ``8 ranks on 2 hosts (n1, n2), 4 per host``."""
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
        """Free what was made; a second call does nothing. Collective over `comm`."""
        if self._open and not MPI.Is_finalized():
            if self._inter_comm != MPI.COMM_NULL:
                self._inter_comm.Free()
            self.intra_comm.Free()
        self._open = False

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.close()


def topology_of(where: MPI.Comm | Context, ranks_per_node: int | None = None) -> Topology:
    """Return the topology that a communicator keeps; made on first use. Collective on first use.

    `where` is a communicator or its context, which closes it. Ranks that may have passed different
    values compare them before they come here.
    """
    context = where if isinstance(where, Context) else of(where)
    key = ("topology", ranks_per_node)
    if not isinstance(ranks_per_node, int | None) or key not in context.store:
        topology = Topology(context.comm, ranks_per_node)
        key = ("topology", topology.ranks_per_node)
        context.store.setdefault(key, topology)
    return context.store[key]


def _agreed(comm, doing: str, ranks_per_node) -> int | None:
    """Check `ranks_per_node` on all ranks together, so that nobody is left alone in a split."""
    facts = same_on_all(comm, doing, lambda: {"ranks_per_node": whole_nodes(ranks_per_node)})
    return facts["ranks_per_node"]


def whole_nodes(ranks_per_node) -> int | None:
    """Return `ranks_per_node` as a plain number; ConfigError unless it is one, or None."""
    if ranks_per_node is None:
        return None
    try:
        number = operator.index(ranks_per_node)
    except TypeError:
        number = 0
    if number < 1:
        raise ConfigError(f"ranks_per_node={shown(ranks_per_node)}; expected a whole number >= 1")
    return number


def _leader(comm: MPI.Comm, intra_comm: MPI.Comm) -> int:
    """Return the rank in `comm` of the lowest rank of a node."""
    mine, everyone = intra_comm.Get_group(), comm.Get_group()
    (leader,) = mine.Translate_ranks([0], everyone)
    mine.Free()
    everyone.Free()
    return leader


def _everyone(context: Context, leader: int) -> tuple[list[int], list[str]]:
    """Return the leader and the host name of each rank. Collective, polled."""
    mine = np.zeros(1, _RECORD)
    mine["leader"], mine["host"] = leader, socket.gethostname().encode()
    records = np.zeros(context.size, _RECORD)
    target = [records.view(np.uint8), MPI.BYTE]
    context.wait(context.control.Iallgather([mine.view(np.uint8), MPI.BYTE], target).Test)
    hosts = [host.decode(errors="replace") for host in records["host"].tolist()]
    return records["leader"].tolist(), hosts


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
    an error that names that rank, its host and what went wrong: of the same class where that is
    one of mpidist, else MpidistError.

    >>> with md.node_once(comm) as first:
    ...     if first:
    ...         unpack()
    """
    number = _agreed(comm, "node_once", ranks_per_node)
    first = topology_of(comm, number).local_rank == 0
    failure = None
    if first:
        try:
            yield True
        except BaseException as error:
            failure = error

    def outcome() -> None:
        if failure is not None:
            raise failure

    # The others wait here, without burning the cores that the leaders work on.
    run_on_all(comm, "node_once", outcome)
    if not first:
        yield False
