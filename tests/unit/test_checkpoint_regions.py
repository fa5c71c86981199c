"""Boxes and flat ranges: decomposition, intersection, tiling, and which rank writes which part."""

import time
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpidist.checkpoint.format import piece_table
from mpidist.checkpoint.format.regions import (
    Box,
    Flat,
    boxes_of,
    fits,
    intersection,
    untiled,
    whole,
)
from mpidist.checkpoint.format.state import Fact
from mpidist.checkpoint.write.write_plan import Description, agree, agree_on_extras, shares
from mpidist.errors import CheckpointError

shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)


def cut(box):
    return tuple(slice(a, a + n) for a, n in zip(box.start, box.extent, strict=True))


@given(shapes, st.data())
def test_a_flat_range_is_a_few_boxes(shape, data):
    count = int(np.prod(shape))
    start = data.draw(st.integers(0, count))
    size = data.draw(st.integers(0, count - start))
    index = np.arange(count).reshape(shape)
    out = np.full(size, -1)
    boxes = boxes_of(Flat(start, size), shape)
    for position, box in boxes:
        out[position : position + box.size] = index[cut(box)].reshape(-1)
    assert (out == np.arange(start, start + size)).all()
    assert len(boxes) <= max(1, 2 * len(shape) - 1)


@given(shapes, st.data())
def test_intersection_is_that_of_the_elements(shape, data):
    index = np.arange(int(np.prod(shape))).reshape(shape)

    def box():
        starts = [data.draw(st.integers(0, n)) for n in shape]
        ends = [data.draw(st.integers(a, n)) for a, n in zip(starts, shape, strict=True)]
        extent = tuple(b - a for a, b in zip(starts, ends, strict=True))
        return Box(tuple(starts), extent)

    one, other = box(), box()
    common = intersection(one, other)
    expected = np.intersect1d(index[cut(one)], index[cut(other)])
    got = index[cut(common)].reshape(-1) if common else np.array([])
    assert sorted(got) == sorted(expected)


@settings(max_examples=200)
@given(shapes, st.data())
def test_tiling_is_each_element_once(shape, data):
    """`untiled` agrees with counting every element, for right and wrong tilings of both kinds."""
    index = np.arange(int(np.prod(shape))).reshape(shape)
    regions = []
    if data.draw(st.booleans()) and shape:
        axis = data.draw(st.integers(0, len(shape) - 1))
        bounds = sorted({0, shape[axis], *(data.draw(st.integers(0, shape[axis])),)})
        for low, high in pairwise(bounds):
            start = tuple(low if k == axis else 0 for k in range(len(shape)))
            extent = tuple(high - low if k == axis else n for k, n in enumerate(shape))
            regions.append(Box(start, extent))
    else:
        bounds = sorted({0, index.size, data.draw(st.integers(0, index.size))})
        regions += [Flat(a, b - a) for a, b in pairwise(bounds)]
    change = data.draw(st.sampled_from(["none", "drop", "double", "mix"]))
    if change == "drop" and regions:
        regions.pop()
    elif change == "double" and regions:
        regions.append(regions[0])
    elif change == "mix" and index.size:
        regions.append(Flat(data.draw(st.integers(0, index.size - 1)), 1))
    seen = np.zeros(index.size, int)
    for region in regions:
        for _, box in boxes_of(region, shape):
            seen[index[cut(box)].reshape(-1)] += 1
    assert (untiled(shape, regions) is None) == bool((seen == 1).all())


def test_outside_and_no_dimensions():
    assert not fits(Flat(3, 3), (5,))
    assert not fits(Flat(-1, 2), (5,))
    assert not fits(Box((0, 4), (1, 2)), (3, 5))
    assert not fits(Box((0,), (1,)), (3, 5))
    assert "outside" in untiled((5,), [Flat(3, 3)])
    assert untiled((), [whole(())]) is None
    assert untiled((), [Flat(0, 1)]) is None
    assert "overlap" in untiled((), [whole(()), Flat(0, 1)])
    assert "covered" in untiled((), [])
    assert untiled((0, 4), []) is None


def rank_with(*leaves):
    """What a rank holds: (path, dtype, shape, region or None) of each tensor."""
    facts = tuple(Fact(*leaf[:3]) for leaf in leaves)
    sharded = tuple(leaf[3] is not None for leaf in leaves)
    regions = [(n, leaf[3]) for n, leaf in enumerate(leaves) if leaf[3] is not None]
    return Description(facts, sharded, piece_table.of_regions(regions))


def planned(every):
    """By rank, (path, region, bytes) of each piece that it gives."""
    tensors = agree(every)
    rows = [share.gives.tolist() for share in shares(tensors, every, range(len(every)))]
    facts = tensors.facts
    return [
        [
            (facts[row[0]].path, region, region.size * np.dtype(facts[row[0]].dtype).itemsize)
            for row in mine
            for region in [piece_table.region_of_row(row, len(facts[row[0]].shape))]
        ]
        for mine in rows
    ]


@settings(max_examples=150)
@given(
    st.lists(st.tuples(shapes, st.sampled_from(["<f4", "<f8", "|i1", "<c16"])), max_size=5),
    st.integers(1, 40),
)
def test_replicated_state_is_cut_evenly_and_exactly(tensors, ranks):
    """R143: every element has one writer, and no writer has more than its share."""
    leaves = [(("t", str(i)), d, s, None) for i, (s, d) in enumerate(tensors)]
    leaves += [(("parameters", str(i)), d, s, None) for i, (s, d) in enumerate(tensors)]
    parts = planned([rank_with(*leaves)] * ranks)
    for path, _, shape, _ in leaves:
        mine = [region for rank in parts for where, region, _ in rank if where == path]
        assert untiled(shape, mine) is None
    assert all(
        [path[0] == "parameters" for path, _, _ in rank]
        == sorted((path[0] == "parameters" for path, _, _ in rank), reverse=True)
        for rank in parts
    )
    held = [sum(nbytes for _, _, nbytes in rank) for rank in parts]
    assert max(held) - sum(held) / ranks <= 2 * 16 + 2


def test_equal_shards_have_one_writer_and_partial_ones_none():
    shard = [(("x",), "<f4", (4,), Flat(2 * i, 2)) for i in (0, 1)]
    every = [rank_with(shard[0]), rank_with(shard[1]), rank_with(shard[1]), rank_with()]
    assert [[str(region) for _, region, _ in rank] for rank in planned(every)] == [
        ["flat [0:2]"],
        ["flat [2:4]"],
        [],
        [],
    ]
    with pytest.raises(CheckpointError, match=r"shards of x do not fit: 2 of 4"):
        planned(every[:1])


def test_replicated_on_some_ranks_is_cut_over_those():
    leaf = (("mean",), "<f4", (10,), None)
    every = [rank_with(), rank_with(leaf), rank_with(leaf)]
    assert [len(rank) for rank in planned(every)] == [0, 1, 1]
    extras = [(), ((("lr",), 0.1),), ((("lr",), 0.1),)]
    assert agree_on_extras(extras) == ((("lr",), 0.1),)


def test_many_flat_ranges_are_compared_in_a_moment():
    """One element each, one of them missing: n log n, though as boxes of a square many meet."""
    n = 100
    ranges = [Flat(k, 1) for k in range(n * n) if k != 5 * n]
    began = time.process_time()
    assert untiled((n, n), ranges) == f"{n * n - 1} of {n * n} elements are covered"
    assert "overlap" in untiled((n, n), [*ranges, Flat(7, 1)])
    assert time.process_time() - began < 1
