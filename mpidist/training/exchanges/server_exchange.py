"""How `ParameterServer` exchanges gradients: workers push gradients, and pull parameters.

The clock of a worker is the number of its finished steps, which may differ from worker to worker.
Workers wait for each other only at a checkpoint, where all workers pause after the same step, and
at the end of the run. If a worker is asked to stop, `Agreement` finds a step that no worker has
passed, and all workers stop after this step. Workers continue to train while `Agreement` finds the
step.
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
    """Exchange the gradients of one model with a group of servers. Collective over `comm`."""

    synchronous = False
    equal_state = False
    price = None

    def __init__(self, comm, model, optimizer, strategy, **settings: int):
        self.comm, self.model = comm, model
        self.group = ServerGroup(comm, servers=strategy.servers, placement=strategy.placement)
        self.dedicated = not self.group.is_worker
        hosts = run_on_all(comm, "md.train: hosts", socket.gethostname, list)
        crowded = crowded_ranks(comm)
        if comm.rank == self.group.server_ranks[0]:
            self.group.link.on_note = Times(self.group.worker_ranks, hosts, crowded).take
        self.workers: Any = self.group.workers
        mode = strategy.consistency
        self.client: Any = self.group.add(
            MODEL, model.parameters, optimizer=optimizer, consistency=mode, **settings
        )
        if self.dedicated:
            return
        for array in getattr(model, "state", {}).values():
            broadcast(self.workers, array)
        self.stragglers = OwnTimes(self.client)
        self.gradients, _ = flat_views(model.parameters)
        self._views = dict(self.gradients)
        slack = mode.staleness if isinstance(mode, SSP) else 0
        assert self.workers is not None  # this rank is a worker
        self.agreement = Agreement(self.workers, slack + 2, self.group.progress)
        self._samples = 0
        # While this rank waits for anything, it answers requests to stop, and requests to a server
        # on this rank. If it did not, two workers could wait for each other: a worker that wants to
        # stop waits for the answers of all workers, one of which may wait for this worker.
        self._serve = self.group.link.background
        self.group.link.background = self._attend

    def _attend(self) -> bool:
        self.agreement.listen()
        return self._serve()

    def part(self, count: int) -> tuple[int, int]:
        """Return (start, stop) of this worker's samples in a global batch of `count` samples."""
        return BlockPartition(count, self.workers.size).range(self.workers.rank)

    def compute(self, feed, indices) -> tuple[float, int]:
        """Compute the gradients of this worker's samples; return (their mean loss, their number).

        If the data source does not answer, this worker waits without a time limit, and the others
        continue. While this worker waits for data, it answers the requests of the other ranks.
        """
        start, stop = self.part(len(indices))
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

    def order(self) -> dict[str, int]:
        """Return an empty order: servers do not need an order of the gradients in memory."""
        return {}

    def arrange(self, order: dict[str, int]) -> None:
        """Do nothing: servers do not need an order of the gradients in memory."""

    def hidden(self) -> None:
        """Return None, because this exchange does not measure its overlap with computing."""

    def reduce(self, loss: float, samples: int, total: int, stop: int) -> tuple[float, bool]:
        """Record this step; return (this worker's loss, whether all workers stop after this step).

        If the loss is not finite, this worker pushes zeros and requests a stop.
        """
        check_in_place(self.gradients, self._views)
        if not np.isfinite(loss):
            for gradient in self.gradients.values():
                gradient[...] = 0
            samples, stop = 0, 1
        self._samples = samples
        return loss, self.agreement.at(self.client.finished + 1, bool(stop))

    def update(self) -> None:
        """Push the gradients of this step, and pull the parameters for the next step."""
        self.client.push_pull(self.gradients, out=self.model.parameters, samples=self._samples)

    def state(self, saving: bool) -> dict:
        """Return the shards (pieces of global arrays) on this rank; a worker returns an empty dict.

        Only the first server saves the scalar state of the optimizer, such as a step counter.
        Scalars of the optimizer may differ in the last bit between servers, because each server
        handles asynchronous pushes in its own order.
        """
        if not self.group.is_server:
            return {}
        held = self.group.shards(MODEL)
        shapes = {name: array.shape for name, array in self.model.parameters.items()}
        slots = {slot: _pieces(triples, shapes) for slot, triples in held["optimizer"].items()}
        if not saving or self.comm.rank == self.group.server_ranks[0]:
            slots.update(held["scalars"])
        state = {"parameters": _pieces(held["parameters"], shapes), "optimizer": slots}
        # A server may hold no tensor of a kind, and an empty dict would be saved as an entry.
        return {kind: entries for kind, entries in state.items() if entries}

    def begin(self) -> None:
        """Pull the parameters for the first step."""
        self.client.pull(out=self.model.parameters)

    def check(self, step: int) -> None:
        """Do nothing: servers hold each parameter only once, so there are no copies to compare."""

    def save_point(self, step: int) -> None:
        """Pause the servers once all workers have finished `step`. Collective over the workers."""
        self.group.pause(step)

    def serve(self, on_pause) -> None:
        """On a dedicated server, answer requests until all workers have finished.

        At each checkpoint, the server calls ``on_pause(step)``, which saves its arrays.
        """
        self.group.serve(on_pause)

    def wait(self, test: Callable[[], bool]) -> None:
        """Wait until `test` is true, and answer the requests of other ranks meanwhile."""
        self.agreement.wait(test)

    def finish(self) -> None:
        """Copy the final parameters to every worker. Collective over the workers.

        A worker that is a server too waits in a second barrier, and answers requests until the last
        worker has pulled the parameters.
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
        """Send servers and workers the error that has ended the run on this rank."""
        self.group.__exit__(type(error), error, error.__traceback__)


def _pieces(triples, shapes) -> dict:
    return {name: Shard(array, shapes[name], int(start)) for name, start, array in triples}


class Agreement:
    """Workers agree on a clock (a number of finished steps) after which all of them stop.

    A worker that wants to stop sends a message to all others. Each worker then proposes a clock
    that it has not passed yet: its own clock plus some slack. A nonblocking allreduce computes the
    maximum of the proposals, and each worker continues meanwhile, at most to the clock that it has
    proposed. All workers stop after the largest proposed clock. A worker waits if it reaches its
    own proposed clock before the maximum is known. Waiting for the maximum cannot deadlock, because
    each worker checks for messages (`listen`) after every step and in every wait. A worker that has
    finished its last step proposes a clock after this step, so all workers then do all their steps.
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
        """Return whether all workers stop after `clock` steps. Call this method once per step."""
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
        """If a worker wants to stop, propose after which step all stop. Returns at once."""
        if self._named is None and (wish or self.comm.Iprobe(MPI.ANY_SOURCE, self._TAG)):
            others = (rank for rank in range(self.comm.size) if rank != self.comm.rank)
            self._notes = [self.comm.Isend([b"", MPI.BYTE], r, self._TAG) for r in others]
            self._name(self._reached + self.slack)

    def _name(self, clock: int) -> None:
        self._limit = clock
        self._named = np.array([clock], np.int64)
        self._request = self.comm.Iallreduce(MPI.IN_PLACE, self._named, MPI.MAX)

    def wait(self, test: Callable[[], bool]) -> None:
        """Wait until `test` is true, and answer the requests of other ranks meanwhile."""
        wait_until(lambda: test() or (self.progress(), False)[1])

    def close(self) -> None:
        """Receive all remaining messages and free the communicator. Collective over the workers."""
        if self._named is None:
            self._name(0)  # other workers may have begun the allreduce, which needs all workers
        self.wait(self._request.Test)
        told = np.array([bool(self._notes)], np.int64)
        self.wait(self.comm.Iallreduce(MPI.IN_PLACE, told, MPI.SUM).Test)
        for _ in range(int(told[0]) - bool(self._notes)):
            self.comm.Recv([bytearray(1), 0, MPI.BYTE], MPI.ANY_SOURCE, self._TAG)
        MPI.Request.Waitall(self._notes)
        self.comm.Free()
