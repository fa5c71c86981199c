"""The methods of `ServerGroup` that change its servers and their shares during training."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from ...errors import MismatchError
from ...runtime.agreement.run_on_all import difference
from ..client import Client
from ..layout.placement import ServerLayout
from ..link import GroupCall, Link, nothing
from ..modes.model_changes import ModelChanges
from ..server import Server
from ..wire.node_share import Transport
from .change_shares import AskedShares, Members, change_shares
from .rebalance import BusySince, Rebalance, rebalance_policy
from .server_load import ServerLoad


class OnlineShares:
    """The base class of `ServerGroup` with the methods that change or measure the servers' shares.

    A share is the fraction of each model that a server holds.
    """

    comm: Any
    link: Link
    votes: bool
    server_ranks: list[int]
    worker_ranks: list[int]
    shares: list[float]
    is_server: bool
    _layouts: dict[str, ServerLayout]
    _clients: list[Client]
    _server: Server | None
    _measured: BusySince  # the measurement of this rank's server at the last `rebalance`
    _changes: ModelChanges
    transports: dict[str, Transport]
    _pause: Callable[[Any], None]
    _workers: Callable[[str], Any]

    def repartition(
        self,
        servers: int | Sequence[int] | Mapping[int, float] | str | None = None,
        weights: Sequence[float] | None = None,
    ) -> None:
        """Give the servers other shares of all models. Collective over the workers.

        A share is the fraction of each model that a server holds. All workers call `repartition`
        between the same two steps; ranks that only serve take part inside `serve`. Parameters,
        optimizer state and counts of updates move to their new servers, and the values do not
        change. Arrays move one after the other, so a server needs extra memory for only one array:
        its part of one tensor, or one kind of optimizer state (such as velocities) of this part. If
        the parameters move into new shared memory, the server needs memory for a second copy of
        them. In an elastic run it needs memory for all its new parts beside the old ones.

        Parameters
        ----------
        servers : int, sequence of int, mapping of int to float, or "auto", optional
            The number or the ranks of the servers, or the share of each rank, as the docstring of
            `ServerGroup` explains; by default the present servers. A worker may become a server
            that also works. A server that is not named, or has share 0, holds nothing afterwards,
            but it can get a share later.
        weights : sequence of float, optional
            The share of each server, in the order of `servers`, or of `server_ranks` if `servers`
            is not given. By default the shares that `servers` gives, or equal shares.

        Raises
        ------
        ConfigError
            Raised on all ranks, and the old shares stay: a share is not a finite number of at least
            0; a server does not exist; there is too little memory; a model has an open table (whose
            rows are made by pushes); the state of an optimizer has an array that is neither a
            scalar nor of the shape of its parameter; in an elastic run of `md.train`, the call
            names other servers or a share of 0.
        MismatchError
            Raised on all ranks, and the old shares stay: the arguments differ between workers.
        ProtocolError
            The workers are at different steps of a model with BSP or SSP(0), or some workers make
            another call.
        """
        self._with_servers("repartition", AskedShares(servers, weights))

    def load(self) -> list[dict[str, float]]:
        """Return the measured work of each server so far. Collective over the workers.

        All workers call it between the same two steps.

        Returns
        -------
        list of dict
            A dict for each rank in `server_ranks`. ``rank``: the rank. ``share``: the fraction of
            each model that it holds now. ``busy_seconds``: the seconds in which it received
            requests, made updates or wrote answers. ``bytes_in``, ``bytes_out``: the bytes of
            requests and of answers. ``pushes``, ``pulls``: the numbers of requests with a push and
            with a pull. ``rows``: the number of table rows in requests for single rows; a row in
            two requests counts twice.
        """
        return self._with_servers("load", None)

    def rebalance(self, policy=None) -> list[float] | None:
        """Measure how busy the servers are, and give the busiest servers smaller shares.

        Collective over the workers, which call it between the same two steps. A share is the
        fraction of each model that a server holds.

        Parameters
        ----------
        policy : Rebalance, or what `ParameterServer` takes as `rebalance`, optional
            When and how far the shares change, according to the seconds for which each server was
            busy since the last call. The setting `every` (the number of steps between two
            measurements) has no effect here.

        Returns
        -------
        list of float or None
            The new shares. None if the shares stay: because they are good enough, because a server
            got no push, or because all servers were busy for less than a fiftieth of the time. Busy
            seconds do not show a slow network link.

        Raises
        ------
        ConfigError, MismatchError
            Raised on all ranks, and the old shares stay: `repartition` would refuse the new shares.
        """
        return self._with_servers("rebalance", policy)

    def _with_servers(self, call: str, given: Any) -> Any:
        """On a worker: pause the servers, and do `call` (a key of `_CALLS`) together with them."""
        self._workers(call)
        try:
            with GroupCall(self.link, call), self.link.doing(call):
                self._pause({"call": call})
                try:
                    return _CALLS[call](self, given)
                finally:
                    self._changes.resumed()
        except Exception as error:
            # The servers go on. If this error ends the group on the workers, they must be told.
            with suppress(Exception):
                error.known_on = None  # type: ignore[attr-defined]
            raise

    def _take_part(self, tag: Mapping[str, str]) -> None:
        """On a rank that only serves: do the call of `_CALLS` for which the workers have paused."""
        try:
            _CALLS[tag["call"]](self, None)
        except Exception as error:  # of any class, for a policy may be the user's own
            # If all ranks have raised this error together, the workers may catch it and go on.
            if self.link.failed is not None or getattr(error, "known_on", None) is not self.link:
                raise

    def _change_shares(self, given: AskedShares | None) -> None:
        if (now := change_shares(self._members(), given)) is not None:
            self._use_shares(now)

    def _use_shares(self, now: Members) -> None:
        begins = self._server is None and now.server is not None
        self.server_ranks, self.shares, self._server = now.servers, now.shares, now.server
        self._layouts |= now.layouts
        for name, before in self.transports.items():
            if name in now.layouts:
                self.transports[name] = before.anew(self.comm.rank, *now.shared[name])
        if begins and now.server is not None:
            self.is_server, self._changes.server = True, now.server
            self.link.background = _both(self.link.background, now.server)

    def _members(self) -> Members:
        return Members(
            self.link, self._server, self._layouts, self._clients, self.server_ranks,
            self.worker_ranks, self.shares,
        )  # fmt: skip

    def _gather_load(self, given: None) -> list[dict[str, float]]:
        with self.link.serving(nothing):
            server = self._server
            everyone = self.link.run_on_all(
                "load", lambda: None if server is None else server.load.facts(), list
            )
        shares = dict(zip(self.server_ranks, self.shares, strict=True))
        return [{"rank": r, "share": shares[r], **everyone[r]} for r in self.server_ranks]

    def _follow_load(self, given: Any) -> list[float] | None:
        worker, server = self.comm.rank in self.worker_ranks, self._server
        load = ServerLoad() if server is None else server.load
        now = BusySince(load.busy_seconds, load.pushes, time.monotonic())
        since = now.since(self._measured)

        def describe() -> tuple[Rebalance | None, BusySince]:
            return (rebalance_policy(given) or Rebalance()) if worker else None, since

        def decide(everyone: list[tuple[Rebalance | None, BusySince]]) -> list[float] | None:
            policy = everyone[self.worker_ranks[0]][0] or Rebalance()
            if differs := difference([{"policy": repr(one or policy)} for one, _ in everyone]):
                raise MismatchError(f"rebalance: {differs}; all workers must give the same")
            return policy.follow(self.shares, [everyone[rank][1] for rank in self.server_ranks])

        with self.link.serving(nothing):
            found = self.link.run_on_all("rebalance", describe, decide)
        self._measured = now
        if found is not None:
            self._change_shares(AskedShares(None, found) if worker else None)
        return found


def _both(before: Callable[[], bool], server: Server) -> Callable[[], bool]:
    """Return what a rank that begins to serve calls in each wait: `before`, and `server.poll`."""
    server.on_pause = lambda tag: None
    return server.poll if before is nothing else lambda: before() | server.poll()


_CALLS: dict[str, Callable[[Any, Any], Any]] = {
    "repartition": lambda group, given: group._change_shares(given),
    "load": OnlineShares._gather_load,
    "rebalance": OnlineShares._follow_load,
}
