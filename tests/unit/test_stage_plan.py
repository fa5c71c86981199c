"""Stages and replicas on ranks, and what each rank does (R60, R62, R63, R88, R89)."""

import itertools
import math

import pytest

from mpidist.errors import ConfigError
from mpidist.pipeline import StageAction, action_lists, plan_stages
from mpidist.pipeline.check_actions import play_actions


def test_twelve_layers_on_three_stages():
    """The cuts [4, 8] are after layers 4 and 8: 1-4, 5-8, 9-12."""
    grid = plan_stages(12, cuts=[4, 8], ranks=4, microbatches=8, replicas=[2, 1, 1])
    assert [list(grid.layers_of(c)) for c in range(3)] == [
        [0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11],
    ]  # fmt: skip
    assert [grid.place(rank) for rank in range(4)] == [(0, 0), (0, 1), (1, 0), (2, 0)]
    assert [list(grid.pieces(rank)) for rank in range(4)] == [
        [0, 1, 2, 3], [4, 5, 6, 7], list(range(8)), list(range(8)),
    ]  # fmt: skip
    entering = [one.microbatch for one in grid.actions(2) if one.kind == "F"]
    assert entering == [0, 4, 1, 5, 2, 6, 3, 7]


def test_one_rank_per_stage_does_the_schedule():
    for name, chunks in (("gpipe", 1), ("1f1b", 1), ("interleaved", 3), ("zero_bubble", 1)):
        cuts = list(range(1, 4 * chunks))
        grid = plan_stages(
            12, cuts=cuts, ranks=4, microbatches=8, schedule=name, chunks=chunks
        )  # fmt: skip
        assert [grid.actions(rank) for rank in range(4)] == action_lists(name, 4, 8, chunks)


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize("stages", [1, 2, 3, pytest.param(4, marks=pytest.mark.exhaustive)])
def test_any_replicas_do_all_and_never_wait_for_ever(name, stages):
    """Each microbatch goes through each chunk once, on the rank that holds it."""
    for replicas in itertools.product(range(1, 5), repeat=stages):
        for m in (1, 2, 3, 5, 8, 13):
            grid = plan_stages(
                stages, cuts=list(range(1, stages)), ranks=sum(replicas), microbatches=m,
                replicas=list(replicas), schedule=name,
            )  # fmt: skip
            lists = [grid.actions(rank) for rank in range(grid.ranks)]
            play_actions(lists, stages, stages)
            done = [
                (one, rank) for rank, each in enumerate(lists) for one in each if one.kind in "FB"
            ]
            assert sorted(done) == sorted(
                (StageAction(kind, c, i), grid.holder(c, i))
                for kind in "FB"
                for c in range(stages)
                for i in range(m)
            )
            for rank in range(grid.ranks):  # one order on all ranks and in both directions
                forward, backward = (
                    [one.microbatch for one in lists[rank] if one.kind == kind] for kind in "FB"
                )
                assert forward == backward
                assert sorted(forward) == list(grid.pieces(rank))


