"""Which rank has which stage and replica: the fewest bytes between hosts (R88, R126)."""

import itertools
import random

import pytest

from mpidist.pipeline import plan_stages
from mpidist.pipeline.grid import stage_placement
from mpidist.pipeline.grid.stage_placement import bytes_between_hosts, place_ranks, slot_links


def grid_of(*replicas, microbatches=4, **more):
    stages = len(replicas)
    return plan_stages(
        9, cuts=list(range(1, stages * more.get("chunks", 1))), ranks=sum(replicas),
        microbatches=microbatches, replicas=list(replicas), **more,
    )  # fmt: skip


def hosts_of(order, nodes):
    return [nodes[rank] for rank in order]


def test_the_bytes_of_slots():
    """Each microbatch crosses each cut once in each direction; a sum sends 2 (r - 1) W in all."""
    grid = grid_of(2, 1, microbatches=4)
    assert slot_links(grid, [10], [100, 999]) == {(0, 2): 20, (1, 2): 20, (0, 1): 200}
    links = slot_links(grid_of(3, 3, microbatches=6), [0], [9, 0])
    assert sum(links.values()) == 2 * (3 - 1) * 9
    assert set(links) == {(0, 1), (0, 2), (1, 2)}
    # "pipedream" sums in each round, and microbatch i is replica i mod r's.
    links = slot_links(grid_of(2, 2, microbatches=8, schedule="pipedream"), [1], [10, 0])
    assert links == {(0, 2): 4, (1, 3): 4, (0, 1): 4 * 20}
    # With chunks, the last stage sends to the first one, too.
    links = slot_links(
        grid_of(1, 1, microbatches=4, schedule="interleaved", chunks=2), [1, 10, 100], [0, 0]
    )
    assert links == {(0, 1): 4 * 111}


def test_cuts_or_replicas_inside_a_host():
    for cut, parameters, together in ((1000, 1, [(0, 2), (1, 3)]), (1, 1000, [(0, 1), (2, 3)])):
        links = slot_links(grid_of(2, 2), [cut], [parameters, parameters])
        for nodes in ([0, 0, 1, 1], [0, 1, 0, 1], [1, 0, 0, 1]):
            hosts = hosts_of(place_ranks(nodes, [2, 2], links), nodes)
            for a, b in together:
                assert hosts[a] == hosts[b], (cut, nodes)


def test_the_ranks_stay_if_nothing_is_saved():
    links = slot_links(grid_of(1, 1, 1, 1), [5, 5, 5], [1] * 4)
    assert place_ranks([0, 0, 1, 1], [1] * 4, links) == [0, 1, 2, 3]
    assert place_ranks([1, 1, 0, 0], [1] * 4, links) == [0, 1, 2, 3]
    assert place_ranks([0] * 4, [1] * 4, links) == [0, 1, 2, 3]
    assert place_ranks([0, 1, 2, 3], [1] * 4, links) == [0, 1, 2, 3]
    # Ranks that were dealt to the hosts in turn: each host gets stages that follow each other.
    assert place_ranks([0, 1, 0, 1], [1] * 4, links) == [0, 2, 1, 3]


@pytest.mark.parametrize("exact", [True, False])
def test_no_other_order_is_better(exact, monkeypatch):
    """All orders of up to 7 ranks; the swaps alone find the best one, too, in nearly all cases."""
    monkeypatch.setattr(stage_placement, "_ALL", 5000 if exact else 0)
    rng, worse, cases = random.Random(3), 0, 0
    for replicas in ([2, 2], [3, 1], [1, 2, 1], [2, 2, 2], [3, 2, 1], [1] * 6, [2, 3, 2]):
        n = sum(replicas)
        for _ in range(4):
            nodes = [rng.randrange(rng.choice((2, 3))) for _ in range(n)]
            cuts = [rng.randrange(1, 50) for _ in replicas[1:]]
            links = slot_links(grid_of(*replicas), cuts, [rng.randrange(200) for _ in replicas])
            order = place_ranks(nodes, replicas, links)
            assert sorted(order) == list(range(n))
            found = bytes_between_hosts(hosts_of(order, nodes), links)
            ways = set(itertools.permutations(nodes))
            least = min(bytes_between_hosts(hosts, links) for hosts in ways)
            assert found <= bytes_between_hosts(nodes, links) + 1e-9
            cases += 1
            worse += found > least + 1e-9
    assert worse == 0 if exact else worse <= cases / 10


def test_many_ranks():
    """8 hosts of 8 ranks: pipelines of 8 stages, or the 8 replicas of a stage, on each host."""
    nodes = [rank // 8 for rank in range(64)]
    grid = grid_of(*[8] * 8, microbatches=16)
    wide = slot_links(grid, [1000] * 7, [1] * 8)
    assert bytes_between_hosts(hosts_of(place_ranks(nodes, grid.replicas, wide), nodes), wide) == (
        8 * 4 * 1 / 8 * 28  # only the sums
    )
    deep = slot_links(grid, [1] * 7, [1000] * 8)
    assert place_ranks(nodes, grid.replicas, deep) == list(range(64))
