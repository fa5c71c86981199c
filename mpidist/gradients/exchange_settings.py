"""What a `Gradients` is made of: checked on each rank, compared between them."""

from __future__ import annotations

from collections.abc import Mapping
from operator import index
from typing import Any, NamedTuple

from ..arrays import array_module, as_array, element_name
from ..collectives.schedules.algorithms import ALLREDUCE, check_name
from ..errors import ClosedError, ConfigError, MpidistError, ProtocolError, nearest, shown
from ..runtime.topology import whole_nodes
from .gradient_buckets import bucket_bytes as bytes_of


class Settings(NamedTuple):
    """What was given, in the form that is used."""

    shapes: dict[str, tuple]  # name -> (shape, dtype)
    uses: dict[str, int]  # name -> how many `ready` in a step
    order: list[str] | None
    ranks_per_node: int | None
    xp: Any  # where the arrays lie: numpy or cupy
    facts: dict[str, Any]


def check_settings(parameters, given: Mapping) -> Settings:
    """Return the `Settings` for the arguments of `Gradients`; ConfigError for bad ones."""
    shapes, xp = _shapes(parameters)
    check_name(given["algorithm"], ALLREDUCE)
    bytes_of(given["bucket_bytes"], 0)
    overlap, progress, order = given["overlap"], given["progress"], given["order"]
    if not isinstance(overlap, bool):
        raise ConfigError(f"overlap={shown(overlap)}: expected true or false")
    if not isinstance(progress, str) or progress not in ("hooks", "thread"):
        raise ConfigError(f"progress={shown(progress)}: expected 'hooks' or 'thread'")
    if order is not None:
        order = check_order(order, shapes)
    counts = _uses(given["uses"], shapes)
    facts = {
        "algorithm": given["algorithm"],
        "bucket_bytes": given["bucket_bytes"],
        "overlap": overlap,
        "progress": progress,
        "ranks_per_node": whole_nodes(given["ranks_per_node"]),
        "memory": xp.__name__,
        "uses": {name: count for name, count in counts.items() if count != 1},
    }
    for k, (name, (shape, dtype)) in enumerate(shapes.items()):
        facts[f"parameter {k}"] = name, shape, element_name(dtype)
    facts.update(order_facts(order) if order is not None else {"order": None})
    return Settings(shapes, counts, order, facts["ranks_per_node"], xp, facts)


def check_order(order, shapes: Mapping) -> list[str]:
    """Return `order` as a list; ConfigError unless it names every gradient once."""
    try:
        names = list(order)
        good = sorted(names) == sorted(shapes)
    except TypeError:
        raise ConfigError(f"order={shown(order)}: expected names of gradients") from None
    if not good:
        raise ConfigError(f"the order of gradients names {len(names)} tensors, not the model's")
    return names


def order_facts(order) -> dict[str, Any]:
    """Return what must be equal on all ranks of an order."""
    return {f"order[{k}]": name for k, name in enumerate(order)}


def _shapes(parameters) -> tuple[dict[str, tuple], Any]:
    if not isinstance(parameters, Mapping) or not parameters:
        raise ConfigError(
            f"Gradients: expected a mapping of name -> array with one array at least, got "
            f"{shown(parameters)}"
        )
    shapes, modules = {}, {}
    for name, given in parameters.items():
        if not isinstance(name, str):
            raise ConfigError(f"Gradients: parameter {shown(name)}: expected a name, a string")
        try:
            x = as_array(given)
            element_name(x.dtype)
        except ConfigError as error:
            raise ConfigError(f"Gradients: parameter {name!r}: {error}") from error
        if x.dtype.kind in "biu":  # a share of samples is no whole number
            raise ConfigError(
                f"Gradients: parameter {name!r} is {x.dtype}; expected real or complex numbers, "
                "for gradients are means: leave it out"
            )
        shapes[name] = (x.shape, x.dtype)
        modules[array_module(x)] = name
    if len(modules) > 1:
        names = " and ".join(repr(name) for name in modules.values())
        raise ConfigError(f"Gradients: {names}: one lies on the host, one on a device")
    return shapes, next(iter(modules))


def _uses(uses, shapes: Mapping) -> dict[str, int]:
    counts = dict.fromkeys(shapes, 1)
    if uses is None:
        return counts
    if not isinstance(uses, Mapping):
        raise ConfigError(f"uses={shown(uses)}: expected a mapping of name -> number of ready")
    for name, given in uses.items():
        if name not in shapes:
            near = nearest(name, shapes)
            raise ConfigError(f"uses: {shown(name)} is no parameter{near}")
        try:
            counts[name] = index(given)
        except TypeError:
            counts[name] = 0
        if counts[name] < 1 or isinstance(given, bool):
            raise ConfigError(f"uses: {name!r}: {shown(given)}; expected a whole number from 1 on")
    return counts


def checked_extras(extras) -> tuple[float, ...]:
    """Return the numbers that are summed beside the gradients. Pure; raises what is wrong."""
    if len(extras) > 2:
        raise ConfigError(f"reduce: {len(extras)} extra numbers; expected two at most")
    try:
        return tuple(float(value) for value in extras)
    except (TypeError, ValueError, OverflowError):
        raise ConfigError(f"reduce: extras={shown(extras)}; expected numbers") from None


def checked_share(share, closed: bool) -> float:
    """Return the share of a step's samples that a rank has. Pure; raises what is wrong with it."""
    if closed:
        raise ClosedError("begin: these gradients were closed; make new ones")
    try:
        return float(share)
    except (TypeError, ValueError, OverflowError):
        raise ConfigError(f"begin: share={shown(share)}; expected a number") from None


def wrong_ready(name, uses: Mapping[str, int], begun: bool) -> MpidistError:
    """Return the error of a call of `ready` that is not expected. Pure."""
    if not isinstance(name, str) or name not in uses:
        near = nearest(name, uses)
        return ConfigError(f"ready({shown(name)}): no parameter has this name{near}")
    if not begun:
        return ProtocolError(f"ready({name!r}) outside a step; call begin first")
    again = "a second time" if uses[name] == 1 else f"more than {uses[name]} times"
    return ProtocolError(
        f"ready({name!r}) {again} in one step: its gradient may have left. Call it once, when the "
        f"gradient is final, or make Gradients with uses={{{name!r}: {uses[name] + 1}}}"
    )
