"""What a worker's push, pull or push_pull asks of the servers, and the answer of one server."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..layout import routing
from ..layout.placement import ServerLayout
from ..link import Link
from ..protocol import HEADER_BYTES, PUSH, Header, Incoming
from .client_stream import ClientStream, can_share
from .node_stream import NodeClientStream


class ServerCall(NamedTuple):
    """The arguments of one push, pull or push_pull of a worker, for its requests to all servers."""

    # The sum of bits such as PUSH, CLOCK and PULL of `protocol`.
    flags: int
    # Name of each wanted tensor -> rows, or None for all rows.
    wanted: Mapping
    # The 1-D arrays that receive the wanted values.
    flat: Mapping
    # Name -> (rows, values).
    pushes: Mapping | None
    samples: int | None
    # Numbers of the servers that already have the push.
    known: Collection[int]
    # The arrays of `pushes` and of `flat`, if they may be sent and received in pieces.
    gradients: dict[str, np.ndarray] | None
    out: Mapping | None

    def flags_of(self, server: int) -> int:
        """Return `flags`, without the bit PUSH if `server` already has the gradients."""
        return self.flags & ~PUSH if server in self.known else self.flags


def whole_push(layout: ServerLayout, pushes: Mapping | None, out: Mapping) -> dict | None:
    """Return the gradients of a push if they can be sent in pieces; otherwise None.

    This is possible if the push has all elements of all tensors, and if `can_share` is true for the
    gradients and `out`, which receives the answer.
    """
    named = {} if pushes is None else {name: rows for name, (rows, _) in pushes.items()}
    if not routing.has_all(layout, named):
        return None
    # A flat gradient may have gaps between its elements, but MPI sends bytes without gaps.
    gradients = {name: np.ascontiguousarray(flat) for name, (_, flat) in (pushes or {}).items()}
    return gradients if can_share(gradients, out) else None


class ServerAnswer:
    """The answer of one server to one request, which is being received."""

    def __init__(
        self,
        incoming: Incoming,
        operation: list,
        parts: Sequence[routing.ShardPart] = (),
        stream: ClientStream | NodeClientStream | None = None,
    ):
        self.operation = operation
        # `stream` sends and receives pieces; `incoming` is then only the header of the answer.
        self._incoming, self._parts, self._stream = incoming, parts, stream

    @property
    def handed(self) -> bool:
        """Whether the worker may send its request to the next server."""
        return self._stream is None or self._stream.handed

    def test(self) -> bool:
        """Send and receive more; return whether the request is sent and the answer is here."""
        if isinstance(self._stream, NodeClientStream):
            return self._stream.is_here(self._incoming)
        return (self._stream is None or self._stream.progress()) and self._incoming.test()

    def unpack(self, link: Link, layout: ServerLayout, wanted: Mapping, flat: Any) -> Header:
        """Copy the values in the answer to the arrays in `flat`, and return the answer's header."""
        header, buffer = self._incoming.header, self._incoming.buffer
        for part, view in routing.views(layout, self._parts, buffer, HEADER_BYTES):
            name = layout.tensors[part.piece.tensor].name
            values, here = routing.part_of(layout, part, wanted[name], flat[name])
            values[here] = view.reshape(-1, *values.shape[1:])
        link.received(header.total)
        link.pool.give(buffer)
        return header
