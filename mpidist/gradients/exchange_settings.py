"""Check the arguments of `Gradients` on each rank, and describe them so that ranks can compare."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import index
from typing import Any, NamedTuple

from ..arrays import array_module, as_array, element_name
from ..collectives.schedules.algorithms import ALLREDUCE, check_name
from ..errors import ClosedError, ConfigError, MpidistError, ProtocolError, nearest, shown
from ..runtime.topology import whole_nodes
from .gradient_buckets import bucket_bytes as bytes_of


class Settings(NamedTuple):
    """All arguments of `Gradients` except the communicator and the parameters."""

    algorithm: str
    bucket_bytes: int | str
    overlap: bool
    progress: str
    order: Sequence[str] | None
    ranks_per_node: int | None
    uses: Any  # name -> calls of `ready` per step; all names after the check


def check_settings(parameters, asked: Settings) -> tuple[Settings, dict[str, tuple], Any, dict]:
    """Check the arguments of `Gradients`; raise ConfigError for invalid arguments.

    Returns four values: the settings to use, a dict of each parameter's (shape, dtype), the module
    of the arrays (numpy or cupy), and a dict of everything that must be equal on all ranks.
    """
    shapes, xp = _shapes(parameters)
    check_name(asked.algorithm, ALLREDUCE)
    bytes_of(asked.bucket_bytes, 0)
    if not isinstance(asked.overlap, bool):
        raise ConfigError(f"overlap={shown(asked.overlap)}: expected true or false")
    if not isinstance(asked.progress, str) or asked.progress not in ("hooks", "thread"):
        raise ConfigError(f"progress={shown(asked.progress)}: expected 'hooks' or 'thread'")
    order = None if asked.order is None else check_order(asked.order, shapes)
    counts, nodes = _uses(asked.uses, shapes), whole_nodes(asked.ranks_per_node)
    used = asked._replace(order=order, ranks_per_node=nodes, uses=counts)
    uses = {name: count for name, count in counts.items() if count != 1}
    facts = {**used._asdict(), "uses": uses, "memory": xp.__name__, "order": order and "given"}
    for k, (name, (shape, dtype)) in enumerate(shapes.items()):
        facts[f"parameter {k}"] = name, shape, element_name(dtype)
    return used, shapes, xp, facts | order_facts(order or ())


def check_order(order, shapes: Mapping) -> list[str]:
    """Return `order` as a list; raise ConfigError unless it names every gradient once."""
    try:
        names = list(order)
        if sorted(names) != sorted(shapes):
            raise ConfigError(f"the order of gradients names {len(names)} tensors, not the model's")
    except TypeError:
        raise ConfigError(f"order={shown(order)}: expected names of gradients") from None
    return names


def order_facts(order) -> dict[str, Any]:
    """Return an order of names as a dict, so that ranks can check that their orders are equal."""
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
        if x.dtype.kind in "biu":  # an integer gradient cannot be multiplied by a fraction
            raise ConfigError(
                f"Gradients: parameter {name!r} is {x.dtype}; expected real or complex numbers, "
                "because gradients are averaged; leave it out"
            )
        shapes[name] = (x.shape, x.dtype)
        modules[array_module(x)] = name
    if len(modules) > 1:
        names = " and ".join(repr(name) for name in modules.values())
        raise ConfigError(f"Gradients: {names}: one is on the host, one on a device")
    return shapes, next(iter(modules))


def _uses(uses, shapes: Mapping) -> dict[str, int]:
    counts = dict.fromkeys(shapes, 1)
    if uses is None:
        return counts
    if not isinstance(uses, Mapping):
        raise ConfigError(f"uses={shown(uses)}: expected a mapping of name -> calls of ready")
    for name, given in uses.items():
        if name not in shapes:
            raise ConfigError(f"uses: {shown(name)} is no parameter{nearest(name, shapes)}")
        try:
            counts[name] = index(given)
        except TypeError:
            counts[name] = 0
        if counts[name] < 1 or isinstance(given, bool):
            raise ConfigError(f"uses: {name!r}: {shown(given)}; expected a whole number from 1 on")
    return counts


def checked_extras(extras) -> tuple[float, ...]:
    """Return the `extras` of `Gradients.reduce` as floats; ConfigError if they are not numbers."""
    if len(extras) > 2:
        raise ConfigError(f"reduce: {len(extras)} extra numbers; expected two at most")
    try:
        return tuple(float(value) for value in extras)
    except (TypeError, ValueError, OverflowError):
        raise ConfigError(f"reduce: extras={shown(extras)}; expected numbers") from None


def checked_share(share, closed: bool) -> float:
    """Return the argument `share` of `Gradients.begin` as a float; raise if it is invalid."""
    if closed:
        raise ClosedError("begin: these gradients were closed; make new ones")
    try:
        return float(share)
    except (TypeError, ValueError, OverflowError):
        raise ConfigError(f"begin: share={shown(share)}; expected a number") from None


def wrong_ready(name, uses: Mapping[str, int], begun: bool) -> MpidistError:
    """Return the error to raise for an unexpected call of `Gradients.ready` with `name`."""
    if not isinstance(name, str) or name not in uses:
        near = nearest(name, uses)
        return ConfigError(f"ready({shown(name)}): no parameter has this name{near}")
    if not begun:
        return ProtocolError(f"ready({name!r}) outside a step; call begin first")
    again = "a second time" if uses[name] == 1 else f"more than {uses[name]} times"
    return ProtocolError(
        f"ready({name!r}) {again} in one step: the gradient may have been sent. Call ready once, "
        f"when the gradient is final, or make Gradients with uses={{{name!r}: {uses[name] + 1}}}"
    )
