"""Change the optimizer of a model during training; keep the state if the kind is the same."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from ...errors import ConfigError
from ..layout.placement import ServerLayout
from ..model_facts import check_server_optimizer, optimizer_facts
from ..shards import ServerShard, state_leaves


def change_optimizer(shard: ServerShard, text: bytes) -> None:
    """Let a shard use the optimizer in a message. The state is kept if the kind is the same."""
    optimizer = decode_optimizer(shard.optimizer, text)
    if _kind(optimizer) != _kind(shard.optimizer):
        shard.state = shard.fresh_state(optimizer)
    shard.use(optimizer)


def _kind(optimizer: Any) -> tuple:
    """Return the kind of an optimizer: its class, its name, and the form of its state."""
    leaves = state_leaves(optimizer.init({"x": np.zeros(3, np.float32)}))
    form = [(path, np.shape(leaf), np.asarray(leaf).dtype.str) for path, leaf in leaves]
    return type(optimizer), getattr(optimizer, "name", ""), sorted(form)


def encode_optimizer(model: str, layout: ServerLayout, present: Any, optimizer: Any) -> bytes:
    """Return the message that changes the optimizer, or raise ConfigError if it is not possible.

    A dedicated server does not have the object `optimizer`. From the name and the settings in the
    message, it makes an equal optimizer by the method ``like`` of the `present` optimizer.
    """
    check_server_optimizer(model, optimizer)
    lazy = [tensor.name for tensor in layout.tensors if tensor.lazy]
    if lazy and not getattr(optimizer, "rows", ""):
        raise ConfigError(
            f"model {model!r}: rows of {lazy[0]!r} is 'lazy', and this optimizer updates whole "
            "arrays only; give an optimizer of mpidist.optim"
        )
    facts = optimizer_facts(optimizer)
    try:
        text = json.dumps({"of": "optimizer", **_made_of(optimizer)})
        same = optimizer_facts(decode_optimizer(present, text)) == facts
    except Exception:  # a user's class may raise any exception
        same, text = False, ""
    if not same:
        raise ConfigError(
            f"model {model!r}: the servers cannot make this optimizer from its name and settings; "
            "give one of mpidist.optim, with a number or a schedule of mpidist.optim as lr"
        )
    return text.encode()


def _made_of(optimizer: Any) -> dict[str, Any]:
    return {"name": optimizer.name, "settings": dict(optimizer.settings)}


def decode_optimizer(present: Any, text: str | bytes) -> Any:
    """Return the optimizer that a message describes, made by the method ``like`` of `present`."""
    found = json.loads(text)
    return present.like(found["name"], found["settings"])
