"""Graphs of peers: they keep the mean, connect all ranks, and no order of events stops them."""

import copy

import numpy as np
import pytest

import mpidist as md
from mpidist.errors import ConfigError
from mpidist.peers.peer_plan import GRAPHS, PeerPlan, halton_number, peer_plan
from mpidist.peers.round_gate import RoundGate
from mpidist.training.strategies import from_settings

SIZES = (2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 31, 32, 64)


def plans(sizes):
    """All plans of named graphs; Halton connects all ranks only in some sizes."""
    for size in sizes:
        for name in GRAPHS:
            if name != "halton" or size in (2, 3, 4, 5, 6, 7, 12):
                yield name, peer_plan(name, size)


def test_each_round_keeps_the_mean():
    """The matrices are doubly stochastic, and a rank's own model always counts."""
    for name, plan in plans(SIZES):
        for number in range(len(plan.rounds)):
            matrix = plan.matrix(number)
            np.testing.assert_allclose(matrix.sum(axis=0), 1, err_msg=f"{name} {plan.size}")
            np.testing.assert_allclose(matrix.sum(axis=1), 1)
            assert matrix.min() >= 0
            assert matrix.diagonal().min() > 0


def test_all_ranks_come_together():
    for name, plan in plans(range(2, 17)):
        rounds = plan.rounds_to(1e-3)
        assert plan.spread(0) == pytest.approx(1)
        assert plan.spread(rounds) <= 1e-3 < plan.spread(rounds - 1), (name, plan.size)


@pytest.mark.parametrize("size", [2, 4, 8, 16, 64])
def test_a_butterfly_of_a_power_of_two_needs_log2_rounds(size):
    plan = peer_plan("butterfly", size)
    rounds = size.bit_length() - 1
    assert plan.rounds_to(1e-3) == rounds
    assert plan.spread(rounds) < 1e-15
    assert {len(plan.sends(rank, k)) for rank in range(size) for k in range(rounds)} == {1}


def test_the_rounds_of_eight_ranks():
    assert peer_plan("all", 8).rounds_to(1e-3) == 1
    assert peer_plan("all", 8).is_all
    assert peer_plan("butterfly", 8).rounds_to(1e-3) == 3
    assert 25 < peer_plan("ring", 8).rounds_to(1e-3) < 35
    assert peer_plan("butterfly", 6).spread(3) < 0.2, "close, where p is no power of two"


def test_halves_that_never_meet_are_refused():
    """The strides of MALT are 4, 2 and 6 for 8 ranks."""
    assert [halton_number(k) for k in (1, 2, 3, 4)] == [1 / 2, 1 / 4, 3 / 4, 1 / 8]
    with pytest.raises(ConfigError, match="graph: ranks 0,2,4,6 never meet ranks 1,3,5,7, so"):
        peer_plan("halton", 8)
    pairs = [[1], [0], [3], [2], [5], [4]]
    with pytest.raises(ConfigError, match="ranks 0,1 never meet ranks 2,3, nor 1 more groups"):
        peer_plan(pairs, 6)
    assert peer_plan("halton", 6).sends(0, 0) == (3, 1, 4)


def test_graphs_of_users():
    plan = peer_plan([[1], [0, 2], [1, 3], [2]], 4)  # a path
    assert plan.weight(0) == 1 / 3
    assert plan.matrix(0)[0].tolist() == pytest.approx([2 / 3, 1 / 3, 0, 0])
    turning = peer_plan(lambda rank, ranks, number: [(rank + number % 2 + 1) % ranks], 5)
    assert [turning.sends(4, number) for number in range(6)] == [(0,), (1,), (0,), (1,), (0,), (0,)]


@pytest.mark.parametrize(
    ("graph", "size", "text"),
    [
        ("rnig", 4, "unknown graph 'rnig'.*did you mean 'ring'"),
        (3, 4, "graph=3: expected 'all', 'ring'"),
        ([], 4, r"graph=\[\]: expected 'all'"),
        ([1, 0], 2, r"graph=\[1, 0\]: expected"),
        ("ring", 1, "needs 2 ranks or more, got 1: there is nobody"),
        ([[1], [0]], 3, "graph has the peers of 2 ranks, and the run has 3"),
        ([[1], [2]], 2, r"peers of a rank are \[2\]; expected ranks from 0 to 1"),
        ([[0], [0]], 2, r"in round 0 rank 0 sends to \[0\]; expected other ranks"),
        ([[1, 1], [0, 0]], 2, r"rank 0 sends to \[1, 1\]"),
        ([[1, 2], [0], [0]], 3, None),
        ([[1, 2], [2], [0]], 3, "rank 0 sends to 2 ranks and receives from 1, so the mean"),
        (lambda *given: 1.5, 3, "peers of a rank are 1.5"),
        (lambda *given: [True], 3, "peers of a rank are"),
    ],
)
def test_bad_graphs(graph, size, text):
    if text is None:
        assert isinstance(peer_plan(graph, size), PeerPlan)
        return
    with pytest.raises(ConfigError, match=text) as caught:
        peer_plan(graph, size)
    assert "\n" not in str(caught.value)


