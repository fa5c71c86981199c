"""Initial values that a worker brings along: from its arrays to the servers, once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from . import protocol
from .link import Link
from .placement import Layout
from .protocol import HEADER_BYTES, VALUES, Header
from .routing import data_bytes, views, whole
from .selection import Selection
from .shards import Shard


def hand_out(
    link: Link,
    layout: Layout,
    servers: Sequence[int],
    *,
    source: int,
    arrays: Mapping,
    shard: Shard | None,
) -> None:
    """Set the shards to the values of `arrays` on rank `source`. Collective over the link.

    `shard` is this rank's, None where it does not serve; `arrays` matters on the source only.
    """
    incoming = None
    if shard is not None:
        parts = whole(layout, shard.server)
        total = HEADER_BYTES + data_bytes(layout, parts)
        # Posted before anything is sent: the source may be a server, and sends to itself.
        incoming = link.receive(source, VALUES, min(total, protocol.MESSAGE_BYTES), total)
    if link.comm.rank == source:
        flat = Selection("", layout).split({t.name: arrays[t.name] for t in layout.tensors})
        for server, rank in enumerate(servers):
            parts = whole(layout, server)
            total = HEADER_BYTES + data_bytes(layout, parts)
            buffer = link.pool.take(total)
            Header(0, total=total).write(buffer)
            for part, view in views(layout, parts, buffer, HEADER_BYTES):
                tensor, start, stop = part.piece
                view[...] = flat[layout.tensors[tensor].name][1][start:stop]
            link.send(buffer, total, rank, VALUES)
    link.waits["all"] += link.wait(lambda: (not incoming or incoming.test()) and link.reap())
    if incoming:
        shard.write(whole(layout, shard.server), incoming.buffer, HEADER_BYTES)
        link.pool.give(incoming.buffer)
