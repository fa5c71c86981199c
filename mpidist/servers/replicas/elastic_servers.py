"""`ElasticServerGroup`: a group of servers whose models continue in a new group after a death."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..balance.change_shares import AskedShares
from ..client import Client
from ..consistency import Consistency
from ..group import ServerGroup
from ..link import GroupCall, nothing
from ..model_facts import KeptModel, Request
from ..modes.stale_gradients import KeepStale, Stale
from ..votes import start_votes
from .elastic_shares import Prepared, change_shares_beside


class ElasticServerGroup(ServerGroup):
    """A `ServerGroup` for elastic runs, in which training continues after a rank has died."""

    # How often the servers have got other shares.
    moved = 0
    # While the shares change: what this rank will use when all ranks are ready.
    prepared: Prepared | None = None

    def vote(self, copies: bool = False, shares: Sequence[float] | None = None) -> None:
        """Let servers apply the gradients of a step only when all servers have them.

        With `copies`, each server also keeps copies of the previous server's parts of the models,
        which `fill_copies` fills. Collective over `comm`, before the first `add`.
        """
        self.shares = self.shares if shares is None else list(shares)
        self.replicated = copies and len(self.server_ranks) > 1
        self.votes = len(self.server_ranks) > 1
        start_votes(self._server, self.server_ranks, copies)

    def fill_copies(self, name: str) -> None:
        """Fill each server's copy of the previous server's part of a model, before it serves."""
        server = self._server
        if server is not None and server.copies is not None:
            with GroupCall(self.link, "fill_copies"), self.link.serving(nothing):
                server.copies.fill(server.models.index(self._hosted(name)))

    def _change_shares(self, given: AskedShares | None) -> None:
        def prepare(prepared: Prepared) -> None:
            self.prepared = prepared

        members = self._members()._replace(elastic=True, copied=self.replicated)
        now = change_shares_beside(members, given, prepare)
        if now is not None:
            self._use_shares(now)
            # If a rank dies before this line, some ranks may already use the new shares, and other
            # ranks not.
            self.prepared, self.moved = None, self.moved + 1

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
        """Add a model again after a death; `kept` has its values and step counts. Collective."""
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
