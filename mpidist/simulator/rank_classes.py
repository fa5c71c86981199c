"""Group ranks with the same steps into classes, which `vector_simulator` simulates at once.

The ranks of a class do the same steps, each with its own peers and its own parts of the vector.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np

from ..collectives.schedules import algorithms, butterfly, double_tree, tree
from ..collectives.schedules.schedule import Step, length


class Class(NamedTuple):
    """Ranks that do the same steps of a simulated allreduce, each with its own peers and data.

    `peers` has an array for each step: the peer of each of the `ranks`.
    """

    ranks: np.ndarray
    steps: list[Step]
    peers: list[np.ndarray]

    def without_empty(self) -> Class:
        """Return a copy of this group of ranks, without the steps that have no elements."""
        kept = [i for i, s in enumerate(self.steps) if length(s.source) or length(s.target)]
        return Class(self.ranks, [self.steps[i] for i in kept], [self.peers[i] for i in kept])


def of_tree(size: int, n: int, itemsize: int) -> list[Class]:
    """Return the groups of ranks that do the same steps in a tree allreduce (equal subtrees)."""
    alike = defaultdict(list)
    for rank in range(size):
        reach = (rank & -rank) or 1 << tree.rounds(size)
        children = sum(rank + (1 << k) < size for k in range(reach.bit_length() - 1))
        alike[reach, children].append(rank)
    result = []
    for ranks in alike.values():
        steps = tree.allreduce(size, ranks[0], n)
        members = np.array(ranks)
        result.append(Class(members, steps, [members + (s.peer - ranks[0]) for s in steps]))
    return result


def of_butterfly(build: Callable, size: int, n: int, itemsize: int) -> list[Class]:
    """Return the groups of ranks that do the same steps in a butterfly allreduce.

    They are the ranks outside of the butterfly (if the number of ranks is no power of two), the
    partners of these ranks, and all other ranks.
    """
    power = 1 << (size.bit_length() - 1)
    rest = size - power
    ranks = np.arange(size)
    folded = ranks < 2 * rest
    members = np.concatenate([ranks[: 2 * rest : 2], ranks[2 * rest :]])
    # The number of each rank in the butterfly. A rank outside of the butterfly has the number of
    # its partner.
    inner = np.where(folded, ranks // 2, ranks - rest)
    result = []
    for chosen in (folded & (ranks % 2 == 1), folded & (ranks % 2 == 0), ~folded):
        mine = ranks[chosen]
        if not mine.size:
            continue
        first = int(mine[0])
        steps = build(size, first, n)
        peers = []
        for step in steps:
            if inner[step.peer] == inner[first]:
                peers.append(mine + (step.peer - first))
            else:
                peers.append(members[inner[mine] ^ int(inner[first] ^ inner[step.peer])])
        result.append(Class(mine, steps, peers))
    return result


def of_double_tree(size: int, n: int, itemsize: int) -> list[Class]:
    """Return the groups of ranks that do the same steps in an allreduce with two trees.

    In each of the two trees, the ranks of a group have the same depth and the same number of
    children.
    """
    alike = defaultdict(list)
    for rank in range(size):
        places = [double_tree.tree_place(size, rank, k) for k in (0, 1)]
        shape = tuple((here.parent is None, len(here.children), here.depth) for here in places)
        alike[shape].append((rank, places))
    result = []
    for shape, members in alike.items():
        # The table has the peers of every rank of the class, one row per rank. The steps are built
        # once; instead of a peer, each step has the number of a column of the table.
        table = np.array(
            [
                [q for here in places for q in (here.parent, *here.children) if q is not None]
                for _, places in members
            ]
        )
        columns = iter(range(table.shape[1]))
        stand_ins = [
            double_tree.TreePlace(
                None if root else next(columns), tuple(next(columns) for _ in range(below)), depth
            )
            for root, below, depth in shape
        ]
        steps = double_tree.steps(size, stand_ins, n, algorithms.tree_segments(n * itemsize))
        ranks = np.array([rank for rank, _ in members])
        result.append(Class(ranks, steps, [table[:, step.peer] for step in steps]))
    return result


def _halved(build: Callable, size: int, n: int, itemsize: int) -> list[Class]:
    """Return the groups for a butterfly whose function `build` takes the argument `itemsize`."""
    return of_butterfly(partial(build, itemsize=itemsize), size, n, itemsize)


#: Algorithms with few classes of ranks. For algorithms that halve the vector, n must be a multiple
#: of the largest power of two that is not above p.
CLASSES: dict[str, Callable[[int, int, int], list[Class]]] = {
    "tree": of_tree,
    "double_tree": of_double_tree,
    "butterfly": partial(_halved, butterfly.butterfly),
    "recursive_doubling": partial(of_butterfly, butterfly.recursive_doubling),
    "halving_doubling": partial(_halved, butterfly.halving_doubling),
}
