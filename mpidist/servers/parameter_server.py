"""``md.parameter_server``: one model on servers, for the duration of a ``with`` block."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from mpi4py import MPI

from .client import Client
from .consistency import Consistency
from .group import ServerGroup
from .model_facts import check_function
from .modes.stale_gradients import Stale
from .rows.cache_policy import RowCache
from .rows.open_rows import OpenRows


@contextmanager
def parameter_server(
    comm: MPI.Comm,
    params: Mapping,
    *,
    optimizer=None,
    update: str | None = None,
    servers: int | Sequence[int] | Mapping[int, float] | str = 1,
    consistency: Consistency | None = None,
    placement: str | Sequence[int] = "dedicated",
    checksums: bool = False,
    seed: int = 0,
    global_batch: int | None = None,
    nonfinite: str = "raise",
    stale: Stale | None = None,
    rows: str | OpenRows | Mapping[str, str | OpenRows] = "dense",
    spread: str | Mapping[str, str] = "ranges",
    server_device: str = "cpu",
    cache_rows: int | RowCache | None = None,
    clip_norm: float | None = None,
    on_pause: Callable[[Any], None] | None = None,
) -> Iterator[Client | None]:
    """Put one model on parameter servers for a ``with`` block. Collective over `comm`.

    On a worker the ``with`` statement gives a `Client` to the block. On a rank that only serves,
    the ``with`` statement serves until all workers have left their blocks, and then gives None to
    the block. The docstrings of `ServerGroup`, `ServerGroup.add` and `ServerGroup.serve` explain
    the arguments.
    """
    with ServerGroup(comm, servers=servers, placement=placement, checksums=checksums) as group:
        check_function(on_pause)
        client = group.add(
            "model",
            params,
            optimizer=optimizer,
            update=update,
            consistency=consistency,
            seed=seed,
            global_batch=global_batch,
            nonfinite=nonfinite,
            stale=stale,
            rows=rows,
            spread=spread,
            server_device=server_device,
            cache_rows=cache_rows,
            clip_norm=clip_norm,
        )
        if client is None:
            group.serve(on_pause)
        yield client
