"""The memory that the workers and the servers of one host share instead of sending data.

::

    part of a worker   | a line for each server of the host | small push | ring of pieces |
    part of a server   | a line for each worker of the host | small answer | parameters |

A line is a cache line with counters. Each part is written only by the rank that owns it, so no lock
is needed: a rank writes data and then its counter, and another rank reads the counter and then the
data. The memory leaves no file behind, even if a rank is killed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from ... import events
from ...collectives.engines.node_barrier import LINE, ORDERED
from ...errors import ConfigError
from ...runtime import ulfm
from ...runtime.node_memory.arena import Segment
from ...runtime.node_memory.cross_memory import CrossMemory
from ...runtime.topology import Topology, topology_of
from ..layout.placement import ServerLayout
from ..layout.routing import WholeShard
from ..link import Link
from ..protocol import HEADER_BYTES, MESSAGE_BYTES
from .wire_pieces import WINDOW, cut_shard

#: Models of at most this many bytes have memory for whole messages, see `bound_push_pull`.
SMALL_BYTES = 256 << 10

#: Whether ranks of one host share memory. Tests and benchmarks change it, on all ranks.
enabled = True

_ALIGNED = 64


class NodeRanks(NamedTuple):
    """The ranks of a group on this rank's host."""

    topology: Topology | None = None
    workers: tuple[int, ...] = ()
    # Rank of a server -> its number.
    servers: Mapping[int, int] = {}
    # Why these ranks share no memory.
    why: str = ""


def node_ranks(comm, servers: Sequence[int], workers: Sequence[int]) -> NodeRanks:
    """Return which workers and servers of a group are on this host. Collective over `comm`."""
    if not enabled:
        return NodeRanks(why="switched off")
    if not ORDERED:
        return NodeRanks(why="the processor may reorder writes to memory")
    if ulfm.current is not None or getattr(comm, "places", None):
        return NodeRanks(why="an elastic run sends messages")
    topology = topology_of(comm)
    here = set(topology.members(topology.node))
    return NodeRanks(
        topology,
        tuple(rank for rank in workers if rank in here),
        {rank: number for number, rank in enumerate(servers) if rank in here},
    )


def count_shared(link: Link, nbytes: int) -> None:
    """Add `nbytes` to the counts of bytes that this rank has written into shared memory."""
    link.counters.shared_bytes += nbytes
    events.total.shared_bytes += nbytes


class NodePair(NamedTuple):
    """The memory that one worker and one server share for one model."""

    # Counters of the worker and of the server, in a cache line each.
    rung: memoryview
    answered: memoryview
    # For a small model, the memory of a push and of its answer.
    push: np.ndarray | None
    answer: np.ndarray | None
    # For a large model, the memory of `WINDOW` pieces, used again and again.
    slots: list[np.ndarray]
    # For a large model: number of a tensor -> (first element that the server holds, its values).
    parameters: Mapping[int, tuple[int, np.ndarray]]


