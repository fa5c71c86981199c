"""What a model must have to be cut into stages: a chain of layers, and a separate loss function."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import ConfigError

_LAYER = ("shapes", "forward", "backward")


def why_no_stages(model) -> str:
    """Return why `model` cannot be cut into the stages of a pipeline, or "" if it can be.

    A model needs ``layers``, a list of objects with the methods ``shapes``, ``forward`` and
    ``backward`` of `mpidist.models.layers`, and a method ``loss(scores, labels)``. A name of a
    parameter may stand in one layer only. The parameters are not looked at, so none are made.
    """
    name = type(model).__name__
    layers = getattr(model, "layers", None)
    if not isinstance(layers, Sequence) or isinstance(layers, str) or not layers:
        return f"model {name} has no layers (a list of objects with {', '.join(_LAYER)})"
    if not callable(getattr(model, "loss", None)):
        return f"model {name} has no method loss(scores, labels)"
    if getattr(model, "state", None):
        return f"model {name} has a state, such as running means, which no stage can keep"
    owners: dict[str, int] = {}
    for i, layer in enumerate(layers):
        what = f"layer {i} of model {name} ({type(layer).__name__})"
        lacks = [method for method in _LAYER if not callable(getattr(layer, method, None))]
        if isinstance(layer, type):
            return f"layer {i} of model {name} is the class {layer.__name__}, not an object of it"
        if lacks:
            return f"{what} has no method {lacks[0]}"
        for parameter in layer.shapes():
            if parameter in owners:
                return f"{what} has the parameter {parameter!r} of layer {owners[parameter]}, too"
            owners[parameter] = i
    return "" if owners else f"model {name} has no layer with parameters"


def checked_arrays(model, layers: Sequence) -> dict:
    """Return the arrays of these layers in ``model.parameters``; raise ConfigError if one lacks."""
    shapes = {name: shape for layer in layers for name, shape in layer.shapes().items()}
    for name, shape in shapes.items():
        found = model.parameters.get(name)
        if found is None or tuple(found.shape) != tuple(shape):
            given = "none" if found is None else f"one of shape {tuple(found.shape)}"
            raise ConfigError(
                f"model.parameters has {given} called {name!r}, and its layer says {tuple(shape)}; "
                "make the model anew if it was trained by md.Pipeline, which leaves a rank the "
                "arrays of its own layers only"
            )
    return {name: model.parameters[name] for name in shapes}
