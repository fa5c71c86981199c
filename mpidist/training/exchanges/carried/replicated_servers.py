"""Elastic runs whose servers keep copies of each other's parts of the model.

After a server's death, the copy of its part is used, so no step is lost. Gradients that the death
has interrupted are sent again to the parts that lack them. The model is then divided among the
living servers, and copied anew. Until all ranks have received their new parts, each rank keeps its
old parts, in case another rank dies meanwhile. All ranks go back to the newest checkpoint only if
both a server and the server with the copy of its part have died.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence

from .... import events
from ....runtime.agreement.run_on_all import run_on_all
from ....servers.layout.placement import ServerLayout, place_tensors
from ....servers.replicas import after_death
from ....servers.replicas.after_death import Held, Holder
from ....servers.replicas.move_shards import MOVE_TAG, Messages, complete_pushes, move_shards
from ....servers.replicas.shard_ranges import set_scalars
from ....servers.shards import ServerShard
from .carried_servers import CarriedServers, NextPartition
from .server_roles import Shares


class ReplicatedServers(CarriedServers):
    """The state that a run keeps when a rank dies, if servers have copies of each other's parts."""

    def __init__(self, given, name: str, strategy, ranks: int):
        super().__init__(given, name, strategy, ranks)
        self._held: Held | None = None  # the shards of this rank in this generation
        self._held_by = Shares()  # the servers of this generation; empty if nobody serves yet

    def restore(self, run, resume, retry_bad: bool, handed: str) -> None:
        """Restore a checkpoint; copy each server's parameters to a second server. Collective."""
        super().restore(run, resume, retry_bad, handed)
        run.exchange.fill_copies()

    def _handed_over(self) -> None:
        super()._handed_over()
        self._held = None

    # -- after a death -------------------------------------------------------------------

    def note_state(self) -> int:
        """Keep the interrupted run's state and parts of the model; return its number of steps."""
        exchange = self._exchange
        step = super().note_state()
        if exchange is not None:
            self._held_by = self._weights
            self._held = None if self._served is None else self._held_now()
        return step

    def check_living(self, ranks: Sequence[int]) -> None:
        """Choose the servers among the living `ranks`."""
        self._begin_roles()
        self._roles.choose(ranks)

    def _go_through(self, comm) -> None:
        super()._go_through(comm)
        if not self._weights:  # a spare, or a rank that goes back to a checkpoint
            self._held, self._held_by = None, {}

    def _commit(self, prepared: NextPartition) -> None:
        self._generation, self._held, self._weights, self._pending = prepared
        self._held_by, self._served = self._weights, None

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
        there = after_death.holders([one["served"] for one in everyone])
        return [rank for number, rank in enumerate(servers) if number not in there]

    def _forget_served(self) -> None:
        self._generation += 1
        self._held, self._held_by = None, {}

    def _who_knows(self, served: list[dict], me: int) -> Collection[int]:
        # At the commit, `_continue` notes that all servers have the push; until then, nothing
        # changes.
        assert self._pending is not None
        return self._pending.known

    def _continue(self, comm, everyone: list[dict], newest: dict) -> None:
        """Decide how this rank goes on, and divide the model among the servers. Collective."""
        super()._continue(comm, everyone, newest)
        model = self._kept.model
        assert model is not None
        facts = [one["served"] for one in everyone]
        before = _servers_before(everyone)
        now = self._roles.shares(before)
        servers = [*now]
        if self._held is not None:
            self._held.applied = model.applied
        giving = after_death.holders(facts)
        current = after_death.up_to_date(facts, self._holds)
        torn = [] if self._holds else self._torn(everyone, giving)
        for _, _, number in torn:
            for rank, here in enumerate(current):
                if rank != giving[number].rank:
                    here.discard(number)
        self._complete(comm, torn, everyone, self._layout(before))
        ranks = self._ranks()
        wanted = after_death.targets([ranks.index(server) for server in servers])
        filled = self._move(comm, wanted, giving, current, (before, now))
        pending = self._kept.pending
        if pending is not None:
            pending = pending._replace(known=range(len(now)))
        held, me = None, ranks[comm.rank]
        if me in now:
            number = servers.index(me)
            clocks = dict(zip((r for r in ranks if self._works(r)), model.clocks, strict=True))
            copy = filled[(number - 1) % len(now)] if len(now) > 1 else None
            held = Held(number, filled[number], copy, clocks, {**clocks}, [0, 0], model.applied)
            model = model._replace(shard=held.shard, copy=copy)
        self._kept = self._kept._replace(model=model, pending=pending)
        self._prepared = NextPartition(self._generation + 1, held, now, pending)
        run_on_all(comm, "md.train: all partitions are there", lambda: None)
        self._commit(self._prepared)
        self._prepared = None
        self._tell(comm, [*before], giving)

    def _torn(self, everyone: list[dict], giving: dict[int, Holder]) -> list[tuple[int, int, int]]:
        """Return (worker, holder, server) for each interrupted sending of gradients to a server.

        `holder` is the rank that has the part of the model of `server`, or its copy, and lacks the
        gradients of `worker`.
        """
        ranks = self._ranks()
        return [
            (rank, giving[number].rank, number)
            for rank, one in enumerate(everyone)
            if one["torn"]
            for number in sorted(giving)
            if giving[number].clocks.get(ranks[rank], -1) <= one["clock"]
        ]

    def _complete(self, comm, torn, everyone: list[dict], layout: ServerLayout) -> None:
        """Apply interrupted gradients to the parts of the model that lack them. Collective."""
        batch, ranks = self.given["global_batch"], self._ranks()

        def apply(number: int, worker: int, parts: list) -> None:
            assert self._held is not None
            held, facts = self._held, everyone[worker]
            held.shards()[number].apply([(1.0, parts)], facts["samples"] / batch)
            held.count(number, ranks[worker], facts["clock"])

        gradients = {} if self._pending is None else self._pending.gradients
        complete_pushes(comm, torn, layout, gradients, apply)

    def _move(
        self, comm, wanted, giving, current, shares: tuple[Shares, Shares]
    ) -> dict[int, ServerShard]:
        """Return {number: part}: this rank's new part of the model, and its new copy of another.

        Collective. `shares` has the sizes of the parts before the death, and their new sizes.
        """
        old, new = map(self._layout, shares)
        before, now = shares
        same = [*before.items()] == [*now.items()]
        holding = {} if self._held is None else self._held.shards()
        moved = [one for one in wanted if not (same and one[1] in current[one[0]])]
        filled, new_ones = {}, {}
        for rank, number in wanted:
            if rank == comm.rank:
                if (rank, number) in moved:
                    optimizer = next(iter(holding.values())).optimizer
                    new_ones[number] = ServerShard(new, number, optimizer, {}, 0)
                filled[number] = new_ones.get(number) or holding[number]
        moves, messages = (
            after_death.moves(old, new, moved, giving, current),
            Messages(comm, MOVE_TAG),
        )
        move_shards(messages, moves, (old, holding), (new, new_ones))
        messages.wait()
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

    def _layout(self, shares: Shares) -> ServerLayout:
        specs = {name: (a.shape, a.dtype) for name, a in self.given["model"].parameters.items()}
        return place_tensors(specs, [*shares.values()])

    def _tell(self, comm, before: list[int], giving: dict[int, Holder]) -> None:
        """Emit an event and print a line for each server whose copied part is now used."""
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


def _servers_before(everyone: list[dict]) -> Shares:
    return next((one["servers"] for one in everyone if one["servers"]), {})
