"""How `PeerAverage` trains: each rank updates a model of its own, and averages it with peers.

    every step           each rank computes gradients and updates its own model, without messages
    every `every` steps  each rank sends its model to peers, and averages it with the models that
                         it receives (`mpidist.peers`)
    checkpoint, end      parameters and optimizer states are averaged over all ranks

A checkpoint has one model, from which any number of ranks and any strategy can start. Ranks may be
at different steps. If a rank is asked to stop, the ranks agree on a step that none of them has
finished, and all stop after this step.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ... import events
from ...collectives.allreduce import allreduce
from ...collectives.broadcast_parameters import broadcast_parameters
from ...errors import MismatchError, MpidistError
from ...fault_tolerance.check_replicas import check_replicas
from ...fault_tolerance.finite import is_finite
from ...gradients.flat_views import flat_views
from ...partition import BlockPartition
from ...peers.async_messages import AsyncMessages
from ...peers.mixed_arrays import MixedArrays, average_state, nested_arrays
from ...peers.peer_messages import PeerMessages
from ...peers.peer_plan import PeerPlan
from ...runtime.agreement.mismatch import Signature
from ...runtime.agreement.run_on_all import run_on_all
from ...runtime.context import of
from ...runtime.elastic_requests import tester
from ..checks import check_loss
from ..feed import beside
from .allreduce_exchange import check_in_place
from .evaluation import WholeModel
from .pipeline_exchange import Untimed
from .stop_agreement import Agreement

#: Exchanges that an error has ended. They are kept, because MPI may still write into their buffers.
_ended: list = []


class Peers(WholeModel):
    """Train this rank's model, and average it with models of other ranks. Collective over `comm`.

    There is one average (a round) after each `every` steps. `plan` says which ranks exchange models
    in each round. `bound` is the number of rounds by which a model may arrive late, or None for any
    number.
    """

    dedicated = False
    synchronous = False
    equal_state = False
    price = None

    def __init__(self, comm, model, optimizer, plan: PeerPlan, every: int, bound: int | None):
        run_on_all(comm, "md.train: graph", plan.digest, _refuse, if_differs=True)
        self._open(comm, model, optimizer)
        self.plan, self.every = plan, every
        # `run_on_all` raises on all ranks if one rank has too little memory for the messages.
        self.messages = run_on_all(comm, "md.train: messages", lambda: self._messages(bound))
        # If each round averages over all ranks, an allreduce is faster.
        self._by_allreduce = plan.is_all and bound == 0

    def _open(self, comm, model, optimizer) -> None:
        self.comm = self.workers = comm
        self.model, self.optimizer = model, optimizer
        broadcast_parameters(comm, model)
        self.optimizer_state = run_on_all(
            comm, "md.train: optimizer", lambda: optimizer.init(model.parameters)
        )
        self.context = of(comm)
        self.stragglers = Untimed()
        run_on_all(comm, "md.train: gradients", self._allocate)
        self.private = comm.Dup()
        self.agreement = Agreement(comm, 2, self._attend)
        self.steps = self._since = self.rounds = 0
        self._equal = True  # whether all ranks have the same model
        self._factor = 1.0
        self._apart = 0.0
        self._bad = False  # whether a loss of this rank was not finite

    def _allocate(self) -> None:
        self.gradients, _ = flat_views(self.model.parameters)
        self._views = dict(self.gradients)
        self.arrays = MixedArrays(nested_arrays(self.model.parameters))

    def _messages(self, bound: int | None) -> PeerMessages | AsyncMessages:
        if bound is None:
            return AsyncMessages(self.private, self.plan, self.arrays)
        return PeerMessages(self.private, self.plan, self.arrays, bound)

    # -- a step ------------------------------------------------------------------------

    def part(self, count: int, step: int = 0) -> tuple[int, int]:
        """Return (start, stop) of this rank's samples in a global batch of `count` samples."""
        return BlockPartition(count, self.comm.size).range(self.comm.rank)

    def compute(self, feed, indices) -> tuple[float, int]:
        """Compute the gradients of this rank's samples; return (their mean loss, their number)."""
        start, stop = self.part(len(indices))
        mine = indices[start:stop]
        while (taken := feed.take(mine, self._attend)) is None:
            events.emit("starved", step=self.steps, seconds=feed.starved)

        def mean(batch: tuple) -> float:
            return check_loss(self.model.loss_and_gradients(batch, self.gradients))

        loss, samples = 0.0, 0
        if len(taken.kept):
            batch = beside(taken.batch, self.model)
            loss, samples = feed.tolerate(batch, mine[taken.kept], mean)
        # With this factor each sample has the same weight, as under `AllReduce`, even if the ranks
        # have different numbers of samples.
        self._factor = samples * self.comm.size / max(len(indices), 1)
        return loss, samples

    def reduce(self, loss: float, samples: int, total: int, stop: int) -> tuple[float, bool]:
        """Return (this rank's loss, whether all ranks stop after this step).

        If the loss is not finite, this rank does not update its model, and requests a stop.
        """
        check_in_place(self.gradients, self._views)
        self._attend()  # so that a rank that never waits also learns of an error
        if not np.isfinite(loss):
            self._factor, stop, self._bad = 0.0, 1, True
        return loss, self.agreement.at(self.steps + 1, bool(stop))

    def update(self) -> None:
        """Update this rank's model; after each `every` steps, average it with peers."""
        if self._factor:
            if self._factor != 1:
                for gradient in self.gradients.values():
                    gradient *= self._factor
            self.optimizer.update(self.gradients, self.optimizer_state, self.model.parameters)
        self.steps += 1
        self._since += 1
        self._equal = False
        if self._since % self.every == 0:
            self._round()

    def _round(self) -> None:
        """Average this rank's model with the models of its peers in the next round."""
        self.rounds += 1
        with self.context.call("md.train: average"):
            self._begin("average", f"round {self._since // self.every}")
            if not self._by_allreduce:
                self.messages.average(self._wait)
                return
            self._wait(tester(self.private.Ibarrier()))
        self.arrays.average(self.comm)

    # -- the state ---------------------------------------------------------------------

    def order(self) -> dict[str, int]:
        """Return {}: this strategy does not depend on the order of the gradients in memory."""
        return {}

    def arrange(self, order: dict[str, int]) -> None:
        """Do nothing: this strategy does not depend on the order of the gradients in memory."""

    def hidden(self) -> None:
        """Return None: it is not measured how much of the messages overlaps with computing."""

    def state(self, saving: bool) -> dict:
        """Return the parameters and the optimizer state for a checkpoint: arrays, not copies."""
        return {"parameters": dict(self.model.parameters), "optimizer": self.optimizer_state}

    def begin(self) -> None:
        """Do nothing: before the first step, this strategy has nothing to prepare."""

    def check(self, step: int) -> None:
        """Raise ReplicaError on all ranks unless their parameters are equal. Collective."""
        check_replicas(self.comm, self.model.parameters, step=step)

    def save_point(self, step: int) -> None:
        """Before a checkpoint, give all ranks the mean of their models. Collective.

        Raises MpidistError on all ranks if a rank's loss was not finite and the mean of the models
        is not finite either.
        """
        self._meet()
        bad = run_on_all(self.comm, "md.train: losses", lambda: self._bad, any)
        if bad and not is_finite(self.state(saving=True)):
            error = MpidistError(
                f"step {step}: the loss is not a number any more; nothing was saved, because the "
                "mean of all models holds NaN or infinity already. Lower the learning rate, clip "
                "the gradients, or look for a bad record"
            )
            error.everywhere = True
            raise error

    def finish(self) -> None:
        """At the end of the run, give all ranks the mean of their models. Collective."""
        self._meet()
        self.agreement.close()

    def peer_facts(self) -> dict | None:
        """Return statistics of the averages with peers, for the summary of the run. Collective.

        `rounds` is the largest number of averages (rounds) that a rank has done. `messages` is the
        number of messages that all ranks have sent, and `skipped` the number of messages that were
        left out because a peer was slow. `oldest` is the largest number of rounds by which a model
        was late. `apart` says how far apart the models were before the last average over all ranks:
        their distance from the mean, divided by the norm of the mean.
        """
        mine = self.messages
        found = self.rounds, mine.sent, mine.skipped, mine.oldest

        def joined(everyone: list) -> dict:
            rounds, sent, skipped, oldest = zip(*everyone, strict=True)
            return {"rounds": max(rounds), "messages": sum(sent), "skipped": sum(skipped),
                    "oldest": max(oldest)}  # fmt: skip

        facts = run_on_all(self.comm, "md.train: peers", lambda: found, joined)
        return {**facts, "apart": self._apart if np.isfinite(self._apart) else None}

    def _meet(self) -> None:
        """Average parameters and optimizer states of all ranks, if they may differ. Collective."""
        with self.context.call("md.train: average"):
            self._begin("average of all ranks")
            self._wait(tester(self.private.Ibarrier()))
            if self._equal:
                return
            self.messages.finish(self._wait)
        before = [array.copy() for array in self.arrays.arrays]
        self.arrays.average(self.comm)
        apart = np.array(self.arrays.distance(before))
        allreduce(self.comm, apart, "sum", algorithm="native")
        self._apart = float(f"{np.sqrt(apart[0] / max(apart[1], 1e-300)):.6g}")
        average_state(self.comm, self.optimizer_state)
        self._equal, self._since = True, 0

    # -- waits and errors --------------------------------------------------------------

    def _begin(self, what: str, extra: str = "") -> None:
        self.context.begin(Signature(f"md.train: {what}", "", "", extra=extra))

    def _wait(self, test: Callable[[], bool]) -> None:
        def answering() -> bool:
            if test():
                return True
            self.agreement.listen()
            return False

        self.context.wait(answering)

    def wait(self, test: Callable[[], bool]) -> None:
        """Wait until ``test()`` is true; meanwhile, answer ranks that want to end the training."""
        self.agreement.wait(test)

    def _attend(self) -> bool:
        """Answer a rank that wants to end the training; raise the error of a failed rank."""
        self.agreement.listen()
        if self.context.failed:
            raise self.context.earlier_failure()
        with self.context.statuses.quiet:
            self.context.statuses.listen()
        return False

    def close(self) -> None:
        """Free the communicator on which the models are sent. Collective."""
        self.messages.close()
        self.private.Free()

    def abandon(self, error: BaseException) -> None:
        """Send the other ranks the error that has ended the run on this rank."""
        _ended.append(self)
        if not self.context.failed and not self.context.closed:
            self.context.break_off(error)

    def lost(self, error: BaseException) -> None:
        """After the death of a rank, keep the buffers into which MPI may still write."""
        _ended.append(self)


def _refuse(everyone: list) -> None:
    raise MismatchError(
        "md.train: the graphs of the ranks differ: a function that is passed as graph must return "
        "the same peers on all ranks"
    )
