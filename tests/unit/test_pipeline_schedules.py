"""Schedules of pipelines as data: proved, simulated, drawn (R63, R82, R83, R85, R87)."""

import pytest

from mpidist.errors import ConfigError
from mpidist.pipeline import (
    SCHEDULES,
    ChunkCost,
    StageAction,
    action_lists,
    check_actions,
    draw_actions,
    simulate_actions,
)
from mpidist.pipeline.pipeline_schedules import COMPUTE
from mpidist.simulator.network_model import NetworkModel

SIZES = [1, 2, 3, 4, 7, 16]
COUNTS = [1, 2, 3, 4, 7, 8, 16, 64]


def theory(name, p, m, v):
    """The time with F = 1 and B = 2 for all chunks of a rank together."""
    if name == "interleaved":
        return 3 * (v * m + p - 1) / v
    return 3 * m + p - 1 if name == "zero_bubble" else 3 * (m + p - 1)


def kept(name, p, m, v, s):
    """The most microbatches, times chunks, that rank s keeps."""
    if name == "interleaved":
        return min(v * m, 2 * (p - s - 1) + (v - 1) * p + 1)
    return {"gpipe": m, "zero_bubble": min(p, m)}.get(name, min(p - s, m))


@pytest.mark.parametrize("name", SCHEDULES)
def test_time_and_memory_are_those_of_theory(name):
    """All p <= 16 and m <= 64; the idle time is what the time leaves over."""
    cases = 0
    for p in SIZES:
        for m in COUNTS:
            for v in (2, 3, 4) if name == "interleaved" else (1,):
                if name == "interleaved" and (m % p or p * m * v > 2048):
                    continue
                lists = action_lists(name, p, m, v)
                run = simulate_actions(lists, [ChunkCost(1 / v, 2 / v)] * (p * v))
                assert run.stash == [kept(name, p, m, v, s) for s in range(p)]
                if name != "zero_bubble" or m >= p:
                    assert run.seconds == pytest.approx(theory(name, p, m, v), rel=1e-12)
                assert run.bubble == pytest.approx(1 - 3 * m / run.seconds)
                cases += 1
    assert cases > 20


@pytest.mark.parametrize("name", SCHEDULES)
def test_64_ranks(name):
    lists = action_lists(name, 64, 64, 2 if name == "interleaved" else 1)
    check_actions(lists)
    assert sum(one.kind in COMPUTE for each in lists for one in each) == {
        "interleaved": 4 * 4096, "zero_bubble": 3 * 4096,
    }.get(name, 2 * 4096)  # fmt: skip


@pytest.mark.parametrize("name", SCHEDULES)
def test_who_blocks_in_each_message_waits_for_ever(name):
    """With blocking calls in the order of use, only GPipe works with two or more microbatches."""
    for p in (2, 3, 4, 8):
        chunks = 2 if name == "interleaved" else 1
        for m in (2 * p, 4 * p):
            lists = action_lists(name, p, m, chunks, ahead=0)
            check_actions(lists)
            if name == "gpipe":
                check_actions(lists, blocking=True)
            else:
                with pytest.raises(ConfigError, match="waits for ever at"):
                    check_actions(lists, blocking=True)


def test_the_versions_of_pipedream():
    """Stage s of S uses version max(0, i - (S - 1 - s)) for microbatch i, and keeps S - s."""
    for stages in (1, 2, 3, 4, 7):
        facts = check_actions(action_lists("pipedream", stages, 12))
        for (s, i), version in facts.versions.items():
            assert version == max(0, i - (stages - 1 - s))
        assert facts.versions_kept == [stages - s for s in range(stages)]


def test_the_drawing():
    run = simulate_actions(action_lists("1f1b", 2, 2), [ChunkCost(1.0, 2.0)] * 2)
    assert draw_actions(run).splitlines() == [
        "rank 0  F0 F1 .. .. B0 B0 .. B1 B1",
        "rank 1  .. F0 B0 B0 F1 B1 B1 .. ..",
    ]


