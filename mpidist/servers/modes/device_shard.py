"""A server's part of a model whose updates are made on a GPU.

::

    host      parameters, which answers contain  <-----------+   after each update
    device    gradients --> update of parameters and optimizer state

Each update copies the gradients to the device and the new parameters back. The gradients of several
workers are added on the host.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ... import arrays
from ...errors import ConfigError
from ...runtime import ulfm
from ..layout.placement import ServerLayout
from ..model_facts import Request, check_device_name
from ..shards import ServerShard


def check_device(asked: Request, group: Any, serves: bool, grows: bool) -> None:
    """Raise ConfigError if this rank cannot update a model on the requested device.

    `serves` says whether this rank is a server. `grows` says whether the model has an open table (a
    table to which pushes add rows). An open table cannot be updated on a GPU.
    """
    name, device = asked.name, asked.server_device
    check_device_name(device, f"model {name!r}: ")
    if device == "gpu":
        if group.replicated or group.votes or ulfm.current is not None:
            raise ConfigError(
                f"model {name!r}: server_device='gpu' is not possible in an elastic run, whose "
                "servers move their parts; use server_device='cpu'"
            )
        if grows:
            raise ConfigError(
                f"model {name!r}: server_device='gpu' is not possible with open tables, which grow "
                "on the host; use server_device='cpu'"
            )
        if serves:
            arrays.load_cupy()


class DeviceShard(ServerShard):
    """The part of one model that one server holds, updated on the GPU of this rank.

    `local_rank` is this rank's number on its host; with n GPUs, the rank uses GPU ``local_rank %
    n``.
    """

    def __init__(
        self, layout: ServerLayout, server: int, optimizer, inits: Mapping, seed: int,
        local_rank: int,
    ):  # fmt: skip
        self._local_rank = local_rank
        self._on_device: dict[str, Any] = {}
        super().__init__(layout, server, optimizer, inits, seed)

    def fresh_state(self, optimizer) -> dict:
        """Return the state of `optimizer` before its first update, in GPU memory."""
        self._send_all()
        return optimizer.init(self._on_device)

    def update(self, gradients: Mapping[str, Any], weight: float) -> None:
        """Let the optimizer make one update on the GPU, and copy the new parameters to the host."""
        sent = {key: self._sent(gradient) for key, gradient in gradients.items()}
        parameters = {key: self._on_device[key] for key in sent}
        extra = {"weight": weight} if self._weighs else {}
        self.optimizer.update(sent, self.state, parameters, **extra)
        for key, array in parameters.items():
            self._on_device[key] = array
            arrays.copy_into(self.parameters[key], array)
        self.version += 1

    def write(self, parts, buffer: np.ndarray, offset: int) -> None:
        """Set the parameters listed in `parts` to the values from byte `offset` of a message on."""
        super().write(parts, buffer, offset)
        self._send_all()

    def export(self) -> dict:
        """Return the dict of arrays and numbers that `ServerGroup.shards` describes."""
        # A copy on the host, so writing into it changes nothing.
        state, self.state = self.state, _on_host(self.state)
        try:
            return super().export()
        finally:
            self.state = state

    def load(self, saved: Mapping) -> None:
        """Set parameters, optimizer state and update count from a result of `export`."""
        state, host = self.state, _on_host(self.state)
        self.state = host
        try:
            super().load(saved)
        finally:
            self.state = state
        _fill(state, host)
        self._send_all()

    def _send_all(self) -> None:
        """Copy all parameters to the device."""
        for key, array in self.parameters.items():
            if key in self._on_device:
                arrays.copy_into(self._on_device[key], array)
            else:
                self._on_device[key] = self._sent(array)

    def _sent(self, gradient: Any) -> Any:
        """Copy a gradient, or its rows and values, to the device."""
        if isinstance(gradient, tuple):
            return tuple(map(self._sent, gradient))
        return arrays.to_device(gradient, self._local_rank)


def _on_host(tree: Mapping) -> dict:
    """Copy the arrays in nested dicts from the device to the host; return the new dicts."""
    return {
        key: _on_host(leaf) if isinstance(leaf, Mapping) else _copy(leaf)
        for key, leaf in tree.items()
    }


def _copy(leaf: Any) -> Any:
    if not arrays.is_device(leaf):
        return leaf
    host = np.empty(leaf.shape, leaf.dtype)
    arrays.copy_into(host, leaf)
    return host


def _fill(tree: Mapping, host: Mapping) -> None:
    """Copy the values of nested dicts of host arrays into the arrays of `tree`."""
    for key, leaf in tree.items():
        if isinstance(leaf, Mapping):
            _fill(leaf, host[key])
        elif arrays.is_device(leaf):
            arrays.copy_into(leaf, host[key])
