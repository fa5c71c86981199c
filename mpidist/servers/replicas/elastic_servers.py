"""`ElasticServerGroup`: after ranks have died, its models continue in a new group."""

from __future__ import annotations

from collections.abc import Mapping

from ..client import Client
from ..consistency import Consistency
from ..group import ServerGroup
from ..link import GroupCall, nothing
from ..model_facts import KeptModel, Request
from ..modes.stale_gradients import KeepStale, Stale
from ..votes import start_votes


class ElasticServerGroup(ServerGroup):
    """A `ServerGroup` for elastic runs: servers vote, may keep copies, and continue after a death.

    The parameters and attributes are the same as for `ServerGroup`.
    """

    def vote(self, copies: bool = False) -> None:
        """Let servers apply the pushes of a clock only when all servers have them; see `votes`.

        With `copies`, each server also keeps copies of the previous server's shards (`replicas`).
        They are equal to the shards after `fill_copies`. Collective over `comm`, before the first
        `add`.
        """
        self.replicated = copies and len(self.server_ranks) > 1
        self.votes = len(self.server_ranks) > 1
        start_votes(self._server, self.server_ranks, copies)

    def fill_copies(self, name: str) -> None:
        """Make the copies equal to their shards. All servers must call it before they serve."""
        server = self._server
        if server is not None and server.copies is not None:
            with GroupCall(self.link, "fill_copies"), self.link.serving(nothing):
                server.copies.fill(server.models.index(self._hosted(name)))

    def add_again(
        self,
        name: str,
        model: Mapping,
        kept: KeptModel,
        *,
        optimizer,
        consistency: Consistency,
        global_batch: int | None = None,
        nonfinite: str = "raise",
        stale: Stale | None = None,
    ) -> Client | None:
        """Add a model after a death, with the state in `kept`. Collective, as `add`."""
        policy = KeepStale() if stale is None else stale
        client = self._host(
            Request(name, model, optimizer, consistency, 0, global_batch, kept, nonfinite, policy)
        )
        if self._server is not None:
            hosted = self._hosted(name)
            hosted.gate.begin_at(kept.clocks)
            hosted.copied[:] = kept.clocks
            hosted.applied = kept.applied
        if client is not None:
            client.begin_at(kept.clocks[self.worker_ranks.index(self.comm.rank)])
        return client
