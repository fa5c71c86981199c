"""How `ParameterServer` exchanges gradients: workers push gradients, and pull parameters.

Workers may be at different steps: they wait for each other only at a checkpoint and at the end of
the run. If a worker is asked to stop, the workers agree on a step that none of them has finished,
and all stop after this step.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import numpy as np

from ... import events
from ...checkpoint.format.state import Shard
from ...collectives.broadcast import broadcast
from ...errors import ConfigError
from ...fault_tolerance.stragglers import crowded_ranks
from ...gradients.flat_views import flat_views
from ...partition import BlockPartition
from ...runtime.agreement.run_on_all import run_on_all
from ...runtime.elastic_requests import tester
from ...runtime.ulfm import is_death, keep_alive
from ...servers.group import ServerGroup
from ...servers.model_facts import KeptModel
from ...servers.replicas.elastic_servers import ElasticServerGroup
from ..checks import check_loss
from ..feed import beside
from .allreduce_exchange import check_in_place
from .evaluation import WholeModel
from .rare_exchange import RareExchange
from .stop_agreement import Agreement
from .worker_times import OwnTimes, Times

MODEL = "model"


class Pending(NamedTuple):
    """A step of this worker whose gradients some servers may lack, because a rank has died.

    `known` has the numbers of the servers that have received the gradients. `state` is the model's
    state after the step, such as running means.
    """

    loss: float
    samples: int
    gradients: dict[str, np.ndarray]
    state: dict[str, np.ndarray]
    known: Collection[int]


class Kept(NamedTuple):
    """The state with which this rank begins a run with parameter servers, or continues it.

    Attributes
    ----------
    servers : sequence of int
        The ranks of the servers.
    weights : sequence of float or None
        The fraction of the model on each server; their sum is 1. None if the run is not elastic.
    placement : str or sequence of int
        Which servers are not workers: "dedicated" (all), "colocated" (none), or their ranks.
    model : KeptModel or None
        The model on the servers; None at the beginning.
    pending : Pending or None
        An interrupted step, which this worker completes first.
    shares : sequence of (step, workers, worker)
        How batches are divided in the steps before the workers last changed. The entries are sorted
        by `step`. Each entry is for the steps from the previous entry's `step` up to ``step - 1``.
        Their batches have `workers` parts, and this rank gets part number `worker`. If `workers` is
        0, this rank gets no samples of these steps.
    ahead : int
        The number of steps that the run had done when the workers' clocks were 0. The clock of a
        worker counts its finished steps.
    clock : int or None
        The clock after which all workers stop, if they have agreed to stop.
    newcomer : bool
        Whether this worker joins a run in which others have already done steps.
    looked : int
        The clock at which the workers last checked how busy the servers are. After such a check,
        slow servers may get smaller parts of the model.
    """

    servers: Sequence[int]
    weights: Sequence[float] | None = None
    placement: str | Sequence[int] = "dedicated"
    model: KeptModel | None = None
    pending: Pending | None = None
    shares: Sequence[tuple[int, int, int]] = ()
    ahead: int = 0
    clock: int | None = None
    newcomer: bool = False
    looked: int = 0

    def without_memory(self) -> Kept:
        """Return this object without the model and the gradients, to free their memory."""
        model = self.model and self.model._replace(shard=None, copy=None)
        return self._replace(model=model, pending=None)


class Served(WholeModel):
    """Exchange the gradients of one model with its parameter servers. Collective over `comm`."""

    synchronous = False
    equal_state = False
    price = None
    first_step = 0  # how many steps the run had done when it was resumed

    def __init__(self, comm, model, optimizer, strategy, kept: Kept | None = None, **settings: Any):
        self.comm, self.model = comm, model
        self.elastic = kept is not None
        self.kept = Kept(strategy.servers, None, strategy.placement) if kept is None else kept
        roles: dict[str, Any] = {"servers": self.kept.servers, "placement": self.kept.placement}
        roles["checksums"] = strategy.checksums
        self.group: Any
        if self.elastic:
            self.group = ElasticServerGroup(comm, **roles)
            self.group.vote(strategy.keeps_copies, self.kept.weights)
        else:
            self.group = ServerGroup(comm, **roles)
        self.dedicated, self._rebalance = not self.group.is_worker, strategy.rebalance
        self.looked = self.kept.looked
        self.agreement: Any = None
        try:
            settings |= {"nonfinite": strategy.nonfinite, "stale": strategy.stale}
            if strategy.server_device != "cpu":
                settings["server_device"] = strategy.server_device
            self._open(optimizer, strategy.consistency, settings)
            self._changes = strategy.changes
            self._rare: RareExchange | None = None
            if strategy.is_rare and not self.dedicated:
                every = {"push_every": strategy.push_every, "pull_every": strategy.pull_every}
                batch = settings["global_batch"]
                self._rare = RareExchange(
                    self.client, model.parameters, optimizer, global_batch=batch, **every
                )
        except BaseException as error:
            self.lost(error) if is_death(error) else self.abandon(error)
            raise

    def _open(self, optimizer, mode, settings: dict) -> None:
        comm, model = self.comm, self.model
        hosts = run_on_all(comm, "md.train: hosts", socket.gethostname, list)
        crowded = crowded_ranks(comm)
        if comm.rank == self.group.server_ranks[0]:
            self.group.link.on_note = Times(self.group.worker_ranks, hosts, crowded).take
        self.workers: Any = self.group.workers
        self.client: Any
        if self.kept.model is None:
            self.client = self.group.add(
                MODEL, model.parameters, optimizer=optimizer, consistency=mode, **settings
            )
        else:
            shapes = {name: (a.shape, a.dtype) for name, a in model.parameters.items()}
            settings.pop("seed", None)
            self.client = self.group.add_again(
                MODEL, shapes, self.kept.model, optimizer=optimizer, consistency=mode, **settings
            )
        self.served = self.group.hosted(MODEL)
        self.pending, self.sent = self.kept.pending, False
        self.kept = self.kept.without_memory()
        if self.dedicated:
            return
        self._share_state()
        self.stragglers = OwnTimes(self.client)
        self.gradients, _ = flat_views(model.parameters)
        self._views = dict(self.gradients)
        slack = mode.bound or 0
        assert self.workers is not None  # this rank is a worker
        self.agreement = Agreement(
            self.workers, slack + 2, self.group.progress, self.client.finished, self.kept.clock
        )
        self._loss, self._samples, self._skipped = 0.0, 0, 0
        # While this rank waits for anything, it answers requests to stop, and requests to a server
        # on this rank. If it did not, two workers could wait for each other: a worker that wants to
        # stop waits for the answers of all workers, one of which may wait for this worker.
        self._serve = self.group.link.background
        self.group.link.background = self._attend

    @property
    def optimizer(self):
        """The optimizer of this server's part of the model; a user's `on_resize` may replace it."""
        return None if self.served is None else self.served[1].shard.optimizer

    @optimizer.setter
    def optimizer(self, optimizer) -> None:
        if self.served is not None:
            for shard in (self.served[1].shard, self.served[1].copy):
                if shard is not None:
                    shard.use(optimizer)
        if self._rare is not None:
            self._rare.use(optimizer)

    def _attend(self) -> bool:
        self.agreement.listen()
        return self._serve()

    def _share_state(self) -> None:
        """Copy a worker's model state (such as running means) to workers that join. Collective."""
        begins = self.kept.model is None or self.kept.newcomer
        for array in getattr(self.model, "state", {}).values():
            received = array if begins else array.copy()
            broadcast(self.workers, received)

    def part(self, count: int, step: int) -> tuple[int, int]:
        """Return (start, stop) of this worker's samples in a global batch of `count` samples."""
        for until, workers, worker in self.kept.shares:
            if step < until:
                return BlockPartition(count, workers).range(worker) if workers else (0, 0)
        return BlockPartition(count, self.workers.size).range(self.workers.rank)

    def compute(self, feed, indices) -> tuple[float, int]:
        """Compute the gradients of this worker's samples; return (mean loss, number of samples)."""
        self._rebalance_shares()
        if self.pending is not None:
            return self._take_up(self.pending)
        start, stop = self.part(len(indices), self.kept.ahead + self.client.finished)
        mine = indices[start:stop]
        while (taken := feed.take(mine, self.group.progress)) is None:
            events.emit("starved", step=self.client.finished, seconds=feed.starved)

        def mean(batch: tuple) -> float:
            return check_loss(self.model.loss_and_gradients(batch, self.gradients))

        batch, good = beside(taken.batch, self.model), mine[taken.kept]
        loss, samples = feed.tolerate(batch, good, mean)
        if not samples:
            for gradient in self.gradients.values():
                gradient[...] = 0
        return loss, samples

    def _rebalance_shares(self) -> None:
        """Give slow servers smaller parts of the model, if a check is due after this step.

        Call this method before all other work of a step.
        """
        clock, policy = self.client.finished, self._rebalance
        if policy is not None and clock > self.looked and clock % policy.every == 0:
            try:
                self.group.rebalance(policy)
            except ConfigError as error:  # raised on all ranks; the shares have not changed
                self._rebalance = None
                events.emit("rebalance_refused", step=clock, reason=str(error))
                if self.comm.rank == self.group.worker_ranks[0]:
                    print(f"mpidist: {error}; the servers keep their shares", file=sys.stderr)
            self.looked = clock

    def _take_up(self, pending: Pending) -> tuple[float, int]:
        """Continue an interrupted step with the kept gradients; return (loss, samples)."""
        for name, gradient in self.gradients.items():
            gradient[...] = pending.gradients.get(name, 0)
        for name, array in pending.state.items():
            self.model.state[name][...] = array
        return pending.loss, pending.samples

    def order(self) -> dict[str, int]:
        """Return {}: this strategy does not depend on the order of the gradients in memory."""
        return {}

    def arrange(self, order: dict[str, int]) -> None:
        """Do nothing: this strategy does not depend on the order of the gradients in memory."""

    def hidden(self) -> None:
        """Return None: it is not measured how much of the messages overlaps with computing."""

    def reduce(self, loss: float, samples: int, total: int, stop: int) -> tuple[float, bool]:
        """Return (this worker's loss, whether all workers stop after this step).

        If the loss is not finite, this worker sends gradients of zero and requests a stop.
        """
        check_in_place(self.gradients, self._views)
        self._loss = loss
        if not np.isfinite(loss):
            for gradient in self.gradients.values():
                gradient[...] = 0
            samples, stop = 0, 1
        self._samples = samples
        return loss, self.agreement.at(self.client.finished + 1, bool(stop))

    def update(self) -> None:
        """Send this step's gradients to the servers; fetch the parameters for the next step."""
        if self.elastic:
            self._state_after = {n: a.copy() for n, a in getattr(self.model, "state", {}).items()}
        self.sent = True  # a death before all answers have arrived interrupts this step
        out, samples = self.model.parameters, self._samples
        if self._changes is not None:
            after = self._changes(self.first_step + self.client.finished + 2)
            self.client.consistency = self.client.consistency if after is None else after
        if self._rare is not None:
            self._rare.step(self.gradients, samples)
        elif self.pending is None:
            self.client.push_pull(self.gradients, out=out, samples=samples)
        else:
            known = self.pending.known
            self.client.repeat_push_pull(self.gradients, out=out, samples=samples, known=known)
            self.pending = None
        self.sent = False

    def passed_over(self) -> int:
        """Return how many steps this late worker has skipped since the last call."""
        before, self._skipped = self._skipped, self.client.skipped
        return self._skipped - before

    def stops(self) -> bool:
        """Whether this worker, which was late and has just skipped some steps, must stop now."""
        return self.agreement.at(self.client.finished, False)

    def unfinished(self) -> Pending | None:
        """Return the step whose gradients this worker has begun to send, or None."""
        if self.pending is not None or not self.sent:
            return self.pending
        gradients = {name: gradient.copy() for name, gradient in self.gradients.items()}
        return Pending(self._loss, self._samples, gradients, self._state_after, ())

    def state(self, saving: bool) -> dict:
        """Return the parts of the parameters on this server; a worker returns an empty dict.

        The parts are `Shard` objects: a checkpoint makes whole arrays of the parts of all servers.
        """
        if not self.group.is_server:
            return {}
        held = self.group.shards(MODEL)
        shapes = {name: array.shape for name, array in self.model.parameters.items()}
        slots = {slot: _pieces(triples, shapes) for slot, triples in held["optimizer"].items()}
        if not saving or self.comm.rank == self.group.server_ranks[0]:
            slots.update(held["scalars"])
        state = {"parameters": _pieces(held["parameters"], shapes), "optimizer": slots}
        # An empty dict would be saved as an entry. So a kind of which this server holds no tensor
        # is left out.
        return {kind: entries for kind, entries in state.items() if entries}

    def begin(self) -> None:
        """Fetch the parameters for the first step from the servers."""
        self.client.pull(out=self.model.parameters)

    def fill_copies(self) -> None:
        """Before the training, copy each server's part of the model to another server.

        Collective over `comm`.
        """
        self.group.fill_copies(MODEL)
        run_on_all(self.comm, "md.train: copies of the partitions", lambda: None)

    def check(self, step: int) -> None:
        """Do nothing: servers hold each parameter only once, so there are no copies to compare."""

    def save_point(self, step: int) -> None:
        """Let the servers save a checkpoint once all workers have finished `step`.

        Collective over the workers.
        """
        if self._rare is not None:
            self._rare.flush()
        self.group.pause(step)

    def serve(self, on_pause) -> None:
        """On a server that is not a worker, answer requests until all workers have finished."""
        self.group.serve(on_pause)

    def wait(self, test: Callable[[], bool]) -> None:
        """Wait until ``test()`` is true; meanwhile, answer the requests of other ranks."""
        self.agreement.wait(test)

    def finish(self) -> None:
        """At the end of the run, copy the final parameters to every worker.

        Collective over the workers.
        """
        if self._rare is not None:
            self._rare.flush()
        self.agreement.wait(tester(self.workers.Ibarrier()))
        self.client.pull(out=self.model.parameters)
        self.agreement.wait(tester(self.workers.Ibarrier()))
        self.group.link.background = self._serve
        self.agreement.close()

    def close(self) -> None:
        """End the exchange and free its communicators. Collective over `comm`."""
        self.group.close()

    def abandon(self, error: BaseException) -> None:
        """Send the other ranks the error that has ended the run on this rank."""
        self.group.__exit__(type(error), error, error.__traceback__)

    def lost(self, error: BaseException) -> None:
        """After a rank's death, end this exchange; keep buffers into which MPI may still write."""
        if self.agreement is not None:
            keep_alive(*self.agreement.memory())
        self.abandon(error)


def _pieces(triples, shapes) -> dict:
    return {name: Shard(array, shapes[name], int(start)) for name, start, array in triples}
