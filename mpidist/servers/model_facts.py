"""Check the arguments of `ServerGroup.add`, and convert them to values that ranks can compare."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..errors import ConfigError, shown
from ..tensors import dtype_of
from .consistency import Consistency
from .layout.row_selection import checked_array
from .modes.stale_gradients import KeepStale, Stale, stale_policy
from .rows.cache_policy import RowCache, row_cache
from .rows.open_rows import OpenRows
from .rows.row_policies import check_open_tables, row_policies
from .shards import parse_init

#: What a client may do with a push that contains a NaN or an infinity.
NONFINITE = ("raise", "drop")

#: Where a server may update a model.
DEVICES = ("cpu", "gpu")


class KeptModel(NamedTuple):
    """What a living rank keeps of a model after a death, to add it to a new group of servers."""

    # This server's part of the model; None on a rank that is no server.
    shard: Any
    # The number of finished steps of each worker of the new group.
    clocks: Sequence[int]
    # The pushes of all steps below this one are applied, if servers hold the pushes of a step.
    applied: int = 0
    # This server's copy of another server's part, if servers keep copies.
    copy: Any = None


class Request(NamedTuple):
    """The arguments of `ServerGroup.add` on this rank.

    If the model is added again after the death of a rank, `kept` is this rank's `KeptModel`.
    """

    name: str
    model: Mapping
    optimizer: Any
    consistency: Consistency
    seed: int = 0
    global_batch: int | None = None
    kept: KeptModel | None = None
    nonfinite: str = "raise"
    stale: Stale = KeepStale()
    rows: str | OpenRows | Mapping[str, str | OpenRows] = "dense"
    spread: str | Mapping[str, str] = "ranges"
    server_device: str = "cpu"
    cache_rows: int | RowCache | None = None
    clip_norm: float | None = None


def parse_model(asked: Request) -> tuple[dict[str, Any], dict[str, tuple[str, float]] | None]:
    """Check the arguments of `ServerGroup.add`; return (facts, initial values).

    The facts are arguments, which the ranks compare because they must be equal. The initial values
    are a pair such as ("normal", 0.01) for each tensor, or None if the user gave arrays. Raises
    ConfigError if an argument is wrong.
    """
    name, model, consistency = asked.name, asked.model, asked.consistency
    seed, global_batch = asked.seed, asked.global_batch
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
        got = shown(consistency)
        raise ConfigError(
            f"model {name!r}: consistency is {got}; give BSP, SSP, DSSP, ASP or BackupWorkers"
        )
    whole = isinstance(global_batch, int) and not isinstance(global_batch, bool)
    if global_batch is not None and not (whole and 1 <= global_batch < 1 << 63):
        got = shown(global_batch)
        raise ConfigError(f"model {name!r}: global_batch is {got}; give an integer >= 1")
    check_stale(asked)
    check_nonfinite(asked.nonfinite, f"model {name!r}: ")
    forms = {isinstance(value, tuple | list): key for key, value in model.items()}
    if len(forms) == 2:
        raise ConfigError(
            f"model {name!r}: {forms[True]!r} is (shape, dtype, init) and {forms[False]!r} an "
            "array; give one form"
        )
    inits = None
    if True in forms:
        specs = {key: _described(name, key, value) for key, value in model.items()}
        inits = {key: parse_init(v[2] if len(v) > 2 else "zeros") for key, v in model.items()}
    else:
        where = f"model {name!r}: "
        arrays = {key: checked_array(f"{where}{key!r}", x, False) for key, x in model.items()}
        specs = {key: (tuple(a.shape), np.dtype(a.dtype)) for key, a in arrays.items()}
    for key, (_, dtype) in specs.items():
        if dtype.name != "bfloat16" and (dtype.kind != "f" or dtype.itemsize > 8):
            raise ConfigError(
                f"model {name!r}: {key!r} is {dtype}; servers keep float16, bfloat16, float32 and "
                "float64"
            )
    shapes = {key: shape for key, (shape, _) in specs.items()}
    policies = row_policies(name, shapes, asked.rows, asked.spread)
    check_open_tables(asked, policies)
    cache = row_cache(name, asked.cache_rows, consistency, asked.stale)
    facts = {
        "name": name,
        "tensors": {key: [list(specs[key][0]), specs[key][1].name] for key in sorted(specs)},
        "consistency": repr(consistency),
        "global_batch": global_batch,
        "seed": seed,
        "nonfinite": asked.nonfinite,
        "server_device": asked.server_device,
        "clip_norm": asked.clip_norm,
        "stale": repr(asked.stale),
        "cache_rows": repr(cache),
        "rows": {key: policy.rows for key, policy in policies.items()},
        "open": {key: policy.open for key, policy in policies.items() if policy.open},
        "spread": {key: policy.spread for key, policy in policies.items()},
    }
    return facts, inits


def check_stale(asked: Request) -> None:
    """Raise ConfigError if a model's policy for stale gradients does not suit its mode."""
    name, stale, mode = asked.name, asked.stale, asked.consistency
    if not isinstance(stale, Stale):
        stale_policy(stale)  # raises an error that says what is expected
        raise ConfigError(f"model {name!r}: stale is {shown(stale)}; give a policy, not its name")
    # True of BSP, SSP(0) and backup workers.
    if mode.holds and stale != KeepStale():
        raise ConfigError(
            f"model {name!r}: stale={stale} needs consistency ASP, SSP(1) or more, or DSSP; under "
            f"{mode} no gradient is stale"
        )
    share = getattr(stale, "keep_if_samples", None)
    if share is not None and share < 1 and asked.global_batch is None:
        raise ConfigError(
            f"model {name!r}: keep_if_samples={share} is a share of the global batch; give "
            "global_batch= as well"
        )


