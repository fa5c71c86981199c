"""Check that a model can be cut into stages: it needs a list of layers and a loss function."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import ConfigError

_LAYER = ("shapes", "forward", "backward")


def why_no_stages(model) -> str:
    """Return why `model` cannot be cut into the stages of a pipeline, or "" if it can be cut.

    A model needs ``layers``, a list of objects with the methods ``shapes``, ``forward`` and
    ``backward`` of `mpidist.models.layers`, and a method ``loss(scores, labels)``. Two layers must
    not have a parameter of the same name.
    """
    name = type(model).__name__
    layers = getattr(model, "layers", None)
    if not isinstance(layers, Sequence) or isinstance(layers, str) or not layers:
        return f"model {name} has no layers (a list of objects with {', '.join(_LAYER)})"
    if not callable(getattr(model, "loss", None)):
        return f"model {name} has no method loss(scores, labels)"
    if getattr(model, "state", None):
        return f"model {name} has a state, such as running means, and no stage can keep a state"
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
    """Return the entries of ``model.parameters`` that belong to `layers`, as a dict name -> array.

    Raises ConfigError if an array is missing or has another shape than its layer says.
    """
    shapes = {name: shape for layer in layers for name, shape in layer.shapes().items()}
    for name, shape in shapes.items():
        found = model.parameters.get(name)
        if found is None or tuple(found.shape) != tuple(shape):
            given = "no array" if found is None else f"an array of shape {tuple(found.shape)}"
            raise ConfigError(
                f"model.parameters has {given} with the name {name!r}; its layer needs the shape "
                f"{tuple(shape)}. If md.Pipeline has trained this model, make a new model, because "
                "afterwards model.parameters has the arrays of this rank's layers only"
            )
    return {name: model.parameters[name] for name in shapes}
