"""Give all models new shared memory on each host, after servers or their shares have changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..layout.placement import ServerLayout
from ..link import Link
from ..server import Server
from ..wire.node_doors import ServerDoors
from ..wire.node_share import NodeShare, node_ranks, share_memory


def share_again(
    link: Link,
    server: Server | None,
    ranks: tuple[Sequence[int], Sequence[int]],
    layouts: Mapping[str, ServerLayout],
    piece_bytes: Mapping[str, int],
) -> dict[str, tuple[NodeShare | None, str]]:
    """Move the parameters of all models into new memory that the ranks of a host share. Collective.

    Called while training pauses, after each server has got the parts of the models that `layouts`
    gives it. Returns a dict with a pair for each model: the new shared memory of this host and "",
    or None and the reason why the ranks share no memory. `layouts` has the models in the same order
    on all ranks.
    """
    node = node_ranks(link.context.comm, *ranks)
    found: dict[str, tuple[NodeShare | None, str]] = {}
    link.doors = None
    for name, layout in layouts.items():
        found[name] = share_memory(node, layout, piece_bytes[name], link.wait)
        link.doors = link.doors or found[name][0]
    if server is not None:
        server.doors = ServerDoors(server)
        for number, hosted in enumerate(server.models):
            share, _ = found.get(hosted.name, (None, ""))
            if share is not None and hosted.removed is None:
                hosted.shard.use_memory(share.parameters(link.comm.rank))
                hosted.use_layout(piece_bytes[hosted.name])
                hosted.due.share = share
                server.doors.open(number, share)
    return found
