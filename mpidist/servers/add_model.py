"""What `ServerGroup.add` does: check its arguments, allocate memory, and send initial values."""

from __future__ import annotations

import socket
from collections.abc import Container, Mapping

from ..errors import ConfigError, MismatchError, ProtocolError, nearest, shown
from ..launch.free_memory import available_memory
from ..runtime import ulfm
from ..runtime.agreement.run_on_all import difference
from ..runtime.topology import topology_of
from .layout.capacity import check_capacity, needed
from .layout.placement import RowPolicy, ServerLayout, place_tensors
from .layout.routing import data_bytes, views, whole_parts
from .layout.row_selection import Selection
from .link import Link
from .model_facts import Request, check_server_optimizer, optimizer_facts, parse_model
from .modes.client_modes import ClientModes
from .modes.device_shard import DeviceShard, check_device
from .modes.global_norm import check_clip_norm
from .modes.stale_gradients import check_momentum
from .protocol import ADD, HEADER_BYTES, TO_SERVER, VALUES, Header
from .rows.row_policies import check_open_group, check_row_optimizer
from .rows.table_updates import check_update
from .rows.unused_rows import open_bytes
from .server import Hosted, Server
from .shards import ServerShard, state_copies
from .wire.node_share import NodeShare, Transport, node_ranks, share_memory
from .wire.wire_pieces import WINDOW, piece_limit


def host_model(
    group, server: Server | None, taken: Container, asked: Request
) -> tuple[ServerLayout, int, NodeShare | None]:
    """Divide one model between the servers of `group`, and give it its initial values.

    Collective over the group's `comm`; raises the errors of `ServerGroup.add`. Returns which server
    holds which tensors, the largest number of bytes in one piece of a message, and the memory that
    the ranks of this host share for the model (or None).
    """
    link, servers, workers = group.link, group.server_ranks, group.worker_ranks
    doing = f"add {shown(asked.name)}"

    def describe() -> dict:
        if isinstance(asked.name, str) and asked.name in taken:
            raise ConfigError(f"{doing}: this group has a model of that name")
        facts, inits = _checked(group, server is not None, asked)
        return {
            "facts": {**facts, "optimizer": optimizer_facts(asked.optimizer)},
            "inits": inits,
            "node": (socket.gethostname(), available_memory()),
            "copies": state_copies(asked.optimizer),
            "kept": asked.kept is not None,
            "streams": ClientModes(asked, group.votes).streams(0),
        }

    def decide(everyone: list[dict]) -> tuple:
        # A rank that passes arrays does not say how to initialise the tensors, so it agrees with
        # any initialisation.
        inits: dict = next((one["inits"] for one in everyone if one["inits"]), {})
        facts = [{**one["facts"], "init": one["inits"] or inits} for one in everyone]
        if differs := difference([_flat(one) for one in facts]):
            raise MismatchError(f"{doing}: {differs}; all ranks must give the same")
        tensors = facts[0]["tensors"]
        layout = place_tensors(tensors, group.shares, policies := _policies(facts[0]))
        copies, needs = everyone[0]["copies"], []
        most = max(layout.bytes_of(index) for index in range(len(servers)))
        piece = piece_limit({one["node"][0] for one in everyone}, most)
        ahead = WINDOW * piece if everyone[0]["streams"] else None
        for index, rank in enumerate(servers):
            host, free = everyone[rank]["node"]
            need = needed(
                layout.bytes_of(index), copies, len(workers), asked.consistency,
                asked.stale.compensates, ahead,
            )  # fmt: skip
            need += open_bytes(layout, index, copies)
            if group.replicated:
                # The copy of the previous server's shard, a gradient that waits to be applied to
                # this copy, and a gradient on its way to the next server's copy.
                need += round(layout.bytes_of(index - 1) * (2 + copies)) + layout.bytes_of(index)
            needs.append((rank, host, need, free))
        if any(one["kept"] for one in everyone):
            # After a death: the servers have kept the model, so they allocate and fill nothing.
            return tensors, policies, inits, False, piece
        check_capacity([asked.name], needs)
        return tensors, policies, inits, everyone[workers[0]]["inits"] is None, piece

    _announce(link, server, servers, workers)
    tensors, policies, inits, as_arrays, piece = link.run_on_all(doing, describe, decide)
    policies = {name: RowPolicy(*policy) for name, policy in policies.items()}
    layout = place_tensors(tensors, group.shares, policies)

    share, on_gpu = None, asked.server_device == "gpu"
    if asked.kept is None:
        here = node_ranks(group.comm, servers, workers)
        share, why = share_memory(here, layout, piece, link.wait, on_gpu)
        group.transports[asked.name] = Transport("", *ClientModes(asked, group.votes).why).anew(
            group.comm.rank, share, why
        )
        link.doors = link.doors or share
    memory = {} if share is None or server is None else share.parameters(link.comm.rank)

    def allocate() -> Hosted | None:
        if server is None:
            return None
        if asked.kept is not None:
            return Hosted(asked, asked.kept.shard, len(workers), asked.kept.copy, piece)
        if on_gpu:
            local_rank = topology_of(group.comm).local_rank
            given = layout, server.index, asked.optimizer, inits, asked.seed
            return Hosted(asked, DeviceShard(*given, local_rank), len(workers), None, piece)
        shards = [
            ServerShard(layout, index % len(servers), asked.optimizer, inits, asked.seed, room)
            for index, room in ((server.index, memory), (server.index - 1, {}))[
                : 1 + group.replicated
            ]
        ]
        return Hosted(asked, shards[0], len(workers), shards[1] if shards[1:] else None, piece)

    hosted = link.run_on_all(f"{doing}: allocating", allocate)
    if server is not None:
        server.models.append(hosted)
        if share is not None:
            hosted.due.share = share
            server.doors.open(len(server.models) - 1, share)
    if as_arrays:
        _send_values(link, layout, servers, workers[0], asked.model, hosted)
    return layout, piece, share


