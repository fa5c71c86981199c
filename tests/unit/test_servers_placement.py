"""The shards of the servers have nearly equal numbers of bytes (R5, R22)."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpidist.servers.layout.placement import place_tensors

LENET = {
    "conv1.w": ((6, 1, 5, 5), "f4"),
    "conv1.b": ((6,), "f4"),
    "conv2.w": ((16, 6, 5, 5), "f4"),
    "conv2.b": ((16,), "f4"),
    "fc1.w": ((400, 120), "f4"),
    "fc1.b": ((120,), "f4"),
    "fc2.w": ((120, 84), "f4"),
    "fc2.b": ((84,), "f4"),
    "fc3.w": ((84, 10), "f4"),
    "fc3.b": ((10,), "f4"),
}
MLP = {
    "w0": ((784, 300), "f4"),
    "b0": ((300,), "f4"),
    "w1": ((300, 100), "f4"),
    "b1": ((100,), "f4"),
    "w2": ((100, 10), "f4"),
    "b2": ((10,), "f4"),
}
# One layer holds two thirds of the bytes, as in AlexNet's and VGG's first dense layer.
TOP_HEAVY = {"fc": ((4096, 1000), "f4"), **{f"w{i}": ((512, 1000), "f4") for i in range(4)}}
EVEN = {f"layer{i}": ((128, 128), "f4") for i in range(48)}


def covered(layout):
    """Every element of every tensor, counted."""
    for i, tensor in enumerate(layout.tensors):
        ranges = sorted((p.start, p.stop) for ps in layout.pieces for p in ps if p.tensor == i)
        at = 0
        for start, stop in ranges:
            assert start == at
            assert stop > start
            at = stop
        assert at == tensor.size
    for pieces in layout.pieces:
        assert len({p.tensor for p in pieces}) == len(pieces)
        assert list(pieces) == sorted(pieces)


@pytest.mark.parametrize("servers", range(1, 9))
@pytest.mark.parametrize("model", [LENET, MLP, TOP_HEAVY, EVEN], ids=["lenet", "mlp", "2/3", "48"])
def test_imbalance(model, servers):
    """R22: at most 1.1 times the mean on real models; R5: large cut, small packed."""
    layout = place_tensors(model, servers)
    covered(layout)
    assert layout.imbalance <= 1.1
    biases = [i for i, t in enumerate(layout.tensors) if len(t.shape) == 1]
    for i in biases:
        assert sum(p.tensor == i for ps in layout.pieces for p in ps) == 1


def test_cuts_are_between_rows_where_that_is_free():
    layout = place_tensors({"embedding": ((1000, 64), "f4"), "b": ((64,), "f4")}, 3)
    for pieces in layout.pieces:
        for piece in pieces:
            assert piece.start % 64 == 0
            assert piece.stop % 64 == 0
    assert layout.tensors[1].by_rows


def test_few_huge_rows_are_cut_anywhere():
    layout = place_tensors({"w": ((10, 100_000), "f4")}, 4)
    assert not layout.tensors[0].by_rows
    assert layout.imbalance < 1.01


def test_order_of_names_does_not_matter():
    assert place_tensors(LENET, 3) == place_tensors(dict(reversed(LENET.items())), 3)


def test_keys_name_the_piece():
    layout = place_tensors({"w": ((100, 10), "f4"), "b": ((10,), "f4")}, 2)
    keys = [layout.key(p) for pieces in layout.pieces for p in pieces]
    assert "b" in keys
    assert "w@0" in keys
    assert len(set(keys)) == len(keys)


@given(
    st.dictionaries(
        st.text("abc", min_size=1, max_size=3),
        st.tuples(st.lists(st.integers(0, 40), max_size=3), st.sampled_from(["f2", "f4", "f8"])),
        max_size=8,
    ),
    st.integers(1, 9),
)
def test_any_model_is_covered(specs, servers):
    """Scalars, empty tensors, more servers than elements."""
    layout = place_tensors(specs, servers)
    covered(layout)
    assert sum(layout.bytes_of(s) for s in range(servers)) == sum(
        int(np.prod(shape)) * np.dtype(dtype).itemsize for shape, dtype in specs.values()
    )
