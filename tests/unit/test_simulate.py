"""The simulator equals textbook formulas and small cases computed by hand (R124; issue 3)."""

import pytest

from mpidist.collectives.schedules import butterfly, check, direct, double_tree, ring, tree
from mpidist.collectives.schedules.protocol_limits import LONG
from mpidist.collectives.schedules.schedule import REDUCE, Step, recv, send
from mpidist.simulator import simulate
from mpidist.simulator.network_model import NetworkModel, Problem

NET = NetworkModel(latency=1e-5, gap=1e-9, reduction=3e-10)


def plain(build):
    return lambda p, r, n, itemsize: build(p, r, n)


def cost(build, p, n, network=NET, **options):
    return simulate.simulate(plain(build), Problem(p, n, network=network, **options))


@pytest.mark.parametrize("p", [2, 4, 8, 16])
def test_formulas(p):
    n = 4096 * p
    a, b, g = NET.latency, NET.gap, NET.reduction
    size = 4 * n
    k = p.bit_length() - 1
    share = (p - 1) / p * size
    found = cost(ring.allreduce, p, n)
    assert found.seconds == pytest.approx(2 * (p - 1) * a + 2 * share * b + share * g)
    assert (found.messages, found.bytes, found.reduced) == (2 * (p - 1), 2 * share, share)
    found = cost(butterfly.recursive_doubling, p, n)
    assert found.seconds == pytest.approx(k * (a + size * b + size * g))
    found = cost(butterfly.halving_doubling, p, n)
    assert found.seconds == pytest.approx(2 * k * a + 2 * share * b + share * g)
    assert found.rounds == 2 * k
    found = cost(tree.allreduce, p, n)
    assert found.seconds == pytest.approx(2 * k * (a + size * b) + k * size * g)
    found = cost(direct.allreduce, p, n)
    assert found.seconds == pytest.approx(a + (p - 1) * size * (b + g))


@pytest.mark.parametrize("p", [4, 5, 16, 33, 64])
def test_double_tree_keeps_its_bound(p):
    """At most (2D + S - 1) (alpha + 2N/S beta) + N gamma, and at least 2 N beta of p = 4 on."""
    n, segments = 64_000, 20
    build = lambda p, r, n: double_tree.allreduce(p, r, n, segments=segments)  # noqa: E731
    found = cost(build, p, n).seconds
    steps = 2 * double_tree.depth(p) + segments - 1
    bound = steps * (NET.latency + 2 * 4 * n / segments * NET.gap) + 4 * n * NET.reduction
    assert 2 * 4 * n * NET.gap <= found <= bound


def test_segments_hide_the_reduction():
    p, n = 4, 1 << 20
    cut = cost(lambda p, r, n: ring.allreduce(p, r, n, segments=8), p, n)
    assert cut.seconds < cost(ring.allreduce, p, n).seconds


def times(plans, network, ranks_per_node=1, repeats=1):
    """Seconds of byte vectors, in plain numbers: gaps and latencies of the tests are integers."""
    return simulate.run(plans, Problem(len(plans), 0, 1, network, ranks_per_node, repeats))


def one_way(*pairs, nbytes=100):
    """All the given messages in round 0, into scratch."""
    size = 1 + max(max(pair) for pair in pairs)
    plans = [[] for _ in range(size)]
    for source, target in pairs:
        plans[source].append(send(0, target, (0, nbytes)))
        used = sum(1 for step in plans[target] if step.kind == "recv")
        at = nbytes * (1 + used)
        plans[target].append(recv(0, source, (at, at + nbytes)))
    return plans


SLOW = NetworkModel(latency=7, gap=1, reduction=2, overhead=3, node_latency=5, node_gap=0.5)


def test_one_message_by_hand():
    # 3 to send, 100 on the link, 7 on the way, 3 to receive; then 2 a byte to add.
    assert times(one_way((0, 1)), SLOW) == 3 + 100 + 7 + 3
    plans = one_way((0, 1))
    plans[1].append(Step(0, REDUCE, 0, (100, 200), (0, 100)))
    assert times(plans, SLOW) == 113 + 200
    assert times(plans, SLOW._replace(call=11)) == 11 + 113 + 200


def test_one_link_out_and_one_in_by_hand():
    # Two messages of one rank share its link; the second one's overhead is hidden behind it.
    assert times(one_way((0, 1), (0, 2)), SLOW) == 3 + 200 + 7 + 3
    # Two messages into one rank share the link as well, unless only sending is limited.
    assert times(one_way((0, 2), (1, 2)), SLOW) == 3 + 100 + 7 + 100 + 3
    sending = SLOW._replace(incoming=False)
    assert times(one_way((0, 2), (1, 2)), sending) == 3 + 100 + 7 + 3 + 3
    # Full duplex.
    assert times(one_way((0, 1), (1, 0)), SLOW) == 3 + 100 + 7 + 3


def test_ranks_of_a_node_share_its_link_by_hand():
    """Two nodes of two ranks: 0 and 1 send to 2 and 3 through one link, in turns."""
    assert times(one_way((0, 2), (1, 3)), SLOW, 2) == 3 + 200 + 7 + 3
    assert times(one_way((0, 2), (1, 3)), SLOW, 1) == 3 + 100 + 7 + 3
    # Inside a node nobody waits for the link.
    assert times(one_way((0, 1), (2, 3)), SLOW, 2) == 3 + 50 + 5 + 3
    assert times(one_way((0, 1), (0, 2), (1, 3)), SLOW, 2) == 3 + 3 + 200 + 7 + 3 - 3


def test_a_bucket_lets_through_what_it_has_saved_by_hand():
    """After 50 seconds of rest a bucket of 30 has 30, after 10 it has 10."""
    bucket = NetworkModel(latency=0, gap=1, reduction=1, overhead=50, burst=30)
    assert times(one_way((0, 1)), bucket) == 50 + 70 + 50
    assert times(one_way((0, 1)), bucket._replace(overhead=10)) == 10 + 90 + 10
    assert times(one_way((0, 1)), bucket._replace(peak=0.9)) == 50 + 90 + 50
    # Calls one after the other: the bucket of 30 saves nothing once the link is always busy.
    steady = times(one_way((0, 1)), bucket._replace(overhead=0), repeats=4)
    assert steady == 100


def test_long_messages_that_cross_by_hand():
    both = one_way((0, 1), (1, 0), nbytes=LONG + 1)
    net = NetworkModel(latency=0, gap=1, reduction=1, crossing=0.5)
    assert times(both, net) == 1.5 * (LONG + 1)
    assert times(one_way((0, 1), (1, 0), nbytes=LONG), net) == LONG


def test_repeats_are_the_mean_of_calls_in_a_row():
    one = cost(ring.allreduce, 3, 3000).seconds
    assert cost(ring.allreduce, 3, 3000, repeats=5).seconds == pytest.approx(one)


def test_a_schedule_that_cannot_be_swept_is_refused():
    """A send may need what earlier rounds brought, not its own."""
    plans = [[recv(0, 1, (0, 4)), send(0, 1, (0, 4))], [send(0, 0, (0, 4)), recv(0, 0, (4, 8))]]
    with pytest.raises(check.ScheduleError, match="needs the data of a later step"):
        times(plans, NET)
