"""Who averages with whom in each round of `md.PeerAverage`. This module uses no MPI.

In a round, each rank sends its model to a few others and averages those that it receives:

    butterfly, 4 ranks      round 0   0 <-> 1   2 <-> 3      each pair has its mean
                            round 1   0 <-> 2   1 <-> 3      all have the mean of all
    ring, 4 ranks           round 0   3 <-> 0 <-> 1 <-> 2 <-> 3 ...

The models after a round are ``M @ models`` with a matrix M (`PeerPlan.matrix`). With d the largest
number of messages that a rank sends in the round, each message has the weight 1 / (1 + d), and the
rank's own model has the rest. If each rank sends as many messages as it receives, all rows and all
columns of M have the sum 1 (M is doubly stochastic), so a round keeps the mean of all models.

========= =================================== ========================== ==========================
graph     a rank sends to                     messages a round           rounds to a spread of 1e-3
========= =================================== ========================== ==========================
all       every other rank                    p - 1 (or an allreduce)    1
butterfly one rank at the distance 2^k        1                          log2 p, if p = 2^k
ring      its two neighbours                  2                          grows with p^2
halton    p/2, p/4, 3p/4, p/8, ... ahead      log2 p                     few, where it connects
========= =================================== ========================== ==========================

If p is no power of two, "butterfly" sends 2^k ranks ahead, and after ceil(log2 p) rounds the
models are close to each other but not equal. With p = 2^k the product of log2 p matrices is the
mean itself.

"halton" is the graph of MALT: Li et al., "MALT: distributed data-parallelism for existing ML
applications", EuroSys 2015.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from functools import cached_property

import numpy as np

from ..errors import ConfigError, shown
from ..registry import look_up
from ..runtime.agreement.mismatch import rank_list

#: For each rank, the ranks to which it sends in a round.
Round = tuple[tuple[int, ...], ...]

#: `rounds_to` looks at no more rounds.
_MOST_ROUNDS = 100_000


class PeerPlan:
    """The rounds of a graph, which repeat for ever.

    Attributes
    ----------
    size : int
        The number of ranks.
    rounds : tuple
        ``rounds[k][rank]`` are the ranks to which `rank` sends in round k.
    """

    def __init__(self, size: int, rounds: Sequence[Round]):
        self.size, self.rounds = size, tuple(rounds)
        for number, one in enumerate(self.rounds):
            _check_round(size, number, one)
        _check_connected(size, self.rounds)

    def sends(self, rank: int, round: int) -> tuple[int, ...]:
        """Return the ranks to which `rank` sends its model in a round."""
        return self.rounds[round % len(self.rounds)][rank]

    def receives(self, rank: int, round: int) -> tuple[int, ...]:
        """Return the ranks whose models `rank` receives in a round."""
        return self._received[round % len(self.rounds)][rank]

    def weight(self, round: int) -> float:
        """Return the weight of each model that a rank receives in a round."""
        return 1 / (1 + max(map(len, self.rounds[round % len(self.rounds)])))

    def ratio(self, rank: int, round: int) -> float:
        """Return the weight of a received model over the weight of the rank's own model."""
        weight = self.weight(round)
        return weight / (1 - weight * len(self.receives(rank, round)))

    def matrix(self, round: int) -> np.ndarray:
        """Return the matrix M of a round: ``M[i, j]`` is the weight of model j for rank i."""
        found = np.zeros((self.size, self.size))
        for rank in range(self.size):
            received = self.receives(rank, round)
            found[rank, received] = self.weight(round)
            found[rank, rank] = 1 - self.weight(round) * len(received)
        return found

    def spread(self, rounds: int) -> float:
        """Return how far the models are apart after some rounds; 1 at first, 0 if all are equal.

        It is the largest sum over a row of ``abs(product of the matrices - 1/p)``, over its value
        before the first round.
        """
        return _spread(self._product(rounds))

    def rounds_to(self, spread: float) -> int:
        """Return after how many rounds the spread is at most `spread`."""
        product = np.eye(self.size)
        for number in range(_MOST_ROUNDS):
            if _spread(product) <= spread:
                return number
            product = self.matrix(number) @ product
        raise ConfigError(f"the spread is above {spread:g} after {_MOST_ROUNDS} rounds")

    def digest(self) -> str:
        """Return a digest of the rounds, by which ranks compare their plans."""
        return hashlib.blake2b(repr(self.rounds).encode(), digest_size=8).hexdigest()

    @property
    def is_all(self) -> bool:
        """Whether each round is an average over all ranks."""
        return all(len(peers) == self.size - 1 for one in self.rounds for peers in one)

    def _product(self, rounds: int) -> np.ndarray:
        product = np.eye(self.size)
        for number in range(rounds):
            product = self.matrix(number) @ product
        return product

    @cached_property
    def _received(self) -> list[list[tuple[int, ...]]]:
        return [_received(self.size, one) for one in self.rounds]


def _shifted(size: int, *strides: int) -> Round:
    """Return the round in which each rank sends to the ranks at some distances ahead."""
    ahead = dict.fromkeys(stride % size for stride in strides if stride % size)
    return tuple(tuple((rank + one) % size for one in ahead) for rank in range(size))


def everyone_rounds(size: int) -> list[Round]:
    """Each rank sends to all others."""
    return [_shifted(size, *range(1, size))]


def ring_rounds(size: int) -> list[Round]:
    """Each rank sends to its two neighbours."""
    return [_shifted(size, 1, -1)]


def butterfly_rounds(size: int) -> list[Round]:
    """In round k, each rank sends to one rank, at the distance 2^k."""
    strides = [1 << k for k in range((size - 1).bit_length())]
    if size & (size - 1):
        return [_shifted(size, stride) for stride in strides]
    return [tuple((rank ^ stride,) for rank in range(size)) for stride in strides]


