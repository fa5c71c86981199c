"""New cuts at a resume, from measured stage times (R60, R61)."""

import itertools

import pytest

from mpidist.pipeline.grid.recut import best_cuts, choose_again, explain_cuts, stage_ratios


def rows(*milliseconds):
    """Layers that take a third of their time forward."""
    return [[each / 3e3, each / 1.5e3, 1e3, 1e3] for each in milliseconds]


def last(layers, cuts, *milliseconds, samples=4):
    seconds = [None if each is None else each / 1e3 for each in milliseconds]
    return {"layers": layers, "cuts": cuts, "seconds": seconds, "samples": samples}


def test_cuts_stay_within_a_fifth():
    """Of each other: a machine that is slower in all stages is no reason for other cuts."""
    layers = rows(4, 4, 4, 4)
    for times, off in (((8, 8), 0.0), ((80, 95), 0.1875), ((8, 9.6), 0.2), ((8, None), 0.0)):
        choice = choose_again(last(layers, [2], *times), 4, 2, 4)
        assert (choice.origin, choice.cuts, choice.before) == ("kept", [2], None)
        assert choice.off == pytest.approx(off)
        assert choice.layers == layers
        assert explain_cuts(choice).startswith("pipeline: cuts [2] stay: ")


def test_a_slow_stage_gives_layers_away():
    layers = rows(4, 4, 4, 4, 4, 4)
    choice = choose_again(last(layers, [3], 12, 24), 6, 2, 4)
    assert (choice.origin, choice.cuts, choice.before) == ("changed", [4], [3])
    assert choice.off == pytest.approx(1.0)
    # The shape is what was measured: the layers of the slow stage take twice as long.
    sums = [row[0] + row[1] for row in choice.layers]
    assert sums[3] / sums[0] == sums[5] / sums[2] == pytest.approx(2)
    assert explain_cuts(choice) == (
        "pipeline: cuts [4] instead of [3]: the stages' measured times are 100% off the plan"
    )
    # The next run measures as planned, so these cuts stay.
    again = choose_again(last(choice.layers, [4], 20, 16), 6, 2, 4)
    assert (again.origin, again.cuts) == ("kept", [4])


def test_the_best_cuts_may_be_the_old_ones():
    choice = choose_again(last(rows(9, 1), [1], 9, 2), 2, 2, 4)
    assert (choice.origin, choice.cuts, choice.before) == ("kept", [1], [1])
    assert explain_cuts(choice).endswith("100% off the plan, and no other cuts are better")


def test_another_number_of_parts_uses_the_known_profile():
    choice = choose_again(last(rows(4, 4, 4, 4), [2], 8, 8), 4, 4, 4)
    assert (choice.origin, choice.cuts, choice.before) == ("changed", [1, 2, 3], [2])
    assert explain_cuts(choice).endswith("another number of parts")


def test_what_tells_nothing_is_measured():
    layers = rows(4, 4)
    for known in ({}, {"cuts": [1]}, last(layers, [1], 4, 4, samples=5), last([], [1], 4, 4)):
        assert choose_again(known, 2, 2, 4) is None
    assert choose_again(last(layers, [1], 4, 4), 3, 2, 4) is None


def test_layers_without_time_have_no_ratio():
    assert stage_ratios(rows(0, 4, 0), [1, 2], [0.001, 0.008, None]) == [
        None,
        pytest.approx(2),
        None,
    ]
    assert choose_again(last(rows(0, 4), [1], 1, 4), 2, 2, 4).off == 0


def test_best_cuts_against_all_cuts():
    layers = rows(5, 1, 7, 2, 2, 6)

    def slowest(cuts):
        bounds = itertools.pairwise([0, *cuts, 6])
        return max(sum(row[0] + row[1] for row in layers[a:b]) for a, b in bounds)

    for parts in range(1, 6):
        found = best_cuts(layers, parts)
        assert len(found) == parts - 1
        least = min(map(slowest, itertools.combinations(range(1, 6), parts - 1)))
        assert slowest(found) == pytest.approx(least)
