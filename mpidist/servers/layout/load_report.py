"""Report how the bytes of the models are divided between the servers of a group; uses no MPI."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .capacity import bytes_text
from .placement import ServerLayout


def group_facts(
    servers: Sequence[int],
    placement: str | Sequence[int],
    shares: Sequence[float],
    layouts: Mapping[str, ServerLayout],
) -> dict[str, Any]:
    """Return the part of `ServerGroup.report` that is equal on all ranks: who holds how much."""
    models = {
        name: {"bytes": layout.bytes_of_all(), "imbalance": layout.imbalance}
        for name, layout in layouts.items()
    }
    return {"servers": servers, "placement": placement, "shares": shares, "models": models}


def group_text(
    servers: Sequence[int],
    workers: Sequence[int],
    shares: Sequence[float],
    layouts: Mapping[str, ServerLayout],
) -> str:
    """Return one line for ``print(group)``: roles of ranks, shares of servers, bytes of models."""
    each = ", ".join(
        f"{rank}{'' if rank in workers else ' (only serves)'} {share:.1%}"
        for rank, share in zip(servers, shares, strict=True)
    )
    models = "".join(
        f"; {name!r} {' + '.join(map(bytes_text, layout.bytes_of_all()))}"
        for name, layout in layouts.items()
    )
    return f"<ServerGroup: {len(workers)} workers, servers {each}{models}>"
