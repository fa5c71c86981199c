"""All collectives but allreduce, with uneven blocks, on any number of ranks (R32, R74, R78)."""

import re
from pathlib import Path

import numpy as np
import pytest

import mpidist as md
from mpidist.collectives.engines import executor
from mpidist.errors import ConfigError, MismatchError

SIZES = (1, 2, 3, 5, 8)


def host(x):
    return x if isinstance(x, np.ndarray) else x.get()


def uneven(p):
    return [(3 * r + 1) % 5 for r in range(p)]


@pytest.mark.ranks(*SIZES)
def test_reduce_scatter(comm, xp):
    for name in ("auto", "ring", "direct", "native"):
        for counts in (None, uneven(comm.size)):
            rows = sum(counts) if counts else comm.size + 1
            whole = np.arange(rows * 3, dtype=np.float32).reshape(rows, 3)
            x = xp.asarray(whole + comm.rank)
            block = md.reduce_scatter(comm, x, counts=counts, algorithm=name)
            expected = comm.size * whole + sum(range(comm.size))
            used = counts or [len(part) for part in np.array_split(whole, comm.size)]
            start = sum(used[: comm.rank])
            np.testing.assert_array_equal(host(block), expected[start : start + used[comm.rank]])
            np.testing.assert_array_equal(host(x), whole + comm.rank)
            mean = md.reduce_scatter(comm, x, "mean", counts=counts, algorithm=name)
            np.testing.assert_allclose(host(mean), host(block) / comm.size, rtol=1e-6)


@pytest.mark.ranks(*SIZES)
def test_allgather(comm, xp):
    counts = uneven(comm.size)
    blocks = [np.full((n, 2), r, np.int32) for r, n in enumerate(counts)]
    for name in ("auto", "ring", "direct", "native"):
        for given in (None, counts):
            x = xp.asarray(blocks[comm.rank])
            whole = md.allgather(comm, x, counts=given, algorithm=name)
            np.testing.assert_array_equal(host(whole), np.concatenate(blocks))
    out = xp.empty((sum(counts), 2), dtype=xp.int32)
    assert md.allgather(comm, xp.asarray(blocks[comm.rank]), out=out) is out
    np.testing.assert_array_equal(host(out), np.concatenate(blocks))


