"""Decide after a death from whom each server gets its new shard, and its new copy; uses no MPI.

    before       server 0: shard 0, copy of 2     server 1: shard 1, copy of 0     server 2 dies
    now          server 0: shard 0, copy of 1     server 1: shard 1, copy of 0

Shards 0 and 1 of now are longer than those of before. What server 1 lacks for them comes from the
copy of shard 2 on server 0. A shard is taken from its server if this lives, and else from its copy.
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
    """What one server holds of a model when a death has ended its group.

    Workers are named by numbers that never change.

    Attributes
    ----------
    index : int
        The number of the server.
    shard, copy : ServerShard
        The server's own shard, and its copy of the shard of the server before; `copy` is None if
        there is only one server.
    clocks, copied : dict
        For each worker, of how many of its clocks the pushes are in `shard`, and in `copy`.
    updates : list of two int
        How many updates this group has made in `shard` and in `copy`.
    applied : int
        The pushes of all clocks before are applied, where servers vote.
    """

    index: int
    shard: ServerShard
    copy: ServerShard | None
    clocks: dict[int, int]
    copied: dict[int, int]
    updates: list[int]
    applied: int = 0

    def shards(self) -> dict[int, ServerShard]:
        """Return shard and copy by the numbers of their servers."""
        found = {self.index: self.shard}
        if self.copy is not None:
            found[self.copy.server] = self.copy
        return found

    def facts(self) -> dict[str, Any]:
        """Return what the other ranks need to know."""
        return {
            "index": self.index,
            "copy": None if self.copy is None else self.copy.server,
            "clocks": self.clocks,
            "copied": self.copied,
            "updates": self.updates,
            "applied": self.applied,
        }

    def count(self, server: int, worker: int, clock: int) -> None:
        """Record that this rank's data of `server` contain the push of a worker's clock."""
        is_copy = server != self.index
        (self.copied if is_copy else self.clocks)[worker] = clock + 1
        self.updates[is_copy] += 1

    def scalars(self) -> dict[int, tuple[dict[str, str], int]]:
        """Return the optimizer's scalars and the version, by the numbers of the servers."""
        return {k: (scalars_of(shard), shard.version) for k, shard in self.shards().items()}


class Holder(NamedTuple):
    """The rank that gives a shard to the others: its server or the one that has the copy."""

    rank: int
    is_copy: bool
    clocks: Mapping[int, int]


class Move(NamedTuple):
    """Rank `source` gives rank `target` what shard `old` and the new shard `new` have both."""

    source: int
    target: int
    old: int
    new: int


def holders(everyone: Sequence[Mapping | None]) -> dict[int, Holder]:
    """Return who gives each shard of before, from `Held.facts` of each rank (or None)."""
    found = {}
    for rank, facts in enumerate(everyone):
        if facts is not None and facts["copy"] is not None:
            found[facts["copy"]] = Holder(rank, True, facts["copied"])
    for rank, facts in enumerate(everyone):
        if facts is not None:
            found[facts["index"]] = Holder(rank, False, facts["clocks"])
    return found


def up_to_date(everyone: Sequence[Mapping | None], voted: bool) -> list[set[int]]:
    """Return for each rank the numbers of the servers of which it holds the newest state.

    Where servers vote (`voted`), all have made the same updates. Elsewhere a copy may be behind its
    shard.
    """
    made = {facts["index"]: facts["updates"][0] for facts in everyone if facts is not None}
    found: list[set[int]] = []
    for facts in everyone:
        here = set()
        if facts is not None:
            here.add(facts["index"])
            copy = facts["copy"]
            same = copy is not None and made.get(copy, facts["updates"][1]) == facts["updates"][1]
            if copy is not None and (voted or same):
                here.add(copy)
        found.append(here)
    return found


def targets(servers: Sequence[int]) -> list[tuple[int, int]]:
    """Return (rank, number of a server) for each shard and each copy; `servers` has the ranks."""
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
    """Return all moves, in an order that all ranks share.

    Parameters
    ----------
    wanted : sequence of (rank, number of a server)
        The new shards and copies to fill.
    giving : mapping
        The holder of each shard of before.
    current : sequence of sets
        For each rank, of which servers of before it holds the newest state; it needs no message
        for these.
    """
    return [
        Move(rank if i in current[rank] else giving[i].rank, rank, i, j)
        for rank, j in wanted
        for i in range(len(old.pieces))
        if are_shared(old, i, new, j)
    ]
