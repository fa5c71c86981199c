"""``md.parameter_server``: one model on servers, for the length of a ``with`` block."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from mpi4py import MPI

from .client import Client
from .consistency import Consistency
from .group import ServerGroup, check_function


@contextmanager
def parameter_server(
    comm: MPI.Comm,
    params: Mapping,
    *,
    optimizer,
    servers: int | Sequence[int] = 1,
    consistency: Consistency | None = None,
    placement: str = "dedicated",
    seed: int = 0,
    global_batch: int | None = None,
    on_pause: Callable[[Any], None] | None = None,
) -> Iterator[Client | None]:
    """One model on parameter servers, as a ``with`` block. Collective over `comm`.

    A worker gets its client. A dedicated server serves on entering and gets None when all
    workers have left the block. Parameters as in `ServerGroup` and `ServerGroup.add`;
    `on_pause` as in `ServerGroup.serve`.
    """
    with ServerGroup(comm, servers=servers, placement=placement) as group:
        check_function(on_pause)
        client = group.add(
            "model",
            params,
            optimizer=optimizer,
            consistency=consistency,
            seed=seed,
            global_batch=global_batch,
        )
        if client is None:
            group.serve(on_pause)
        yield client
