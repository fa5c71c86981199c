"""What the living ranks of a run with parameter servers keep when a rank dies.

A server keeps its part of the model (its shard), and a worker keeps its step and its position in
the data. A worker also keeps the gradients of a step if some servers have not confirmed them. All
living ranks exchange these facts, and open a new group of servers and workers.

If all workers do each step together (BSP), the servers first catch up with the most advanced of
them, and the living workers repeat the steps that no server has applied. Otherwise each worker
continues at its own step, and sends interrupted gradients again to the servers that do not have
them.

If a server dies, its part of the model is lost, and all ranks go back to the newest checkpoint,
unless servers keep copies of each other's parts (`replicated_servers`).
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from .... import events
from ....elasticity.elastic_group import host
from ....elasticity.evict_on_exception import EvictOnException
from ....elasticity.peer_state import NOTHING
from ....errors import NoCheckpoint, RankFailure
from ....runtime.agreement.run_on_all import run_on_all
from ....servers.model_facts import KeptModel
from ....servers.replicas.after_death import Held
from ...elastic_run import Carried
from ...run_state import without_losses
from ..server_exchange import MODEL, Kept, Pending
from .server_roles import ServerRoles, Shares


class NextPartition(NamedTuple):
    """A new division of the model among the servers, prepared on a rank but not yet in use.

    `held` has the parts of the model on this rank, and is None if the rank is not a server.
    `weights` has the fraction of the model that each server gets. `pending` has the gradients of
    this worker that some servers have not confirmed, if any.
    """

    generation: int
    held: Held | None
    weights: Shares
    pending: Pending | None


_GIVE = "give checkpoint=..., from which the run can go on"


class CarriedServers(Carried):
    """The state that a run with parameter servers keeps in memory when a rank dies."""

    memory = None  # copies in memory would need all ranks to be at the same step

    def __init__(self, given, name: str, strategy, ranks: int):
        super().__init__(given, name)
        self._holds = strategy.consistency.holds
        self._roles, self._size = ServerRoles(strategy, ranks), ranks
        # `_generation` counts how often the model was divided anew among the servers, `_weights`
        # has the shares of all servers since then, and `_prepared` belongs to the next division.
        self._generation, self._weights = 0, Shares()
        self._prepared: NextPartition | None = None
        self._lost: list[int] = []  # dead servers whose shards are not restored yet
        self._exchange: Any = None
        self._began = self._newcomer = self._goes_back = False
        self._newest = 0  # the step of the fastest worker
        self._numbers: list[int] = []  # the numbers of all ranks when the exchange was opened
        self._kept = Kept(())
        # Set after the death of a rank: what this rank serves; and, on a worker, its clock, its old
        # shares of the batches, its unanswered push, and the clock after which all workers stop.
        self._served: Any = None
        self._served_workers: list[int] = []
        self._clock, self._ahead, self._stop = 0, 0, None
        self._looked = 0
        self._shares: Sequence[tuple[int, int, int]] = ()
        self._share: tuple[int, int] | None = None
        self._pending: Pending | None = None
        self._whole = 0  # how many bad records this worker had found in finished steps

    # -- a run continues from the kept state ---------------------------------------------

    def copies(self, store, step: int) -> None:
        """Return None: with parameter servers, nodes keep no copies of the state in memory."""

    def open(self, strategy, comm, asked, settings):
        """Return the object that exchanges gradients. Collective.

        After a death, this object begins with the state that this rank has kept.
        """
        self._begin_roles()
        self._numbers = ranks = self._ranks()
        shares = self._roles.shares(self._weights)
        kept = (Kept(()) if self._facts is None else self._kept)._replace(
            servers=[ranks.index(rank) for rank in shares],
            weights=[*shares.values()],
            placement=self._roles.placement(ranks),
        )
        # The shares are noted now, because faster workers may do a step before all ranks have
        # opened the exchange.
        if not self._only_serves():
            workers = [k for k, rank in enumerate(ranks) if self._works(rank)]
            self._shares, self._share = kept.shares, (len(workers), workers.index(comm.rank))
        self._exchange = strategy.open(comm, asked.model, asked.optimizer, kept=kept, **settings)
        self._handed_over()
        return self._exchange

    def _handed_over(self) -> None:
        """Drop the references to the parts of the model that the exchange now has."""
        self._served, self._kept = None, self._kept.without_memory()

    def continue_run(self, run) -> bool:
        """Let `run` continue from the state that this rank has kept; return whether it has one.

        Collective.
        """
        continues = super().continue_run(run)
        if continues:
            assert self._facts is not None
            run.quarantine.found = [tuple(each) for each in self._facts["found"]]
            # This worker may repeat the step in which it had learned when to stop, so the clock
            # that it has kept decides whether it stops.
            stop = self._kept.clock
            run.stopping = stop is not None and self._clock >= stop
        return continues

    def restore(self, run, resume, retry_bad: bool, handed: str) -> None:
        """Restore `run` from the newest checkpoint, when it begins or when a server's part is lost.

        Collective.
        """
        if not self._goes_back:
            super().restore(run, resume, retry_bad, handed)
            return
        many = len(self._lost) > 1
        who = ", ".join(map(self._name, self._lost))
        text = f"the partitions of server{'s' if many else ''} {who} are lost"
        if run.store is None:
            raise _no_checkpoint(f"{text}; {_GIVE}")
        try:
            run.resume(True, retry_bad)
        except NoCheckpoint:
            cure = f"{run.store.path} has no checkpoint yet; save earlier"
            raise _no_checkpoint(f"{text}, and {cure}") from None
        events.emit("servers_lost", ranks=self._lost, step=run.first_step)
        if run.comm.rank == 0 and events.VERBOSITY:
            back = f"all ranks go back to step {run.first_step} of {run.store.path}"
            print(f"mpidist: {text}; {back}", file=sys.stderr, flush=True)

    def begin(self, exchange) -> None:
        """Let a worker fetch the servers' parameters, at the beginning and after each death."""
        exchange.begin()

    def interval_from(self, step: int) -> int:
        """Return the step from which the steps to the next checkpoint are counted.

        It is the same on all workers: after a death, the step of the fastest worker.
        """
        return max(step, self._newest) if self._facts is not None else step

    def hold(self, run, guard, callbacks) -> None:
        """From now on, keep the state of `run` if a rank dies."""
        assert self.group is not None
        guard.survives = True
        if self._guard is not None:
            guard.take_over(self._guard, guard.losses())
            run.began, run.loop_began = self._times
        self._times = run.began, run.loop_began
        self._run, self._guard = run, guard
        self._began, self._lost, self._newcomer, self._goes_back = True, [], False, False
        self._pending = None  # from now on, the exchange knows it
        if not run.exchange.dedicated:
            if self.group.settings.on_exception == "evict":
                servers = sum(not self._works(rank) for rank in self._ranks())
                self.evict_on_exception = EvictOnException(self.group, lambda: run.step, servers)
            self.group.watch.begin_steps()

    # -- after a death -------------------------------------------------------------------

    def note_state(self) -> int:
        """Keep the state of the interrupted run; return its number of steps, -1 if unknown."""
        exchange, self._exchange = self._exchange, None
        run, self._run = self._run, None
        if exchange is not None:
            self._served = exchange.served
            self._served_workers = [self._numbers[k] for k in exchange.group.worker_ranks]
            self._looked = exchange.looked
        if exchange is not None and run is not None and not exchange.dedicated:
            self._facts = run.facts_to_carry([])
            self._facts["found"] = run.quarantine.found
            self._whole = run.quarantine.whole
            self._clock = exchange.client.finished
            self._ahead = run.step - self._clock
            self._pending, self._stop = exchange.unfinished(), exchange.agreement.clock
            self._newest = run.step
        if exchange is not None:
            self._note_shares(exchange.group)
        return self.step

    def _note_shares(self, group) -> None:
        """Keep how the model is divided among the servers, and a prepared new division, if any."""

        def numbered(shares: Sequence[float]) -> Shares:
            ranks = (self._numbers[k] for k in group.server_ranks)
            return dict(zip(ranks, shares, strict=True))

        self._generation += group.moved
        self._weights = numbered(group.shares)
        if group.prepared is not None:
            shares, parts = group.prepared
            held = None
            if self._served is not None:
                shard, copy = parts[MODEL]
                held = replace(self._held_now(), shard=shard, copy=copy)
            shares = numbered(shares)
            self._prepared = NextPartition(self._generation + 1, held, shares, self._pending)

    def _held_now(self) -> Held:
        """Return this server's part of the model, its copy of another part, and their clocks.

        The clocks say, for each worker, how many steps of this worker are in the part.
        """
        (server, hosted), copies = self._served, self._served[0].copies
        workers = self._served_workers
        return Held(
            server.index,
            hosted.shard,
            hosted.copy,
            dict(zip(workers, hosted.gate.clocks, strict=True)),
            {} if copies is None else dict(zip(workers, hosted.copied, strict=True)),
            [0, 0] if copies is None else [copies.sent, copies.received],
            hosted.applied,
        )

    def check_living(self, ranks: Sequence[int]) -> None:
        """Choose the servers among the living `ranks`.

        Raises RankFailure if the run cannot go on.
        """
        self._begin_roles()
        lost = [rank for rank in self._roles.servers if rank not in ranks]
        self._lost = sorted({*self._lost, *lost})
        if lost:
            who = f"{', '.join(map(self._name, lost))} died, and with it the partitions it served"
            if self.given["checkpoint"] is None:
                raise RankFailure(f"{who}; {_GIVE}")
        self._roles.choose(ranks)

    def bring_up_to_date(self, comm, step: int) -> int:
        """Decide with the living ranks from which state each rank goes on. Collective.

        Returns the number of steps that the fastest worker has done, or -1 if all ranks go back to
        a checkpoint or to the beginning. Returns `NOTHING` (-2) if no rank knows the step of the
        run, because all workers have died and were replaced.
        """
        self._go_through(comm)
        mine = {
            "weights": self._weights,
            "looked": self._looked,
            "idle": step == NOTHING or self._only_serves(),
            "lost": self._lost if self._began else [],
            "began": self._began,
            "facts": None if self._only_serves() else self._facts,
            "clock": self._clock,
            "ahead": self._ahead,
            "open": self._pending is not None,
            "stop": self._stop,
            "served": self._describe_served(),
            **self._more_facts(),
        }
        everyone = run_on_all(comm, "md.train: servers and workers", lambda: mine, list)
        self._weights = next((one["weights"] for one in everyone if one["weights"]), {})
        begun = [one for one in everyone if one["facts"] is not None]
        lost = sorted({*self._lost_now(everyone), *(r for one in everyone for r in one["lost"])})
        if not lost and all(one["idle"] for one in everyone):
            return NOTHING
        if lost or not begun:
            # No worker has begun to train, or all ranks go back to the newest checkpoint.
            self._goes_back = bool(lost) and (bool(begun) or any(one["began"] for one in everyone))
            self._lost, self._began = lost if self._goes_back else [], self._goes_back
            self._facts = self._served = self._pending = self._stop = None
            self._shares, self._share, self._looked = (), None, 0
            self._forget_served()
            return -1
        self._continue(comm, everyone, max(begun, key=lambda one: one["clock"]))
        return self._newest

    def _go_through(self, comm) -> None:
        """Use the prepared division of the model if another rank already uses it. Collective."""
        doing, prepared = "md.train: the layout of the servers", self._prepared
        newest = run_on_all(comm, doing, lambda: self._generation, max)
        if prepared is not None and prepared.generation == newest > self._generation:
            self._commit(prepared)
        elif self._generation < newest:  # a spare, or a rank that goes back to a checkpoint
            self._generation, self._weights, self._served = newest, {}, None
        self._prepared = None

    def _commit(self, prepared: NextPartition) -> None:
        """Use the division of the model `prepared` from now on."""
        self._generation, held, self._weights, self._pending = prepared
        if held is not None:
            self._served[1].shard = held.shard

    def _continue(self, comm, everyone: list[dict], newest: dict) -> None:
        """Decide how this rank goes on, from the facts of all ranks and of the fastest worker."""
        ranks, served = self._ranks(), [one["served"] for one in everyone if one["served"]]
        applied = max(one["applied"] for one in served) if self._holds else 0
        if self._served is not None and self._holds:
            server, hosted = self._served
            server.settle(MODEL, applied)
            hosted.applied = applied
        everywhere = range(len(self._roles.servers))
        working = [one for one in everyone if one["facts"] is not None]
        # For clocks before `switch`, batches are still divided in the old way, because a worker
        # (which may be dead now) has already pushed for them.
        ends = [one["clock"] + one["open"] for one in working]
        for one in served:
            ends += [*one["clocks"].values(), *one.get("copied", {}).values()]
        switch = applied if self._holds else max(ends)
        if not self._only_serves() and self._facts is None:
            self._newcomer, self._clock, self._share = True, newest["clock"], (0, 0)
        if self._holds:
            if self._clock >= applied:
                self._pending = None  # all workers repeat this step
            else:
                passed = self._pending or Pending(0.0, 0, {}, {}, ())
                self._pending = passed._replace(known=everywhere)
        elif self._pending is not None:
            known = self._who_knows(served, ranks[comm.rank])
            self._pending = self._pending._replace(known=known)
        if self._facts is None or self._only_serves():
            self._facts = without_losses({**newest["facts"], "found": []})
        # A worker that repeats a step will find the bad records of this step again.
        elif self._pending is None:
            self._facts["found"] = self._facts["found"][: self._whole]
        self._ahead = ahead = newest["ahead"]
        self._newest = newest["facts"]["step"]
        self._looked = max(one["looked"] for one in everyone)
        shares = [*self._shares]
        if self._share is not None and not self._holds:
            shares.append((switch + ahead, *self._share))
        workers = [k for k, rank in enumerate(ranks) if self._works(rank)]
        clocks = [
            (newest if everyone[k]["facts"] is None else everyone[k])["clock"] for k in workers
        ]
        shard = None if self._served is None else self._served[1].shard
        stops = [one["stop"] for one in everyone if one["stop"] is not None]
        model, stop = KeptModel(shard, clocks, applied), max(stops, default=None)
        self._kept = Kept(
            (), None, "", model, self._pending, shares, ahead, stop, self._newcomer, self._looked
        )

    def _who_knows(self, served: list[dict], me: int) -> Collection[int]:
        """Return the servers that already have the gradients that this rank, `me`, has kept."""
        assert self._pending is not None
        have = {one["index"] for one in served if one["clocks"].get(me, -1) > self._clock}
        return have | {*self._pending.known}

    def _more_facts(self) -> dict:
        """Return more facts to tell other ranks after a death. Subclasses override this method."""
        return {}

    def _lost_now(self, everyone: list[dict]) -> Collection[int]:
        """Return the servers whose part of the model no rank has, from the facts of `everyone`."""
        return ()

    def _forget_served(self) -> None:
        """Forget which parts of the model this rank has: the parts are made anew or restored."""

    def _describe_served(self) -> dict | None:
        if self._served is None:
            return None
        server, hosted = self._served
        return {
            "index": server.index,
            "applied": hosted.applied,
            "clocks": dict(zip(self._served_workers, hosted.gate.clocks, strict=True)),
        }

    # -- who is who ----------------------------------------------------------------------

    def _ranks(self) -> list[int]:
        """Return, for each rank of the present communicator, its rank in the run's first one."""
        assert self.group is not None
        return self.group.original_ranks

    def _name(self, rank: int) -> str:
        assert self.group is not None
        return self.group.name_of(rank)

    def _works(self, rank: int) -> bool:
        return self._roles.works(rank)

    def _begin_roles(self) -> None:
        """If the run is beginning, choose how large a part of the model each server has."""
        if not self._roles.known:
            self._roles.balance([host(self._name(rank)) for rank in range(self._size)])
        if not self._generation:
            self._weights = self._weights or self._roles.at_first()

    def _only_serves(self) -> bool:
        assert self.group is not None
        return not self._works(self._ranks()[self.group.rank])


def _no_checkpoint(text: str) -> NoCheckpoint:
    error = NoCheckpoint(text)
    error.exit_code, error.everywhere = RankFailure.exit_code, True
    return error
