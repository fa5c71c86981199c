"""Measure the times and sizes of a model's layers, for `cut`."""

from __future__ import annotations

import time

import numpy as np

from ..arrays import array_module
from ..errors import ConfigError
from ..registry import checked_whole
from .layer_profile import Layer, LayerProfile, chain

#: Passes before the measured ones: the first ones allocate memory.
_WARM_UP = 2


def measure(model, batch, *, repeats: int = 9) -> LayerProfile:
    """Return the profile of a model that is a chain of layers. Nothing is trained.

    Parameters
    ----------
    model : object
        With ``layers``, a list of objects with ``shapes``, ``forward`` and ``backward`` as in
        `mpidist.models.layers`, with ``parameters``, and with
        ``loss(scores, labels) -> (losses, gradient)``; `md.models.Network` is one.
    batch : (inputs, labels)
        A microbatch: the times and the sizes of outputs are those of so many samples. The first
        axis is that of the samples.
    repeats : int
        How many passes are measured; each time is the median.

    Raises
    ------
    ConfigError
        The model is no chain of layers, or the batch is empty.
    """
    missing = [name for name in ("layers", "loss", "parameters") if not hasattr(model, name)]
    if missing:
        kind, lacks = type(model).__name__, ", ".join(missing)
        raise ConfigError(f"{kind} cannot be cut into layers: it has no attribute {lacks}")
    checked_whole("repeats", repeats, 1)
    inputs, labels = batch
    if not len(inputs):
        raise ConfigError("batch: no samples; expected a microbatch")
    layers, parameters = model.layers, model.parameters
    xp = array_module(next(iter(parameters.values()), inputs))
    dtype = next((array.dtype for array in parameters.values()), None)
    first_x, labels = xp.asarray(inputs, dtype=dtype)[None], xp.asarray(labels)[None]
    gradients = {name: xp.empty_like(array)[None] for name, array in parameters.items()}
    first = next((k for k, layer in enumerate(layers) if layer.shapes()), 0)
    times = np.zeros((2, len(layers), _WARM_UP + repeats))
    sizes = [0] * len(layers)
    for run in range(_WARM_UP + repeats):
        x, tape = first_x, []
        for k, layer in enumerate(layers):
            began = _now(xp)
            x, saved = layer.forward(parameters, x)
            times[0, k, run] = _now(xp) - began
            tape.append(saved)
            sizes[k] = x.nbytes
        _, dy = model.loss(x, labels)
        for k in range(len(layers) - 1, first - 1, -1):
            began = _now(xp)
            back = layers[k].backward
            dy = back(parameters, tape.pop(), dy, gradients, _nothing, first=k == first)
            times[1, k, run] = _now(xp) - began
    return chain(
        [
            Layer(
                name=f"layer{k + 1}",
                text=type(layer).__name__,
                forward=float(np.median(times[0, k, _WARM_UP:])),
                backward=float(np.median(times[1, k, _WARM_UP:])),
                output_bytes=float(sizes[k]),
                parameter_bytes=float(sum(parameters[name].nbytes for name in layer.shapes())),
            )
            for k, layer in enumerate(layers)
        ]
    )


def _now(xp) -> float:
    if xp is not np:  # a GPU computes behind the calls
        xp.cuda.get_current_stream().synchronize()
    return time.perf_counter()


def _nothing(name: str) -> None:
    pass
