"""The exchange of `AllReduce`: every rank a replica, one allreduce per step.

All gradients lie in one flat vector (per dtype), and the loss and the wish to stop ride at its
end, so a step costs exactly one reduction however many tensors there are (R100).

    [ conv1.w | conv1.b | ... | dense3.b | loss | stop ]     scaled by local / global samples
"""

from __future__ import annotations

from math import prod

import numpy as np

from ..arrays import array_module
from ..collectives.allreduce import allreduce
from ..collectives.rooted import broadcast
from ..errors import ConfigError

_EXTRAS = 2


class Replicas:
    """Gradients averaged over all ranks, the same update on each. Collective over `comm`."""

    dedicated = False
    synchronous = True
    equal_state = False  # the model's state may differ from rank to rank
    price: dict | None = None  # what `PieceReplicas` has measured

    def __init__(self, comm, model, optimizer, algorithm: str):
        self.comm = self.workers = comm
        self.model, self.optimizer, self.algorithm = model, optimizer, algorithm
        # The initial parameters are rank 0's on all ranks, whatever the models were seeded with.
        for array in model.parameters.values():
            broadcast(comm, array)
        for array in getattr(model, "state", {}).values():
            broadcast(comm, array)
        self.optimizer_state = optimizer.init(model.parameters)
        self.gradients, self.flat = flat_views(model.parameters)
        self._views = dict(self.gradients)

    def reduce(self, loss: float, samples: int, total: int, stop: int) -> tuple[float, bool]:
        """Turn local mean gradients into the global mean; returns (global loss, stop). Collective.

        `samples` of the `total` samples of this step were this rank's.
        """
        check_in_place(self.gradients, self._views)
        share = samples / total
        for vector in self.flat:
            vector *= share
        first = self.flat[0]
        first[-2], first[-1] = loss * share, stop
        for vector in self.flat:
            allreduce(self.comm, vector, algorithm=self.algorithm)
        return float(first[-2]), bool(first[-1] > 0)

    def update(self) -> None:
        """Apply the reduced gradients. Local."""
        self.optimizer.update(self.gradients, self.optimizer_state, self.model.parameters)

    def state(self, saving: bool) -> dict:
        """Return what a checkpoint holds, by live arrays. Local."""
        return {"parameters": dict(self.model.parameters), "optimizer": self.optimizer_state}

    def begin(self) -> None:
        """Get ready for the first step, after a checkpoint was loaded. Nothing to do here."""

    def save_point(self, step: int) -> None:
        """Bring all ranks to a point where `state` may be read. Nothing to do here."""

    def finish(self) -> None:
        """Bring the final parameters to every worker. Nothing to do here."""

    def close(self) -> None:
        """Free what was made. Nothing to do here."""


def flat_views(parameters: dict) -> tuple[dict, list]:
    """Return (gradients, vectors): a view per parameter into one zeroed vector per dtype. Local.

    The first vector has room for `_EXTRAS` further numbers at its end. It is one of the widest
    real type, and of float32 at least, if need be for them alone: a loss in float16 would overflow.
    """
    groups: dict = {}
    for name, array in parameters.items():
        groups.setdefault(array.dtype, []).append(name)
    wide = [dtype for dtype in groups if dtype.kind == "f" and dtype.itemsize >= 4]
    first = max(wide, key=lambda dtype: dtype.itemsize, default=np.dtype(np.float32))
    groups = {first: groups.pop(first, []), **groups}
    xp = array_module(next(iter(parameters.values())))
    gradients: dict = {}
    vectors: list = []
    for dtype, names in groups.items():
        sizes = [prod(parameters[name].shape) for name in names]
        vector = xp.zeros(sum(sizes) + (0 if vectors else _EXTRAS), dtype)
        start = 0
        for name, size in zip(names, sizes, strict=True):
            gradients[name] = vector[start : start + size].reshape(parameters[name].shape)
            start += size
        vectors.append(vector)
    return {name: gradients[name] for name in parameters}, vectors


def check_in_place(gradients: dict, views: dict) -> None:
    """Raise ConfigError where a model has put arrays of its own into `gradients`. Local.

    Nobody would send them: the replicas would drift apart without a word.
    """
    for name, view in views.items():
        if gradients.get(name) is not view:
            raise ConfigError(
                f"the model replaced gradients[{name!r}] by another array; write into the one "
                f"that is there: gradients[{name!r}][...] = values"
            )
