"""Add and remove models before the training begins, and in pauses of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from ...errors import ProtocolError
from ..link import GroupCall, Link, nothing


class ModelChanges:
    """What one rank of a group knows of pauses, in which models may come and go.

    Parameters
    ----------
    link : Link
    server : Server or None
        The server on this rank, which may begin later.
    """

    def __init__(self, link: Link, server: Any):
        self._link, self.server = link, server
        self._added = 0
        self._quiet: int | None = None  # how many messages this rank had sent when a pause began

    def number(self) -> int:
        """Return the number of a new model; removed ones keep theirs."""
        self._added += 1
        return self._added - 1

    @contextmanager
    def pausing(self) -> Iterator[None]:
        """Wait in a ``with`` block, on a worker, until all workers are in a pause."""
        server = self.server
        if server is not None:
            server.in_own_pause = True
        yield
        if server is not None:
            server.in_own_pause = False
        self._quiet = self._link.counters.messages_sent

    def resumed(self) -> None:
        """Note that the servers serve again, so that models may change in another pause only."""
        self._quiet = -1

    @contextmanager
    def changing(self, doing: str, clients: Sequence[Any]) -> Iterator[None]:
        """Add or remove a model in a ``with`` block, in which this rank serves nobody.

        `clients` are those of this worker.
        """
        link, call = self._link, doing.split()[0]
        # Other ranks need no notice of this error. A server that is in `add`, too, receives an
        # earlier pull or push of this worker there, and raises an error.
        quiet = self._quiet == link.counters.messages_sent
        started = any(client.requests.started for client in clients)
        if (started or self._quiet is not None) and not quiet:
            raise ProtocolError(
                f"{doing}: the workers have begun; call group.pause(tag) on all workers first, and "
                f"then {call} on them and in on_pause on the servers"
            )
        # A dedicated server is within `serve`, a call of the group, while it runs `on_pause`.
        nested = self.server is not None and self.server.in_pause
        within: AbstractContextManager = nullcontext() if nested else GroupCall(link, call)
        try:
            with within, link.serving(nothing):
                yield
        finally:  # the workers are still in the pause, also after an error on all ranks
            if self._quiet is not None:
                self._quiet = link.counters.messages_sent
