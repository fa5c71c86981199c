"""Putting a model on the servers: agree, check, allocate, and bring the initial values."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from mpi4py import MPI

from ..errors import MismatchError, ProtocolError, shown
from ..events import OPEN
from ..launch.free_memory import available_memory
from ..runtime.agreement.run_on_all import difference
from .layout.capacity import check_capacity, needed
from .layout.placement import ServerLayout, place_tensors
from .layout.routing import data_bytes, views, whole_parts
from .layout.row_selection import Selection
from .link import Link
from .model_facts import Request, check_server_optimizer, optimizer_facts, parse_model
from .protocol import ADD, HEADER_BYTES, TO_SERVER, VALUES, Header
from .server import Hosted, Server
from .shards import ServerShard, state_copies


def host_model(
    link: Link,
    server: Server | None,
    servers: Sequence[int],
    workers: Sequence[int],
    check: Callable[[], None],
    asked: Request,
) -> ServerLayout:
    """Place one model and make `server` (this rank's, or None) ready. Collective over the link.

    `servers` and `workers` are ranks; `check` raises where this rank cannot add; the rest is
    described at `ServerGroup.add`, with what is raised.
    """
    doing = f"add {shown(asked.name)}"
    source = workers[0]

    def describe() -> dict:
        check()
        spec = parse_model(asked)
        check_server_optimizer(asked.name, asked.optimizer)
        return {
            "facts": {**spec.facts, "optimizer": optimizer_facts(asked.optimizer)},
            "inits": spec.inits,
            "node": (socket.gethostname(), available_memory()),
            "copies": state_copies(asked.optimizer),
        }

    def decide(everyone: list[dict]) -> tuple:
        # Ranks that give arrays say nothing of how to fill them.
        inits: dict = next((each["inits"] for each in everyone if each["inits"] is not None), {})
        said = [inits if each["inits"] is None else each["inits"] for each in everyone]
        facts = [{**each["facts"], "init": one} for each, one in zip(everyone, said, strict=True)]
        differs = difference([_flat(each) for each in facts])
        if differs is not None:
            raise MismatchError(f"{doing}: {differs}; all ranks must give the same")
        tensors = facts[0]["tensors"]
        layout = place_tensors(tensors, len(servers))
        copies, needs = everyone[0]["copies"], []
        for index, rank in enumerate(servers):
            host, free = everyone[rank]["node"]
            need = needed(layout.bytes_of(index), copies, len(workers), asked.consistency)
            needs.append((rank, host, need, free))
        check_capacity(asked.name, needs)
        return tensors, inits, everyone[source]["inits"] is None

    _announce(link, server, servers, workers)
    tensors, inits, as_arrays = link.run_on_all(doing, describe, decide)
    layout = place_tensors(tensors, len(servers))

    def allocate() -> Hosted | None:
        if server is None:
            return None
        shard = ServerShard(layout, server.index, asked.optimizer, inits, asked.seed)
        return Hosted(asked.name, shard, asked.consistency, len(workers), asked.global_batch)

    hosted = link.run_on_all(f"{doing}: allocating", allocate)
    if server is not None:
        server.models.append(hosted)
    if as_arrays:
        shard = None if hosted is None else hosted.shard
        hand_out(link, layout, servers, source=source, arrays=asked.model, shard=shard)
    return layout


def _flat(facts: Mapping, path: str = "") -> dict[str, str]:
    """Return nested facts as texts, with names such as ``tensors x`` and ``optimizer lr``."""
    flat: dict[str, str] = {}
    for key, value in facts.items():
        name = f"{path}{key}"
        flat |= _flat(value, f"{name} ") if isinstance(value, Mapping) else {name: str(value)}
    return flat


def _announce(link: Link, server: Server | None, servers, workers) -> None:
    """Meet in `add`: a worker that adds while a server serves, or the reverse, is an error."""
    if link.comm.rank in workers:
        for rank in servers:
            link.tell(ADD, rank, TO_SERVER)
    if server is None:
        return
    for rank in workers:
        operation = link.trail.begin("add", rank)
        status = MPI.Status()
        link.wait(partial(link.probe, rank, TO_SERVER, status), partial(list, [rank]))
        incoming = link.receive(rank, TO_SERVER, status.Get_count(MPI.BYTE))
        link.wait(incoming.test, partial(list, [rank]))
        if not incoming.header.flags & ADD:
            raise ProtocolError(
                f"parameter server {server.index}: rank {rank} is not in add while this server "
                "is; all ranks call add, in the same order"
            )
        link.pool.give(incoming.buffer)
        operation[OPEN] = False


def hand_out(
    link: Link,
    layout: ServerLayout,
    servers: Sequence[int],
    *,
    source: int,
    arrays: Mapping,
    shard: ServerShard | None,
) -> None:
    """Set the shards to the values of `arrays` on rank `source`. Collective over the link.

    `shard` is this rank's, None where it does not serve; `arrays` matters on the source only.
    """
    incoming = None
    if shard is not None:
        parts = whole_parts(layout, shard.server)
        total = HEADER_BYTES + data_bytes(layout, parts)
        # Posted before anything is sent: the source may be a server, and sends to itself.
        incoming = link.receive(source, VALUES, total)
    if link.comm.rank == source:
        flat = Selection("", layout).split({t.name: arrays[t.name] for t in layout.tensors})
        for server, rank in enumerate(servers):
            parts = whole_parts(layout, server)
            total = HEADER_BYTES + data_bytes(layout, parts)
            buffer = link.pool.take(total)
            Header(0, total=total).write(buffer)
            for part, view in views(layout, parts, buffer, HEADER_BYTES):
                tensor, start, stop = part.piece
                view[...] = flat[layout.tensors[tensor].name][1][start:stop]
            link.send(buffer, total, rank, VALUES)
    operation = link.trail.begin("initial values", source)
    link.wait(
        lambda: (not incoming or incoming.test()) and link.reap(),
        lambda: [source] if incoming and not incoming.test() else [],
        "all",
    )
    operation[OPEN] = False
    if shard is not None and incoming is not None:
        shard.write(whole_parts(layout, shard.server), incoming.buffer, HEADER_BYTES)
        link.pool.give(incoming.buffer)
