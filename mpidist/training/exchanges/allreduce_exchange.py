"""The exchange of `AllReduce`: every rank a replica, gradients averaged in every step.

The loss and the wish to stop ride beside the gradients, so inside a node a step costs exactly one
reduction however many tensors there are (R100), and between nodes one per bucket:

    [ dense3.b | dense3.w | ... | conv1.w | loss | stop ]    scaled by local / global samples
"""

from __future__ import annotations

from inspect import signature

import numpy as np

from ...collectives.broadcast_parameters import broadcast_parameters
from ...errors import ConfigError
from ...fault_tolerance.check_replicas import check_replicas
from ...fault_tolerance.stragglers import Stragglers
from ...gradients.exchange import Gradients
from ...gradients.flat_views import flat_views
from ...partition import BlockPartition
from ...runtime.agreement.run_on_all import run_on_all
from ...runtime.context import of
from ...runtime.polling import wait_until
from ..checks import check_loss
from ..feed import REJECTIONS, beside


class Replicas:
    """Gradients averaged over all ranks, the same update on each. Collective over `comm`."""

    dedicated = False
    synchronous = True
    equal_state = False  # the model's state may differ from rank to rank
    price: dict | None = None  # what `PieceReplicas` has measured
    wait = staticmethod(wait_until)

    def __init__(self, comm, model, optimizer, algorithm: str, accumulate: int = 1, **settings):
        self.accumulate = accumulate
        self.comm = self.workers = comm
        self.model, self.optimizer, self.algorithm = model, optimizer, algorithm
        # The initial parameters are rank 0's on all ranks, whatever the models were seeded with.
        broadcast_parameters(comm, model)
        self.optimizer_state = run_on_all(
            comm, "md.train: optimizer", lambda: optimizer.init(model.parameters)
        )
        self.stragglers = Stragglers(comm)
        self._allocate(**settings)

    def _allocate(self, **settings) -> None:
        self.exchange = Gradients(
            self.comm, self.model.parameters, algorithm=self.algorithm, **settings
        )
        self.gradients = self.exchange.views
        # A model of a user's own may know nothing of `ready`.
        names = signature(self.model.loss_and_gradients).parameters
        self._tells = "ready" in names
        if self.accumulate > 1:
            self._scratch, _ = flat_views(self.model.parameters)

    def part(self, count: int) -> tuple[int, int]:
        """Return which samples of a global batch of `count` are this rank's."""
        return BlockPartition(count, self.comm.size).range(self.comm.rank)

    def compute(self, feed, indices) -> tuple[float, int]:
        """Compute this rank's part of a global batch; returns (local mean loss, samples).

        A rank without a good sample has zeros, and takes part in every exchange.
        """
        start, stop = self.part(len(indices))
        mine = indices[start:stop]
        taken = feed.take(mine)
        self._told = False

        def mean(batch: tuple) -> float:
            samples = len(batch[0])
            self.exchange.begin(samples / len(indices))
            views = dict(self.gradients)
            try:
                if self.accumulate > 1:
                    loss = self._add_up(batch, samples)
                else:
                    loss = self._call(batch, self.gradients, self._ready)
            except ConfigError:
                raise  # no fault of a record
            except REJECTIONS as error:
                if not self._told:
                    raise
                raise RuntimeError("the model failed when gradients were under way") from error
            check_in_place(self.gradients, views)
            return loss

        loss, samples = 0.0, 0
        if taken is not None and len(taken.kept):
            loss, samples = feed.tolerate(beside(taken.batch, self.model), mine[taken.kept], mean)
        if not samples:
            self.exchange.begin(0.0)
            for name, view in self.gradients.items():
                view[...] = 0
                self.exchange.ready(name)
        return loss, samples

    def _ready(self, name: str) -> None:
        self._told = self.exchange.overlapping
        self.exchange.ready(name)

    def _call(self, batch, gradients: dict, ready) -> float:
        if self._tells:
            return check_loss(self.model.loss_and_gradients(batch, gradients, ready))
        return check_loss(self.model.loss_and_gradients(batch, gradients))

    def _add_up(self, batch, samples: int) -> float:
        """Compute the local mean in `accumulate` parts, one after the other.

        Nothing is exchanged before the last part; from then on a gradient is final, and told, as
        soon as that part's share is added.
        """
        bounds = BlockPartition(samples, min(self.accumulate, samples)).bounds()
        last, total = len(bounds) - 2, 0.0
        told: set[str] = set()

        def add(name: str) -> None:
            if self._number:
                self.gradients[name] += self._scratch[name] * self._part
            else:
                np.multiply(self._scratch[name], self._part, out=self.gradients[name])
            if self._number == last:
                self._ready(name)
            told.add(name)

        for self._number in range(last + 1):
            start, stop = bounds[self._number : self._number + 2]
            self._part = (stop - start) / samples
            told.clear()
            part = tuple(array[start:stop] for array in batch)
            total += self._call(part, self._scratch, add) * self._part
            for name in self._scratch:
                if name not in told:
                    add(name)
        return total

    def reduce(self, loss: float, samples: int, total: int, stop: int) -> tuple[float, bool]:
        """Turn local mean gradients into the global mean; returns (global loss, flag). Collective.

        `samples` of the `total` samples of this step were this rank's; the flag is up where `stop`
        is on any rank.
        """
        self.exchange.reduce(loss * samples / max(total, 1), stop)
        return float(self.exchange.extras[0]), bool(self.exchange.extras[1] > 0)

    def rescale(self, factor: float) -> None:
        """Multiply the reduced gradients, where samples turned out to be missing.

        To be called after every reduction whose flag is up and whose gradients are used.
        """
        for gradient in self.gradients.values():
            gradient *= factor

    def order(self) -> dict[str, int]:
        """Return the place of every gradient where it has been learned: name -> number."""
        return {name: k for k, name in enumerate(self.exchange.order or [])}

    def arrange(self, order: dict[str, int]) -> None:
        """Lay the gradients out as a run did that is resumed. Collective; between two steps."""
        if order:
            self.exchange.arrange(sorted(order, key=order.__getitem__))

    def hidden(self) -> float | None:
        """Share of the exchange that ran behind backward."""
        return self.exchange.hidden()

    def update(self) -> None:
        """Apply the reduced gradients."""
        self.optimizer.update(self.gradients, self.optimizer_state, self.model.parameters)

    def state(self, saving: bool) -> dict:
        """Return what a checkpoint holds, by live arrays."""
        return {"parameters": dict(self.model.parameters), "optimizer": self.optimizer_state}

    def begin(self) -> None:
        """Get ready for the first step, after a checkpoint was loaded. Nothing to do here."""

    def check(self, step: int) -> None:
        """Raise ReplicaError on all ranks unless all hold the same parameters. Collective."""
        check_replicas(self.comm, self.model.parameters, step=step)

    def save_point(self, step: int) -> None:
        """Make sure that `state` is one state: each rank writes a part of it. Collective."""
        self.check(step)

    def finish(self) -> None:
        """Bring the final parameters to every worker. Nothing to do here."""

    def close(self) -> None:
        """Free what was made. Collective."""
        self.exchange.close()

    def abandon(self, error: BaseException) -> None:
        """Tell the other ranks, which wait for this one or will, why it does not come."""
        self._let_go()
        context = of(self.comm)
        if context.failed or context.closed or context.size == 1:
            return
        if context.handles:  # a bucket is under way, which the others wait for
            context.break_off(error, min(handle.sequence for handle in context.handles))
        else:
            context.raised(error)

    def _let_go(self) -> None:
        self.exchange.abandon()


def check_in_place(gradients: dict, views: dict) -> None:
    """Raise ConfigError where a model has put arrays of its own into `gradients`.

    Nobody would send them: the replicas would drift apart without a word.
    """
    for name, view in views.items():
        if gradients.get(name) is not view:
            raise ConfigError(
                f"the model replaced gradients[{name!r}] by another array; write into the one "
                f"that is there: gradients[{name!r}][...] = values"
            )
