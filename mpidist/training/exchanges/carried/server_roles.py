"""Which ranks are servers or workers, also after deaths, and the part of the model on each server.

Ranks are named by their numbers in the communicator with which the run began.
"""

from __future__ import annotations

from collections.abc import Sequence

from ....errors import RankFailure
from ....servers.layout.roles import AUTO, choose_ranks, ranks_and_shares, ranks_asked

#: The share of each server, by its number, in the order of the servers.
Shares = dict[int, float]


class ServerRoles:
    """The servers and the workers of a run that goes on when a rank dies.

    Parameters
    ----------
    strategy : ParameterServer
        The settings of the run, such as which ranks are servers.
    ranks : int
        How many ranks the run has at its beginning, without ranks that only wait to replace dead
        ones.

    Attributes
    ----------
    servers : list of int
        The living servers.
    """

    def __init__(self, strategy, ranks: int):
        asked, self._placement = ranks_asked(strategy.servers), strategy.placement
        self._given = ranks, asked, strategy.placement
        self.servers, workers = choose_ranks(*self._given)
        self._only_serve = {*range(ranks)} - {*workers}
        self._asked: Shares | None = None
        if asked != AUTO:
            self.balance(())

    @property
    def known(self) -> bool:
        """Whether it is known how large a part of the model each server has."""
        return self._asked is not None

    def balance(self, hosts: Sequence[str]) -> None:
        """Choose how large a part of the model each server has; `hosts` has the ranks' hosts."""
        self.servers, _, parts = ranks_and_shares(*self._given, lambda: hosts)
        self._asked = _scaled(dict(zip(self.servers, parts, strict=True)))

    def at_first(self) -> Shares:
        """Return {server: fraction of the model that it has} for the beginning of the run."""
        assert self._asked is not None
        return self._asked

    def choose(self, ranks: Sequence[int]) -> None:
        """Choose the servers among the living `ranks`; without a living server, take the last rank.

        Raises RankFailure if no worker is left.
        """
        # If no server is left, the last rank becomes one.
        self.servers = [rank for rank in self.servers if rank in ranks] or [ranks[-1]]
        if not any(map(self.works, ranks)):
            raise RankFailure("all workers died; a run with parameter servers needs a worker")

    def works(self, rank: int) -> bool:
        """Whether a rank is a worker (computes gradients), perhaps besides being a server."""
        if isinstance(self._placement, str) and self._placement == "dedicated":
            return rank not in self.servers
        return rank not in self._only_serve

    def placement(self, ranks: Sequence[int]) -> list[int]:
        """Return, as indices into `ranks`, the servers that are not also workers."""
        return [ranks.index(rank) for rank in self.servers if not self.works(rank)]

    def shares(self, before: Shares) -> Shares:
        """Return {living server: fraction of the model}: those of `before`, scaled to the sum 1."""
        if [*before] == self.servers:
            return before  # equal to the last bit, because the layout follows from the shares
        return _scaled({rank: before.get(rank, 1.0) for rank in self.servers})


def _scaled(parts: Shares) -> Shares:
    total = sum(parts.values())
    return {rank: part / total for rank, part in parts.items()}