def check_checksums(checksums) -> None:
    """Raise ConfigError if the argument `checksums` of a group is not true or false."""
    if not isinstance(checksums, bool):
        raise ConfigError(f"checksums={shown(checksums)}; expected True or False")


def check_nonfinite(nonfinite, where: str = "") -> None:
    """Raise ConfigError if `nonfinite` is neither "raise" nor "drop"."""
    if not isinstance(nonfinite, str) or nonfinite not in NONFINITE:
        names = " or ".join(map(repr, NONFINITE))
        raise ConfigError(f"{where}nonfinite is {shown(nonfinite)}; give {names}")


def check_device_name(device, where: str = "") -> None:
    """Raise ConfigError if `device` is neither "cpu" nor "gpu"."""
    if not isinstance(device, str) or device not in DEVICES:
        names = " or ".join(map(repr, DEVICES))
        raise ConfigError(f"{where}server_device={shown(device)}; give {names}")


def check_function(on_pause) -> None:
    """Raise ConfigError if the argument `on_pause` of a server is neither None nor callable."""
    if on_pause is not None and not callable(on_pause):
        raise ConfigError(f"serve: on_pause={shown(on_pause)}; expected a function of the tag")


def _described(model: str, name: str, value) -> tuple[tuple, np.dtype]:
    if len(value) not in (2, 3):
        raise ConfigError(
            f"model {model!r}: {name!r} is {shown(value)}; expected (shape, dtype) or "
            "(shape, dtype, init)"
        )
    try:
        first = value[0][:1] if isinstance(value[0], tuple | list) else ()
        unknown = first == type(first)([None])  # an open table has None as its first length
        shape = tuple(int(n) for n in (value[0][1:] if unknown else value[0]))
        dtype = dtype_of(value[1])
    except (TypeError, ValueError) as error:
        raise ConfigError(f"model {model!r}: {name!r}: {error}") from error
    if any(n < 0 for n in shape):
        raise ConfigError(f"model {model!r}: {name!r} has a negative length in shape {shape}")
    return ((None, *shape) if unknown else shape), dtype


def check_server_optimizer(name: str, optimizer) -> None:
    """Raise ConfigError if an optimizer needs a whole tensor to update a part of the tensor."""
    if not all(callable(getattr(optimizer, each, None)) for each in ("init", "update")):
        raise ConfigError(f"model {name!r}: optimizer={shown(optimizer)} has no init and update")
    if not getattr(optimizer, "elementwise", False):
        kind = getattr(optimizer, "name", type(optimizer).__name__)
        settings = getattr(optimizer, "settings", None)
        if isinstance(settings, Mapping) and "clip_norm" in settings:  # made by `optim.clipped`
            raise ConfigError(
                f"model {name!r}: optimizer {kind} clips gradients itself "
                f"(clip_norm={shown(settings['clip_norm'])}), expected one that does not clip; "
                "give it without clipped(), and clip_norm= once, when the model is added"
            )
        raise ConfigError(
            f"model {name!r}: optimizer {kind} needs whole tensors, but servers hold parts of "
            "tensors; use an elementwise optimizer: sgd, momentum, adam, adagrad, ftrl"
        )


def optimizer_facts(optimizer) -> dict[str, Any]:
    """Return the properties of an optimizer that must be equal on all ranks, as plain values."""
    settings = getattr(optimizer, "settings", None)
    given = settings if isinstance(settings, Mapping) else getattr(optimizer, "__dict__", {})
    facts = {
        "class": f"{type(optimizer).__module__}.{type(optimizer).__qualname__}",
        "name": _plain(getattr(optimizer, "name", "")),
        **_plain(dict(given)),
    }
    if settings is given:
        # A learning-rate schedule may be a function, which cannot be compared. So the sizes of two
        # updates are compared, one at the first step and one later.
        facts["step"] = [_first_step(optimizer, progress) for progress in (0.0, 100.0)]
    return facts


def _first_step(optimizer, progress: float) -> str:
    """Return how far one update moves a parameter, as text; digits that may differ are left out."""
    parameters = {"x": np.zeros(1)}
    try:
        state = optimizer.init(parameters)
        state["progress"][...] = progress
        optimizer.update({"x": np.ones(1)}, state, parameters)
    except Exception as error:  # a user's schedule will raise the same error in training
        return type(error).__name__
    return f"{parameters['x'][0]:.6g}"


def _plain(value) -> Any:
    """Return a mapping as a dict of texts, a plain value as text, others as their type name."""
    if isinstance(value, Mapping):
        return {str(key): _plain(value[key]) for key in value if not str(key).startswith("_")}
    if value is None or isinstance(value, bool | int | float | str | np.number):
        return shown(value)
    if isinstance(value, np.ndarray):
        digest = hashlib.sha256(np.ascontiguousarray(value).tobytes()).hexdigest()
        return f"{value.dtype} {value.shape} {digest}"
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return getattr(value, "__qualname__", type(value).__qualname__)
