"""Change the servers' shares in an elastic run, so that a death during the change loses nothing.

    all ranks    agree on the new shares, as in `balance.change_shares`
    servers      make new shards and new copies, and fill them from the old ones, which they keep
    all ranks    are prepared: each rank stores the shares, and its new shards, for the commit
    all ranks    learn that all ranks are prepared, and commit: they use the new shards

A shard is a server's part of a model, and to commit means to use the new shards from then on. If a
rank dies before any rank has committed, the living ranks continue with the old shards. If some
ranks have committed, the other living ranks commit after the death.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from ...errors import ConfigError, ProtocolError
from ...runtime.elastic_requests import test_all
from ..balance.change_shares import (
    DOING,
    AskedShares,
    Members,
    NewShares,
    divided,
    finish_sending,
    plan_shares,
    tell_clients,
)
from ..layout.placement import ServerLayout
from ..link import Link, nothing
from ..modes.hosted_model import Hosted
from ..protocol import VALUES
from ..server import Server
from ..shards import ServerShard
from .after_death import Holder, moves, targets
from .move_shards import Messages, move_shards
from .shard_ranges import scalars_of, set_scalars


class Prepared(NamedTuple):
    """The new shares of the servers, and this rank's new parts, before all ranks use them.

    A share says how much of each model a server holds. On a server, `parts` has its new part of
    each model and its new copy of another server's part.
    """

    shares: list[float]
    parts: dict[str, tuple[ServerShard, ServerShard | None]]


def change_shares_beside(
    members: Members, given: AskedShares | None, prepare: Callable[[Prepared], None]
) -> Members | None:
    """Divide the models of an elastic run anew between the servers. Collective, in a pause.

    Each server makes its new part of each model beside the old one, which it keeps until all ranks
    are ready. ``prepare`` is called with this rank's new parts (a `Prepared`) before any rank uses
    its own. Returns a `Members` with the new servers and shares, or None if nothing changes.
    """
    link, server = members.link, members.server
    with link.serving(nothing):
        if server is not None:
            finish_sending(link, server.models)
            _check_quiet(server)
        plan = plan_shares(members, given)
        if plan is None:
            return None
        layouts = {name: divided(old, plan.shares) for name, old in members.layouts.items()}
        hosted = {} if server is None else {one.name: one for one in server.models}
        parts = link.run_on_all(f"{DOING}: allocating", lambda: _allocate(hosted, layouts))
        for name, new in layouts.items():
            _fill(link, plan, hosted.get(name), (members.layouts[name], new), parts.get(name))
        prepare(Prepared(plan.shares, parts))
        link.run_on_all(f"{DOING}: all parts are there", lambda: None)
    for name, one in hosted.items():
        if name in parts:
            shard, copy = parts[name]
            one.use_shards(shard, copy, plan.models[name].piece_bytes)
    why = "the servers of an elastic run have other shares"
    shared = {name: (None, why) for name in layouts}
    tell_clients(members, plan, layouts, shared)
    return members._replace(layouts=layouts, shares=plan.shares, shared=shared)


def _check_quiet(server: Server) -> None:
    """Raise ProtocolError if updates are on their way to copies, or wait for votes of servers."""
    waits = server.votes is not None and server.votes.pending
    if waits or (server.copies is not None and server.copies.behind):
        raise ProtocolError(
            f"{DOING}: pushes are not applied on all servers yet; let workers pull after each push"
        )


def _allocate(hosted: Mapping[str, Hosted], layouts: Mapping[str, ServerLayout]) -> dict:
    """Return the memory of the new parts of this rank; raise ConfigError if there is too little."""
    try:
        return {name: _empty(hosted[name], new) for name, new in layouts.items() if hosted}
    except MemoryError:
        raise ConfigError(f"{DOING}: no memory for the new parts beside the present ones") from None


def _empty(hosted: Hosted, layout: ServerLayout) -> tuple[ServerShard, ServerShard | None]:
    """Return a new shard and a new copy, which have no values yet."""

    def make(old: ServerShard) -> ServerShard:
        made = ServerShard(layout, old.server, old.optimizer, {}, 0)
        set_scalars(made, scalars_of(old))
        made.clock = old.clock
        return made

    return make(hosted.shard), None if hosted.copy is None else make(hosted.copy)


def _fill(
    link: Link,
    plan: NewShares,
    hosted: Hosted | None,
    layouts: tuple[ServerLayout, ServerLayout],
    parts: tuple[ServerShard, ServerShard | None] | None,
) -> None:
    """Fill the new parts of one model from the old ones. Collective over the servers."""
    if hosted is None or parts is None:
        return
    servers, copied = plan.servers, hosted.copy is not None
    wanted = targets(servers)[: None if copied else len(servers)]
    current: list[set[int]] = [set() for _ in range(link.comm.size)]
    for number, rank in enumerate(servers):
        current[rank] = {number, (number - 1) % len(servers)} if copied else {number}
    giving = {number: Holder(rank, False, {}) for number, rank in enumerate(servers)}
    old, new = layouts
    messages = Messages(link.comm, link.tag + VALUES)
    with link.pinned(messages.requests, messages.memory):
        move_shards(
            messages,
            moves(old, new, wanted, giving, current),
            (old, _numbered(hosted.shard, hosted.copy)),
            (new, _numbered(*parts)),
        )
        link.wait(lambda: test_all(messages.requests), peers="all")
    for shard in parts:
        if shard is not None:
            shard.version = plan.models[hosted.name].version


def _numbered(shard: ServerShard, copy: ServerShard | None) -> Mapping[int, ServerShard]:
    return {shard.server: shard} | ({} if copy is None else {copy.server: copy})
