"""`ElasticServerGroup`: after ranks have died, its models continue in a new group."""

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
    """A `ServerGroup` for elastic runs: servers vote, may keep copies, and continue after a death.

    It has the parameters and attributes of a `ServerGroup`.

    Attributes
    ----------
    moved : int
        How often the servers have got other shares.
    prepared : Prepared or None
        While the shares change: what this rank will use when the change is committed. After a
        death, some ranks may have committed the change, and others not.
    """

    moved = 0
    prepared: Prepared | None = None

    def vote(self, copies: bool = False, shares: Sequence[float] | None = None) -> None:
        """Let servers apply the pushes of a clock only when all servers have them; see `votes`.

        With `copies`, each server also keeps copies of the previous server's shards; `fill_copies`
        makes them equal to the shards. `shares` has the share of each server, in the order of the
        servers; their sum is 1. Collective over `comm`, before the first `add`.
        """
        self.shares = self.shares if shares is None else list(shares)
        self.replicated = copies and len(self.server_ranks) > 1
        self.votes = len(self.server_ranks) > 1
        start_votes(self._server, self.server_ranks, copies)

    def fill_copies(self, name: str) -> None:
        """Make the copies equal to their shards. All servers must call it before they serve."""
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
