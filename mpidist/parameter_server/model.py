"""What a user says about a model, checked and brought into one form that ranks can compare."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from ..arrays import as_array
from ..errors import ConfigError
from .consistency import Consistency
from .shards import parse_init


class Spec(NamedTuple):
    """One rank's view of a model.

    Attributes
    ----------
    specs : dict
        Name to (shape, dtype).
    inits : dict or None
        Name to (kind, scale); None where the model was given as arrays.
    facts : dict
        What must be equal on all ranks, as JSON.
    """

    specs: dict[str, tuple[tuple[int, ...], np.dtype]]
    inits: dict[str, tuple[str, float]] | None
    facts: dict[str, Any]


def parse_model(name: str, model: Mapping, consistency, global_batch, seed: int) -> Spec:
    """Check a model given as arrays or as (shape, dtype, init). Local.

    Raises
    ------
    ConfigError
        Names that are no strings, dtypes that are not floating-point, a mixture of the two forms.
    """
    if not isinstance(model, Mapping) or not all(isinstance(key, str) for key in model):
        raise ConfigError(
            f"model {name!r}: expected a dict of name to array or (shape, dtype, init)"
        )
    if not isinstance(consistency, Consistency):
        raise ConfigError(f"model {name!r}: consistency is {consistency!r}; give BSP, ASP or SSP")
    if global_batch is not None and (not isinstance(global_batch, int) or global_batch < 1):
        raise ConfigError(f"model {name!r}: global_batch is {global_batch!r}; give an integer >= 1")
    described = [key for key, value in model.items() if isinstance(value, tuple | list)]
    if described and len(described) != len(model):
        other = next(key for key in model if key not in described)
        raise ConfigError(
            f"model {name!r}: {described[0]!r} is (shape, dtype, init) and {other!r} an array; "
            "give one form"
        )
    if described:
        specs = {key: _described(name, key, value) for key, value in model.items()}
        inits = {key: parse_init(v[2] if len(v) > 2 else "zeros") for key, v in model.items()}
    else:
        arrays = {key: as_array(value) for key, value in model.items()}
        specs = {key: (tuple(a.shape), np.dtype(a.dtype)) for key, a in arrays.items()}
        inits = None
    for key, (_, dtype) in specs.items():
        if dtype.kind != "f" or dtype.itemsize > 8:
            raise ConfigError(
                f"model {name!r}: {key!r} is {dtype}; servers keep float16, float32 and float64"
            )
    facts = {
        "name": name,
        "tensors": {key: [list(specs[key][0]), specs[key][1].name] for key in sorted(specs)},
        "consistency": repr(consistency),
        "global_batch": global_batch,
        "seed": seed,
    }
    return Spec(specs, inits, facts)


def _described(model: str, name: str, value) -> tuple[tuple[int, ...], np.dtype]:
    if len(value) not in (2, 3):
        raise ConfigError(
            f"model {model!r}: {name!r} is {value!r}; expected (shape, dtype) or "
            "(shape, dtype, init)"
        )
    try:
        shape = tuple(int(n) for n in value[0])
        dtype = np.dtype(value[1])
    except (TypeError, ValueError) as error:
        raise ConfigError(f"model {model!r}: {name!r}: {error}") from error
    if any(n < 0 for n in shape):
        raise ConfigError(f"model {model!r}: {name!r} has a negative length in shape {shape}")
    return shape, dtype


def check_optimizer(name: str, optimizer) -> None:
    """Refuse what a server cannot apply to pieces of tensors. Local."""
    if not (
        callable(getattr(optimizer, "init", None)) and callable(getattr(optimizer, "update", None))
    ):
        raise ConfigError(f"model {name!r}: optimizer {optimizer!r} has no init and update")
    if not getattr(optimizer, "elementwise", False):
        kind = getattr(optimizer, "name", type(optimizer).__name__)
        raise ConfigError(
            f"model {name!r}: optimizer {kind} needs whole tensors, servers hold pieces of them; "
            "use an elementwise one: sgd, momentum, adam"
        )