def _checked(group, serves: bool, asked: Request) -> tuple[dict, dict | None]:
    """Check this rank's arguments of `ServerGroup.add`; return the results of `parse_model`."""
    check_update(asked)
    facts, inits = parse_model(asked)
    name, optimizer, policies = asked.name, asked.optimizer, _policies(facts)
    survives = group.votes or ulfm.current is not None
    elsewhere = group.replicated or asked.server_device != "cpu"
    asked.consistency.check(len(group.worker_ranks))
    check_device(asked, group, serves, bool(facts["open"]))
    check_server_optimizer(name, optimizer)
    check_momentum(name, asked.stale, optimizer, elsewhere)
    check_clip_norm(name, asked.clip_norm, survives)
    check_row_optimizer(name, policies, optimizer)
    check_open_group(name, policies, group.votes or group.replicated)
    return facts, inits


def _policies(facts: Mapping) -> dict[str, RowPolicy]:
    each, more = facts["rows"].items(), facts["open"]
    return {n: RowPolicy(rows, facts["spread"][n], more.get(n)) for n, rows in each}


def agree_to_remove(group, server: Server | None, name, taken: Mapping) -> None:
    """Check on all ranks that all of them remove the same model, which must exist. Collective."""
    doing, link = f"remove {shown(name)}", group.link

    def describe() -> dict[str, str]:
        if not isinstance(name, str) or name not in taken:
            close = nearest(name, taken) if isinstance(name, str) else ""
            raise ConfigError(f"{doing}: the group has no model of that name{close}")
        return {"name": repr(name)}

    def decide(everyone: list[dict[str, str]]) -> None:
        if differs := difference(everyone):
            raise MismatchError(f"{doing}: {differs}; all ranks must remove the same model")

    _announce(link, server, group.server_ranks, group.worker_ranks)
    link.run_on_all(doing, describe, decide)


def _flat(facts: Mapping, path: str = "") -> dict[str, str]:
    """Flatten a nested dict into a dict of texts; a key is a path such as ``optimizer lr``."""
    flat: dict[str, str] = {}
    for key, value in facts.items():
        name = f"{path}{key}"
        flat |= _flat(value, f"{name} ") if isinstance(value, Mapping) else {name: str(value)}
    return flat


def _announce(link: Link, server: Server | None, servers, workers) -> None:
    """Check on each server that all workers are in `add` or `remove`. Collective."""
    if link.comm.rank in workers:
        for rank in servers:
            link.tell(ADD, rank, TO_SERVER)
    if server is None:
        return
    for rank in workers:
        if rank in server.announced:
            server.announced.remove(rank)
            continue
        with link.doing("add", rank):
            message = link.receive(rank, TO_SERVER, link.wait_for_size(rank, TO_SERVER))
            link.wait_for([message])
            if not message.header.flags & ADD:
                raise ProtocolError(
                    f"parameter server {server.index}: rank {rank} is not in add while this server "
                    "is; all ranks call add, in the same order"
                )
            link.pool.give(message.buffer)


def _send_values(
    link: Link, layout: ServerLayout, servers, source: int, arrays: Mapping, hosted: Hosted | None
) -> None:
    """Send the values of `arrays` from rank `source` to all servers. Collective over the group."""
    incoming, here = [], [] if hosted is None else whole_parts(layout, hosted.shard.server)
    if hosted is not None:
        # The receive is posted before the sends, because the source may be a server, which then
        # sends to itself.
        incoming = [link.receive(source, VALUES, HEADER_BYTES + data_bytes(layout, here))]
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
    with link.doing("initial values", source):
        link.wait_for(incoming, "all")
        link.wait(link.reap, peers="all")
    if hosted is not None:
        hosted.shard.write(here, incoming[0].buffer, HEADER_BYTES)
        link.pool.give(incoming[0].buffer)
