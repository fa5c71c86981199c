"""Boxes and flat ranges: decomposition, intersection, tiling, and who writes what. No MPI."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpidist.checkpoint.plan import Description, Leaf, agree, assign
from mpidist.checkpoint.regions import Box, Flat, boxes_of, fits, intersection, untiled, whole
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


def rank_with(*leaves, **extras):
    return Description(tuple(leaves), tuple(((k,), v) for k, v in extras.items()))


@settings(max_examples=150)
@given(
    st.lists(st.tuples(shapes, st.sampled_from(["<f4", "<f8", "|i1", "<c16"])), max_size=5),
    st.integers(1, 40),
)
def test_replicated_state_is_cut_evenly_and_exactly(tensors, ranks):
    """R143: every element has one writer, and no writer has more than its share."""
    leaves = [Leaf(("t", str(i)), d, s, None) for i, (s, d) in enumerate(tensors)]
    leaves += [Leaf(("parameters", str(i)), d, s, None) for i, (s, d) in enumerate(tensors)]
    every = [rank_with(*leaves)] * ranks
    agreed, _ = agree(every)
    parts = assign(agreed, every)
    for leaf in leaves:
        mine = [part.region for rank in parts for part in rank if part.path == leaf.path]
        assert untiled(leaf.shape, mine) is None
    assert all(
        [p.path[0] == "parameters" for p in rank]
        == sorted((p.path[0] == "parameters" for p in rank), reverse=True)
        for rank in parts
    )
    held = [sum(p.region.size * np.dtype(p.dtype).itemsize for p in rank) for rank in parts]
    assert max(held) - sum(held) / ranks <= 2 * 16 + 2


def test_equal_shards_have_one_writer_and_partial_ones_none():
    shard = [Leaf(("x",), "<f4", (4,), Flat(2 * i, 2)) for i in (0, 1)]
    every = [rank_with(shard[0]), rank_with(shard[1]), rank_with(shard[1]), rank_with()]
    parts = assign(agree(every)[0], every)
    assert [[str(p.region) for p in rank] for rank in parts] == [
        ["flat [0:2]"],
        ["flat [2:4]"],
        [],
        [],
    ]
    with pytest.raises(CheckpointError, match=r"shards of x do not fit: 2 of 4"):
        assign(agree(every[:1])[0], every[:1])


def test_replicated_on_some_ranks_is_cut_over_those():
    leaf = Leaf(("mean",), "<f4", (10,), None)
    every = [rank_with(), rank_with(leaf, lr=0.1), rank_with(leaf, lr=0.1)]
    tensors, extras = agree(every)
    assert [len(rank) for rank in assign(tensors, every)] == [0, 1, 1]
    assert extras == [(("lr",), 0.1)]