def halton_rounds(size: int) -> list[Round]:
    """Each rank sends p/2, p/4, 3p/4, ... ranks ahead: log2 p numbers of the Halton sequence."""
    return [_shifted(size, *(int(size * halton_number(k + 1)) for k in range(_log2(size))))]


def halton_number(index: int) -> float:
    """Return number `index` (1, 2, ...) of the Halton sequence of base 2: 1/2, 1/4, 3/4, ..."""
    number, digit = 0.0, 0.5
    while index:
        number += digit * (index & 1)
        index, digit = index >> 1, digit / 2
    return number


def _log2(size: int) -> int:
    return max(1, math.ceil(math.log2(size)))


GRAPHS: dict[str, Callable[[int], list[Round]]] = {
    "all": everyone_rounds, "ring": ring_rounds, "butterfly": butterfly_rounds,
    "halton": halton_rounds,
}  # fmt: skip


def peer_plan(graph, size: int) -> PeerPlan:
    """Return the plan of a graph for `size` ranks.

    Parameters
    ----------
    graph : str, sequence of sequences, or function
        A name in `GRAPHS`; or for each rank the ranks to which it sends; or a function of (rank,
        number of ranks, round) that returns the ranks to which `rank` sends in this round. The
        rounds 0 to size - 1 of a function repeat.
    size : int
        The number of ranks.

    Raises
    ------
    ConfigError
        There is one rank only, the graph is not valid, the mean would not be kept, or some ranks
        never meet.
    """
    check_graph(graph)
    if size < 2:
        raise ConfigError(
            f"PeerAverage needs 2 ranks or more, got {size}: there is nobody to average with; use "
            "more ranks, or md.AllReduce()"
        )
    if isinstance(graph, str):
        return PeerPlan(size, GRAPHS[graph](size))
    if callable(graph):
        return PeerPlan(size, [
            tuple(_peers(graph(rank, size, number), size) for rank in range(size))
            for number in range(size)
        ])  # fmt: skip
    if len(graph) != size:
        raise ConfigError(
            f"graph has the peers of {len(graph)} ranks, and the run has {size}: give one list of "
            "peers for each rank"
        )
    return PeerPlan(size, [tuple(_peers(peers, size) for peers in graph)])


def check_graph(graph) -> None:
    """Raise ConfigError for a graph that no number of ranks can have."""
    if isinstance(graph, str):
        look_up(GRAPHS, graph, "graph")
        return
    listed = isinstance(graph, Sequence) and all(
        isinstance(one, Sequence) and not isinstance(one, str) for one in graph
    )
    if not callable(graph) and not (listed and len(graph)):
        names = ", ".join(map(repr, GRAPHS))
        raise ConfigError(
            f"graph={shown(graph)}: expected {names}, a list of peers for each rank, such as "
            "[[1], [0]], or a function of (rank, ranks, round) that returns the peers"
        )


def _peers(given, size: int) -> tuple[int, ...]:
    """Return the ranks in one list of peers; raise ConfigError if it is not such a list."""
    try:
        peers = tuple(given)
        good = all(
            not isinstance(one, bool) and int(one) == one and 0 <= one < size for one in peers
        )
    except (TypeError, ValueError, OverflowError):
        good = False
    if not good:
        raise ConfigError(
            f"graph: the peers of a rank are {shown(given)}; expected ranks from 0 to {size - 1}"
        )
    return tuple(int(one) for one in peers)


def _received(size: int, one: Round) -> list[tuple[int, ...]]:
    found: list[list[int]] = [[] for _ in range(size)]
    for sender, peers in enumerate(one):
        for peer in peers:
            found[peer].append(sender)
    return [tuple(senders) for senders in found]


def _check_round(size: int, number: int, one: Round) -> None:
    """Raise ConfigError unless a round has valid messages and keeps the mean."""
    received = _received(size, one)
    for rank, peers in enumerate(one):
        if rank in peers or len(set(peers)) < len(peers):
            raise ConfigError(
                f"graph: in round {number} rank {rank} sends to {shown(list(peers))}; expected "
                "other ranks, each once"
            )
        if len(peers) != len(received[rank]):
            raise ConfigError(
                f"graph: in round {number} rank {rank} sends to {len(peers)} ranks and receives "
                f"from {len(received[rank])}, so the mean of the models would change; let each "
                "rank send to as many as it receives from"
            )


def _check_connected(size: int, rounds: Sequence[Round]) -> None:
    """Raise ConfigError unless the messages of all rounds connect all ranks.

    If each rank sends as many messages as it receives, ranks that are connected in one direction
    are connected in the other one, too. So it is enough to join the ends of each message.
    """
    parts = list(range(size))

    def top(rank: int) -> int:
        while parts[rank] != rank:
            parts[rank] = parts[parts[rank]]
            rank = parts[rank]
        return rank

    for one in rounds:
        for rank, peers in enumerate(one):
            for peer in peers:
                parts[top(peer)] = top(rank)
    groups: dict[int, list[int]] = {}
    for rank in range(size):
        groups.setdefault(top(rank), []).append(rank)
    if len(groups) > 1:
        first, second, *others = (rank_list(ranks) for ranks in groups.values())
        more = f", nor {len(others)} more groups" if others else ""
        raise ConfigError(
            f"graph: {first} never meet {second}{more}, so their models would never have one mean; "
            "use graph='butterfly', or a graph of your own that connects them"
        )


def _spread(product: np.ndarray) -> float:
    size = len(product)
    return float(np.abs(product - 1 / size).sum(axis=1).max() / (2 * (size - 1) / size))
