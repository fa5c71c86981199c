"""Which ranks average with each other in each round of `md.PeerAverage`. Without MPI.

In a round, each rank sends its model to a few other ranks, and averages its own model with the
models that it receives:

    butterfly, 4 ranks      round 0   0 <-> 1   2 <-> 3      each pair has its mean
                            round 1   0 <-> 2   1 <-> 3      each rank has the mean of all
    ring, 4 ranks           round 0   3 <-> 0 <-> 1 <-> 2 <-> 3 ...

If d is the largest number of messages that a rank sends in the round, each received model has the
weight 1 / (1 + d), and the rank's own model has the rest. If each rank sends as many messages as it
receives, a round does not change the mean of all models. The spread in the table says how different
the models still are; it is 1 at first.

========= =================================== ========================== ==========================
graph     a rank sends to                     messages a round           rounds to a spread of 1e-3
========= =================================== ========================== ==========================
all       every other rank                    p - 1 (or an allreduce)    1
butterfly one rank at the distance 2^k        1                          log2 p, if p = 2^k
ring      its two neighbours                  2                          grows with p^2
halton    p/2, p/4, 3p/4, p/8, ... ahead      log2 p                     few, if all are connected
========= =================================== ========================== ==========================

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

#: One round: for each rank, the ranks to which it sends.
Round = tuple[tuple[int, ...], ...]

#: The largest number of rounds that `rounds_to` tries.
_MOST_ROUNDS = 100_000


class PeerPlan:
    """To which ranks each rank sends its model, in a list of rounds that is repeated for ever.

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
        """Return the weight of each received model in the average that a rank forms in a round."""
        return 1 / (1 + max(map(len, self.rounds[round % len(self.rounds)])))

    def ratio(self, rank: int, round: int) -> float:
        """Return the weight of a received model, divided by the weight of the rank's own model."""
        weight = self.weight(round)
        return weight / (1 - weight * len(self.receives(rank, round)))

    def matrix(self, round: int) -> np.ndarray:
        """Return the matrix of a round: [i, j] is the weight of model j in the mean of rank i."""
        found = np.zeros((self.size, self.size))
        for rank in range(self.size):
            received = self.receives(rank, round)
            found[rank, received] = self.weight(round)
            found[rank, rank] = 1 - self.weight(round) * len(received)
        return found

    def spread(self, rounds: int) -> float:
        """Return how different the models are after some rounds: 1 at first, 0 if all are equal."""
        return _spread(self._product(rounds))

    def rounds_to(self, spread: float) -> int:
        """Return after how many rounds the models of the ranks differ by at most `spread`.

        The method `PeerPlan.spread` measures how much the models differ.
        """
        product = np.eye(self.size)
        for number in range(_MOST_ROUNDS):
            if _spread(product) <= spread:
                return number
            product = self.matrix(number) @ product
        raise ConfigError(f"the spread is above {spread:g} after {_MOST_ROUNDS} rounds")

    def digest(self) -> str:
        """Return a hash of the rounds, which ranks compare to check that their plans are equal."""
        return hashlib.blake2b(repr(self.rounds).encode(), digest_size=8).hexdigest()

    @property
    def is_all(self) -> bool:
        """Whether each rank sends to all other ranks in each round."""
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
    """Return the round in which each rank r sends to r + s (modulo `size`) for s in `strides`."""
    ahead = dict.fromkeys(stride % size for stride in strides if stride % size)
    return tuple(tuple((rank + one) % size for one in ahead) for rank in range(size))


def everyone_rounds(size: int) -> list[Round]:
    """Return one round in which each of `size` ranks sends to all others."""
    return [_shifted(size, *range(1, size))]


def ring_rounds(size: int) -> list[Round]:
    """Return one round in which each of `size` ranks sends to its two neighbours."""
    return [_shifted(size, 1, -1)]


def butterfly_rounds(size: int) -> list[Round]:
    """Return rounds in which each rank sends to one other rank: in round k, to one 2^k away.

    If `size` is a power of two, the two ranks send to each other. Otherwise each rank sends to the
    rank 2^k ahead.
    """
    strides = [1 << k for k in range((size - 1).bit_length())]
    if size & (size - 1):
        return [_shifted(size, stride) for stride in strides]
    return [tuple((rank ^ stride,) for rank in range(size)) for stride in strides]


def halton_rounds(size: int) -> list[Round]:
    """Return one round, in which each rank r sends to the ranks r + p/2, r + p/4, r + 3p/4, ...

    p is the number of ranks, `size`. The numbers are rounded down and taken modulo p, and there are
    about log2 p of them.
    """
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
    """Return the plan of which ranks average with each other in each round.

    Parameters
    ----------
    graph : str, sequence of sequences, or function
        "all", "ring", "butterfly" or "halton"; or a sequence that has, for each rank, the ranks to
        which it sends; or a function of (rank, number of ranks, round) that returns them. The
        rounds 0 to size - 1 of the function are repeated.
    size : int
        The number of ranks.

    Raises
    ------
    ConfigError
        There is only one rank, the graph is not valid, a round would change the mean of all models,
        or the messages of all rounds do not connect all ranks.
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
    """Raise ConfigError if `graph` has the wrong form, or is a name that is not known."""
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
    """Return the peers of one rank as a tuple; raise ConfigError if `given` is no list of ranks."""
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
    """Raise ConfigError if the messages of a round are not valid or would change the mean."""
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
    """Raise ConfigError unless the messages of all rounds connect all ranks."""
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