def test_few_microbatches_are_kept():
    """As many as the ranks from the stage to the end can work at, divided by its replicas."""
    grid = plan_stages(
        4, cuts=[1], ranks=4, microbatches=32, replicas=[3, 1], schedule="1f1b"
    )  # fmt: skip
    for rank, most in ((0, 2), (1, 2), (2, 2), (3, 1)):
        kept, peak = 0, 0
        for one in grid.actions(rank):
            kept += (one.kind == "F") - (one.kind == "B")
            peak = max(peak, kept)
        assert peak == most


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_pipedream_on_any_grid(stages):
    """Each step ends without the next one; rounds go on from step to step; no rank hangs."""
    for replicas in itertools.product(range(1, 5 if stages < 3 else 6 - stages), repeat=stages):
        grid = plan_stages(
            stages, cuts=list(range(1, stages)), ranks=sum(replicas), microbatches=5,
            replicas=list(replicas), schedule="pipedream",
        )  # fmt: skip
        each, steps = grid.padded, 3
        assert each - 5 < math.lcm(*replicas)
        assert not any(each % r for r in replicas)
        lists = [[] for _ in range(grid.ranks)]
        for k in range(steps):
            for rank, known in enumerate(lists):
                known += grid.passes(rank, 0, k * each, (k + 1) * each, k == steps - 1)
            play_actions(lists, stages, stages, replicas=replicas)
        for rank, known in enumerate(lists):
            stage, replica = grid.place(rank)
            depth = -(-sum(replicas[stage:]) // replicas[stage]) - 1
            done = [one for one in known if one.kind in "FBU"]
            mine = list(range(replica, steps * each, replicas[stage]))
            for kind in "FBU":
                assert [one.microbatch for one in done if one.kind == kind] == mine
            for k, i in enumerate(mine):  # the version of a forward pass
                before = done[: done.index(("F", stage, i))]
                assert sum(one.kind == "U" for one in before) == max(0, k - depth)


def test_replicas_wait_for_each_other_in_an_update():
    grid = plan_stages(
        2, cuts=[1], ranks=3, microbatches=4, replicas=[2, 1], schedule="pipedream"
    )  # fmt: skip
    lists = [grid.actions(rank) for rank in range(3)]
    play_actions(lists, 2, 2, replicas=[2, 1])
    assert lists[1].pop() == StageAction("U", 0, 3)
    with pytest.raises(ConfigError, match=r"rank 0 waits for ever at U0\.2"):
        play_actions(lists, 2, 2, replicas=[2, 1])


WRONG = [
    ({"cuts": [8, 4]}, "cuts=[8, 4]; expected rising numbers"),
    ({"cuts": [0, 4]}, "cuts=[0, 4]; expected rising numbers"),
    ({"cuts": [4, 12]}, "cuts=[4, 12]: the model has 12 layers, so the last cut is 11 at most"),
    ({"cuts": list(range(1, 13)), "ranks": 13}, "the model has 12 layers"),
    ({"cuts": "auto"}, "cuts='auto'; expected whole numbers"),
    ({"cuts": [4.0]}, "cuts=[4.0]; expected whole numbers"),
    ({"ranks": 4}, "4 ranks are no multiple of the 3 stages"),
    ({"replicas": [2, 1, 1]}, "are 4 ranks, and the job has 3"),
    ({"replicas": [2, 1]}, "2 numbers for 3 stages"),
    ({"replicas": [3, 0, 0]}, "replicas=[3, 0, 0]; expected whole numbers"),
    ({"schedule": "interleaved", "microbatches": 7}, "needs a multiple of the 3 stages; the next"),
    (
        {"schedule": "interleaved", "microbatches": 7, "ranks": 6, "replicas": [2, 2, 2]},
        "needs a multiple of the 3 stages for each of the 2 replicas; the next one is 12",
    ),
    ({"schedule": "zero_bubble", "ranks": 4, "replicas": [2, 1, 1]}, "the same number of replicas"),
    ({"schedule": "1f1b", "chunks": 2}, "'1f1b' has one chunk"),
    ({"schedule": "interleaved", "chunks": 2}, "3 parts are no multiple of chunks=2"),
    ({"schedule": "fast"}, "unknown schedule 'fast'"),
    ({"microbatches": None}, "a pipeline needs microbatches"),
    ({"microbatches": 0}, "microbatches is 0"),
    (
        {"schedule": "pipedream", "flush": 4, "ranks": 7, "replicas": [3, 2, 2]},
        "flush=4: expected a multiple of all replicas=[3, 2, 2], such as 6",
    ),
]


@pytest.mark.parametrize(("wrong", "told"), WRONG)
def test_bad_input_is_one_line(wrong, told):
    with pytest.raises(ConfigError) as caught:
        plan_stages(12, **{"cuts": [4, 8], "ranks": 3, "microbatches": 8, **wrong})
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)
