"""Decide after a death which rank sends each server its new shard and its new copy. Uses no MPI.

    before       server 0: shard 0, copy of 2     server 1: shard 1, copy of 0     server 2 dies
    now          server 0: shard 0, copy of 1     server 1: shard 1, copy of 0

The new shards 0 and 1 are longer than the old shards 0 and 1. The elements that server 1 does not
have come from the copy of shard 2 on server 0. An old shard is sent by its server if the server
lives, and otherwise by the server with its copy.
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
    """What one server holds when a death has ended its group, and which pushes it has applied.

    The numbers of workers stay the same after a death.

    Attributes
    ----------
    index : int
        The number of the server.
    shard, copy : ServerShard
        The server's own shard, and its copy of the previous server's shard. `copy` is None if there
        is only one server.
    clocks, copied : dict
        For each worker, the number of its clocks whose pushes are applied to `shard`, and to
        `copy`.
    updates : list of two int
        How many updates this group has made in `shard` and in `copy`.
    applied : int
        If servers vote: the pushes of all clocks below `applied` are applied.
    """

    index: int
    shard: ServerShard
    copy: ServerShard | None
    clocks: dict[int, int]
    copied: dict[int, int]
    updates: list[int]
    applied: int = 0

    def shards(self) -> dict[int, ServerShard]:
        """Return a dict: number of a server -> its shard or its copy on this rank."""
        found = {self.index: self.shard}
        if self.copy is not None:
            found[self.copy.server] = self.copy
        return found

    def facts(self) -> dict[str, Any]:
        """Return what the other ranks need to know about this server."""
        return {
            "index": self.index,
            "copy": None if self.copy is None else self.copy.server,
            "clocks": self.clocks,
            "copied": self.copied,
            "updates": self.updates,
            "applied": self.applied,
        }

    def count(self, server: int, worker: int, clock: int) -> None:
        """Record that the push of a worker's clock is applied to this rank's shard of `server`."""
        is_copy = server != self.index
        (self.copied if is_copy else self.clocks)[worker] = clock + 1
        self.updates[is_copy] += 1

    def scalars(self) -> dict[int, tuple[dict[str, str], int]]:
        """Return a dict: number of a server -> (scalars of the optimizer, version)."""
        return {k: (scalars_of(shard), shard.version) for k, shard in self.shards().items()}


class Holder(NamedTuple):
    """The rank that sends an old shard to others: its server, or the server with its copy."""

    rank: int
    is_copy: bool
    clocks: Mapping[int, int]


class Move(NamedTuple):
    """Rank `source` sends rank `target` the common elements of the old and the new shard."""

    source: int
    target: int
    old: int
    new: int


def holders(everyone: Sequence[Mapping | None]) -> dict[int, Holder]:
    """Return the holder of each old shard, from the result of `Held.facts` of each rank."""
    found = {}
    for rank, facts in enumerate(everyone):
        if facts is not None and facts["copy"] is not None:
            found[facts["copy"]] = Holder(rank, True, facts["copied"])
    for rank, facts in enumerate(everyone):
        if facts is not None:
            found[facts["index"]] = Holder(rank, False, facts["clocks"])
    return found


def up_to_date(everyone: Sequence[Mapping | None], voted: bool) -> list[set[int]]:
    """Return for each rank the numbers of the servers whose newest state it holds.

    If servers vote (`voted`), shards and copies have the same updates. Otherwise a copy may have
    fewer updates than its shard.
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
    """Return (rank, number of a server) for each new shard and copy; `servers` has the ranks."""
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
    """Return which rank sends elements of which shard to which rank, in one order on all ranks.

    Parameters
    ----------
    wanted : sequence of (rank, number of a server)
        The new shards and copies to fill.
    giving : mapping
        The holder of each old shard.
    current : sequence of sets
        For each rank, the numbers of the old servers whose newest state it holds. The rank gets no
        messages with elements of these servers.
    """
    return [
        Move(rank if i in current[rank] else giving[i].rank, rank, i, j)
        for rank, j in wanted
        for i in range(len(old.pieces))
        if are_shared(old, i, new, j)
    ]
