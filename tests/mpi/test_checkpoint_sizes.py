"""A save on p ranks and a restore on q ranks give equal bits, for all p and q and three layouts."""

import numpy as np
import pytest
from mpi4py import MPI

import mpidist as md
from mpidist.arrays import copy_into
from mpidist.checkpoint import histories
from mpidist.checkpoint.format import piece_table
from mpidist.checkpoint.format.state import Shard
from mpidist.checkpoint.storage import files, steps
from mpidist.checkpoint.store import CheckpointStore
from mpidist.partition import BlockPartition

SHAPES = {"w": (13, 5), "b": (7,), "t": (4, 3, 6), "one": (1,), "zero": (0, 4)}


def truth(name, dtype):
    """The whole array of a name: values that no other name has."""
    count = int(np.prod(SHAPES[name]))
    values = np.arange(count) * 7 + 1000 * list(SHAPES).index(name)
    return values.astype(dtype).reshape(SHAPES[name])


def replicated(rank, size, blank=False):
    state = {
        "parameters": {n: truth(n, "f4") for n in SHAPES},
        "slots": {n: truth(n, "f8").T for n in SHAPES},
        "data": {"position": 17, "scalar": np.array(2.5)},
    }
    if blank:
        for group in ("parameters", "slots"):
            for array in state[group].values():
                array[...] = -1
        state["data"] = {"position": 0, "scalar": np.array(0.0)}
    return state


def blocks(rank, size, blank=False):
    """Rows cut over the ranks, and tiles of a 2 x n grid where the size is even."""
    state = {"parameters": {}, "tiles": {}}
    grid = (2, size // 2) if size % 2 == 0 else (1, size)
    place = divmod(rank, grid[1])
    for n in ("w", "t"):
        whole = truth(n, "f4")
        low, high = BlockPartition(whole.shape[0], size).range(rank)
        part = whole[low:high].copy()
        state["parameters"][n] = Shard(part, whole.shape, (low,) + (0,) * (whole.ndim - 1))
        ranges = [BlockPartition(whole.shape[k], grid[k]).range(place[k]) for k in (0, 1)]
        tile = whole[tuple(slice(*r) for r in ranges)]
        # A view with strides: a shard of something bigger that the user keeps.
        padded = np.full((*tile.shape[:-1], tile.shape[-1] * 2), -5, "f4")
        view = padded[..., ::2]
        view[...] = tile
        start = tuple(r[0] for r in ranges) + (0,) * (whole.ndim - 2)
        state["tiles"][n] = Shard(view, whole.shape, start)
    if blank:
        for group in state.values():
            for shard in group.values():
                shard.array[...] = -1
    return state


def servers(rank, size, blank=False):
    """Flat ranges on two of the ranks; the others hold replicated state, or nothing of it."""
    holders = [size - 1] if size < 2 else [0, size - 1]
    state = {"position": 5}
    if rank in holders:
        part = holders.index(rank)
        state["parameters"] = {}
        for n in SHAPES:
            flat = truth(n, "f4").reshape(-1)
            low, high = BlockPartition(flat.size, len(holders)).range(part)
            state["parameters"][n] = Shard(flat[low:high].copy(), SHAPES[n], low)
    if rank not in holders or size < 3:
        state["statistics"] = {"mean": truth("w", "f8")}
    if blank:
        for shard in state.get("parameters", {}).values():
            shard.array[...] = -1
        for array in state.get("statistics", {}).values():
            array[...] = -1
        state["position"] = 0
    return state


LAYOUTS = {"replicated": replicated, "blocks": blocks, "servers": servers}


def same(one, other):
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[k], other[k]) for k in one)
    if isinstance(one, Shard):
        return one.start == other.start and same(one.array, other.array)
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and one.tobytes() == other.tobytes()
    return one == other


@pytest.mark.ranks(6)
@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_save_on_p_restore_on_q(comm, folder, layout):
    """R52: 36 pairs of sizes, each layout, arrays and views bit-equal, like given or not."""
    make = LAYOUTS[layout]
    for p in range(1, 7):  # p ranks save step p
        run_on(comm, p, lambda part: save_one(part, folder, make))
    for q in range(1, 7):
        run_on(comm, q, lambda part: restore_all(part, folder, make))


def run_on(comm, size, work):
    part = comm.Split(0 if comm.rank < size else MPI.UNDEFINED)
    if part != MPI.COMM_NULL:
        work(part)
        part.Free()
    comm.Barrier()


def save_one(comm, path, make):
    with CheckpointStore(comm, path, keep=None) as store:
        if comm.size > 1:
            store.restore(make(comm.rank, comm.size, blank=True))
        store.save(comm.size, make(comm.rank, comm.size))


def restore_all(comm, path, make):
    with CheckpointStore(comm, path, keep=None) as store:
        for p in range(1, 7):
            like = make(comm.rank, comm.size, blank=True)
            step, state = store.restore(like, step=p)
            whole_step, whole = store.restore(step=p)
            assert step == whole_step == p
            assert same(state, make(comm.rank, comm.size))
            for group in ("parameters", "tiles"):
                for name, array in whole.get(group, {}).items():
                    assert same(array, truth(name, "f4"))
                for name, leaf in like.get(group, {}).items():
                    assert state[group][name] is leaf


