"""Decide after a death which rank sends each server its new shard and its new copy. Uses no MPI.

    before       server 0: shard 0, copy of 2     server 1: shard 1, copy of 0     server 2 dies
    now          server 0: shard 0, copy of 1     server 1: shard 1, copy of 0

A shard is the part of the model that one server holds; each server also has a copy of the shard of
the server before it. An old shard is sent by its server if this server lives, and otherwise by the
server that has the copy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..layout.placement import ServerLayout
from ..shards import ServerShard
from .shard_ranges import are_shared, scalars_of


@dataclass
class Held:
    """What one server holds when a death has ended its group, and which updates it has made."""

    index: int
    # This server's part of the model.
    shard: ServerShard
    # Its copy of the previous server's part, if there are several servers.
    copy: ServerShard | None
    # For each worker, the steps whose pushes are applied to `shard`, and to `copy`.
    clocks: dict[int, int]
    copied: dict[int, int]
    # The updates in `shard` and in `copy` since the group began.
    updates: list[int]
    # With votes: the pushes of all steps below this one are applied.
    applied: int = 0

    def shards(self) -> dict[int, ServerShard]:
        """Return {number of a server: its part of the model} for the parts on this rank."""
        found = {self.index: self.shard}
        if self.copy is not None:
            found[self.copy.server] = self.copy
        return found

    def facts(self) -> dict[str, Any]:
        """Return as plain values which parts this server holds, and which updates it has made."""
        return {
            "index": self.index,
            "copy": None if self.copy is None else self.copy.server,
            "clocks": self.clocks,
            "copied": self.copied,
            "updates": self.updates,
            "applied": self.applied,
        }

    def count(self, server: int, worker: int, clock: int) -> None:
        """Record that gradients of `worker` in step `clock` are applied to the part of `server`."""
        is_copy = server != self.index
        (self.copied if is_copy else self.clocks)[worker] = clock + 1
        self.updates[is_copy] += 1

    def scalars(self) -> dict[int, tuple[dict[str, str], int]]:
        """Return {number of a server: (the optimizer's scalars, number of updates)}.

        The dict has an entry for each part of the model that this rank holds. The scalars are
        values such as Adam's step count.
        """
        return {k: (scalars_of(shard), shard.version) for k, shard in self.shards().items()}


class Holder(NamedTuple):
    """The rank that sends the others the part of the model that one server held before a death.

    The holder is the rank of that server, if the server lives, and otherwise the rank of the server
    with the copy of the part (`is_copy`). `clocks` has, for each worker, the number of its steps
    whose gradients are applied to this part.
    """

    rank: int
    is_copy: bool
    clocks: Mapping[int, int]


class Move(NamedTuple):
    """A transfer after a death: rank `source` sends rank `target` elements of the model.

    They are the elements that server number `old` of the old layout and server number `new` of the
    new layout have in common.
    """

    # `source` and `target` may be the same rank.
    source: int
    target: int
    old: int
    new: int


def holders(everyone: Sequence[Mapping | None]) -> dict[int, Holder]:
    """Return the `Holder` of each part of the model, by the number of the part's old server."""
    # `everyone` has the result of `Held.facts` of each rank, or None.
    found = {}
    for rank, facts in enumerate(everyone):
        if facts is not None and facts["copy"] is not None:
            found[facts["copy"]] = Holder(rank, True, facts["copied"])
    for rank, facts in enumerate(everyone):
        if facts is not None:
            found[facts["index"]] = Holder(rank, False, facts["clocks"])
    return found


def up_to_date(everyone: Sequence[Mapping | None], voted: bool) -> list[set[int]]:
    """Return for each rank a set: the numbers of the servers whose newest parameters it holds."""
    made = {facts["index"]: facts["updates"][0] for facts in everyone if facts is not None}
    found: list[set[int]] = []
    for facts in everyone:
        here = set()
        if facts is not None:
            here.add(facts["index"])
            copy = facts["copy"]
            # With votes, a server's parameters and their copy have the same updates. Without, the
            # copy may have fewer.
            same = copy is not None and made.get(copy, facts["updates"][1]) == facts["updates"][1]
            if copy is not None and (voted or same):
                here.add(copy)
        found.append(here)
    return found


def targets(servers: Sequence[int]) -> list[tuple[int, int]]:
    """Return pairs (rank, i), which mean that this rank must hold the shard of server `i`.

    `servers` has the rank of each server. With several servers, the rank of the next server must
    hold a copy of the shard.
    """
    size = len(servers)
    shards = [(rank, number) for number, rank in enumerate(servers)]
    copies = [(servers[(number + 1) % size], number) for number in range(size)]
    return shards + copies if size > 1 else shards


def moves(
    old: ServerLayout,
    new: ServerLayout,
    wanted: Sequence[tuple[int, int]],
    giving: Mapping[int, Holder],
    current: Sequence[set[int]],
) -> list[Move]:
    """Return which rank sends which elements to which rank after a death, as a list of `Move`.

    The list has the same order on all ranks. `wanted` has pairs (rank, number of a server): the
    rank must get the part that this server has in the layout `new`. `giving` has the `Holder` of
    each server's part in the layout `old`, by the server's number.
    """
    return [
        # `current`: for each rank, the old servers whose newest parameters it holds.
        Move(rank if i in current[rank] else giving[i].rank, rank, i, j)
        for rank, j in wanted
        for i in range(len(old.pieces))
        if are_shared(old, i, new, j)
    ]
