"""Change the optimizer of a model during training, and keep its state if it is of the same kind."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from ...errors import ConfigError
from ..layout.placement import ServerLayout
from ..model_facts import check_server_optimizer, optimizer_facts
from ..shards import ServerShard, state_leaves


def change_optimizer(shard: ServerShard, text: bytes) -> None:
    """Let a shard use the optimizer of a message. One of the same kind goes on with the state."""
    optimizer = decode_optimizer(shard.optimizer, text)
    if _kind(optimizer) != _kind(shard.optimizer):
        shard.state = shard.fresh_state(optimizer)
    shard.use(optimizer)


def _kind(optimizer: Any) -> tuple:
    """Return the class and the name of an optimizer, and the form of its state."""
    leaves = state_leaves(optimizer.init({"x": np.zeros(3, np.float32)}))
    form = [(path, np.shape(leaf), np.asarray(leaf).dtype.str) for path, leaf in leaves]
    return type(optimizer), getattr(optimizer, "name", ""), sorted(form)


def encode_optimizer(model: str, layout: ServerLayout, present: Any, optimizer: Any) -> bytes:
    """Return the message that changes the optimizer, or raise ConfigError if it is not possible.

    A server that only serves has no such object of its own. It makes one by the name, the settings,
    and the method ``like`` of the `present` optimizer.
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
    except Exception:  # of any kind, by a class of the user
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
    """Return the optimizer of a message, made by the `present` one."""
    found = json.loads(text)
    return present.like(found["name"], found["settings"])