class World:
    """Ranks that do some rounds, and the messages on the way; the network may be as slow as it is.

    A send ends only when its receiver has posted the receive, as MPI may do it.
    """

    def __init__(self, plan, bound, rounds):
        self.gates = [RoundGate(plan, rank, bound) for rank in range(plan.size)]
        self.waits = [False] * plan.size
        self.rounds, self.bound = rounds, bound
        self.sent = []  # (round, sender, receiver), not received yet

    def key(self):
        return (
            tuple(gate.round for gate in self.gates), tuple(self.waits), tuple(sorted(self.sent)),
        )  # fmt: skip

    def copied(self):
        other = copy.copy(self)
        other.gates = [copy.copy(gate) for gate in self.gates]
        for gate in other.gates:
            gate.missing, gate.arrived = [*gate.missing], [*gate.arrived]
        other.waits, other.sent = [*self.waits], [*self.sent]
        return other

    def may_finish(self, rank):
        gate = self.gates[rank]
        old = gate.round - self.bound - 1
        posted = all(
            self.gates[to].round >= number
            for number, sender, to in self.sent if sender == rank and number <= old
        )  # fmt: skip
        return gate.may_finish() and posted

    def events(self):
        for rank, gate in enumerate(self.gates):
            if not self.waits[rank] and gate.round + 1 < self.rounds:
                yield "begin", rank
            if self.waits[rank] and self.may_finish(rank):
                yield "finish", rank
        for one in self.sent:
            number, _, receiver = one
            if self.gates[receiver].round >= number:
                yield "arrive", one

    def do(self, kind, what):
        if kind == "begin":
            peers, _ = self.gates[what].begin()
            self.sent += [(self.gates[what].round, what, peer) for peer in peers]
            self.waits[what] = True
        elif kind == "finish":
            taken = self.gates[what].take()
            assert all(self.gates[what].round - one.round <= self.bound for one in taken)
            self.waits[what] = False
        else:
            number, sender, receiver = what
            self.sent.remove(what)
            gate = self.gates[receiver]
            gate.arrive(next(e for e in gate.missing if e == (number, sender)))


@pytest.mark.parametrize(
    ("graph", "size", "rounds", "bound"),
    [
        ("ring", 2, 4, 0), ("ring", 2, 4, 1), ("ring", 2, 4, 2), ("ring", 3, 2, 0),
        ("butterfly", 3, 3, 0), ("butterfly", 3, 3, 1), ("butterfly", 3, 3, 2),
        ("butterfly", 4, 2, 0), ("butterfly", 4, 2, 1),
    ],
)  # fmt: skip
def test_every_order_of_events_comes_to_its_end(graph, size, rounds, bound):
    start = World(peer_plan(graph, size), bound, rounds)
    stack, seen, ends = [start], {start.key()}, 0
    while stack:
        world = stack.pop()
        able = list(world.events())
        if not able:
            # Nobody waits for ever: if nothing can happen, all have done all rounds.
            assert not any(world.waits), world.key()
            assert {gate.round for gate in world.gates} == {rounds - 1}
            assert not world.sent
            assert not any(gate.missing for gate in world.gates), "each message was received"
            ends += 1
        for event in able:
            after = world.copied()
            after.do(*event)
            if after.key() not in seen:
                seen.add(after.key())
                stack.append(after)
    assert ends
    assert len(seen) > 20


@pytest.mark.parametrize(
    ("settings", "strategy"),
    [
        ({}, md.PeerAverage()),
        ({"graph": "ring", "every": 4}, md.PeerAverage("ring", 4)),
        ({"graph": [[1], [0]], "consistency": "asp"}, md.PeerAverage([[1], [0]], 10, md.ASP())),
        ({"consistency": "ssp", "staleness": 2}, md.PeerAverage(consistency=2)),
    ],
)
def test_a_job_file(settings, strategy):
    assert from_settings("peer_average", settings) == strategy


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"graph": "star"}, "unknown graph 'star'"),
        ({"every": 0}, "every=0: expected a whole number of 1 step or more"),
        (
            {"consistency": "dssp"},
            "unknown consistency 'dssp': expected one of 'bsp', 'ssp', 'asp'",
        ),
        ({"staleness": 2}, "staleness=2 needs consistency='ssp', got 'bsp'"),
        ({"evry": 2}, "did you mean 'every'"),
    ],
)
def test_bad_settings_of_a_job_file(settings, text):
    with pytest.raises(ConfigError, match=text):
        from_settings("peer_average", settings)
    with pytest.raises(ConfigError, match=r"consistency=.*expected md\.BSP"):
        md.PeerAverage(consistency=md.DSSP())
