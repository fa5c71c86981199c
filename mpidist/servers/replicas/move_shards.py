"""After a death, send shards to their new owners, and send interrupted pushes once more.

A shard is a server's part of a model. A push is interrupted if the death of a rank has kept servers
from receiving its gradients. Servers receive into new memory, so if another rank dies meanwhile,
each rank still has its old shards.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from mpi4py import MPI

from ...partition import pieces
from ...runtime.elastic_requests import wait_for
from ..layout.placement import ServerLayout
from ..layout.routing import ShardPart, data_bytes, views, whole_parts
from ..layout.row_selection import Selection
from ..shards import ServerShard
from .after_death import Move
from .shard_ranges import shared_ranges

_PIECE = 1 << 30  # bytes of one message
MOVE_TAG, _PUSH_TAG = 11, 12


class Messages:
    """Begins each send and receive without waiting, and waits for all of them in `wait`."""

    def __init__(self, comm: MPI.Comm, tag: int):
        # All sends and receives are posted before the first wait, so no order of ranks can
        # deadlock.
        self.comm, self._tag = comm, tag
        self.requests: list[MPI.Request] = []
        self.memory: list[np.ndarray] = []

    def send(self, array: np.ndarray, rank: int) -> None:
        """Begin to send a contiguous array, which must not change before `wait` returns."""
        self._post(self.comm.Isend, array, rank)

    def receive(self, array: np.ndarray, rank: int) -> None:
        """Begin to receive a message from rank `rank` into a contiguous array."""
        self._post(self.comm.Irecv, array, rank)

    def _post(self, call: Callable[..., MPI.Request], array: np.ndarray, rank: int) -> None:
        raw = array.view(np.uint8)
        self.memory.append(raw)
        for start, stop in pieces(0, raw.size, _PIECE):
            self.requests.append(call([raw[start:stop], MPI.BYTE], rank, self._tag))

    def wait(self) -> None:
        """Wait for all sends and receives. Raises RankFailure if a rank has died."""
        wait_for(self.requests, *self.memory)


def move_shards(
    messages: Messages,
    moves: Sequence[Move],
    old: tuple[ServerLayout, Mapping[int, ServerShard]],
    new: tuple[ServerLayout, Mapping[int, ServerShard]],
) -> None:
    """Begin to send the servers' parts of a model to their new owners. Collective.

    All ranks pass the same `moves`. The new parts are complete when the caller has waited for
    `messages`.
    """
    # A layout, and this rank's parts of the model in it.
    (old_layout, giving), (new_layout, filling) = old, new
    me = messages.comm.rank
    for source, target, i, j in moves:
        # Data go from the old arrays directly into the new ones, which nobody uses yet.
        given = shared_ranges(giving[i], new_layout, j) if me == source else ()
        wanted = shared_ranges(filling[j], old_layout, i) if me == target else ()
        if source == target:
            for from_, to in zip(given, wanted, strict=True):
                to[...] = from_
        else:
            for array in given:
                messages.send(array, target)
            for array in wanted:
                messages.receive(array, source)


def complete_pushes(
    comm: MPI.Intracomm,
    torn: Sequence[tuple[int, int, int]],
    layout: ServerLayout,
    gradients: Mapping[str, np.ndarray],
    apply: Callable[[int, int, list[tuple[ShardPart, np.ndarray]]], None],
) -> None:
    """Send gradients to the servers that lack them because of a death. Collective.

    An entry of `torn` is (rank of a worker, rank that now holds a server's part, number of this
    server), for each server that lacks the gradients of this worker. On the rank that holds the
    part, ``apply(server, worker, gradients)`` is called.
    """
    messages, arriving = Messages(comm, _PUSH_TAG), []
    for worker, holder, server in torn:
        parts = whole_parts(layout, server)
        if comm.rank == worker:
            buffer = np.zeros(data_bytes(layout, parts), np.uint8)
            names = {layout.tensors[part.piece.tensor].name for part in parts}
            flat = Selection("", layout).split({name: gradients[name] for name in names})
            for part, view in views(layout, parts, buffer, 0):
                tensor, start, stop = part.piece
                view[...] = flat[layout.tensors[tensor].name][1][start:stop]
            if worker != holder:
                messages.send(buffer, holder)
        if comm.rank == holder:
            if worker != holder:
                buffer = np.empty(data_bytes(layout, parts), np.uint8)
                messages.receive(buffer, worker)
            arriving.append((server, worker, parts, buffer))
    messages.wait()
    for server, worker, parts, buffer in arriving:
        apply(server, worker, list(views(layout, parts, buffer, 0)))
