"""Decide after a death which rank sends each server its new shard and its new copy. Uses no MPI.

    before       server 0: shard 0, copy of 2     server 1: shard 1, copy of 0     server 2 dies
    now          server 0: shard 0, copy of 1     server 1: shard 1, copy of 0

A shard is the part of the model that one server holds; each server also has a copy of the shard of
the server before it. The new shards 0 and 1 are longer than the old shards 0 and 1. The elements
that server 1 does not have come from the copy of shard 2 on server 0. An old shard is sent by its
server if this server lives, and otherwise by the server that has the copy.
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

    The servers use it to divide the model anew between the servers that live. A worker keeps its
    number after a death.

    Attributes
    ----------
    index : int
        The number of the server.
    shard, copy : ServerShard
        The server's own part of the model, and its copy of the previous server's part. `copy` is
        None if there is only one server.
    clocks, copied : dict
        For each worker, the number of its steps whose pushes are applied to `shard`, and to `copy`.
    updates : list of two int
        How many updates this server has made in `shard` and in `copy` since the group began.
    applied : int
        If servers vote before they apply a step: the pushes of all steps below `applied` are
        applied.
    """

    index: int
    shard: ServerShard
    copy: ServerShard | None
    clocks: dict[int, int]
    copied: dict[int, int]
    updates: list[int]
    applied: int = 0

    def shards(self) -> dict[int, ServerShard]:
        """Return the parts of the model that this rank holds: number of a server -> its part.

        They are the server's own part, and its copy of the previous server's part.
        """
        found = {self.index: self.shard}
        if self.copy is not None:
            found[self.copy.server] = self.copy
        return found

    def facts(self) -> dict[str, Any]:
        """Return which parts of the model this server holds, and which pushes it has applied.

        The other ranks get the result, which has plain values, after a death.
        """
        return {
            "index": self.index,
            "copy": None if self.copy is None else self.copy.server,
            "clocks": self.clocks,
            "copied": self.copied,
            "updates": self.updates,
            "applied": self.applied,
        }

    def count(self, server: int, worker: int, clock: int) -> None:
        """Record that the push of `worker` in the step `clock` is applied.

        The push is applied to what this rank holds of the part of server number `server`.
        """
        is_copy = server != self.index
        (self.copied if is_copy else self.clocks)[worker] = clock + 1
        self.updates[is_copy] += 1

    def scalars(self) -> dict[int, tuple[dict[str, str], int]]:
        """Return for each part on this rank: (scalars of the optimizer, number of updates)."""
        return {k: (scalars_of(shard), shard.version) for k, shard in self.shards().items()}


class Holder(NamedTuple):
    """The rank that sends an old server's part of the model to others after a death.

    The holder is the rank of that server, if the server lives, and otherwise the rank of the server
    with the copy (`is_copy`). `clocks` has, for each worker, the number of its steps whose pushes
    are applied to what this rank sends.
    """

    rank: int
    is_copy: bool
    clocks: Mapping[int, int]


class Move(NamedTuple):
    """A transfer after a death: rank `source` sends rank `target` elements of the model.

    They are the elements that the part of server number `old` in the old layout and the part of
    server number `new` in the new layout have in common. `source` and `target` may be the same
    rank.
    """

    source: int
    target: int
    old: int
    new: int


def holders(everyone: Sequence[Mapping | None]) -> dict[int, Holder]:
    """Return a dict: number of an old server -> the `Holder` that sends its part of the model.

    `everyone` has the result of `Held.facts` of each rank, or None.
    """
    found = {}
    for rank, facts in enumerate(everyone):
        if facts is not None and facts["copy"] is not None:
            found[facts["copy"]] = Holder(rank, True, facts["copied"])
    for rank, facts in enumerate(everyone):
        if facts is not None:
            found[facts["index"]] = Holder(rank, False, facts["clocks"])
    return found


def up_to_date(everyone: Sequence[Mapping | None], voted: bool) -> list[set[int]]:
    """Return for each rank a set: the numbers of the servers whose newest parameters it holds.

    `everyone` has the result of `Held.facts` of each rank, or None. If the servers vote before they
    apply a step (`voted`), a server's parameters and their copy have the same updates. Otherwise a
    copy may have fewer updates than the parameters of which it is a copy.
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
    """Return (rank, number of a server) for each part of the model that a rank must have now.

    Each server has its own part and, if there are several servers, a copy of the previous server's
    part. `servers` has the ranks of the servers.
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

    The list has the same order on all ranks. `old` and `new` are the layouts before and after the
    death.

    Parameters
    ----------
    wanted : sequence of (rank, number of a server)
        Which rank must get the new part of which server, as its own part or as a copy.
    giving : mapping
        The holder of each old server's part.
    current : sequence of sets
        For each rank, the numbers of the old servers whose newest parameters it holds. The rank
        needs no messages with elements of these servers.
    """
    return [
        Move(rank if i in current[rank] else giving[i].rank, rank, i, j)
        for rank, j in wanted
        for i in range(len(old.pieces))
        if are_shared(old, i, new, j)
    ]