@pytest.mark.ranks(4)
def test_another_layout_reads_it(comm, folder):
    """From any strategy to any other: what servers saved, as rows, as tiles and replicated."""
    with CheckpointStore(comm, folder) as store:
        whole = {n: truth(n, "f4") for n in SHAPES}
        flat = {n: a.reshape(-1) for n, a in whole.items()}
        cut = {n: BlockPartition(a.size, 4).range(comm.rank) for n, a in flat.items()}
        state = {n: Shard(flat[n][slice(*cut[n])], SHAPES[n], cut[n][0]) for n in SHAPES}
        store.save(1, {"parameters": state})
        blank = {n: np.full(SHAPES[n], -1, "f4") for n in SHAPES}
        _, got = store.restore({"parameters": blank})
        assert same(got["parameters"], whole)
        store.save(2, {"parameters": blank})
        for shard in state.values():
            shard.array[...] = -1
        store.restore({"parameters": state}, step=2)
        assert all(same(state[n].array, truth(n, "f4").reshape(-1)[slice(*cut[n])]) for n in state)


@pytest.mark.ranks(1, 2, 3, further=(5,))
def test_replicated_state_is_written_once_and_evenly(comm, folder):
    """R143, R53: the bytes on disk are those of one copy, shared out; parameters lie first."""
    rng = np.random.default_rng(5)
    state = {
        "momentum": {"w": rng.standard_normal((300, 70)).astype("f4")},
        "parameters": {"w": rng.standard_normal((300, 70)).astype("f4"), "b": np.ones(70, "f2")},
    }
    with CheckpointStore(comm, folder) as store:
        store.save(7, state)
        assert store.verify(7) > 0
    if comm.rank:
        return
    entry = histories.first(folder, 7)
    found = steps.read_manifest(folder, entry)
    sizes = {"<f4": 4, "<f2": 2}
    held = [0] * comm.size
    first = [{} for _ in held]
    counts = piece_table.sizes(found.rows).tolist()
    for (number, file, offset, *_), count in zip(found.rows.tolist(), counts, strict=True):
        tensor = found.tensors[number]
        held[file] += count * sizes[tensor.dtype]
        first[file].setdefault(tensor.path[0] == "parameters", []).append(offset)
    total = sum(a.nbytes for group in state.values() for a in group.values())
    assert sum(held) == total
    assert max(held) - min(held) <= 16
    assert all(max(f[True]) < min(f[False]) for f in first)
    assert sum(file.size for file in found.files) - total < 20_000 * comm.size


@pytest.mark.ranks(1, 3)
def test_any_size_in_small_blocks(comm, folder):
    """R32: nothing depends on sizes that fit one call; the block of 1 MiB is lowered to 64 bytes.

    The checkpoint says its block size, so it is read back with the usual one.
    """
    state = {"parameters": {n: truth(n, "c16") for n in SHAPES}, "bits": np.arange(900) % 3 == 0}
    usual = files.BLOCK
    with CheckpointStore(comm, folder) as store:
        try:
            files.BLOCK = 64
            store.save(1, state)
            assert same(store.restore()[1], state)
        finally:
            files.BLOCK = usual
        assert same(store.restore()[1], state)
        tile = Shard(np.full((3, 2), -1, "c16"), (13, 5), (9, 3))
        blank = {n: np.zeros_like(a) for n, a in state["parameters"].items()}
        like = {"parameters": {**blank, "w": tile}, "bits": np.zeros(900, bool)}
        store.restore(like)
        assert (tile.array == truth("w", "c16")[9:12, 3:5]).all()
        store.verify(1)


@pytest.mark.ranks(1, 2)
def test_every_dtype(comm, folder, xp):
    """Every number type comes back with its bits, on the host and on a device."""
    names = ["f2", "f4", "f8", "c8", "c16", "?", "i1", "u1", "i2", "u4", "i8", "u8"]
    arrays = {n: xp.arange(23).astype(n) for n in names}
    arrays["nan"] = xp.asarray(np.array([np.nan, -0.0, np.inf, 5e-324]))
    if xp is np:
        import ml_dtypes

        for n in ("bfloat16", "float8_e5m2", "float8_e4m3fn"):
            arrays[n] = np.arange(-8, 9).astype(getattr(ml_dtypes, n))
        arrays["big"] = np.arange(5, dtype=">f4")
        arrays["long"] = np.arange(5).astype(np.longdouble) / 3
        arrays["text"] = np.array(["a", "höhe"])
        arrays["when"] = np.array(["2026-01-02"], "M8[s]")
    with CheckpointStore(comm, folder) as store:
        store.save(3, arrays)
        blank = {n: xp.zeros_like(a) for n, a in arrays.items()}
        store.restore(blank)
        _, whole = store.restore()
    for n, array in arrays.items():
        expected = np.empty(array.shape, array.dtype)
        copy_into(expected, array)
        got = np.empty_like(expected)
        copy_into(got, blank[n])
        if n == "long":  # its padding bytes are not part of the value
            assert (got == expected).all()
            continue
        assert got.tobytes() == expected.tobytes(), n
        assert whole[n].dtype == expected.dtype, n
        assert whole[n].tobytes() == expected.tobytes(), n


