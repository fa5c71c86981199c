"""Models without an optimizer: pushed values are added to the present values, or replace them.

three rows of one value            10  20  30
worker 0 pushes, in a clock (BSP)   1   .   1
worker 1 pushes, in the same clock  3   .   .
after update="add"                 14  20  31
after update="assign"               3  20   1     worker 1 comes after worker 0, so 3 counts
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ...errors import ConfigError, nearest, shown
from ..shards import Parts, ServerShard
from .row_sums import last_of_equal_rows

UPDATES = ("add", "assign")


class TableUpdate:
    """Used instead of an optimizer: pushed values are added to parameters, or replace them."""

    elementwise, rows = True, "exact"

    def __init__(self, name: Any, replaced: Any = None):
        self.name, self.settings, self.replaced = name, {"update": name}, replaced
        self.assigns = isinstance(name, str) and name == "assign"
        self.streams = not self.assigns

    def init(self, parameters: Mapping) -> dict:
        """Return an empty dict, because this update needs no state."""
        return {}

    def update(self, gradients: Mapping, state: dict, parameters: Mapping) -> None:
        """Add the sums of the pushes to the parameters, or set parameters to pushed values."""
        for key, parameter in parameters.items():
            gradient = gradients[key]
            if not isinstance(gradient, tuple):
                parameter[...] = gradient if self.assigns else parameter + gradient
                continue
            rows, values = gradient
            if len(rows):
                table = parameter.reshape(-1, values[0].size)
                values = values.reshape(len(rows), -1)
                table[rows] = values if self.assigns else table[rows] + values


def chosen_update(optimizer: Any, update: Any, clip_norm: Any) -> tuple[Any, Any]:
    """Return the optimizer of a model and its `clip_norm`, from the arguments of `ServerGroup.add`.

    If the user gives `update`, the optimizer is a `TableUpdate`. For an optimizer made by
    `optim.clipped`, the function returns the optimizer inside it and its norm.
    """
    if update is not None:
        return TableUpdate(update, optimizer), clip_norm
    inner = getattr(optimizer, "inner", None)
    if inner is not None and clip_norm is None and "clip_norm" in optimizer.settings:
        return inner, optimizer.settings["clip_norm"]
    return optimizer, clip_norm


def check_update(asked: Any) -> None:
    """Raise ConfigError if a model has both `update` and an argument for optimizers."""
    table, where = asked.optimizer, f"model {asked.name!r}: update="
    if not isinstance(table, TableUpdate):
        return
    if not isinstance(table.name, str) or table.name not in UPDATES:
        close = nearest(table.name, UPDATES) if isinstance(table.name, str) else ""
        names = " or ".join(map(repr, UPDATES))
        raise ConfigError(f"{where}{shown(table.name)}; give {names}, or an optimizer{close}")
    given = {
        "optimizer": table.replaced,
        "global_batch": asked.global_batch,
        "clip_norm": asked.clip_norm,
    }
    for name, value in given.items():
        if value is not None:
            raise ConfigError(
                f"{where}{table.name!r} and {name}={shown(value)}: pushes are no gradients here; "
                "give one of the two"
            )
    kinds = asked.rows.values() if isinstance(asked.rows, Mapping) else [asked.rows]
    if table.assigns and any(kind not in ("dense", "lazy") for kind in kinds):
        raise ConfigError(f"{where}'assign' needs rows='dense' or 'lazy', got {shown(asked.rows)}")


def newest_values(
    shard: ServerShard, pushes: Sequence[tuple[float, Parts]]
) -> tuple[dict[str, Any], float] | None:
    """Return ({name of a tensor: its newest pushed values}, 1.0); None if no push has an effect.

    The values are an array for a whole tensor, or a tuple (rows, values) for some rows of a table.
    1.0 is the weight of the update, as in a result of `ServerShard.merge`.
    """
    found: dict[str, Any] = {}
    # A push is (share, [(part, values), ...]), and has no effect with share 0.
    pushes = [push for push in pushes if push[0]]
    for _, parts in pushes:
        for part, view in parts:
            key, before = shard.key(part), found.get(shard.key(part))
            if part.rows is None:
                found[key] = view
                continue
            rows = part.local_rows(shard.layout)
            values = view.reshape(len(rows), -1)
            if before is None:
                found[key] = rows, values
            elif isinstance(before, tuple):
                found[key] = last_of_equal_rows(
                    np.concatenate([before[0], rows]), np.concatenate([before[1], values])
                )
            elif len(rows):
                found[key] = before.copy()
                found[key].reshape(-1, values.shape[1])[rows] = values
    return (found, 1.0) if pushes else None
