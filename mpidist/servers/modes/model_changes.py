"""Add and remove models before the training begins, and in pauses of the training."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from ...errors import ProtocolError
from ..link import GroupCall, Link, nothing
from ..protocol import MessagePool


class ModelChanges:
    """Decides whether models may be added to a server group, or removed, at this moment.

    Models may be added and removed before the first client is used, and in pauses (see
    `ServerGroup.pause`).
    """

    def __init__(self, link: Link, server: Any):
        self._link, self.server = link, server
        self._added = 0
        self._quiet: int | None = None  # how many messages this rank had sent when a pause began

    def number(self) -> int:
        """Return a new number, by which messages name a new model."""
        self._added += 1
        return self._added - 1

    @contextmanager
    def pausing(self) -> Iterator[None]:
        """Context manager around the wait for the servers' replies in `ServerGroup.pause`."""
        server = self.server
        if server is not None:
            server.in_own_pause = True
        yield
        if server is not None:
            server.in_own_pause = False
        self._quiet = self._link.counters.messages_sent

    def resumed(self) -> None:
        """Record that a pause of the training has ended.

        Models may be added or removed again only in a later pause.
        """
        self._quiet = -1

    def end(self) -> None:
        """Free the memory of a failed group's models."""
        # The link itself may have to be kept, because MPI may still use its buffers.
        link = self._link
        link.background, link.models, link.trail.about = nothing, [], None
        link.pool, self.server = MessagePool(keep=0), None

    @contextmanager
    def changing(self, doing: str, clients: Sequence[Any]) -> Iterator[None]:
        """Context manager for adding or removing a model; in it, this rank answers no requests.

        Raises ProtocolError if models may not be added or removed at this moment.
        """
        link, call = self._link, doing.split()[0]
        # Other ranks need no notice of this error. If a server is in `add`, too, it receives an
        # earlier pull or push of this worker, and raises an error itself.
        quiet = self._quiet == link.counters.messages_sent
        started = any(client.requests.started for client in clients)
        if (started or self._quiet is not None) and not quiet:
            raise ProtocolError(
                f"{doing}: the workers have begun; call group.pause(tag) on all workers first, and "
                f"then {call} on them and in on_pause on the servers"
            )
        # While a dedicated server runs `on_pause`, it is inside `serve`, a call of the group.
        nested = self.server is not None and self.server.in_pause
        within: AbstractContextManager = nullcontext() if nested else GroupCall(link, call)
        try:
            with within, link.serving(nothing):
                yield
        finally:  # the workers are still in the pause, even after an error on all ranks
            if self._quiet is not None:
                self._quiet = link.counters.messages_sent
