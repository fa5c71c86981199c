"""How the strategy `AllReduce` exchanges gradients: each step averages them over all ranks.

Each rank has a copy of the whole model, and updates it with the averaged gradients. The gradients
of all tensors, the loss and a rank's request to stop are in one vector, which is summed inside each
node as a whole and between nodes in parts (buckets):

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
from .evaluation import WholeModel


class Replicas(WholeModel):
    """Average the gradients over all ranks; each rank updates its own copy of the model.

    Collective over `comm`.
    """

    dedicated = False
    synchronous = True
    equal_state = False  # the model's state may differ from rank to rank
    price: dict | None = None  # the cost of sums in a fixed order, which `PieceReplicas` measures
    wait = staticmethod(wait_until)

    def __init__(
        self, comm, model, optimizer, algorithm: str, accumulate: int = 1, optimizer_state=None,
        **settings,
    ):  # fmt: skip
        self.accumulate = accumulate
        self.comm = self.workers = comm
        self.model, self.optimizer, self.algorithm = model, optimizer, algorithm
        self.optimizer_state = optimizer_state
        if optimizer_state is None:
            # All ranks begin with the parameters of rank 0, whatever the seeds of their models.
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
        # The method of a user's own model may have no argument `ready`.
        self._has_ready = "ready" in signature(self.model.loss_and_gradients).parameters
        if self.accumulate > 1:
            self._scratch, _ = flat_views(self.model.parameters)

    def part(self, count: int, step: int = 0) -> tuple[int, int]:
        """Return (start, stop) of this rank's samples in a global batch of `count` samples."""
        return BlockPartition(count, self.comm.size).range(self.comm.rank)

    def compute(self, feed, indices) -> tuple[float, int]:
        """Compute the gradients of this rank's samples; return (their mean loss, their number)."""
        start, stop = self.part(len(indices))
        mine = indices[start:stop]
        taken = feed.take(mine)
        self._sending = False

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
                raise  # a wrong setting, not a bad record
            except REJECTIONS as error:
                if not self._sending:
                    raise
                raise RuntimeError("the model failed after gradients had been sent") from error
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
        self._sending = self.exchange.overlapping
        self.exchange.ready(name)

    def _call(self, batch, gradients: dict, ready) -> float:
        more = (ready,) if self._has_ready else ()
        return check_loss(self.model.loss_and_gradients(batch, gradients, *more))

    def _add_up(self, batch, samples: int) -> float:
        """Compute the mean gradients of `batch` in `accumulate` parts; return the mean loss."""
        bounds = BlockPartition(samples, min(self.accumulate, samples)).bounds()
        last, total = len(bounds) - 2, 0.0
        added: set[str] = set()

        def add(name: str) -> None:
            if self._number:
                self.gradients[name] += self._scratch[name] * self._part
            else:
                np.multiply(self._scratch[name], self._part, out=self.gradients[name])
            if self._number == last:
                self._ready(name)
            added.add(name)

        for self._number in range(last + 1):
            start, stop = bounds[self._number : self._number + 2]
            self._part = (stop - start) / samples
            added.clear()
            part = tuple(array[start:stop] for array in batch)
            total += self._call(part, self._scratch, add) * self._part
            for name in self._scratch:
                if name not in added:
                    add(name)
        return total

    def reduce(self, loss: float, samples: int, total: int, stop: int) -> tuple[float, bool]:
        """Average the gradients over all ranks; return (global mean loss, flag). Collective.

        This step has `total` samples on all ranks, of which this rank computed `samples`. `loss` is
        the mean loss of these samples. The flag is true if `stop` is true on any rank.
        """
        self.exchange.reduce(loss * samples / max(total, 1), stop)
        return float(self.exchange.extras[0]), bool(self.exchange.extras[1] > 0)

    def rescale(self, factor: float) -> None:
        """Multiply the averaged gradients by `factor`, to correct the mean for samples left out."""
        for gradient in self.gradients.values():
            gradient *= factor

    def order(self) -> dict[str, int]:
        """Return the order in which the backward pass finishes gradients: {name: number}."""
        return {name: k for k, name in enumerate(self.exchange.order or [])}

    def arrange(self, order: dict[str, int]) -> None:
        """Arrange the gradients in memory in the order that `order` has returned in an earlier run.

        Collective.
        """
        if order:
            self.exchange.arrange(sorted(order, key=order.__getitem__))

    def hidden(self) -> float | None:
        """Return the fraction of the exchange's time that passed during the backward pass."""
        return self.exchange.hidden()

    def update(self) -> None:
        """Update the parameters with the reduced gradients."""
        self.optimizer.update(self.gradients, self.optimizer_state, self.model.parameters)

    def state(self, saving: bool) -> dict:
        """Return the parameters and the optimizer state for a checkpoint: arrays, not copies."""
        return {"parameters": dict(self.model.parameters), "optimizer": self.optimizer_state}

    def begin(self) -> None:
        """Do nothing: before the first step, this strategy has nothing to prepare."""

    def check(self, step: int) -> None:
        """Raise ReplicaError on all ranks unless their parameters are equal. Collective."""
        check_replicas(self.comm, self.model.parameters, step=step)

    def save_point(self, step: int) -> None:
        """Check, before a checkpoint, that all ranks have the same parameters. Collective."""
        self.check(step)

    def finish(self) -> None:
        """Do nothing at the end of the run: every rank already has the final parameters."""

    def close(self) -> None:
        """Free the buffers and communicators of this object. Collective over `comm`."""
        self.exchange.close()

    def abandon(self, error: BaseException) -> None:
        """Send the other ranks the error that has ended the run on this rank."""
        self._let_go()
        context = of(self.comm)
        if context.failed or context.closed or context.size == 1:
            return
        if context.handles:  # other ranks wait for a bucket of gradients
            context.break_off(error, min(handle.sequence for handle in context.handles))
        else:
            context.escaped(error)  # unless `Gradients.ready` has sent it

    def lost(self, error: BaseException) -> None:
        """Do nothing after a death. The buffers stay, because MPI may still write into them."""

    def _let_go(self) -> None:
        self.exchange.abandon()


def check_in_place(gradients: dict, views: dict) -> None:
    """Raise ConfigError if a model has put arrays of its own into `gradients`."""
    for name, view in views.items():
        if gradients.get(name) is not view:
            raise ConfigError(
                f"the model replaced gradients[{name!r}] by another array; write into the given "
                f"array instead: gradients[{name!r}][...] = values"
            )
