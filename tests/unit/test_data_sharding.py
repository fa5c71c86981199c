"""Which rank reads which records, checked for many cases; the cost of shuffles (R131 to R137)."""

import numpy as np
import pytest

from mpidist import events
from mpidist.data.sharding import MODES, choose_sharding, coverage, deal, shard
from mpidist.errors import ConfigError

SHAPES = [
    ([10, 20, 30, 40], [2, 2]), ([100], [1]), ([7], [3, 2]), ([0, 5, 0, 9], [1, 1, 1]),
    ([1] * 50, [4]), ([3, 3], [4, 4]), ([1000, 1, 1, 1, 1, 1], [2]), ([13, 17, 19, 23, 29], [3, 1]),
]  # fmt: skip


def parts(mode, counts, nodes, **settings):
    return [shard(mode, counts, nodes, rank, **settings) for rank in range(sum(nodes))]


@pytest.mark.parametrize(("counts", "nodes"), SHAPES)
@pytest.mark.parametrize("mode", ["file", "record", "grid"])
def test_exact_cover(counts, nodes, mode):
    """R131: disjoint, and nothing is lost; in another order in every epoch."""
    for epoch in range(3):
        found = np.concatenate([p.records for p in parts(mode, counts, nodes, epoch=epoch)])
        assert sorted(found.tolist()) == list(range(sum(counts)))
    first, second = (
        np.concatenate([p.records for p in parts(mode, counts, nodes, epoch=e)]) for e in (0, 1)
    )
    if sum(counts) > 20:
        assert not np.array_equal(first, second)


@pytest.mark.parametrize(("counts", "nodes"), SHAPES)
def test_who_opens_which_file(counts, nodes):
    """R132: by file no two ranks open one. R135, R137: in a grid no two nodes do."""
    starts = np.concatenate([[0], np.cumsum(counts)])
    for mode in ("file", "grid"):
        owners: dict = {}
        for rank, part in enumerate(parts(mode, counts, nodes)):
            node = int(np.searchsorted(np.cumsum(nodes), rank, side="right"))
            of = np.searchsorted(starts, part.records, side="right") - 1
            assert set(of.tolist()) <= set(part.files)
            for file in part.files:
                owners.setdefault(file, set()).add(rank if mode == "file" else node)
        assert all(len(owner) == 1 for owner in owners.values())
    by_record = parts("record", counts, nodes)
    sizes = [len(part.records) for part in by_record]
    assert max(sizes) - min(sizes) <= 1


def test_by_file_reads_one_file_at_a_time():
    part = shard("file", [5] * 12, [3], 1)
    of = part.records // 5
    assert len(part.files) == 4
    assert (np.diff(of) != 0).sum() == 3, "three changes of file"


def test_dealing_is_even():
    rng = np.random.default_rng(0)
    for _ in range(50):
        counts = rng.integers(1, 100, rng.integers(20, 60)).tolist()
        loads = [sum(counts[f] for f in files) for files in deal(counts, [1] * 4)]
        assert max(loads) <= sum(counts) / 4 * 4 / 3 + max(counts) / 3
    assert [len(files) for files in deal([1] * 40, [3, 1])] == [30, 10]


def test_streams_have_seeds_of_their_own():
    """R137: equal files on two nodes are not walked through alike."""
    a, b = (shard("grid", [100, 100], [1, 1], rank).records % 100 for rank in (0, 1))
    assert not np.array_equal(a, b)


def test_independent_shuffles_are_measured():
    """R136: duplicates early, misses late: 1 - (1 - 1/p)^p of all records in an epoch."""
    for size in (1, 2, 8):
        found = parts("independent", [4000, 6000], [size])
        assert all(sorted(part.records.tolist()) == list(range(10_000)) for part in found)
        report = coverage(10_000, [part.records for part in found])
        expected = 1 - (1 - 1 / size) ** size
        assert report.draws == 10_000
        assert report.seen == pytest.approx(expected, abs=0.02)
        assert report.repeated == pytest.approx(1 - expected, abs=0.02)
        late = coverage(10_000, [part.records for part in found], 10_000 * size)
        assert (late.seen, late.most) == (1, size)
    exact = coverage(100, [p.records for p in parts("record", [100], [3])])
    assert exact == (100, 1.0, 0.0, 1)


@pytest.mark.parametrize(
    ("counts", "nodes", "indexed", "mode", "why"),
    [
        ([10] * 8, [2, 2], True, "file", "8 files can be spread evenly"),
        ([10] * 8, [2, 2], False, "file", "8 files can be spread evenly"),
        (
            [10] * 2,
            [2, 2],
            True,
            "record",
            "2 files are too few for 4 ranks, and there is an index",
        ),
        ([10] * 2, [2, 2], False, "grid", "there is at least one file per node"),
        ([100, 1, 1, 1], [2], True, "record", "1.94 times the mean, and there is an index"),
        ([100], [2, 2], False, "record", "no other mode gives all ranks"),
    ],
)
def test_auto_says_what_and_why(capsys, counts, nodes, indexed, mode, why):
    """R134: one line of rank 0, an event on each."""
    assert choose_sharding(counts, nodes, indexed)[0] == mode
    events.recent.clear()
    settings = {"indexed": indexed}
    if mode == "record" and not indexed:
        with pytest.warns(UserWarning, match="read all 100 records and use only their own"):
            found = parts("auto", counts, nodes, **settings)
    else:
        found = parts("auto", counts, nodes, **settings)
    assert {part.mode for part in found} == {mode}
    assert why in found[0].why
    said = capsys.readouterr().err
    assert said.count(f"mpidist: sharding by {mode}: ") == 1
    assert why in said
    assert [e[1] for e in events.recent] == ["sharding"] * sum(nodes)


def test_auto_says_nothing_where_errors_alone_are_wanted(capsys, monkeypatch):
    """R98: the choice is in the events all the same."""
    monkeypatch.setattr(events, "VERBOSITY", 0)
    events.recent.clear()
    assert shard("auto", [10] * 8, [2], 0).mode == "file"
    assert capsys.readouterr().err == ""
    assert [e[1] for e in events.recent] == ["sharding"]


def test_by_record_without_an_index_warns():
    """R133: reading what others have and dropping it is the worst way."""
    with pytest.warns(UserWarning, match="make an index, or shard by file"):
        shard("record", [5, 5], [2], 0, indexed=False)


def test_bad_input():
    with pytest.raises(ConfigError, match=r"unknown sharding 'files': expected one of .*'file'"):
        shard("files", [5], [2], 0)
    for arguments in (([5], [2], 2), ([], [2], 0), ([-1], [2], 0)):
        with pytest.raises(ConfigError, match="sharding: rank"):
            shard("file", *arguments)
    assert set(MODES) == {"auto", "file", "record", "grid", "independent"}


@pytest.mark.parametrize("mode", ["file", "grid"])
def test_counts_of_a_short_type(mode):
    """As a loop over files may have counted them: more records in all than int32 has numbers."""
    counts = [2**31 - 2] * 3 + [5]
    mine = [shard(mode, given, [1, 1, 1, 1], 3) for given in (counts, np.array(counts, np.int32))]
    assert str(mine[0]) == str(mine[1])
