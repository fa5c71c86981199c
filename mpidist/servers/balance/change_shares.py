"""What `ServerGroup.repartition` does: divide all models between the servers by new shares.

A share is the fraction of a model on a server. During the change, all workers are between two
steps.

    every rank   its arguments, its host and memory, what its server holds   -> rank 0
    rank 0       checks all of it, and chooses the shares                    -> every rank
    servers      move what changes owner, one array after the other
    every host   shares memory again
    every rank   uses the new layout: servers, gates of new servers, clients

If a check fails, all ranks raise the same error, and nothing has changed, so the group can go on.
"""

from __future__ import annotations

import math
import socket
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ...errors import ConfigError, MismatchError, shown
from ...launch.free_memory import available_memory
from ...runtime.agreement.run_on_all import difference
from ..client import Client
from ..decisions import Decisions
from ..layout.capacity import check_capacity
from ..layout.placement import RowPolicy, ServerLayout, place_tensors
from ..layout.roles import AUTO, ranks_and_shares, ranks_asked
from ..link import Link, nothing
from ..modes.device_shard import DeviceShard
from ..modes.hosted_model import Hosted
from ..server import Server
from ..shards import ServerShard
from ..wire.node_share import NodeShare
from ..wire.wire_pieces import piece_limit
from .moved_arrays import PARAMETERS, PULLED, arrays_of, move_model
from .shared_again import share_again

DOING = "repartition"


class AskedShares(NamedTuple):
    """The arguments of `ServerGroup.repartition` on a worker."""

    servers: Any = None
    weights: Any = None


class ModelState(NamedTuple):
    """What a rank that becomes a server must know about one model, besides the model's arrays."""

    # The kinds of arrays of each tensor, such as parameters and velocities.
    slots: dict[int, list]
    version: int
    # For each worker, the updates since its newest pull.
    ages: list[int]
    # Attributes of the first server's gate, such as the clocks of the workers.
    gate: dict[str, Any]
    changes: dict[str, Any]
    # The scalars of the first server's optimizer state, by their paths.
    scalars: list[tuple[tuple[str, ...], np.ndarray]]
    piece_bytes: int


class NewShares(NamedTuple):
    """The new servers, their fractions of each model, and the models' state at the change."""

    servers: list[int]
    shares: list[float]
    models: dict[str, ModelState]


class Members(NamedTuple):
    """What one rank knows of its group: servers, workers, models, and who holds how much."""

    link: Link
    server: Server | None
    layouts: dict[str, ServerLayout]
    clients: list[Client]
    servers: list[int]
    workers: list[int]
    shares: list[float]
    # For each model, the memory that the ranks of this host share, or why they share none.
    shared: Mapping[str, tuple[NodeShare | None, str]] = {}
    elastic: bool = False
    copied: bool = False  # whether servers keep copies of each other's parts


def change_shares(members: Members, given: AskedShares | None) -> Members | None:
    """Divide the models of a group anew between the servers. Collective, while training pauses.

    `given` has the arguments of `repartition` on a worker, and is None on a rank that only serves.
    Returns this rank's `Members` with the new servers, shares and layouts. Returns None if the
    servers and shares stay the same.
    """
    link, server = members.link, members.server
    with link.serving(nothing):
        if server is not None:
            finish_sending(link, server.models)
        plan = plan_shares(members, given)
        if plan is None:
            return None
        if server is None and link.comm.rank in plan.servers:
            server = _new_server(members, plan)
        layouts = {name: divided(old, plan.shares) for name, old in members.layouts.items()}
        if server is not None:
            server.decisions = Decisions(link, plan.servers)
            for hosted in server.models:
                if hosted.removed is None:
                    _move(link, plan, hosted, members.layouts[hosted.name], layouts[hosted.name])
        pieces = {name: plan.models[name].piece_bytes for name in layouts}
        ranks = plan.servers, members.workers
        shared = share_again(link, server, ranks, layouts, pieces)
        tell_clients(members, plan, layouts, shared)
        link.run_on_all(f"{DOING}: all parts have moved", lambda: None)
    return members._replace(
        server=server, layouts=layouts, servers=plan.servers, shares=plan.shares, shared=shared
    )


def tell_clients(
    members: Members,
    plan: NewShares,
    layouts: Mapping[str, ServerLayout],
    shared: Mapping[str, tuple[NodeShare | None, str]],
) -> None:
    """Let the clients of this rank use the new servers, and this host's new shared memory."""
    for client in members.clients:
        if not client.removed:
            name = client.name
            piece_bytes = plan.models[name].piece_bytes
            client.use_layout(layouts[name], plan.servers, piece_bytes, shared[name][0])


def _move(
    link: Link, plan: NewShares, hosted: Hosted, old: ServerLayout, new: ServerLayout
) -> None:
    state = plan.models[hosted.name]
    move_model(link, plan.servers, hosted, (old, new), state.slots)
    hosted.use_layout(state.piece_bytes)
    hosted.shard.version = state.version
    hosted.pulled[:] = [state.version - age for age in state.ages]


