"""Downpour SGD: a worker pushes and pulls only every few steps, with local updates between.

    push_every=2, pull_every=3     step    1     2     3     4     5     6
                                   push          x           x           x
                                   pull                x                 x
                                   local   x     x           x     x

A push sends the parameter servers the mean gradient over all samples since the last push. In a step
without a pull the worker applies its gradient to its own parameters, with an optimizer state of its
own. A pull replaces the worker's parameters by the servers' parameters.

Dean et al., "Large scale distributed deep networks", NIPS 2012.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ...registry import has_argument
from ...servers.client import Client


class RareExchange:
    """Downpour SGD on one worker: sends gradients and fetches parameters only in some steps.

    To push is to send gradients to the servers, and to pull is to fetch the parameters.

    Parameters
    ----------
    client : Client
        This worker's access to the model on the servers.
    parameters : dict of str to array
        The worker's parameters, which `step` changes in place.
    optimizer : object with init and update
        The optimizer of the local updates, with a state of its own.
    push_every, pull_every : int
        The worker pushes after every `push_every` steps, and pulls after every `pull_every` steps.
    global_batch : int
        A local update of n samples has the weight ``n / global_batch``.
    """

    def __init__(
        self, client: Client, parameters: dict[str, Any], optimizer, *,
        push_every: int, pull_every: int, global_batch: int,
    ):  # fmt: skip
        self._client, self._parameters = client, parameters
        self._push_every, self._pull_every, self._batch = push_every, pull_every, global_batch
        self.use(optimizer)
        # Without local updates, a worker needs no memory for an optimizer state.
        self._state = optimizer.init(parameters) if pull_every > 1 else None
        self._sums = {name: np.zeros_like(array) for name, array in parameters.items()}
        self._samples = self._steps = 0

    def use(self, optimizer) -> None:
        """Use another optimizer for the local updates, and keep the present optimizer state."""
        self._optimizer = optimizer
        self._weighs = has_argument(optimizer.update, "weight")

    def step(self, gradients: dict[str, Any], samples: int) -> None:
        """Finish a step: send gradients, fetch parameters, or update own parameters, as is due."""
        # The weight is a share of the batch. If it were the number of samples, sums in float16
        # could overflow.
        for name, total in self._sums.items():
            total += gradients[name] * (samples / self._batch)
        self._samples += samples
        self._steps += 1
        if self._steps % self._push_every == 0:
            self._push()
        self._client.clock()
        if self._steps % self._pull_every == 0:
            self._client.pull(out=self._parameters)
        elif samples:
            weight = samples / self._batch
            if self._weighs:
                self._optimizer.update(gradients, self._state, self._parameters, weight=weight)
            else:
                scaled = {name: gradient * weight for name, gradient in gradients.items()}
                self._optimizer.update(scaled, self._state, self._parameters)

    def flush(self) -> None:
        """Send the remaining gradients to the servers, and fetch the parameters."""
        # This push counts for the next step, which itself never pushes: gradients remain only if
        # `push_every` is at least 2.
        if self._samples:
            self._push()
        self._client.pull(out=self._parameters)
        self._steps = 0

    def _push(self) -> None:
        samples = self._samples
        for total in self._sums.values():
            total /= (samples or self._batch) / self._batch
        self._client.push(self._sums, samples=samples)
        for total in self._sums.values():
            total[...] = 0
        self._samples = 0