# `node_barrier` explains on which processors writes and reads keep their order.
class NodeShare:
    """The shared memory of one model on one host. All ranks of the host make it together.

    If it cannot be allocated, all ranks of the host raise ConfigError.
    """

    def __init__(
        self, node: NodeRanks, layout: ServerLayout, piece_bytes: int, wait: Callable
    ) -> None:
        self._layout, self._node = layout, node
        whole = [WholeShard(layout, k) for k in range(len(layout.pieces))]
        sizes = [HEADER_BYTES + shard.nbytes for shard in whole]
        small = sum(sizes) <= SMALL_BYTES and max(sizes) <= MESSAGE_BYTES
        self._cut = {rank: cut_shard(layout, k, piece_bytes) for rank, k in node.servers.items()}
        # The parameters of a server that gets pushes in pieces are in this memory.
        self.in_pieces = any(len(pieces) > 1 for pieces in self._cut.values())
        self._messages = {rank: small * sizes[k] for rank, k in node.servers.items()}
        assert node.topology is not None
        members = node.topology.members(node.topology.node)
        plans = [_Plan(self._sizes(rank)) for rank in members]
        segment = Segment(node.topology.intra_comm, [plan.nbytes for plan in plans], wait)
        parts = zip(members, plans, segment.parts, strict=True)
        # Reads gradients in the memory of workers, if the kernel allows it.
        self.cross, self.why = _cross_memory(node.topology, wait) if self.in_pieces else (None, "")
        self._memory = {rank: plan.views(part) for rank, plan, part in parts}
        self._pairs: dict[tuple[int, int], NodePair] = {}

    def has(self, worker: int, server: int) -> bool:
        """Whether the ranks `worker` and `server` share memory."""
        return worker in self._node.workers and server in self._node.servers

    def transport(self, rank: int, whole_pushes: str, stale: str) -> str:
        """Return a text on how data are sent between `rank` and other ranks; see `Transport`."""
        text, here = "shared memory", self._node
        peers = [*(here.servers if rank in here.workers else ())]
        peers += here.workers if rank in here.servers else ()
        if here.topology is not None and here.topology.nodes > 1:
            numbers = ", ".join(map(str, sorted({*peers} - {rank})))
            text += f" with ranks {numbers or 'none'}; messages with other hosts"
        if self.in_pieces and whole_pushes:
            text += f"; pushes in messages: {whole_pushes}"
        elif self.in_pieces and (why := stale or self.why):
            text += f"; pushes outside BSP in messages: {why}"
        return text

    def local_rank(self, rank: int) -> int:
        """Return the number of a rank of the group among the group's ranks on this host."""
        assert self._node.topology is not None
        return self._node.topology.members(self._node.topology.node).index(rank)

    def pair(self, worker: int, server: int) -> NodePair | None:
        """Return the memory that two ranks share; None if they are not both on this host."""
        if not self.has(worker, server):
            return None
        if (worker, server) not in self._pairs:
            self._pairs[worker, server] = self._pair(worker, server)
        return self._pairs[worker, server]

    def parameters(self, server: int) -> dict[int, np.ndarray]:
        """Return {number of a tensor: the values that `server` holds in shared memory}."""
        memory, found = self._memory[server], {}
        for tensor, _, _ in self._layout.pieces[self._node.servers[server]]:
            if ("parameters", tensor) in memory:
                array = memory["parameters", tensor]
                found[tensor] = array.view(self._layout.tensors[tensor].dtype)
        return found

    def _pair(self, worker: int, server: int) -> NodePair:
        ours, theirs = self._memory[worker], self._memory[server]
        starts = {
            piece.tensor: piece.start for piece in self._layout.pieces[self._node.servers[server]]
        }
        slots = [memory for key, memory in ours.items() if key[:2] == ("slot", server)]
        return NodePair(
            _line(ours["line", server]),
            _line(theirs["answers", worker]),
            ours.get(("push", server)),
            theirs.get(("answer", worker)),
            slots,
            {
                tensor: (starts[tensor], values)
                for tensor, values in self.parameters(server).items()
            },
        )

    def _sizes(self, rank: int) -> dict[tuple, int]:
        """Return the bytes of each array in one rank's part of the shared memory, by its key."""
        sizes: dict[tuple, int] = {}
        for server in self._node.servers if rank in self._node.workers else ():
            sizes["line", server] = 8 * LINE
            if self._messages[server]:
                sizes["push", server] = self._messages[server]
            if len(pieces := self._cut[server]) > 1:
                most = max(piece.nbytes for piece in pieces)
                for slot in range(min(WINDOW, len(pieces))):
                    sizes["slot", server, slot] = most
        for worker in self._node.workers if rank in self._node.servers else ():
            sizes["answers", worker] = 8 * LINE
            if self._messages[rank]:
                sizes["answer", worker] = self._messages[rank]
        if rank in self._node.servers and len(self._cut[rank]) > 1:
            for tensor, start, stop in self._layout.pieces[self._node.servers[rank]]:
                nbytes = (stop - start) * self._layout.tensors[tensor].dtype.itemsize
                sizes["parameters", tensor] = nbytes
        return sizes


class Transport(NamedTuple):
    """Texts for the report of one rank, which say how the data of one model are sent."""

    text: str
    # Why servers must have a whole push before they update anything, in every mode and outside BSP.
    whole_pushes: str
    stale: str

    def anew(self, rank: int, share: NodeShare | None, why: str) -> Transport:
        """Return a copy of this `Transport`, whose text describes the shared memory `share`.

        If `share` is None, the text says that data are sent in messages, for the reason `why`.
        """
        text = f"messages: {why}"
        if share is not None:
            text = share.transport(rank, self.whole_pushes, self.stale)
        return self._replace(text=text)


class _Plan:
    """The position of each array in one rank's part of the shared memory."""

    def __init__(self, sizes: Mapping[tuple, int]):
        self._places: dict[tuple, slice] = {}
        self.nbytes = 0
        for key, size in sizes.items():
            self._places[key] = slice(self.nbytes, self.nbytes + size)
            self.nbytes += -(-size // _ALIGNED) * _ALIGNED

    def views(self, part: np.ndarray) -> dict[tuple, np.ndarray]:
        return {key: part[place] for key, place in self._places.items()}


def _cross_memory(topology: Topology, wait: Callable) -> tuple[CrossMemory | None, str]:
    """Return a `CrossMemory` of this host, or None and the reason. Collective over the host."""
    try:
        return CrossMemory(topology.intra_comm, wait), ""
    except ConfigError as error:
        return None, str(error)


def _line(memory: np.ndarray) -> memoryview:
    return memoryview(memory).cast("q")  # type: ignore[arg-type]


def share_memory(
    node: NodeRanks, layout: ServerLayout, piece_bytes: int, wait: Callable, on_gpu: bool = False
) -> tuple[NodeShare | None, str]:
    """Make the shared memory of a model on this host. Collective over the host's ranks.

    Returns (memory, "") or, if the ranks share no memory, (None, the reason). `on_gpu` says whether
    a server updates the model on a GPU.
    """
    if node.why or not (node.workers and node.servers):
        return None, node.why or "no worker and server are on this host"
    if any(tensor.open is not None for tensor in layout.tensors):
        return None, "the model has an open table, which grows"
    if on_gpu and any(len(cut_shard(layout, k, piece_bytes)) > 1 for k in node.servers.values()):
        return None, "the model is large and on a GPU"
    try:
        return NodeShare(node, layout, piece_bytes, wait), ""
    except ConfigError as error:
        return None, str(error)
