"""The exchange of `ParameterServer`: push gradients, pull parameters, no reduction among workers.

Workers run apart by design, so nothing here makes them wait for each other, with two exceptions:
a checkpoint (all pause between the same two clocks) and the end. A wish to stop travels by
`Agreement`, which finds a clock that nobody has passed without holding anyone up.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

import numpy as np
from mpi4py import MPI

from ... import events
from ...checkpoint.format.state import Shard
from ...collectives.broadcast import broadcast
from ...fault_tolerance.stragglers import crowded_ranks
from ...gradients.flat_views import flat_views
from ...partition import BlockPartition
from ...runtime.agreement.run_on_all import run_on_all
from ...runtime.polling import wait_until
from ...servers.consistency import SSP
from ...servers.group import ServerGroup
from ..checks import check_loss
from ..feed import beside
from .allreduce_exchange import check_in_place
from .worker_times import OwnTimes, Times

MODEL = "model"


class Served:
    """One model on a server group. Collective over `comm`."""

    synchronous = False
    equal_state = False
    price = None

    def __init__(self, comm, model, optimizer, strategy, global_batch: int, seed: int):
        self.comm, self.model = comm, model
        self.group = ServerGroup(comm, servers=strategy.servers, placement=strategy.placement)
        self.dedicated = not self.group.is_worker
        hosts = run_on_all(comm, "md.train: hosts", socket.gethostname, list)
        crowded = crowded_ranks(comm)
        if comm.rank == self.group.server_ranks[0]:
            self.group.link.on_note = Times(self.group.worker_ranks, hosts, crowded).take
        self.workers: Any = self.group.workers
        self.client: Any = self.group.add(
            MODEL,
            model.parameters,
            optimizer=optimizer,
            consistency=strategy.consistency,
            seed=seed,
            global_batch=global_batch,
        )
        if self.dedicated:
            return
        for array in getattr(model, "state", {}).values():
            broadcast(self.workers, array)
        self.stragglers = OwnTimes(self.client)
        self.gradients, _ = flat_views(model.parameters)
        self._views = dict(self.gradients)
        slack = strategy.consistency.staleness if isinstance(strategy.consistency, SSP) else 0
        assert self.workers is not None  # this rank works
        self.agreement = Agreement(self.workers, slack + 2, self.group.progress)
        self._samples = 0
        # A wish to stop is answered from inside every wait, where servers of this rank serve too:
        # those that wish wait for the answer of all, and others may be waiting for those.
        self._serve = self.group.link.background
        self.group.link.background = self._attend

    def _attend(self) -> bool:
        self.agreement.listen()
        return self._serve()

    def part(self, count: int) -> tuple[int, int]:
        """Return which samples of a global batch of `count` are this worker's."""
        return BlockPartition(count, self.workers.size).range(self.workers.rank)

    def compute(self, feed, indices) -> tuple[float, int]:
        """Compute this worker's part of a global batch; returns (mean loss, samples).

        A source that does not answer is this worker's trouble alone: it waits, as long as it takes,
        and serves and listens to the others meanwhile.
        """
        start, stop = self.part(len(indices))
        mine = indices[start:stop]
        taken = feed.take(mine, self.group.progress)
        while taken is None:
            events.emit("starved", step=self.client.finished, seconds=feed.starved)
            taken = feed.take(mine, self.group.progress)

        def mean(batch: tuple) -> float:
            return check_loss(self.model.loss_and_gradients(batch, self.gradients))

        batch, good = beside(taken.batch, self.model), mine[taken.kept]
        loss, samples = feed.tolerate(batch, good, mean)
        if not samples:
            for gradient in self.gradients.values():
                gradient[...] = 0
        return loss, samples

    def order(self) -> dict[str, int]:
        """Return nothing: servers add gradients wherever they lie."""
        return {}

    def arrange(self, order: dict[str, int]) -> None:
        """Nothing to arrange."""

    def hidden(self) -> None:
        """Return None: what a push hides is in the servers' statistics."""

    def reduce(self, loss: float, samples: int, total: int, stop: int) -> tuple[float, bool]:
        """Take note of this step; returns (this worker's loss, whether all stop here).

        A loss that is no number is not pushed: this worker asks for a stop instead, and pushes
        nothing until all have stopped.
        """
        check_in_place(self.gradients, self._views)
        if not np.isfinite(loss):
            for gradient in self.gradients.values():
                gradient[...] = 0
            samples, stop = 0, 1
        self._samples = samples
        return loss, self.agreement.at(self.client.finished + 1, bool(stop))

    def update(self) -> None:
        """Push the gradients, finish the clock and pull what the next clock may see."""
        self.client.push_pull(self.gradients, out=self.model.parameters, samples=self._samples)

    def state(self, saving: bool) -> dict:
        """Return this rank's shards, as pieces of global arrays. Workers hold nothing.

        The counters of the optimizer are saved by the first server: asynchronous pushes are
        added up in another order on each, and so agree but for the last bit.
        """
        if not self.group.is_server:
            return {}
        held = self.group.shards(MODEL)
        shapes = {name: array.shape for name, array in self.model.parameters.items()}
        state: dict = {"parameters": _pieces(held["parameters"], shapes), "optimizer": {}}
        for slot, triples in held["optimizer"].items():
            state["optimizer"][slot] = _pieces(triples, shapes)
        if not saving or self.comm.rank == self.group.server_ranks[0]:
            state["optimizer"].update(held["scalars"])
        # A server may hold nothing of a kind; an empty dict would be an entry of its own.
        return {kind: entries for kind, entries in state.items() if entries}

    def begin(self) -> None:
        """Pull the parameters that the first clock begins with."""
        self.client.pull(out=self.model.parameters)

    def check(self, step: int) -> None:
        """Nothing to compare: servers hold each parameter once."""

    def save_point(self, step: int) -> None:
        """Pause the servers after the same clock of all workers. Collective over the workers."""
        self.group.pause(step)

    def serve(self, on_pause) -> None:
        """Serve until all workers have left; for dedicated servers. `on_pause(step)` saves."""
        self.group.serve(on_pause)

    def wait(self, test: Callable[[], bool]) -> None:
        """Wait among the workers, and serve meanwhile those that still need it."""
        self.agreement.wait(test)

    def finish(self) -> None:
        """Bring the final parameters to every worker. Collective over the workers.

        The second barrier keeps colocated servers serving until the last pull is answered.
        """
        self.agreement.wait(self.workers.Ibarrier().Test)
        self.client.pull(out=self.model.parameters)
        self.agreement.wait(self.workers.Ibarrier().Test)
        self.group.link.background = self._serve
        self.agreement.close()

    def close(self) -> None:
        """End the group. Collective over `comm`."""
        self.group.close()

    def abandon(self, error: BaseException) -> None:
        """Tell servers and workers, which wait for this rank or will, why it is gone."""
        self.group.__exit__(type(error), error, error.__traceback__)


