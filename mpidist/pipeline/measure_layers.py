"""Measure the time and the size of each layer of a model, to choose its cuts. Uses no MPI."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from ..arrays import array_module, synchronize
from ..errors import ConfigError
from ..registry import checked_whole
from .layer_profile import Layer, LayerProfile, chain
from .stage_plan import check_layers

#: How often each pass is measured; the shortest of the measured times is used.
REPEATS = 5


def measure(model, batch, repeats: int = REPEATS) -> LayerProfile:
    """Measure each layer of a model with one microbatch; return the times and sizes as a profile.

    `batch` is the microbatch, a tuple (inputs, labels). Each time is the shortest of `repeats`
    passes. Raises ConfigError if `repeats` is not an integer of 1 or more.
    """
    repeats = checked_whole("repeats", repeats, 1)
    layers = check_layers(model)
    inputs, labels = batch
    kept = getattr(model, "initial_parameters", None) if "parameters" not in vars(model) else None
    first = next(k for k, layer in enumerate(layers) if layer.shapes())

    def parameters(k: int) -> dict:
        return model.parameters if kept is None else kept(k, k + 1)

    dtype = next(iter(parameters(first).values())).dtype
    x: Any = array_module(next(iter(parameters(first).values()))).asarray(inputs, dtype=dtype)[None]
    forward, sizes, tape = [], [], []
    for k, layer in enumerate(layers):
        own = parameters(k)
        seconds, (y, saved) = _shortest(partial(layer.forward, own, x), repeats)
        forward.append(seconds)
        nbytes = sum(own[name].nbytes for name in layer.shapes())
        sizes.append((float(y.nbytes), float(nbytes)))
        tape.append(saved)
        x = y
    _, dy = model.loss(x, array_module(x).asarray(labels)[None])
    backward = [0.0] * len(layers)
    for k in range(len(layers) - 1, first - 1, -1):
        layer, own = layers[k], parameters(k)
        gradients = {name: np.empty_like(own[name])[None] for name in layer.shapes()}

        # A layer may overwrite the gradient that is passed to it, so each pass gets a copy.
        def one_pass(layer=layer, own=own, saved=tape[k], dy=dy, gradients=gradients, k=k):
            return layer.backward(own, saved, dy.copy(order="K"), gradients, first=k == first)

        backward[k], dy = _shortest(one_pass, repeats)
    return chain([
        Layer(f"layer{k}", _text(layer), forward[k], backward[k], *sizes[k])
        for k, layer in enumerate(layers)
    ])  # fmt: skip


def random_batch(model, samples: int) -> tuple[np.ndarray, np.ndarray]:
    """Return (inputs, labels) for `measure`: `samples` random inputs of the model's input shape."""
    check_layers(model)
    shape = getattr(model, "sample_shape", None)
    if shape is None:
        raise ConfigError(
            f"{type(model).__name__} has no sample_shape, so its layers cannot be measured with "
            "random inputs; call md.pipeline.measure(model, (inputs, labels))"
        )
    inputs = np.random.default_rng(0).standard_normal((samples, *shape), np.float32)
    return inputs, np.zeros(samples, np.int64)


def _text(layer) -> str:
    """Return the class name of a layer, followed by the layer's own name if the layer has one."""
    kind, name = type(layer).__name__, getattr(layer, "name", None)
    return f"{kind}({name})" if isinstance(name, str) and name.isidentifier() else kind


def _shortest(call: Callable[[], Any], repeats: int) -> tuple[float, Any]:
    best = float("inf")
    for _ in range(repeats):
        began = time.perf_counter()
        result = call()
        synchronize(result[0] if isinstance(result, tuple) else result)
        best = min(best, time.perf_counter() - began)
    return best, result
