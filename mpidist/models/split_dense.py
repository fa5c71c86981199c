"""A dense layer whose weights are split over the ranks of a communicator.

    layer = SplitDense(comm, "dense2", 1024, 3862, split="columns")

All ranks have the same x, and get the same y. With 4 ranks, rank 1 has:

    columns    weight[:, 1/4 to 2/4], bias[1/4 to 2/4]     y: allgather    dx: sum by allreduce
    rows       weight[1/4 to 2/4, :], bias                 y: allreduce    dx: allgather

An allreduce sends about twice as many bytes as an allgather of as many values. So `columns` suits a
layer with more outputs than inputs, such as a classifier with many classes, and `rows` suits a
layer with more inputs than outputs.

All ranks get the same bits, and every run with as many ranks gives the same bits. The last bits may
differ from those of one rank with the whole layer.

Reference: Shoeybi et al., Megatron-LM, 2019, arXiv:1909.08053.
"""

from __future__ import annotations

from collections.abc import Callable

from ..arrays import array_module
from ..errors import ConfigError, nearest, shown
from ..partition import BlockPartition
from ..registry import checked_whole
from .batch_norm import call_guard

#: The axis of the weights that each way splits.
SPLITS = {"rows": 0, "columns": 1}


def _nothing(name: str) -> None:
    pass


class SplitDense:
    """Dense layer with a part of the weights on each rank: ``y = x @ weight + bias``.

    Collective over `comm`, as are the methods `forward`, `backward` and `backward_input`: all ranks
    call them in the same order, with the same batch. `x` and `y` have shape (pieces, samples,
    features), and every rank has all features. A piece is a batch with gradients of its own. Each
    rank computes the gradients of its part of the weights, and updates this part.

    Parameters
    ----------
    comm : MPI.Comm
        The ranks over which the weights are split. Do not pass `comm` to `md.train` or `md.Stage`
        yourself, because these expect equal parameters on all ranks. Instead, let
        `md.Pipeline(split=...)` make such layers for `md.train`.
    name : str
        The parameters are called ``name.weight`` and ``name.bias``.
    inputs, outputs : int
        The size of the whole layer.
    split : "columns" or "rows"
        With "columns" each rank has some of the outputs, and with "rows" some of the inputs.

    Raises
    ------
    ConfigError
        There are fewer columns (or rows) than ranks.
    MismatchError
        The ranks give different arguments.
    """

    def __init__(self, comm, name: str, inputs: int, outputs: int, split: str = "columns"):
        # Not imported at the top: models can be imported, and used by one process, without MPI.
        from ..runtime.agreement.run_on_all import same_on_all

        def checked() -> dict:
            checked_whole("SplitDense: inputs", inputs, 1)
            checked_whole("SplitDense: outputs", outputs, 1)
            if split not in SPLITS:
                names = " or ".join(map(repr, SPLITS))
                raise ConfigError(f"split={shown(split)}; expected {names}{nearest(split, SPLITS)}")
            size = (inputs, outputs)[SPLITS[split]]
            if size < comm.size:
                raise ConfigError(
                    f"SplitDense {name!r}: {size} {split} on {comm.size} ranks; split it over "
                    f"{size} ranks at most"
                )
            return {"name": name, "inputs": inputs, "outputs": outputs, "split": split}

        same_on_all(comm, "md.models.SplitDense", checked)
        self.comm, self.name, self.inputs, self.outputs = comm, name, inputs, outputs
        self.split = split
        self._parts = BlockPartition((inputs, outputs)[SPLITS[split]], comm.size)
        self.start, self.stop = self._parts.range(comm.rank)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the names of the parameters, and the shapes of this rank's part, in order."""
        mine = self.stop - self.start
        if self.split == "columns":
            return {f"{self.name}.weight": (self.inputs, mine), f"{self.name}.bias": (mine,)}
        return {f"{self.name}.weight": (mine, self.outputs), f"{self.name}.bias": (self.outputs,)}

    def whole_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the whole layer's parameters."""
        return {
            f"{self.name}.weight": (self.inputs, self.outputs),
            f"{self.name}.bias": (self.outputs,),
        }

    def window(self, name: str) -> tuple[slice, ...]:
        """Return the slices that select this rank's part from the whole parameter called `name`."""
        mine, everything = slice(self.start, self.stop), slice(None)
        if name == f"{self.name}.bias":
            return (mine if self.split == "columns" else everything,)
        return (everything, mine) if self.split == "columns" else (mine, everything)

    def forward(self, parameters, x):
        """Return (y, x): the output, and the values that `backward` needs.

        Collective over `comm`.
        """
        with call_guard(self.comm, "SplitDense.forward"):
            weight, bias = parameters[f"{self.name}.weight"], parameters[f"{self.name}.bias"]
            if self.split == "columns":
                part = x @ weight
                part += bias
                return self._gathered(part), x
            y = self._summed(self._part(x) @ weight)
            y += bias
            return y, x

    def backward(
        self, parameters, x, dy, gradients, ready: Callable[[str], None] = _nothing, first=False
    ):
        """Write the gradients of this rank's part; return the gradient of x, or None for the first
        layer.

        Collective over `comm`, unless the layer is the first layer.
        """
        with call_guard(self.comm, "SplitDense.backward"):
            self.backward_weights(parameters, x, dy, gradients, ready)
        return None if first else self.backward_input(parameters, x, dy)

    def backward_input(self, parameters, x, dy):
        """Return the gradient of x. Collective over `comm`."""
        with call_guard(self.comm, "SplitDense.backward_input"):
            weight = parameters[f"{self.name}.weight"]
            if self.split == "columns":
                return self._summed(self._part(dy) @ weight.T)
            return self._gathered(dy @ weight.T)

    def backward_weights(
        self, parameters, x, dy, gradients, ready: Callable[[str], None] = _nothing
    ) -> None:
        """Write the gradients of weight and bias of this rank's part."""
        xp = array_module(dy)
        if self.split == "columns":
            dy = self._part(dy)
        else:
            x = self._part(x)
        xp.sum(dy, axis=1, out=gradients[f"{self.name}.bias"])
        ready(f"{self.name}.bias")
        xp.matmul(x.swapaxes(1, 2), dy, out=gradients[f"{self.name}.weight"])
        ready(f"{self.name}.weight")

    def _part(self, array):
        """Return this rank's features of `array`, which has the features of all ranks."""
        return array[..., self.start : self.stop]

    def _summed(self, array):
        from ..collectives.allreduce import allreduce  # not at the top, as in `__init__`

        return allreduce(self.comm, array, reproducible=True)

    def _gathered(self, part):
        """Return the features of all ranks, in a contiguous array."""
        from ..collectives.allgather import allgather  # not at the top, as in `__init__`

        xp = array_module(part)
        # `allgather` joins along the first axis.
        features_first = xp.ascontiguousarray(part.transpose(2, 0, 1))
        whole = allgather(self.comm, features_first, counts=self._parts.counts())
        return xp.ascontiguousarray(whole.transpose(1, 2, 0))