@pytest.mark.ranks(*SIZES)
def test_broadcast(comm, xp):
    for name in ("auto", "tree", "direct", "native"):
        for root in {0, comm.size - 1, comm.size // 2}:
            for shape in ((), (0,), (7,), (3, 4)):
                x = xp.full(shape, comm.rank, dtype=xp.float64)
                assert md.broadcast(comm, x, root=root, algorithm=name) is x
                assert (host(x) == root).all()
            view = xp.zeros((4, 6))[::2, ::3]
            view[...] = comm.rank
            md.broadcast(comm, view, root=root, algorithm=name)
            assert (host(view) == root).all()


@pytest.mark.ranks(*SIZES)
def test_reduce(comm, xp):
    for name in ("auto", "tree", "direct", "ordered", "native"):
        for root in {0, comm.size - 1}:
            for op, value in (("sum", 3 * comm.size), ("max", 3), ("mean", 3)):
                x = xp.full((2, 3), 3.0)
                result = md.reduce(comm, x, op, root=root, algorithm=name)
                if comm.rank == root:
                    assert (host(result) == value).all()
                else:
                    assert result is None
                assert (host(x) == 3).all()


@pytest.mark.ranks(*SIZES)
def test_reduce_with_weights(comm, xp):
    """The mean by weight, where the values say what it is; float16 is rounded once."""
    total = sum(range(1, comm.size + 1))
    expected = sum(r * (r + 1) for r in range(comm.size)) / total
    for name in ("auto", "tree", "direct", "ordered", "native"):
        for dtype in ("f8", "f2"):
            x = xp.full((2, 3), comm.rank, dtype=dtype)
            result = md.reduce(comm, x, "mean", algorithm=name, weight=comm.rank + 1)
            assert (host(x) == comm.rank).all()
            if comm.rank == 0:
                assert result.dtype == x.dtype
                rtol = 1e-3 if dtype == "f2" else 1e-12
                np.testing.assert_allclose(host(result), expected, rtol=rtol)
    with pytest.raises(ConfigError, match="weight=2 needs op='mean'"):
        md.reduce(comm, xp.ones(3), weight=2)
    with pytest.raises(ConfigError, match="add up to 0"):
        md.reduce(comm, xp.ones(3), "mean", weight=0)


@pytest.mark.ranks(*SIZES)
def test_gather_and_scatter(comm, xp):
    counts = uneven(comm.size)
    blocks = [np.full((n, 2), r + 0.5) for r, n in enumerate(counts)]
    for name in ("auto", "direct", "native"):
        for root in {0, comm.size - 1}:
            mine = xp.asarray(blocks[comm.rank])
            whole = md.gather(comm, mine, root=root, algorithm=name)
            assert (whole is None) == (comm.rank != root)
            if whole is not None:
                np.testing.assert_array_equal(host(whole), np.concatenate(blocks))
            back = md.scatter(comm, whole, root=root, counts=counts, algorithm=name)
            np.testing.assert_array_equal(host(back), blocks[comm.rank])
            even = np.arange(comm.size + 2) if comm.rank == root else None
            block = md.scatter(comm, even, root=root, algorithm=name)
            expected = np.array_split(np.arange(comm.size + 2), comm.size)[comm.rank]
            np.testing.assert_array_equal(host(block), expected)


#: docs/collectives.md, "What auto means for other operations": operation -> algorithm.
PAGE = (Path(__file__).parents[2] / "docs" / "collectives.md").read_text(encoding="utf-8")
DOCUMENTED = {
    operation: name
    for row in re.findall(r"^\| (`\w+`(?:, `\w+`)*) \| `(\w+)`[^|]*\| [^|]*\|$", PAGE, re.MULTILINE)
    for operation in re.findall(r"\w+", row[0])
    for name in row[1:]
}


@pytest.mark.ranks(3)
def test_auto_is_what_the_docs_say(comm):
    """A rank that asks for "auto" and one that gives the name make the same operation."""
    assert set(DOCUMENTED) == {
        "reduce_scatter", "allgather", "broadcast", "reduce", "gather", "scatter", "iallreduce"
    }  # fmt: skip
    for operation, name in DOCUMENTED.items():
        algorithm = name if comm.rank == 1 else "auto"
        made = getattr(md, operation)(comm, np.ones(6), algorithm=algorithm)
        if operation == "iallreduce":
            made.wait()
        md.allreduce(comm, np.ones(3), algorithm="ring")  # a root may hear of others only now


@pytest.mark.ranks(3)
def test_long_messages_are_cut(comm, monkeypatch):
    """R32: nothing reaches 2^31 elements; tested with messages of 64 bytes."""
    monkeypatch.setattr(executor, "MAX_MESSAGE", 64)
    for name in ("tree", "direct", "native"):
        x = np.arange(1001.0) if comm.rank == 0 else np.zeros(1001)
        md.broadcast(comm, x, algorithm=name)
        np.testing.assert_array_equal(x, np.arange(1001.0))
    gathered = md.allgather(comm, np.full(300, comm.rank), algorithm="ring")
    np.testing.assert_array_equal(gathered, np.repeat([0, 1, 2], 300))


@pytest.mark.ranks(2)
def test_reduce_scatter_then_allgather_is_allreduce(comm):
    """R78: the two halves of the ring are there as calls of their own."""
    x = np.random.default_rng(comm.rank).standard_normal(101).astype(np.float32)
    halves = md.allgather(comm, md.reduce_scatter(comm, x, algorithm="ring"), algorithm="ring")
    np.testing.assert_array_equal(halves, md.allreduce(comm, x.copy(), algorithm="ring"))


@pytest.mark.ranks(3)
def test_swapped_bytes(comm):
    """Elements of the other byte order keep it; ranks that differ in it are told."""
    whole = np.arange(6, dtype=">f8")
    for name in ("auto", "native"):
        x = whole if comm.rank == 1 else None
        block = md.scatter(comm, x, root=1, algorithm=name)
        np.testing.assert_array_equal(block, whole[2 * comm.rank : 2 * comm.rank + 2])
        np.testing.assert_array_equal(md.allgather(comm, block, algorithm=name), whole)
    with pytest.raises(MismatchError, match="float64"):
        md.broadcast(comm, np.zeros(3, ">f8" if comm.rank else "<f8"))


@pytest.mark.ranks(2)
def test_a_block_does_not_hold_the_whole(comm):
    block = md.reduce_scatter(comm, np.ones(1000))
    assert block.base is None or block.base.nbytes == block.nbytes


@pytest.mark.ranks(2)
def test_counts_may_be_any_integers(comm):
    """NumPy's integers on one rank and Python's on the other are the same operation."""
    counts = np.array([2, 1]) if comm.rank else [2, 1]
    x = np.full(2 - comm.rank, comm.rank)
    assert md.allgather(comm, x, counts=counts).tolist() == [0, 0, 1]
    assert md.reduce_scatter(comm, np.ones(3), counts=counts).tolist() == [2.0] * x.size


@pytest.mark.ranks(2)
def test_references_do_not_travel(comm):
    x = np.array(["a", None], object)
    for call in (md.broadcast, md.allgather, md.gather, md.scatter):
        with pytest.raises(ConfigError, match=r"object|refused"):
            call(comm, x)
    with pytest.raises(ConfigError, match="Python objects"):
        md.allreduce(comm, x, np.add)


#: Collectives that only read their array, with their algorithms.
READERS = [
    (md.reduce, "tree direct ordered native"),
    (md.gather, "direct native"),
    (md.allgather, "ring direct native"),
    (md.scatter, "direct native"),
    (md.reduce_scatter, "ring direct native"),
    (lambda *args, **named: md.allreduce(*args, out=np.empty((5, 2)), **named), "ring native"),
    (lambda *args, **named: md.iallreduce(*args, out=np.empty((5, 2)), **named).wait(), "ring"),
]


@pytest.mark.ranks(1, 3)
@pytest.mark.parametrize(("call", "names"), READERS)
def test_what_is_only_read_may_be_read_only(comm, call, names):
    """And the error for a list does not say that the result is written into it."""
    x = np.arange(10.0).reshape(5, 2) + comm.rank
    fixed = x.copy()
    fixed.flags.writeable = False
    for name in names.split():
        expected = call(comm, x.copy(), algorithm=name)
        np.testing.assert_array_equal(call(comm, fixed, algorithm=name), expected)
    assert (fixed == x).all()
    with pytest.raises(ConfigError, match=r"got list; wrap it: numpy.asarray\(x\)$"):
        call(comm, [1.0])


@pytest.mark.ranks(1, 3)
@pytest.mark.parametrize("order", ["C", "F"])
def test_the_root_of_a_broadcast_may_be_read_only(comm, order):
    values = np.arange(6.0).reshape(2, 3)
    for name in ("tree", "direct", "native"):
        x = np.array(values + comm.rank, order=order)
        x.flags.writeable = comm.rank > 0
        np.testing.assert_array_equal(md.broadcast(comm, x, algorithm=name), values)
    y = np.ones(3)  # a second array, so that both are packed
    md.broadcast_parameters(comm, {"x": x, "y": y})


@pytest.mark.ranks(2)
def test_bad_input(comm):
    x = np.zeros((4, 2))
    with pytest.raises(ConfigError, match="expected 2 whole numbers"):
        md.reduce_scatter(comm, x, counts=[2.0, 2.0])
    with pytest.raises(ConfigError, match=r"expected a writable array .* dtype float64"):
        md.allgather(comm, x, out=np.zeros((8, 2), np.float32))
    with pytest.raises(ConfigError, match=r"got list|refused"):
        md.scatter(comm, [1, 2] if comm.rank == 0 else None)
    with pytest.raises(ConfigError, match="add up to 3, expected 4"):
        md.reduce_scatter(comm, x, counts=[1, 2])
    with pytest.raises(ConfigError, match="expected 2 lengths"):
        md.reduce_scatter(comm, x, counts=[4])
    with pytest.raises(ConfigError, match="root=2"):
        md.broadcast(comm, x, root=2)
    with pytest.raises(ConfigError, match="did you mean 'ring'"):
        md.allgather(comm, x, algorithm="rign")
    with pytest.raises(ConfigError, match="0-d"):
        md.allgather(comm, np.array(1.0))
