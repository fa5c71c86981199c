"""Choose which rank has which stage and replica, so that few bytes are sent between hosts.

Each replica of each stage is called a slot here, and needs a rank. Slots of neighbouring stages
exchange activations and gradients; the replicas of a stage sum their gradients. If more bytes are
exchanged between stages than between replicas, neighbouring stages should be on one host.
Otherwise, the replicas of a stage should be on one host:

    2 stages, 2 replicas     large outputs at the cut     large sums (many parameters)
    host A                   stage 0.0, stage 1.0         stage 0.0, stage 0.1
    host B                   stage 0.1, stage 1.1         stage 1.0, stage 1.1

If there are few ways to put the slots on the hosts, all are tried. Otherwise, two slots on
different hosts change places as long as this saves bytes (Kernighan and Lin, "An Efficient
Heuristic Procedure for Partitioning Graphs", Bell System Technical Journal 49(2), 1970).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from math import factorial, prod

Links = Mapping[tuple[int, int], float]

#: If there are at most this many ways to put the slots on the hosts, all ways are tried.
_ALL = 5000
#: With more ranks than this, no slots are swapped, because swapping would take seconds.
_MOST_SWAPPED = 256


def slot_links(
    grid, cut_bytes: Sequence[float], sum_bytes: Sequence[float]
) -> dict[tuple[int, int], float]:
    """Return how many bytes the stage replicas a < b exchange in a step, as {(a, b): bytes}.

    Parameters
    ----------
    grid : PipelineGrid
    cut_bytes : sequence of float
        For each cut between two groups of layers, the bytes of a microbatch in both directions.
    sum_bytes : sequence of float
        For each stage, the bytes of its parameters.
    """
    links: dict[tuple[int, int], float] = defaultdict(float)
    for c, size in enumerate(cut_bytes):
        for i in range(grid.microbatches):
            ends = grid.holder(c, i), grid.holder(c + 1, i)
            links[min(ends), max(ends)] += size
    for stage, size in enumerate(sum_bytes):
        r = grid.replicas[stage]
        sums = grid.padded // r if grid.in_rounds else 1
        # In a sum, each of r replicas sends 2 (r - 1) / r of the bytes, in equal parts to each of
        # the r - 1 other replicas.
        for pair in combinations(grid.ranks_of(stage), 2):
            links[pair] += sums * 4 * size / r
    return {pair: size for pair, size in links.items() if size}


def bytes_between_hosts(hosts: Sequence, links: Links) -> float:
    """Return the bytes sent between hosts in a step; `hosts[a]` is the host of stage replica a."""
    return sum(size for (a, b), size in links.items() if hosts[a] != hosts[b])


def place_ranks(nodes: Sequence[int], replicas: Sequence[int], links: Links) -> list[int]:
    """Choose the rank of each slot (a replica of a stage), so that nodes exchange few bytes.

    Parameters
    ----------
    nodes : sequence of int
        The node of each rank.
    replicas : sequence of int
        The number of slots of each stage.
    links : mapping
        The result of `slot_links`.

    Returns
    -------
    list of int
        For each slot, its rank: 0, 1, 2, ... if no other order sends fewer bytes between nodes.
    """
    room = Counter(nodes)
    starts = [list(nodes), *_starts(room, replicas)]
    if factorial(len(nodes)) // prod(map(factorial, room.values())) <= _ALL:
        found = min(
            _all_ways(room, len(nodes)), key=lambda hosts: bytes_between_hosts(hosts, links)
        )
    else:
        found = min(
            (_swapped(start, links) for start in starts),
            key=lambda one: bytes_between_hosts(one, links),
        )
    if bytes_between_hosts(found, links) >= bytes_between_hosts(nodes, links):
        return list(range(len(nodes)))
    ranks: dict[int, list[int]] = defaultdict(list)
    for rank in reversed(range(len(nodes))):
        ranks[nodes[rank]].append(rank)
    return [ranks[node].pop() for node in found]


def _starts(room: Counter, replicas: Sequence[int]) -> Iterator[list[int]]:
    """Yield two ways to put replicas of stages on hosts: stage by stage, and by pipelines."""
    places = [node for node, count in sorted(room.items()) for _ in range(count)]
    yield places
    slots = [(k / r, stage) for stage, r in enumerate(replicas) for k in range(r)]
    hosts = [0] * len(places)
    for slot, node in zip(sorted(range(len(slots)), key=slots.__getitem__), places, strict=True):
        hosts[slot] = node
    yield hosts


def _all_ways(room: Counter, slots: int) -> Iterator[list[int]]:
    hosts, left = [-1] * slots, dict(sorted(room.items()))

    def fill(slot: int) -> Iterator[list[int]]:
        if slot == slots:
            yield hosts.copy()
            return
        for node, count in left.items():
            if count:
                left[node] = count - 1
                hosts[slot] = node
                yield from fill(slot + 1)
                left[node] = count

    return fill(0)


def _swapped(hosts: Sequence[int], links: Links) -> list[int]:
    """Swap the hosts of two replicas of stages as long as this saves bytes; return all hosts."""
    hosts = list(hosts)
    if len(hosts) > _MOST_SWAPPED:
        return hosts
    near: dict[int, dict[int, float]] = defaultdict(dict)
    for (a, b), size in links.items():
        near[a][b] = near[b][a] = size

    def gain(a: int, b: int) -> float:
        """Return how many bytes a swap of slots (replicas of stages) a and b saves."""
        saved = 0.0
        for one, other in ((a, b), (b, a)):
            for slot, size in near[one].items():
                if slot != other:
                    saved += size * ((hosts[slot] == hosts[other]) - (hosts[slot] == hosts[one]))
        return saved

    while True:
        best = max(
            ((gain(a, b), -a, -b) for a, b in combinations(range(len(hosts)), 2)
             if hosts[a] != hosts[b]),
            default=(0.0, 0, 0),
        )  # fmt: skip
        if best[0] <= 1e-9 * sum(links.values()):
            return hosts
        a, b = -best[1], -best[2]
        hosts[a], hosts[b] = hosts[b], hosts[a]
