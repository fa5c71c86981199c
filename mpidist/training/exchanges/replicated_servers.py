"""Elastic runs whose servers keep copies of each other's shards: after a death no step is lost.

    facts     each server tells which shards and copies it holds; for the shard of a dead server,
              its copy is used
    pushes    if the mode applies each push when it arrives, a push that a death has interrupted is
              sent again to the servers that provide the shards without this push
    move      each living server gets its part of the new layout for fewer servers, and a new copy
    commit    when all ranks have received all their parts, they forget their old shards

Until the commit, each rank keeps its old shards beside the new ones. If another rank dies before
the commit, the next repair starts from the old shards. If a rank dies during the commit, some ranks
have committed and others have not. The others then commit at the beginning of the next repair; the
ranks find this out by comparing the generation, a number that each commit increases. Only if a
server and the server with its copy have both died, all ranks go back to the newest checkpoint.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from ... import events
from ...runtime.agreement.run_on_all import run_on_all
from ...servers.layout.placement import ServerLayout, place_tensors
from ...servers.replicas import repartition
from ...servers.replicas.move_shards import complete_pushes, move_shards
from ...servers.replicas.repartition import Held, Holder
from ...servers.replicas.shard_ranges import set_scalars
from ...servers.shards import ServerShard
from .carried_servers import CarriedServers
from .server_exchange import Pending


class _Prepared(NamedTuple):
    """The new state of a rank, which becomes valid at its commit."""

    generation: int
    held: Held | None
    servers: list[int]
    pending: Pending | None


class ReplicatedServers(CarriedServers):
    """The state that an elastic run with copies keeps when the communicator changes."""

    def __init__(self, given, name: str, strategy, ranks: int):
        super().__init__(given, name, strategy, ranks)
        self._generation = 0
        self._held: Held | None = None  # the shard and the copy of this rank in this generation
        self._held_by: list[int] = []  # the servers of this generation; empty before the first one
        self._prepared: _Prepared | None = None

    def restore(self, run, resume, retry_bad: bool, handed: str) -> None:
        """Restore `run` from the newest checkpoint, and fill the copies. Collective."""
        super().restore(run, resume, retry_bad, handed)
        run.exchange.fill_copies()

    # -- after a death -------------------------------------------------------------------

    def note_state(self) -> int:
        """Keep the state of the interrupted run and the shards; return the step of it, or -1."""
        exchange = self._exchange
        step = super().note_state()
        if exchange is not None:
            self._held_by = [self._numbers[k] for k in exchange.group.server_ranks]
            self._held = None
            if self._served is not None:
                self._held = _held(self._served, self._served_workers)
        return step

    def check_living(self, ranks: Sequence[int]) -> None:
        """Choose the servers among `ranks`. `bring_up_to_date` finds out which shards exist."""
        self._choose_roles(ranks)

    def bring_up_to_date(self, comm, step: int) -> int:
        """Decide with the living ranks how the run goes on; return the newest step. Collective."""
        doing = "md.train: the layout of the servers"
        newest = run_on_all(comm, doing, lambda: self._generation, max)
        if self._prepared is not None and self._prepared.generation == newest > self._generation:
            self._commit(self._prepared)
        elif self._generation < newest:  # a spare, or a rank that goes back with the others
            self._generation, self._held, self._served, self._held_by = newest, None, None, []
        self._prepared = None
        return super().bring_up_to_date(comm, step)

    def _commit(self, prepared: _Prepared) -> None:
        self._generation, self._held, self._held_by, self._pending = prepared
        self._served = None

    def _more_facts(self) -> dict:
        pending = self._pending
        return {
            "servers": self._held_by,
            # The push of a worker is torn if some servers may not have received it.
            "torn": pending is not None and not pending.known,
            "samples": 0 if pending is None else pending.samples,
        }

    def _describe_served(self) -> dict | None:
        return None if self._held is None else self._held.facts()

    def _lost_now(self, everyone: list[dict]) -> Collection[int]:
        servers = _servers_before(everyone)
        there = repartition.holders([one["served"] for one in everyone])
        return [rank for number, rank in enumerate(servers) if number not in there]

    def _forget_served(self) -> None:
        self._generation += 1
        self._held, self._held_by = None, []

    def _who_knows(self, served: list[dict], me: int) -> Collection[int]:
        # `_continue` decides this for all servers at the commit; before, nothing changes.
        assert self._pending is not None
        return self._pending.known

    def _continue(self, comm, everyone: list[dict], newest: dict) -> None:
        """Decide how this rank goes on, and divide the model among the servers. Collective."""
        super()._continue(comm, everyone, newest)
        model = self._kept.model
        assert model is not None
        facts, now = [one["served"] for one in everyone], self._servers
        before = _servers_before(everyone)
        if self._held is not None:
            self._held.applied = model.applied
        giving = repartition.holders(facts)
        current = repartition.up_to_date(facts, self._holds)
        torn = [] if self._holds else self._torn(everyone, giving)
        for _, _, number in torn:
            for rank, here in enumerate(current):
                if rank != giving[number].rank:
                    here.discard(number)
        self._complete(comm, torn, everyone, self._layout(len(before)))
        ranks = self._ranks()
        wanted = repartition.targets([ranks.index(server) for server in now])
        filled = self._move(comm, wanted, giving, current, before)
        pending = self._kept.pending
        if pending is not None:
            pending = pending._replace(known=range(len(now)))
        held, me = None, ranks[comm.rank]
        if me in now:
            number = now.index(me)
            clocks = dict(zip((r for r in ranks if self._works(r)), model.clocks, strict=True))
            copy = filled[(number - 1) % len(now)] if len(now) > 1 else None
            held = Held(number, filled[number], copy, clocks, {**clocks}, [0, 0], model.applied)
            model = model._replace(shard=held.shard, copy=copy)
        self._kept = self._kept._replace(model=model, pending=pending)
        self._prepared = _Prepared(self._generation + 1, held, [*now], pending)
        run_on_all(comm, "md.train: all partitions are there", lambda: None)
        self._commit(self._prepared)
        self._tell(comm, before, giving)

    def _torn(self, everyone: list[dict], giving: dict[int, Holder]) -> list[tuple[int, int, int]]:
        """Return (worker, holder, server) for each part of a push that is missing in a shard."""
        ranks = self._ranks()
        return [
            (rank, giving[number].rank, number)
            for rank, one in enumerate(everyone)
            if one["torn"]
            for number in sorted(giving)
            if giving[number].clocks.get(ranks[rank], -1) <= one["clock"]
        ]

    def _complete(self, comm, torn, everyone: list[dict], layout: ServerLayout) -> None:
        """Apply the missing parts of pushes to the shards that are moved. Collective."""
        batch, ranks = self.given["global_batch"], self._ranks()

        def apply(number: int, worker: int, parts: list) -> None:
            assert self._held is not None
            held, facts = self._held, everyone[worker]
            held.shards()[number].apply([(1.0, parts)], facts["samples"] / batch)
            held.count(number, ranks[worker], facts["clock"])

        gradients = {} if self._pending is None else self._pending.gradients
        complete_pushes(comm, torn, layout, gradients, apply)

    def _move(self, comm, wanted, giving, current, before: list[int]) -> dict[int, ServerShard]:
        """Return the new shard and the new copy of this rank: number -> shard. Collective."""
        old, new = self._layout(len(before)), self._layout(len(self._servers))
        same = before == self._servers
        holding = {} if self._held is None else self._held.shards()
        moved = [one for one in wanted if not (same and one[1] in current[one[0]])]
        filled, new_ones = {}, {}
        for rank, number in wanted:
            if rank == comm.rank:
                if (rank, number) in moved:
                    optimizer = next(iter(holding.values())).optimizer
                    new_ones[number] = ServerShard(new, number, optimizer, {}, 0)
                filled[number] = new_ones.get(number) or holding[number]
        moves = repartition.moves(old, new, moved, giving, current)
        move_shards(comm, moves, (old, holding), (new, new_ones))
        if moved:
            mine = None if self._held is None else self._held.scalars()
            scalars = run_on_all(comm, "md.train: scalars of the optimizer", lambda: mine, list)
            for number, shard in new_ones.items():
                # In an asynchronous mode, servers may have made different numbers of updates. The
                # numbers of the first server are used, as in a checkpoint.
                of = number if same else 0
                values, shard.version = scalars[giving[of].rank][of]
                set_scalars(shard, values)
        return filled

    def _layout(self, servers: int) -> ServerLayout:
        arrays = self.given["model"].parameters
        return place_tensors({name: (a.shape, a.dtype) for name, a in arrays.items()}, servers)

    def _tell(self, comm, before: list[int], giving: dict[int, Holder]) -> None:
        """Emit an event and print a line for each copy that has replaced a lost shard."""
        ranks = self._ranks()
        taken = {before[n]: ranks[one.rank] for n, one in giving.items() if one.is_copy}
        if not taken:
            return
        copies = {"ranks": [*taken], "holders": [*taken.values()]}
        events.emit("servers_restored", **copies, step=self._newest)
        if comm.rank == 0 and events.VERBOSITY:
            for dead, living in taken.items():
                text = f"the partitions of server {self._name(dead)} go on from their copy on "
                print(f"mpidist: {text}{self._name(living)}", file=sys.stderr, flush=True)


def _servers_before(everyone: list[dict]) -> list[int]:
    return next((one["servers"] for one in everyone if one["servers"]), [])


def _held(served: tuple[Any, Any], workers: Sequence[int]) -> Held:
    server, hosted = served
    copies = server.copies
    return Held(
        server.index,
        hosted.shard,
        hosted.copy,
        dict(zip(workers, hosted.gate.clocks, strict=True)),
        {} if copies is None else dict(zip(workers, hosted.copied, strict=True)),
        [0, 0] if copies is None else [copies.sent, copies.received],
        hosted.applied,
    )