@pytest.mark.covering
@pytest.mark.ranks(2, 3, 5)
@pytest.mark.parametrize("writers", ["node", 1, 2, 99])
@pytest.mark.parametrize("method", ["save", "save_async"])
def test_fewer_files_than_ranks(comm, folder, writers, method):
    """Issue 4, point 4: 1,000 ranks need not make 1,000 files; what is held elsewhere is sent."""
    rank, size = comm.rank, comm.size
    w = np.arange(1000.0).reshape(100, 10)
    low, high = BlockPartition(100, size).range(rank)
    state = {
        "parameters": {"w": w, "b": np.arange(7, dtype="f4")},
        "momentum": {"w": md.Shard((-w)[low:high], w.shape, (low, 0))},
        "transposed": md.Shard((w.T * 2)[:, low:high], (10, 100), (0, low)),
        "step": 3,
    }
    if rank == size - 1:
        state["only"] = np.arange(5)  # replicated over one rank, which may be no writer
    with md.CheckpointStore(comm, folder, writers=writers) as store:
        for step in (1, 2):
            getattr(store, method)(step, state)
        store.wait()
        store.verify(2)
        comm.Barrier()
        shards = sorted(path.name for path in (folder / "step-000000000002").glob("*.h5"))
        assert len(shards) == {"node": 1, 1: 1, 2: 2, 99: size}[writers]
        found = md.load(folder)
        np.testing.assert_array_equal(found["parameters"]["w"], w)
        np.testing.assert_array_equal(found["momentum"]["w"], -w)
        np.testing.assert_array_equal(found["transposed"], w.T * 2)
        np.testing.assert_array_equal(found["only"], np.arange(5))
        blank = {
            **state,
            "momentum": {"w": md.Shard(np.zeros((high - low, 10)), w.shape, (low, 0))},
        }
        assert store.restore(blank)[0] == 2
        np.testing.assert_array_equal(blank["momentum"]["w"].array, (-w)[low:high])
        comm.Barrier()


@pytest.mark.ranks(2)
def test_a_writer_without_room_for_what_is_sent(comm, folder, monkeypatch):
    """Nobody sends to a rank that cannot take it in."""
    from mpidist.checkpoint.write import shard_writer as shard

    def fail(*_):
        raise MemoryError("no room")

    state = {"w": md.Shard(np.ones(100_000), (200_000,), 100_000 * comm.rank)}
    with md.CheckpointStore(comm, folder, writers=1) as store:
        if comm.rank == 0:
            monkeypatch.setattr(shard.Memory, "room", fail)
        with pytest.raises(md.CheckpointError, match=r"rank 0 of 2 .*no room"):
            store.save(1, state)
        monkeypatch.undo()
        store.save(2, state)
        assert store.all_steps() == [2]


@pytest.mark.ranks(3)
def test_a_copy_that_fails_before_it_is_sent(comm, folder, monkeypatch):
    """Nobody waits for what a rank without memory does not send."""
    from mpidist.checkpoint.write import shard_writer as shard

    def fail(*_):
        raise MemoryError("no host memory")

    with md.CheckpointStore(comm, folder, writers=1) as store:
        if comm.rank == 1:
            monkeypatch.setattr(shard, "copied", fail)
        with pytest.raises(md.CheckpointError, match=r"rank 1 of 3 .*no host memory"):
            store.save_async(1, {"w": np.ones(4)})
        monkeypatch.undo()
        store.save(2, {"w": np.ones(4)})
        assert store.all_steps() == [2]


@pytest.mark.ranks(3)
def test_an_array_that_cannot_be_made_contiguous_while_it_is_sent(comm, folder, monkeypatch):
    """What a rank has no memory for is not waited for, and is no part of a checkpoint."""
    from mpidist.checkpoint.write import shard_writer as shard

    original, calls = shard._host_bytes, []

    def fail_once(view):
        calls.append(view)
        if len(calls) == 2:
            raise MemoryError("no memory for the second one")
        return original(view)

    low = 10 * comm.rank
    state = {n: md.Shard(np.ones((4, 10)).T, (30, 4), (low, 0)) for n in ("a", "b", "c")}
    with md.CheckpointStore(comm, folder, writers=1) as store:
        if comm.rank == 1:
            monkeypatch.setattr(shard, "_host_bytes", fail_once)
        with pytest.raises(md.CheckpointError, match=r"rank 1 of 3 .*the second one"):
            store.save(1, state)
        monkeypatch.undo()
        store.save(2, state)
        assert store.all_steps() == [2]
