"""What a user says about a model, checked and brought into one form that ranks can compare."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from ..errors import ConfigError, shown
from ..tensors import dtype_of
from .consistency import Consistency
from .layout.row_selection import checked_array
from .shards import parse_init


class Request(NamedTuple):
    """What one rank asks of its group: the arguments of `ServerGroup.add`."""

    name: str
    model: Mapping
    optimizer: Any
    consistency: Consistency
    seed: int = 0
    global_batch: int | None = None


class Spec(NamedTuple):
    """One rank's view of a model.

    Attributes
    ----------
    inits : dict or None
        Name to (kind, scale); None where the model was given as arrays.
    facts : dict
        What must be equal on all ranks, as JSON.
    """

    inits: dict[str, tuple[str, float]] | None
    facts: dict[str, Any]


def parse_model(asked: Request) -> Spec:
    """Check a model given as arrays or as (shape, dtype, init).

    Raises
    ------
    ConfigError
        Names that are no strings, dtypes that are not floating-point, a mixture of the two forms.
    """
    name, model, _, consistency, seed, global_batch = asked
    if not isinstance(name, str):
        raise ConfigError(f"add: name={shown(name)}; expected a string")
    if isinstance(seed, bool) or not isinstance(seed, int) or not abs(seed) < 1 << 63:
        raise ConfigError(f"model {name!r}: seed={shown(seed)}; expected a whole number of 64 bits")
    if not isinstance(model, Mapping) or not all(isinstance(key, str) for key in model):
        raise ConfigError(
            f"model {name!r}: got {shown(model)}; expected a dict of name to array or "
            "(shape, dtype, init)"
        )
    if not isinstance(consistency, Consistency):
        said = shown(consistency)
        raise ConfigError(f"model {name!r}: consistency is {said}; give BSP, ASP or SSP")
    whole = isinstance(global_batch, int) and not isinstance(global_batch, bool)
    if global_batch is not None and not (whole and 1 <= global_batch < 1 << 63):
        said = shown(global_batch)
        raise ConfigError(f"model {name!r}: global_batch is {said}; give an integer >= 1")
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
        arrays = {key: checked_array(f"model {name!r}: {key!r}", x) for key, x in model.items()}
        specs = {key: (tuple(a.shape), np.dtype(a.dtype)) for key, a in arrays.items()}
        inits = None
    for key, (_, dtype) in specs.items():
        if dtype.name != "bfloat16" and (dtype.kind != "f" or dtype.itemsize > 8):
            raise ConfigError(
                f"model {name!r}: {key!r} is {dtype}; servers keep float16, bfloat16, float32 and "
                "float64"
            )
    facts = {
        "name": name,
        "tensors": {key: [list(specs[key][0]), specs[key][1].name] for key in sorted(specs)},
        "consistency": repr(consistency),
        "global_batch": global_batch,
        "seed": seed,
    }
    return Spec(inits, facts)


def _described(model: str, name: str, value) -> tuple[tuple[int, ...], np.dtype]:
    if len(value) not in (2, 3):
        raise ConfigError(
            f"model {model!r}: {name!r} is {shown(value)}; expected (shape, dtype) or "
            "(shape, dtype, init)"
        )
    try:
        shape = tuple(int(n) for n in value[0])
        dtype = dtype_of(value[1])
    except (TypeError, ValueError) as error:
        raise ConfigError(f"model {model!r}: {name!r}: {error}") from error
    if any(n < 0 for n in shape):
        raise ConfigError(f"model {model!r}: {name!r} has a negative length in shape {shape}")
    return shape, dtype


def check_server_optimizer(name: str, optimizer) -> None:
    """Refuse what a server cannot apply to pieces of tensors."""
    if not (
        callable(getattr(optimizer, "init", None)) and callable(getattr(optimizer, "update", None))
    ):
        raise ConfigError(f"model {name!r}: optimizer={shown(optimizer)} has no init and update")
    if not getattr(optimizer, "elementwise", False):
        kind = getattr(optimizer, "name", type(optimizer).__name__)
        raise ConfigError(
            f"model {name!r}: optimizer {kind} needs whole tensors, servers hold pieces of them; "
            "use an elementwise one: sgd, momentum, adam"
        )


def optimizer_facts(optimizer) -> dict[str, Any]:
    """Return what must be equal on all ranks of an optimizer, in plain values.

    Its class, name and settings; of one that is not mpidist's its attributes. A schedule may be
    any function: what one update makes of a gradient of one, at the first step and later, tells
    two of them apart.
    """
    settings = getattr(optimizer, "settings", None)
    given = settings if isinstance(settings, Mapping) else getattr(optimizer, "__dict__", {})
    kind = type(optimizer)
    facts = {
        "class": f"{kind.__module__}.{kind.__qualname__}",
        "name": _plain(getattr(optimizer, "name", "")),
        **_plain(dict(given)),
    }
    if settings is given:
        facts["step"] = [_first_step(optimizer, progress) for progress in (0.0, 100.0)]
    return facts


def _first_step(optimizer, progress: float) -> str:
    """Return how far one update moves; six digits, for hosts may differ in the last one."""
    parameters = {"x": np.zeros(1)}
    try:
        state = optimizer.init(parameters)
        state["progress"][...] = progress
        optimizer.update({"x": np.ones(1)}, state, parameters)
    except Exception as error:  # a schedule of the user's: its failure shows when it is used
        return type(error).__name__
    return f"{parameters['x'][0]:.6g}"


def _plain(value) -> Any:
    """Return a value as what is equal where it means the same: numbers, texts, names of types."""
    if isinstance(value, Mapping):
        return {str(key): _plain(value[key]) for key in value if not str(key).startswith("_")}
    if value is None or isinstance(value, bool | int | float | str | np.number):
        return shown(value)
    return type(value).__qualname__