def finish_sending(link, models: Sequence[Hosted]) -> None:
    """Wait until MPI has sent all answers that this server has begun to send."""

    def is_done() -> bool:
        for model in models:
            model.due.pulls.send_more()
        return link.reap() and not any(model.due.pending for model in models)

    link.wait(is_done, peers="all")


def plan_shares(members: Members, given: AskedShares | None) -> NewShares | None:
    """Check the arguments of `repartition`, and return the new shares. Collective.

    Returns None if the servers and shares stay the same.
    """
    return members.link.run_on_all(
        DOING,
        lambda: _describe(members, given),
        lambda everyone: _decide(members, everyone),
    )


# -- facts and decision ------------------------------------------------------------------------


def _describe(members: Members, given: AskedShares | None) -> dict[str, Any]:
    for name, layout in members.layouts.items():
        if any(tensor.open is not None for tensor in layout.tensors):
            raise ConfigError(
                f"model {name!r} has an open table, whose rows stay on their servers; save it, and "
                "restore it into a group with other servers"
            )
    models = [] if members.server is None else members.server.models
    if any(isinstance(one.shard, DeviceShard) for one in models):
        raise ConfigError("the state of a model is on a GPU; add it with server_device='cpu'")
    asked = None
    if given is not None:
        weights = None if given.weights is None else _checked_weights(given.weights)
        servers = None if given.servers is None else ranks_asked(given.servers)
        if servers is None and weights is None:
            raise ConfigError("give servers=, or weights= with one number for each server")
        asked = servers, weights
    return {
        "asked": asked,
        "node": (socket.gethostname(), available_memory()),
        "served": {one.name: _facts(one) for one in models if one.removed is None},
    }


def _checked_weights(weights) -> list[float]:
    try:
        if isinstance(weights, str | bytes | Mapping):
            raise TypeError
        found = [float(weight) for weight in weights]
    except (TypeError, ValueError):
        raise ConfigError(
            f"weights={shown(weights)}; expected one number for each server, such as [2, 1]"
        ) from None
    total = sum(found)
    if not all(0 <= weight < math.inf for weight in found) or not 0 < total < math.inf:
        raise ConfigError(
            f"weights={shown(weights)}; expected finite numbers, 0 or more, with a sum above 0"
        )
    return found


def _facts(hosted: Hosted) -> dict[str, Any]:
    shard, gate = hosted.shard, hosted.gate
    slots = {
        tensor: {slot: array.dtype.name for slot, array in arrays.items()}
        for tensor, arrays in arrays_of(hosted).items()
    }
    state = {name: getattr(gate, name) for name in ("clocks", "live", "pushed", "entered")}
    if hasattr(gate, "round"):
        state["round"] = gate.round
    return {
        "slots": slots,
        "version": shard.version,
        "ages": [shard.version - seen for seen in hosted.pulled],
        "gate": state,
        "changes": hosted.changes.facts(),
        "scalars": [(path, np.array(leaf)) for path, leaf in shard.leaves() if not np.ndim(leaf)],
    }


def _decide(members: Members, everyone: list[dict]) -> NewShares | None:
    """On rank 0: check the reports of all ranks; return the new shares, or None for no change."""
    first = everyone[members.workers[0]]["asked"]
    told = [first if one["asked"] is None else one["asked"] for one in everyone]
    if differs := difference([{"servers": repr(a), "weights": repr(b)} for a, b in told]):
        raise MismatchError(f"{DOING}: {differs}; all workers must give the same")
    hosts = [one["node"][0] for one in everyone]
    servers, shares = _shares(members, first[0], first[1], hosts)
    if members.elastic and (servers != members.servers or not all(shares)):
        raise ConfigError(
            f"{DOING}: in an elastic run the servers stay the same, and each keeps a share above "
            f"0; give shares for the servers {members.servers}"
        )
    if servers == members.servers and shares == members.shares:
        return None
    models = {}
    new = {name: divided(old, shares) for name, old in members.layouts.items()}
    for name, layout in new.items():
        served = [everyone[rank]["served"][name] for rank in members.servers]
        most = max(layout.bytes_of(index) for index in range(len(servers)))
        held = [one for one in served if one["slots"]] or served
        models[name] = ModelState(
            _agreed_slots(name, served),
            max(one["version"] for one in served),
            [max(ages) for ages in zip(*(one["ages"] for one in held), strict=True)],
            served[0]["gate"],
            served[0]["changes"],
            served[0]["scalars"],
            piece_limit({*hosts}, most),
        )
    _check_memory(members, new, models, servers, [everyone[rank]["node"] for rank in servers])
    return NewShares(servers, shares, models)


