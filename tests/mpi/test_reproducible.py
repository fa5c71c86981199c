"""``reproducible=True`` adds along one tree over the ranks, whatever the algorithm (issue 3)."""

import numpy as np
import pytest
from test_train import fit

import mpidist as md
from mpidist.collectives.schedules import algorithms
from mpidist.errors import ConfigError
from mpidist.runtime.context import of

NAMES = ["auto", "native", *algorithms.NODE, *algorithms.ALLREDUCE]


def tree(vectors, add=np.add):
    """The order that is promised, by its definition."""
    if len(vectors) == 1:
        return vectors[0]
    middle = 1 << ((len(vectors) - 1).bit_length() - 1)
    return add(tree(vectors[:middle], add), tree(vectors[middle:], add))


def vectors(size, n, dtype=np.float32):
    rng = np.random.default_rng((size, n))
    scale = 10.0 ** rng.integers(-3, 3, (size, 1))
    return list((rng.standard_normal((size, n)) * scale).astype(dtype))


@pytest.mark.ranks(1, 2, 3, 4, 5, further=(7, 8, 9))
def test_every_algorithm_gives_the_serial_bits(comm):
    """Equal to the serial tree for all names, lengths and ways to call."""
    for n in (1, comm.size + 1, 5000):
        data = vectors(comm.size, n)
        expected = tree(data).tobytes()
        for name in NAMES:
            mine = data[comm.rank]
            options = {"algorithm": name, "reproducible": True}
            assert md.allreduce(comm, mine.copy(), **options).tobytes() == expected
            again = md.allreduce(comm, mine, out=np.empty(n, np.float32), **options)
            assert again.tobytes() == expected
            assert md.iallreduce(comm, mine.copy(), **options).wait().tobytes() == expected
            bound = mine.copy()
            md.plan(comm, bound, **options)()
            assert bound.tobytes() == expected


@pytest.mark.ranks(3, 6)
def test_means_weights_and_other_operations(comm):
    data = vectors(comm.size, 40, np.float64)
    mine = data[comm.rank]
    mean = md.allreduce(comm, mine.copy(), "mean", reproducible=True)
    assert mean.tobytes() == (tree(data) / comm.size).tobytes()
    weights = [0.1 * (rank + 1) for rank in range(comm.size)]
    mean = md.allreduce(comm, mine.copy(), "mean", weight=weights[comm.rank], reproducible=True)
    total = tree([np.float64(weight) for weight in weights])
    weighted = tree([w * x for w, x in zip(weights, data, strict=True)]) / total
    assert mean.tobytes() == weighted.tobytes()
    product = md.allreduce(comm, mine.copy(), "prod", algorithm="ring", reproducible=True)
    assert product.tobytes() == tree(data, np.multiply).tobytes()
    half = vectors(comm.size, 40, np.float16)
    rounded = tree([x.astype(np.float32) for x in half]).astype(np.float16)
    got = md.allreduce(comm, half[comm.rank].copy(), reproducible=True)
    assert got.tobytes() == rounded.tobytes()


@pytest.mark.ranks(1, 2, 3, further=(5, 7, 8, 9))
def test_a_reduce_gives_the_serial_bits_to_any_root(comm):
    """Those of the allreduce: for all names, lengths and roots, means and weights as well."""
    weights = [0.1 * (rank + 1) for rank in range(comm.size)]
    for n in (1, comm.size + 1, 5000):
        data = vectors(comm.size, n)
        mine = data[comm.rank]
        for root in sorted({0, comm.size // 2, comm.size - 1}):
            for name in ("auto", "native", *algorithms.REDUCE):
                options = {"root": root, "algorithm": name, "reproducible": True}
                got = md.reduce(comm, mine, **options)
                if comm.rank == root:
                    assert got.tobytes() == tree(data).tobytes()
                else:
                    assert got is None
        for weight in (None, weights[comm.rank]):
            options = {"weight": weight, "reproducible": True}
            everybodys = md.allreduce(comm, mine.copy(), "mean", **options)
            mean = md.reduce(comm, mine, "mean", root=comm.size - 1, **options)
            if comm.rank == comm.size - 1:
                assert mean.tobytes() == everybodys.tobytes()


@pytest.mark.ranks(5, 8)
def test_the_order_of_operands_does_not_follow_the_root(comm):
    """The maximum of zeros of both signs is one operand or the other: which one is promised."""
    signs = np.array([1.0, -1.0, -1.0, 1.0, -1.0, 1.0, 1.0, -1.0])
    data = [np.zeros(3) * signs[(rank + np.arange(3)) % 8] for rank in range(comm.size)]
    expected = tree(data, np.maximum).tobytes()
    for root in range(comm.size):
        got = md.reduce(comm, data[comm.rank], "max", root=root, reproducible=True)
        assert comm.bcast(got, root).tobytes() == expected


@pytest.mark.ranks(4, 6)
def test_the_layout_of_nodes_does_not_matter(comm):
    """Arenas on faked nodes of 1, 2 or 3 ranks, and on the real one."""
    data = vectors(comm.size, 300)
    expected = tree(data).tobytes()
    for ranks_per_node in (None, 1, 2, 3):
        with md.Arena(comm, {"w": ((300,), "f4")}, ranks_per_node=ranks_per_node) as arena:
            for name in ("auto", "node", "ring"):
                arena["w"][...] = data[comm.rank]
                md.allreduce(comm, arena, algorithm=name, reproducible=True)
                assert arena["w"].tobytes() == expected, (ranks_per_node, name)


@pytest.mark.ranks(3)
def test_training_and_names(comm):
    """The strategy takes the word; the name of the algorithm is still checked."""
    hashes = {
        fit(comm, strategy=md.AllReduce(name, reproducible=True), epochs=1)[1].parameters_sha256
        for name in ("auto", "native", "ring", "tree")
    }
    assert len(hashes) == 1
    for call in (md.allreduce, md.iallreduce, md.plan):
        with pytest.raises(ConfigError, match="did you mean 'ring'"):
            call(comm, np.ones(3), algorithm="rnig", reproducible=True)
    with pytest.raises(ConfigError, match="reproducible=1"):
        md.AllReduce(reproducible=1)


@pytest.mark.ranks(2, 3, 5, 8)
def test_counters_equal_the_formula(comm):
    """2 (p-1)/p N bytes on any p, as the ring; 2 (p-1) messages, or 2 log2 p."""
    p, n = comm.size, 4096 * comm.size
    x = np.ones(n)
    md.allreduce(comm, x, reproducible=True)
    before = of(comm).counters.snapshot()
    md.allreduce(comm, x, reproducible=True)
    after = of(comm).counters.snapshot()
    power = p & (p - 1) == 0
    messages = 2 * (p.bit_length() - 1) if power else 2 * (p - 1)
    assert after["messages_sent"] - before["messages_sent"] == messages
    assert after["bytes_sent"] - before["bytes_sent"] == 2 * (p - 1) * n // p * 8