def test_messages_take_time():
    """Two ranks, one microbatch: both messages take latency + bytes / bandwidth, and overheads."""
    network = NetworkModel(latency=0.1, gap=1e-3, overhead=0.01)
    run = simulate_actions(action_lists("gpipe", 2, 1), [ChunkCost(1.0, 2.0, 200.0)] * 2, network)
    assert run.seconds == pytest.approx(6 + 2 * (0.1 + 0.2 + 0.02))


def test_a_link_sends_one_message_at_a_time():
    """Four microbatches that are computed in no time leave one after the other."""
    network = NetworkModel(latency=0.0, gap=1.0)
    costs = [ChunkCost(0.0, 0.0, 1.0), ChunkCost(0.0, 0.0, 1.0)]
    assert simulate_actions(action_lists("gpipe", 2, 4), costs, network).seconds >= 4


@pytest.mark.parametrize(
    "cost", [ChunkCost(-1.0, 1.0), ChunkCost(1.0, float("nan")), ChunkCost(1.0, 1.0, 0.0, 1.5)]
)
def test_costs_that_cannot_be(cost):
    with pytest.raises(ConfigError, match="expected finite numbers >= 0"):
        simulate_actions(action_lists("1f1b", 1, 1), [cost])


def lists():
    return action_lists("1f1b", 3, 4)


def test_a_lost_action():
    for rank in range(3):
        for at in range(len(lists()[rank])):
            broken = lists()
            del broken[rank][at]
            with pytest.raises(ConfigError, match=r"^rank \d"):
                check_actions(broken)


def test_a_doubled_and_a_foreign_action():
    broken = lists()
    broken[1].append(broken[1][0])
    with pytest.raises(ConfigError, match="is in the list 2 times"):
        check_actions(broken)
    broken = lists()
    broken[1][0] = StageAction("F", 2, 0)
    with pytest.raises(ConfigError, match="does not have the chunk"):
        check_actions(broken)


@pytest.mark.parametrize("one", [StageAction("X", 0, 0), StageAction("F", 0, -1)])
def test_what_is_no_action(one):
    with pytest.raises(ConfigError, match=rf"rank 0: {one}; expected one of F, B, I, W, SEND_F"):
        check_actions([[StageAction("F", 0, 0), one, StageAction("B", 0, 0)]])


def test_backward_passes_of_both_kinds():
    """A rank may cut only some of the backward passes of a chunk in two."""
    mixed = action_lists("1f1b", 2, 3)
    last = mixed[1]
    at = last.index(StageAction("B", 1, 1))
    last[at : at + 2] = [StageAction("I", 1, 1), last[at + 1], StageAction("W", 1, 1)]
    assert last[at + 1] == StageAction("SEND_B", 1, 1)
    assert check_actions(mixed).stash == [2, 1]


def test_actions_in_a_wrong_order():
    for rank, first, second, words in [
        (0, StageAction("F", 0, 1), StageAction("SEND_F", 0, 1), "comes before"),
        (2, StageAction("F", 2, 0), StageAction("B", 2, 0), "comes before"),
        (0, StageAction("SEND_F", 0, 0), StageAction("SEND_F", 0, 1), "sends|before"),
        (
            0,
            StageAction("RECV_B", 0, 0),
            StageAction("B", 0, 0),
            "has no RECV_B0.0 before it|sends",
        ),
    ]:
        broken = lists()
        a, b = broken[rank].index(first), broken[rank].index(second)
        broken[rank][a], broken[rank][b] = second, first
        with pytest.raises(ConfigError, match=words):
            check_actions(broken)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (("1f1b", 0, 4), "stages is 0"),
        (("1f1b", 4, 0), "microbatches is 0"),
        (("1f1b", 4, 4, 2), "chunks=2: schedule '1f1b' has one chunk"),
        (("interleaved", 4, 6, 2), "the next one is 8"),
        (("1f1c", 4, 4), "1f1b"),
    ],
)
def test_wrong_arguments(given, words):
    with pytest.raises(ConfigError, match=words):
        action_lists(*given)
