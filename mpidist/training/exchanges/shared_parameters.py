"""How `Hogwild` trains: all ranks of a node update the same parameters, without a lock.

    node memory   [ w ............ | b ... ]   the parameters, once per node
                    ^     ^      ^
    rank 0 -= lr * g      |      |             each where its gradients are not zero
    rank 1 ------------ -= lr * g              at the same time

If two ranks read the same number and then both write it, one of the two changes is lost. Each rank
has an optimizer state of its own. At a checkpoint and at the end, all ranks get the mean of these
states.
"""

from __future__ import annotations

import numpy as np

from ...arrays import array_module
from ...errors import ConfigError
from ...peers.mixed_arrays import average_state
from ...registry import has_argument
from ...runtime.agreement.run_on_all import run_on_all
from ...runtime.elastic_requests import tester
from ...runtime.node_memory.arena import Segment
from ...runtime.topology import topology_of
from .peer_exchange import Peers

#: If a larger share of a gradient's rows is not zero, the update uses the whole gradient.
_SPARSE = 0.25
#: For a gradient with fewer rows than this number, an update of all rows is faster than a search
#: for the rows that are not zero.
_FEW_ROWS = 256
_ALIGNED = 64


class SharedParameters(Peers):
    """Update parameters that all ranks of a node share. Collective over `comm`."""

    def __init__(self, comm, model, optimizer):
        nodes = topology_of(comm).nodes
        run_on_all(comm, "md.train: Hogwild", lambda: _check(nodes, model))
        self._open(comm, model, optimizer)
        self._own = dict(model.parameters)
        self._asked, self._weighs = None, False
        self._share()

    def _share(self) -> None:
        """Copy the parameters of the first rank into shared memory, which all ranks then use."""
        places, stop = {}, 0
        for name, array in self._own.items():
            start = -(-stop // _ALIGNED) * _ALIGNED
            stop = start + array.nbytes
            places[name] = start, stop
        with self.context.call("md.train: shared parameters"):
            self._begin("shared parameters")
            memory = Segment(self.private, stop, self.context.wait).parts[0]
        shared = {
            name: memory[start:stop].view(self._own[name].dtype).reshape(self._own[name].shape)
            for name, (start, stop) in places.items()
        }
        if self.comm.rank == 0:
            for name, array in self._own.items():
                shared[name][...] = array
        # No rank may read the parameters before the first rank has written them.
        run_on_all(self.comm, "md.train: shared parameters", lambda: self._use(shared))

    def _use(self, arrays: dict) -> None:
        """Replace the parameters of the model by `arrays`."""
        for name, array in arrays.items():
            self.model.parameters[name] = array
            if self.model.parameters[name] is not array:
                raise ConfigError(
                    f"Hogwild: the model {type(self.model).__name__} does not use an array that is "
                    f"assigned to parameters[{name!r}]; let `parameters` always be the same dict"
                )

    def update(self) -> None:
        """Update the shared parameters in the rows in which this rank's gradients are not zero."""
        if self._factor:
            weight = self._factor / self.comm.size
            if self.optimizer is not self._asked:  # a function `on_resize` may replace it
                self._asked = self.optimizer
                self._weighs = has_argument(self.optimizer.update, "weight")
            more = {"weight": weight} if self._weighs else {}
            if not self._weighs:
                for gradient in self.gradients.values():
                    gradient *= weight
            gradients = self.gradients
            if getattr(self.optimizer, "rows", "") == "exact":
                gradients = {name: nonzero_rows(array) for name, array in gradients.items()}
            self.optimizer.update(gradients, self.optimizer_state, self.model.parameters, **more)
        self.steps += 1
        self._equal = False

    def _meet(self) -> None:
        """Wait for all ranks, and average the states of their optimizers. Collective."""
        with self.context.call("md.train: all ranks"):
            self._begin("all ranks")
            self._wait(tester(self.private.Ibarrier()))
        if not self._equal:
            average_state(self.comm, self.optimizer_state)
            self._equal = True

    def peer_facts(self) -> None:
        """Return None: this strategy does not average the models of ranks."""

    def close(self) -> None:
        """Copy the parameters into memory of each rank, and free the shared memory. Collective."""
        self._return()
        self.private.Free()

    def abandon(self, error: BaseException) -> None:
        """Send the other ranks the error that has ended the run on this rank."""
        super().abandon(error)
        self._return()

    def _return(self) -> None:
        for name, array in self._own.items():
            array[...] = self.model.parameters[name]
            self.model.parameters[name] = array


def nonzero_rows(gradient: np.ndarray):
    """Return (rows, values) of the nonzero rows, or the whole gradient if many rows are nonzero."""
    if gradient.ndim == 0 or len(gradient) < _FEW_ROWS:
        return gradient
    flat = gradient.reshape(len(gradient), -1)
    rows = np.flatnonzero(flat[:, 0] if flat.shape[1] == 1 else flat.any(axis=1))
    return gradient if len(rows) > _SPARSE * len(gradient) else (rows, gradient[rows])


def _check(nodes: int, model) -> None:
    """Raise ConfigError if the ranks or the model cannot share parameters."""
    if nodes > 1:
        raise ConfigError(
            f"Hogwild: the ranks are on {nodes} nodes, and only the ranks of one node share "
            "memory; use md.PeerAverage(), or md.ParameterServer(consistency=md.ASP())"
        )
    if any(array_module(array) is not np for array in model.parameters.values()):
        raise ConfigError(
            "Hogwild: the parameters are on a device; ranks share host memory, so use device 'cpu'"
        )
