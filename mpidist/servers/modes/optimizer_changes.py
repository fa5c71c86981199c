"""Change the optimizer of a model during training; keep the state if the kind is the same."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from ...errors import ConfigError, ProtocolError, shown
from ..layout.placement import ServerLayout
from ..model_facts import check_server_optimizer, optimizer_facts
from ..shards import ServerShard, state_leaves


def change_optimizer(shard: ServerShard, text: bytes) -> None:
    """Let a server use the optimizer that the message `text` contains, for its part of a model.

    If the new optimizer has the same kind as the present one, the optimizer's state stays;
    otherwise it begins anew.
    """
    optimizer = decode_optimizer(text)
    if _kind(optimizer) != _kind(shard.optimizer):
        shard.state = shard.fresh_state(optimizer)
    shard.use(optimizer)


def _kind(optimizer: Any) -> tuple:
    """Return the kind of an optimizer: its class, its name, and the form of its state."""
    leaves = state_leaves(optimizer.init({"x": np.zeros(3, np.float32)}))
    form = [(path, np.shape(leaf), np.asarray(leaf).dtype.str) for path, leaf in leaves]
    return type(optimizer), getattr(optimizer, "name", ""), sorted(form)


def encode_optimizer(model: str, layout: ServerLayout, optimizer: Any) -> bytes:
    """Return the message by which workers change the optimizer of a model during training.

    Raises ConfigError if the optimizer cannot be used or sent.
    """
    check_server_optimizer(model, optimizer)
    lazy = [tensor.name for tensor in layout.tensors if tensor.lazy]
    if lazy and not getattr(optimizer, "rows", ""):
        raise ConfigError(
            f"model {model!r}: rows of {lazy[0]!r} is 'lazy', and this optimizer updates whole "
            "arrays only; give an optimizer of mpidist.optim"
        )
    facts, why = optimizer_facts(optimizer), ""
    told = {"of": "optimizer", "told": _told(optimizer), "digest": _digest(facts)}
    try:
        # Pickled, because the program of a rank that only serves has not made this object.
        pickled = base64.b64encode(_pickle().dumps(optimizer)).decode()
        text = json.dumps({**told, "pickled": pickled}).encode()
        if optimizer_facts(decode_optimizer(text)) == facts:
            return text
    except Exception as error:  # of any kind, by a class of the user
        why = f" ({error})"
    raise ConfigError(
        f"model {model!r}: this optimizer cannot be sent to the servers{why}; give one of "
        "mpidist.optim, with a number or a schedule of mpidist.optim as lr, or one whose class "
        "stands at the top of a module"
    )


def _pickle():
    from mpi4py import MPI  # here, because the settings of a job are checked without MPI

    return MPI.pickle


def _told(optimizer: Any) -> str:
    """Return an optimizer as text for errors."""
    settings = getattr(optimizer, "settings", None)
    if not isinstance(settings, Mapping):
        return type(optimizer).__qualname__
    given = ", ".join(f"{key}={shown(value)}" for key, value in settings.items())
    return f"{getattr(optimizer, 'name', type(optimizer).__qualname__)}({given})"


def _digest(facts: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def agreed_part(text: bytes) -> dict[str, Any]:
    """Of a message with an optimizer, return the contents that must be equal for all workers."""
    found = json.loads(text)
    # These may contain addresses of memory.
    for name in ("pickled", "told"):
        found.pop(name, None)
    return found


def decode_optimizer(text: str | bytes) -> Any:
    """Return the optimizer in a message that a worker of this job has made by `encode_optimizer`.

    Raises ProtocolError if this rank cannot make the optimizer.
    """
    found = json.loads(text)
    try:
        return _pickle().loads(base64.b64decode(found["pickled"]))
    except Exception as error:
        raise ProtocolError(
            f"set_optimizer: a server cannot make {found['told']}: {error}; define its class in a "
            "module that all ranks import"
        ) from error
