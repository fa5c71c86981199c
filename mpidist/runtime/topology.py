"""The nodes of a job and their leaders, and a context manager for work that is done once per node.

    rank        0 1 2 3   4 5 6 7        8 ranks on 2 nodes
    node        0 0 0 0   1 1 1 1
    local rank  0 1 2 3   0 1 2 3        the leader of a node is its lowest rank: 0 and 4

A node is a set of ranks that MPI reports as able to share memory. For tests and on laptops, the
ranks of one machine can be divided into groups, and each group counts as a node.
"""

from __future__ import annotations

import operator
import socket
from contextlib import contextmanager

import numpy as np
from mpi4py import MPI

from ..errors import ConfigError, shown
from .agreement.run_on_all import run_on_all, same_on_all
from .communicator import translated_rank
from .context import Context, of

_RECORD = np.dtype([("leader", "i8"), ("host", "S256")])
#: The tag with which the leaders make their communicator. With a tag of its own, the call does not
#: match another `Create_group` that the program makes at the same time.
_LEADERS = 71


class Topology:
    """The nodes of a communicator, and communicators within and between them.

    Collective over `comm`. The method `close` frees the communicators.

    Parameters
    ----------
    comm : MPI.Intracomm
    ranks_per_node : int, optional
        The number of consecutive ranks that are treated as a node, instead of the real nodes. All
        ranks pass the same `ranks_per_node`.

    Attributes
    ----------
    size, rank : int
        The size of `comm`, and the rank of this process in it.
    nodes : int
        The number of nodes.
    node : int
        The node of this rank. Nodes are numbered in the order of their leaders.
    node_of : tuple of int
        The node of each rank.
    hosts : tuple of str
        The host name of each node.
    leaders : tuple of int
        The lowest rank of each node.
    ranks_per_node : int or None
        The argument `ranks_per_node`.
    local_rank, local_size : int
        The position of this rank on its node, and the number of ranks of that node.
    single_host : bool
        Whether all ranks run on one machine. If so, measurements say nothing about a network.
    intra_comm : MPI.Intracomm
        The ranks of this rank's node, in rank order.
    """

    _borrows = False

    def __init__(self, comm: MPI.Comm, ranks_per_node: int | None = None):
        context = of(comm)
        self.size, self.rank = comm.size, comm.rank
        number = _agreed(comm, "Topology", ranks_per_node)
        self.faked, self.ranks_per_node = number is not None, number
        places = getattr(comm, "places", None) if number is None else None  # of an elastic group
        self._borrowed = bool(self._borrows and places and len(set(places)) == 1)
        # MPI has no nonblocking split. A blocking split is safe here, because all ranks have just
        # agreed to call it.
        if self._borrowed:
            self.intra_comm = context.data
        elif number is None:
            self.intra_comm = comm.Split_type(MPI.COMM_TYPE_SHARED, comm.rank)
        else:
            self.intra_comm = comm.Split(comm.rank // number, comm.rank)
        self._comm, self._inter_comm, self._open = comm, MPI.COMM_NULL, True

        if places:
            leaders, hosts = [places.index(place) for place in places], [host for _, host in places]
        else:
            leaders, hosts = _everyone(context, translated_rank(0, self.intra_comm, comm))
        self.leaders = tuple(sorted(set(leaders)))
        node_of = {leader: node for node, leader in enumerate(self.leaders)}
        self.node_of = tuple(node_of[leader] for leader in leaders)
        self.hosts = tuple(hosts[leader] for leader in self.leaders)
        self.nodes = len(self.leaders)
        self.node = self.node_of[self.rank]
        self.local_rank, self.local_size = self.intra_comm.rank, self.intra_comm.size
        # Two machines may have the same host name, but MPI reports them as two nodes. With
        # simulated nodes (`ranks_per_node`), only the host names show on which machine a rank is.
        self.single_host = len(set(self.hosts)) == 1 and (self.faked or self.nodes == 1)

    def __repr__(self):
        here = f"rank {self.rank} is local rank {self.local_rank} of node {self.node}"
        return f"<Topology: {self.describe()}; {here}{'' if self._open else '; closed'}>"

    @property
    def inter_comm(self) -> MPI.Comm:
        """The communicator of nodes' first ranks, in node order; ``MPI.COMM_NULL`` on other ranks.

        Reading this property the first time is collective over the first ranks of all nodes.
        """
        if self._open and self.local_rank == 0 and self._inter_comm == MPI.COMM_NULL:
            everyone = self._comm.Get_group()
            leaders = everyone.Incl(self.leaders)
            self._inter_comm = self._comm.Create_group(leaders, _LEADERS)  # type: ignore
            leaders.Free()
            everyone.Free()
        return self._inter_comm

    def members(self, node: int) -> tuple[int, ...]:
        """Return the ranks of `node` in ascending order."""
        return tuple(rank for rank, of in enumerate(self.node_of) if of == node)

    def describe(self) -> str:
        """Return one line of text, such as ``8 ranks on 2 hosts (n1, n2), 4 per host``."""
        names = list(dict.fromkeys(self.hosts)) if self.faked else list(self.hosts)
        unit = "node" if self.faked else "host"
        where = f"{_count(len(names), 'host')} ({_some(names)})"
        where += f" as {_count(self.nodes, 'node')}" if self.faked else ""
        counts = [self.node_of.count(node) for node in range(self.nodes)]
        low, high = min(counts), max(counts)
        per = f", {low if low == high else f'{low} to {high}'} per {unit}" if self.nodes > 1 else ""
        return f"{_count(self.size, 'rank')} on {where}{per}"

    def close(self) -> None:
        """Free both communicators; a second call does nothing. Collective over `comm`."""
        if self._open and not MPI.Is_finalized():
            if self._inter_comm != MPI.COMM_NULL:
                self._inter_comm.Free()
            if not self._borrowed:
                self.intra_comm.Free()
        self._open = False

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.close()


class _Inside(Topology):
    """The topology that mpidist itself uses on a communicator.

    In an elastic group (ranks that go on after a rank has died) on one node, `intra_comm` is not a
    new communicator, but one that mpidist has already.
    """

    _borrows = True


def topology_of(where: MPI.Comm | Context, ranks_per_node: int | None = None) -> Topology:
    """Return the topology of a communicator. The first call for a communicator is collective.

    `where` is a communicator or its `Context` (mpidist's state for it). If `ranks_per_node` comes
    from the user, the caller must check first that all ranks pass the same value.
    """
    context = where if isinstance(where, Context) else of(where)
    key = ("topology", ranks_per_node)
    if not isinstance(ranks_per_node, int | None) or key not in context.store:
        topology = _Inside(context.comm, ranks_per_node)
        key = ("topology", topology.ranks_per_node)
        context.store.setdefault(key, topology)
    return context.store[key]


def _agreed(comm, doing: str, ranks_per_node) -> int | None:
    """Check that all ranks pass the same `ranks_per_node`, and return it. Collective."""
    facts = same_on_all(comm, doing, lambda: {"ranks_per_node": whole_nodes(ranks_per_node)})
    return facts["ranks_per_node"]


def whole_nodes(ranks_per_node) -> int | None:
    """Return `ranks_per_node` as an int or None; raise ConfigError if it is anything else."""
    if ranks_per_node is None:
        return None
    try:
        number = operator.index(ranks_per_node)
    except TypeError:
        number = 0
    if number < 1:
        raise ConfigError(f"ranks_per_node={shown(ranks_per_node)}; expected a whole number >= 1")
    return number


def _everyone(context: Context, leader: int) -> tuple[list[int], list[str]]:
    """Return, for each rank, the leader of its node and its host name. Collective."""
    mine = np.zeros(1, _RECORD)
    mine["leader"], mine["host"] = leader, socket.gethostname().encode()
    records = np.zeros(context.size, _RECORD)
    target = [records.view(np.uint8), MPI.BYTE]
    context.wait(context.control.Iallgather([mine.view(np.uint8), MPI.BYTE], target).Test)
    hosts = [host.decode(errors="replace") for host in records["host"].tolist()]
    return records["leader"].tolist(), hosts


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _some(names: list[str]) -> str:
    return ", ".join(names if len(names) <= 4 else [*names[:2], "...", names[-1]])


@contextmanager
def node_once(comm: MPI.Intracomm, *, ranks_per_node: int | None = None):
    """Let one rank per node do work such as a download before the other ranks continue.

    Collective over `comm`. On the leader of each node, the ``with`` statement gives True, and the
    body runs at once. On the other ranks, the ``with`` statement gives False, and the body runs
    after all leaders have finished it. If a leader's body raises an exception, all other ranks
    raise an error that names the leader, its host and the cause. If the leader's exception is an
    error of mpidist, the others raise an error of the same class. Otherwise they raise an
    MpidistError.

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

    # The other ranks wait here and leave the cores to the leaders.
    run_on_all(comm, "node_once", outcome)
    if not first:
        yield False
