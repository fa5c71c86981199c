"""Models with some dense layers that are split over ranks, for `Pipeline(split=...)`.

    split={"dense2": "columns"}     dense2 becomes a `SplitDense`; all other layers are copies

Only `split_model` needs MPI.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import numpy as np

from ..arrays import array_module
from ..errors import ConfigError, nearest, shown
from ..registry import checked_whole
from .layers import Dense
from .split_dense import SPLITS, SplitDense


def check_split_settings(split, split_ranks) -> None:
    """Raise ConfigError unless `split` and `split_ranks` are valid; both may be None.

    `split` maps names of dense layers to "columns" or "rows". `split_ranks` is the number of ranks
    that share each of these layers.
    """
    if split_ranks is not None:
        checked_whole("split_ranks", split_ranks, 1)
    if split is None:
        if split_ranks is not None:
            raise ConfigError(
                f"split_ranks={split_ranks} needs split, the layers that these ranks share, such "
                "as {'dense2': 'columns'}"
            )
        return
    if not isinstance(split, Mapping) or not split or not all(isinstance(k, str) for k in split):
        raise ConfigError(
            f"split={shown(split)}; expected the names of dense layers, each with 'columns' or "
            "'rows', such as {'dense2': 'columns'}"
        )
    for name, how in split.items():
        if not isinstance(how, str) or how not in SPLITS:
            hint = nearest(how, SPLITS) if isinstance(how, str) else ""
            raise ConfigError(
                f"split: {shown(name)} is {shown(how)}; expected 'columns' or 'rows'{hint}"
            )


def split_ways(size: int, others: int, split_ranks: int | None) -> int:
    """Return over how many of `size` ranks each layer is split.

    `split_ranks` is the requested number of ranks, or None for as many as possible: `size` divided
    by `others`. `others` is the number of stages of the pipeline times the number of replicas of
    the pipeline, or 0 if it is not known.
    """
    if split_ranks is None and not others:
        raise ConfigError("split needs stages, cuts, replicas or split_ranks; give stages")
    divisor = split_ranks or others
    if size % divisor:
        what = f"split_ranks={divisor}" if split_ranks else f"the {others} ranks of the stages"
        raise ConfigError(f"{size} ranks are no multiple of {what}; start a multiple")
    return split_ranks or size // others


def check_layers_of_split(model, optimizer, split: Mapping[str, str], ranks: int) -> None:
    """Raise ConfigError if the model cannot be split as `split` says over `ranks` ranks."""
    if not getattr(optimizer, "elementwise", False):
        kind = getattr(optimizer, "name", type(optimizer).__name__)
        raise ConfigError(
            f"split: optimizer {kind} needs whole arrays, ranks hold parts of them; use an "
            "elementwise one: sgd, momentum, adam, adagrad, ftrl"
        )
    dense = dense_layers(model)
    for name, how in split.items():
        if name not in dense:
            known = ", ".join(map(repr, dense)) or "none"
            raise ConfigError(
                f"split: the model has no dense layer {shown(name)}; its dense layers are {known}"
                f"{nearest(name, dense)}"
            )
        layer = model.layers[dense[name]]
        size = (layer.inputs, layer.outputs)[SPLITS[how]]
        if size < ranks:
            raise ConfigError(
                f"split: {name} has {size} {how}, and {ranks} ranks share it; use {size} ranks at "
                "most for split_ranks"
            )


def dense_layers(model) -> dict[str, int]:
    """Return a dict from the name of each dense layer to its index in ``model.layers``."""
    return {layer.name: k for k, layer in enumerate(model.layers) if isinstance(layer, Dense)}


def split_model(model, comm, split: Mapping[str, str]) -> Any:
    """Return a copy of a model in which each rank has only parts of some layers. Collective."""
    dense = dense_layers(model)
    new = copy.copy(model)
    new.layers = list(model.layers)
    for name, how in split.items():
        layer = model.layers[dense[name]]
        new.layers[dense[name]] = SplitDense(comm, name, layer.inputs, layer.outputs, how)
    if "parameters" in vars(model):
        new.parameters = dict(model.parameters)
        for name in split:
            layer = new.layers[dense[name]]
            for key, shape in layer.whole_shapes().items():
                new.parameters[key] = _part(model.parameters.get(key), layer.window(key), shape)
    return new


def _part(array, window, shape):
    """Return a contiguous copy of a part of an array; return an array of a wrong shape as it is."""
    # `checked_arrays` later raises an error for a missing array or an array of another shape.
    if array is None or tuple(array.shape) != tuple(shape):
        return np.empty(()) if array is None else array
    return array_module(array).ascontiguousarray(array[window].copy())


def parts_of(model) -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return the parameters of which this rank has only a part: {name: (whole shape, start)}."""
    found = {}
    for layer in model.layers:
        if not hasattr(layer, "window"):
            continue
        own = layer.shapes()
        for name, whole in layer.whole_shapes().items():
            if tuple(own[name]) != tuple(whole):
                start = tuple(part.indices(n)[0] for part, n in zip(
                    layer.window(name), whole, strict=True
                ))  # fmt: skip
                found[name] = (tuple(whole), start)
    return found