def _pieces(triples, shapes) -> dict:
    return {name: Shard(array, shapes[name], int(start)) for name, start, array in triples}


class Agreement:
    """Workers at different clocks agree on one to stop after, without waiting for each other.

    A worker that wants to stop tells all others. Each, once it knows, names a clock that it has
    not passed yet (its own plus some slack) and goes on until then while a nonblocking maximum of
    the names is under way: the maximum is the clock after which all stop. Wishes are heard at
    every clock and in every wait (`listen`), so whoever has come to the clock it named may wait
    for the others, also for those that wait for it. One that has finished names a clock beyond the
    last, and then nobody stops early.
    """

    _TAG = 7

    def __init__(self, workers: MPI.Comm, slack: int, progress: Callable[[], object]):
        self.comm, request = workers.Idup()
        wait_until(request.Test)
        self.slack, self.progress = slack, progress
        self.clock: int | None = None
        self._reached = self._limit = 0
        self._named: np.ndarray | None = None
        self._request = MPI.REQUEST_NULL
        self._notes: list = []

    def at(self, clock: int, wish: bool) -> bool:
        """Whether all workers stop after `clock`. Called once per clock."""
        self._reached = clock
        if self.clock is None:
            self.listen(wish)
            if self._named is not None:
                if clock >= self._limit:
                    self.wait(self._request.Test)
                if self._request.Test():
                    self.clock = int(self._named[0])
        return self.clock is not None and clock >= self.clock

    def listen(self, wish: bool = False) -> None:
        """Name a clock if this worker or another one wishes to stop. Returns at once."""
        if self._named is None and (wish or self.comm.Iprobe(MPI.ANY_SOURCE, self._TAG)):
            others = (rank for rank in range(self.comm.size) if rank != self.comm.rank)
            self._notes = [self.comm.Isend([b"", MPI.BYTE], r, self._TAG) for r in others]
            self._name(self._reached + self.slack)

    def _name(self, clock: int) -> None:
        self._limit = clock
        self._named = np.array([clock], np.int64)
        self._request = self.comm.Iallreduce(MPI.IN_PLACE, self._named, MPI.MAX)

    def wait(self, test: Callable[[], bool]) -> None:
        """Wait, and serve meanwhile where this worker is a server as well."""
        wait_until(lambda: test() or (self.progress(), False)[1])

    def close(self) -> None:
        """Take in what is under way and free the communicator. Collective over the workers."""
        if self._named is None:
            self._name(0)  # the maximum that others may have begun needs every rank
        self.wait(self._request.Test)
        told = np.array([bool(self._notes)], np.int64)
        self.wait(self.comm.Iallreduce(MPI.IN_PLACE, told, MPI.SUM).Test)
        for _ in range(int(told[0]) - bool(self._notes)):
            self.comm.Recv([bytearray(1), 0, MPI.BYTE], MPI.ANY_SOURCE, self._TAG)
        MPI.Request.Waitall(self._notes)
        self.comm.Free()