def _shares(members: Members, servers, weights, hosts) -> tuple[list[int], list[float]]:
    """Return the ranks of all servers and their shares, also of servers that hold nothing."""
    present = members.servers
    given = present if servers is None else servers
    ranks, _, parts_given = ranks_and_shares(
        len(hosts), given, "colocated", lambda: hosts, members.workers
    )
    if weights is None:
        weights = parts_given
    elif isinstance(servers, dict) or servers == AUTO:
        raise ConfigError(f"{DOING}: servers has shares already; leave out weights")
    if len(weights) != len(ranks):
        raise ConfigError(
            f"{DOING}: {len(weights)} weights for {len(ranks)} servers {ranks}; give one for each"
        )
    parts = dict(zip(ranks, weights, strict=True))
    every = [*present, *sorted(rank for rank in ranks if rank not in present and parts[rank])]
    total = sum(weights)
    shares = [parts.get(rank, 0.0) / total for rank in every]
    return every, shares


def _agreed_slots(name: str, served: Sequence[Mapping]) -> dict[int, list]:
    """Return the kinds of arrays of each tensor and their dtypes, the parameters last.

    Raises ConfigError if servers have different kinds for a tensor.
    """
    # The kinds are the parameters, each kind of optimizer state, and what each worker has pulled.
    found: dict[int, dict] = {}
    pulled = {s: None for one in served for slots in one["slots"].values() for s in slots}
    workers = sorted(slot for slot in pulled if slot[0] == PULLED)
    for one in served:
        for tensor, slots in one["slots"].items():
            mine = {slot: dtype for slot, dtype in slots.items() if slot[0] != PULLED}
            if found.setdefault(tensor, mine) != mine:
                raise ConfigError(
                    f"{DOING}: model {name!r}: the optimizer keeps other arrays on some servers: "
                    f"{sorted(found[tensor])} and {sorted(mine)}; they cannot be divided anew"
                )
    return {
        tensor: [
            *((slot, slots[PARAMETERS]) for slot in workers),
            *sorted(item for item in slots.items() if item[0] != PARAMETERS),
            (PARAMETERS, slots[PARAMETERS]),
        ]
        for tensor, slots in found.items()
    }


def _check_memory(
    members: Members,
    new: Mapping[str, ServerLayout],
    models: Mapping[str, ModelState],
    servers: Sequence[int],
    nodes: Sequence[tuple[str, int | None]],
) -> None:
    """Raise ConfigError if the servers of a host need more memory than the host has."""
    # A server needs memory for the elements that it gets, for one more array at a time, and for new
    # shared memory; in an elastic run, for all new parts beside the old ones.
    needs = []
    for index, (rank, (host, free)) in enumerate(zip(servers, nodes, strict=True)):
        more = largest = 0
        for name, layout in new.items():
            old, slots = members.layouts[name], models[name].slots.values()
            kinds = max(map(len, slots), default=1)
            sizes = [
                (stop - start) * layout.tensors[tensor].dtype.itemsize
                for tensor, start, stop in layout.pieces[index]
            ]
            if members.elastic:
                more += kinds * (sum(sizes) + layout.bytes_of(index - 1) * members.copied)
                continue
            before = old.bytes_of(index) if index < len(old.pieces) else 0
            # The parameters are counted once more: ranks of a host may share memory for them, and
            # that of all models is made beside the memory of the old layouts.
            more += kinds * max(0, sum(sizes) - before) + sum(sizes)
            largest = max(largest, *sizes, 0)
        needs.append((rank, host, more + largest, free))
    check_capacity([*new], needs)


def divided(old: ServerLayout, shares: list[float]) -> ServerLayout:
    """Return a layout of the tensors of `old`, divided between servers with these `shares`."""
    specs = {tensor.name: (tensor.shape, tensor.dtype) for tensor in old.tensors}
    policies = {
        tensor.name: RowPolicy(
            "lazy" if tensor.lazy else "dense", "rows" if tensor.dealt else "ranges"
        )
        for tensor in old.tensors
    }
    return place_tensors(specs, shares, policies)


# -- new servers -------------------------------------------------------------------------------


def _new_server(members: Members, plan: NewShares) -> Server:
    """Return the `Server` of a rank that begins to serve; it holds nothing yet."""
    index = plan.servers.index(members.link.comm.rank)
    server = Server(members.link, index, members.workers, plan.servers)
    for client in members.clients:  # in the order of the models' numbers
        hosted = _begin(client.asked, client.layout, index, len(members.workers))
        server.models.append(hosted)
        if client.removed:
            hosted.remove()
            continue
        state = plan.models[client.name]
        for name, value in state.gate.items():
            setattr(hosted.gate, name, value)
        hosted.changes.go_on(state.changes)
        for path, value in state.scalars:
            _set(hosted.shard.state, path, value)
    return server


def _begin(asked, layout: ServerLayout, index: int, workers: int) -> Hosted:
    """Return a model on a new server, which holds no elements of the model yet."""
    pieces = layout.pieces + ((),) * (index + 1 - len(layout.pieces))
    shard = ServerShard(layout._replace(pieces=pieces), index, asked.optimizer, {}, 0)
    return Hosted(asked, shard, workers)


def _set(state: dict, path: Sequence[str], value: np.ndarray) -> None:
    for key in path[:-1]:
        state = state.setdefault(key, {})
    state[path[-1]] = value
