"""Checkpoints of many tensors: fast plans and checks, plans that are used again, HDF5 metadata."""

import io
import random
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from queue import Queue

import h5py
import numpy as np
import pytest
from checkpoint_solo import Solo, Threaded, equal

import mpidist as md
from mpidist.checkpoint import histories
from mpidist.checkpoint.format import hdf5_layout, piece_table
from mpidist.checkpoint.format.regions import Box, Flat, boxes_of, intersection, untiled, whole
from mpidist.checkpoint.format.state import Fact
from mpidist.checkpoint.load import load
from mpidist.checkpoint.read import share_manifest
from mpidist.checkpoint.storage import steps
from mpidist.checkpoint.write import planner, save, write_plan
from mpidist.checkpoint.write.write_plan import Description, agree, shares
from mpidist.errors import CheckpointError, MismatchError, StorageError

# ------------------------------------------------------------------------------------- cost


def many(count, value=0.0):
    return {"parameters": {f"w{n}": np.full(16, n + value, "f4") for n in range(count)}}


def cpu(call):
    begin = time.process_time()
    call()
    return time.process_time() - begin


def test_4000_tensors(tmp_path):
    """Issue 10, point 13: planning was quadratic, and done at each save (5.6 s each, 0.35 s)."""
    state = many(4000)
    with md.CheckpointStore(Solo(), tmp_path) as store:
        first = cpu(lambda: store.save(0, state))
        again = min(cpu(partial(store.save, step, state)) for step in (1, 2, 3))
        restore = min(cpu(lambda: store.restore(many(4000, 1.0))) for _ in range(3))
    assert first < 1.0
    assert again < 0.1
    assert restore < 0.5
    assert equal(load(tmp_path), state)


def sharded(ranks, tensors):
    """What each rank of a job says: two rows of each tensor."""
    facts = tuple(Fact(("t", str(n)), "<f4", (2 * ranks, 8)) for n in range(tensors))
    table = piece_table.of_regions([(n, Box((0, 0), (2, 8))) for n in range(tensors)])
    every = []
    for rank in range(ranks):
        mine = table.copy()
        mine[:, piece_table.START] = 2 * rank
        every.append(Description(facts, (True,) * tensors, mine))
    return every


def test_many_pieces():
    """Issue 10, point 13: 100,000 pieces, which took 23 us each to prove alone."""
    every = sharded(100, 1000)
    tensors = agree(every)
    found = []
    assert cpu(lambda: found.extend(shares(tensors, every, range(100)))) < 1.0
    assert [len(share.writes) for share in found] == [1000] * 100
    rows = piece_table.joined([share.writes for share in found])
    shapes = [fact.shape for fact in tensors.facts]
    assert cpu(lambda: piece_table.untiled_tensor(shapes, rows)) < 0.5
    grid = piece_table.Grid(shapes, 2)
    wants = piece_table.joined([one.shards for one in every])
    assert cpu(lambda: piece_table.overlapping(grid, wants, rows)) < 0.5


# ------------------------------------------------------------------------------- the same plan


class Counted:
    """Counts the plans that are made."""

    def __init__(self, monkeypatch):
        self.made = 0
        original = write_plan.shares

        def count(*args):
            self.made += 1
            return original(*args)

        monkeypatch.setattr(write_plan, "shares", count)


@pytest.fixture
def plans(monkeypatch):
    return Counted(monkeypatch)


CHANGES = {
    "a name": lambda s: s.update(other=s.pop("w")),
    "a shape": lambda s: s.update(w=np.ones((4, 2))),
    "a dtype": lambda s: s.update(w=np.ones((2, 4), "f4")),
    "a shard": lambda s: s.update(w=md.Shard(np.ones((2, 4)), (2, 4), (0, 0))),
    "a tensor more": lambda s: s.update(more=np.ones(3)),
    "a tensor less": lambda s: s.pop("b"),
    "an array for a value": lambda s: s.update(step=np.int64(3)),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("method", ["save", "save_async"])
def test_a_plan_is_made_anew_when_the_state_changes(tmp_path, plans, change, method):
    """Names, dtypes, shapes and shards count; numbers, extras and how arrays lie do not."""
    state = {"w": np.arange(8.0).reshape(2, 4), "b": np.ones(3, "f4"), "step": 0, "list": [1]}
    with md.CheckpointStore(Solo(), tmp_path, keep=None) as store:
        for step in range(3):
            state |= {"step": step, "list": [1] * step}
            state["w"] = np.asfortranarray(state["w"] + 1) if step == 1 else state["w"] + 1
            getattr(store, method)(step, state)
            store.wait()
            assert equal(load(tmp_path, step), state)
        assert plans.made == 1
        state["extra"] = "one more is no other plan"
        store.save(3, state)
        assert plans.made == 1
        CHANGES[change](state)
        getattr(store, method)(4, state)
        store.wait()
        assert plans.made == 2
        found = store.restore()[1]
        store.save(5, found)
    expected = {**state, "w": state["w"].array} if change == "a shard" else state
    assert equal(found, expected)
    assert equal(load(tmp_path, 3)["list"], [1, 1])


def two(folder, job):
    """Run `job(store, rank)` on two ranks that are threads; what each returned."""
    boxes = [[Queue(), Queue()], [Queue(), Queue()]]

    def run(rank):
        with md.CheckpointStore(Threaded(rank, boxes), folder) as store:
            return job(store, rank)

    with ThreadPoolExecutor(2) as pool:
        return [one.result(timeout=60) for one in [pool.submit(run, rank) for rank in (0, 1)]]


def blocks(rank, cut, value):
    """Rows before and from `cut` on."""
    w = np.arange(40.0).reshape(10, 4) + value
    part = w[:cut] if rank == 0 else w[cut:]
    return {"w": md.Shard(part.copy(), w.shape, (0 if rank == 0 else cut, 0)), "r": w[0].copy()}


def test_one_rank_with_another_state_makes_a_plan_for_all(tmp_path, plans):
    """A rank that has its plan in hand follows one that has not."""

    def job(store, rank):
        for step, cut in enumerate([5, 5, 3, 3]):
            store.save(step, {**blocks(rank, cut, step), "step": step})
        alone = {"alone": np.arange(3)} if rank else {}
        for step in (4, 5):
            store.save(step, {**blocks(rank, 3, step), **alone})
        mine = blocks(rank, 7, -100)
        if rank:  # these threads pass nothing on
            mine = {"w": mine["w"], "alone": np.zeros(3, int)}
        store.restore(mine)
        return mine

    low, high = two(tmp_path, job)
    w = np.concatenate([low["w"].array, high["w"].array])
    np.testing.assert_array_equal(w, np.arange(40.0).reshape(10, 4) + 5)
    np.testing.assert_array_equal(low["r"], np.arange(4.0) + 5)
    np.testing.assert_array_equal(high["alone"], np.arange(3))
    assert plans.made == 3


def test_extras_are_compared_at_each_save(tmp_path, plans):
    """They are no part of a plan, and may differ after any number of saves that were equal."""

    def job(store, rank):
        for step in range(2):
            store.save(step, {**blocks(rank, 5, step), "step": step})
        with pytest.raises(MismatchError, match=r"lr is 1\.0 on rank 1, 0\.0 on rank 0"):
            store.save(2, {**blocks(rank, 5, 2), "lr": float(rank)})
        only = {"position": 7} if rank else {}
        store.save(3, {**blocks(rank, 5, 3), **only})
        for _ in range(2):  # said again at the next save
            with pytest.raises(MismatchError, match="arrays on some ranks"):
                store.save(4, {**blocks(rank, 5, 3), **({} if rank else {"r": 1})})
        for _ in range(2):
            with pytest.raises(CheckpointError, match=r"r/x|leaf"):
                store.save(4, {**blocks(rank, 5, 3), **({} if rank else {"r": {"x": 1}})})

    two(tmp_path, job)
    assert load(tmp_path)["position"] == 7


def test_a_save_that_fails_leaves_a_plan_that_works(tmp_path, plans, monkeypatch):
    """Where the folder cannot be made, on the first save or a later one."""
    original = save.retention.claim

    def fail(_):
        raise OSError(28, "no space")

    with md.CheckpointStore(Solo(), tmp_path) as store:
        for step in range(4):
            state = {"w": np.full(5, float(step)), "x": np.ones(step // 2 + 1)}
            monkeypatch.setattr(save.retention, "claim", fail)
            with pytest.raises(StorageError, match="no space"):
                store.save(step, state)
            monkeypatch.setattr(save.retention, "claim", original)
            store.save(step, state)
            assert equal(store.restore()[1], state)
    assert plans.made == 4  # of two plans, each also for nothing


def test_a_shard_of_another_plan_is_not_committed(tmp_path, monkeypatch):
    """Rank 0 knows which pieces each table must have; it reads no table for that."""
    monkeypatch.setattr(planner.Work, "numbers", b"\0" * 40)
    for method in ("save", "save_async"):
        with md.CheckpointStore(Solo(), tmp_path) as store:
            with pytest.raises(CheckpointError, match=r"planned|written"):
                getattr(store, method)(2, {"w": np.ones(3)}) or store.wait()
            assert store.all_steps() == []


# ----------------------------------------------------------------------------- tables of pieces


def tiling(rng, shape):
    """Boxes or flat ranges that tile a shape."""
    count = int(np.prod(shape))
    if rng.random() < 0.3:
        bounds = sorted([0, count, *(rng.randrange(count + 1) for _ in range(2))])
        return [Flat(low, high - low) for low, high in pairwise(bounds)]
    boxes = [whole(shape)]
    for _ in range(rng.randrange(6)):
        box = boxes.pop(rng.randrange(len(boxes)))
        axes = [axis for axis, n in enumerate(box.extent) if n > 1]
        if not axes:
            boxes.append(box)
            continue
        axis = rng.choice(axes)
        at = rng.randrange(1, box.extent[axis])
        for begin, end in ((0, at), (at, box.extent[axis])):
            start, extent = list(box.start), list(box.extent)
            start[axis], extent[axis] = start[axis] + begin, end - begin
            boxes.append(Box(tuple(start), tuple(extent)))
    return boxes


def shape_of(rng, least=0):
    return tuple(rng.randrange(least, 5) for _ in range(rng.randrange(4)))


@pytest.mark.parametrize("first", range(0, 300, 60))
def test_the_proof_of_all_tensors_is_that_of_each(first):
    """Tilings, and what is wrong with them, in any order: as `untiled` says of one at a time."""
    for seed in range(first, first + 60):
        rng = random.Random(seed)
        shapes = [shape_of(rng) for _ in range(rng.randrange(1, 6))]
        regions = [tiling(rng, shape) for shape in shapes]
        for shape, some in zip(shapes, regions, strict=True):
            fault = rng.random()
            if fault < 0.1:
                some.append(rng.choice(some))
            elif fault < 0.2:
                some.pop()
            elif fault < 0.3 and shape:
                some.append(Box((rng.randrange(-1, 6), *shape[1:]), (1,) * len(shape)))
        listed = [(n, region) for n, some in enumerate(regions) for region in some]
        rng.shuffle(listed)
        table = piece_table.joined([piece_table.of_regions(listed)], 3)
        wrong = [n for n, some in enumerate(regions) if untiled(shapes[n], some)]
        found = piece_table.untiled_tensor(shapes, table)
        assert (found[0] if found else None) == (wrong[0] if wrong else None), seed


@pytest.mark.parametrize("first", range(0, 300, 60))
def test_what_a_rank_wants_is_found(first):
    """All pieces that share an element with a want, and no others but for flat ranges."""
    for seed in range(first, first + 60):
        rng = random.Random(seed)
        shapes = [shape_of(rng, 1) for _ in range(rng.randrange(1, 5))]
        saved = [(n, r) for n, shape in enumerate(shapes) for r in tiling(rng, shape) if r.size]
        wants = [(n, r) for n, shape in enumerate(shapes) for r in tiling(rng, shape) if r.size]
        wants = [want for want in wants if rng.random() < 0.7]
        tables = [piece_table.joined([piece_table.of_regions(some)], 3) for some in (wants, saved)]
        pairs = zip(*piece_table.overlapping(piece_table.Grid(shapes, 3), *tables), strict=True)
        found = [(int(want), int(piece)) for want, piece in pairs]
        expected = {
            (i, j)
            for i, (n, one) in enumerate(wants)
            for j, (m, other) in enumerate(saved)
            if n == m
            and any(
                intersection(a, b)
                for _, a in boxes_of(one, shapes[n])
                for _, b in boxes_of(other, shapes[n])
            )
        }
        assert len(set(found)) == len(found), seed
        assert expected <= set(found)
        flat = {i for i, (_, region) in enumerate(wants) if isinstance(region, Flat)}
        more = {j for j, (_, region) in enumerate(saved) if isinstance(region, Flat)}
        assert all(i in flat or j in more for i, j in set(found) - expected)


def test_a_rank_is_told_what_it_wants(tmp_path):
    """Issue 10, point 13: not all pieces of all ranks; what somebody wants whole, all are told."""

    def job(store, rank):
        state = {f"t{n}": blocks(rank, 5, n)["w"] for n in range(6)}
        store.save(1, {**state, "r": np.arange(9.0)})

    two(tmp_path, job)
    found = steps.read_manifest(str(tmp_path), histories.first(str(tmp_path)))
    names = [tensor.path[0] for tensor in found.tensors]
    assert len(found.rows) == 6 * 2 + 2
    mask = np.packbits([name == "r" for name in names]).tobytes()
    upper = piece_table.of_regions([(names.index(f"t{n}"), Box((0, 0), (5, 4))) for n in range(6)])
    lower = piece_table.of_regions([(names.index("t3"), Box((6, 0), (2, 4)))])
    base, each = share_manifest._looked_up(found, [(mask, upper), (mask, lower), (mask, upper[:0])])
    assert [names[row[0]] for row in base.rows] == ["r", "r"]
    assert sorted(base.files) == [0, 1]
    (first,), (second,), third = each
    assert sorted(names[row[0]] for row in first.rows) == [f"t{n}" for n in range(6)]
    assert sorted(first.files) == [0]
    assert [(names[row[0]], row[1]) for row in second.rows] == [("t3", 1)]
    assert third == []


# -------------------------------------------------------------------------------------- HDF5


@pytest.mark.parametrize("count", [1, 2, 7, 8, 9, 1023, 1024, 1025, 5000])
def test_a_file_of_any_number_of_pieces(count):
    """HDF5 finds each by its number, its data where we put them, and takes more into the file."""
    facts = [Fact((f"layer{n // 10}", f"w{n % 10}"), "<f4", (n % 5 + 1,)) for n in range(count)]
    rows = piece_table.of_regions([(n, whole(fact.shape)) for n, fact in enumerate(facts)])
    rows[:, piece_table.OFFSET], end = hdf5_layout.place(4 * piece_table.sizes(rows))
    before, behind = hdf5_layout.around(facts, rows, end)
    data = bytearray(before + bytes(end - len(before)) + behind)
    for n, row in enumerate(rows.tolist()):
        values = np.full(facts[n].shape, n, "<f4").tobytes()
        data[row[piece_table.OFFSET] : row[piece_table.OFFSET] + len(values)] = values
    with h5py.File(io.BytesIO(bytes(data))) as file:
        assert sorted(map(int, file)) == list(range(count))
        for n in {0, 1, count // 2, count - 1} & set(range(count)):
            dataset = file[str(n)]
            assert (dataset.dtype, dataset.shape) == (np.dtype("<f4"), facts[n].shape)
            assert dataset.attrs["name"] == f"layer{n // 10}/w{n % 10}"
            assert dataset.attrs["dtype"] == "<f4"
            assert dataset.id.get_offset() == rows[n, piece_table.OFFSET]
            assert (dataset[...] == n).all()
    memory = io.BytesIO(bytes(data))
    with h5py.File(memory, "a") as file:
        for n in range(30):
            file[f"more{n}"] = n
    with h5py.File(memory) as file:
        assert len(file) == count + 30


def test_names_that_hdf5_cannot_hold():
    """Lone surrogates, NUL and very long names: some text, cut between two characters."""
    paths = [("a\0b",), ("\ud800x",), ("\u00e9" * 2000,), ("",)]
    facts = [Fact(path, "|u1", (4,)) for path in paths]
    rows = piece_table.of_regions([(n, Flat(1, 2)) for n in range(4)])
    rows[:, piece_table.OFFSET], end = hdf5_layout.place(piece_table.sizes(rows))
    before, behind = hdf5_layout.around(facts, rows, end)
    with h5py.File(io.BytesIO(before + bytes(end - len(before)) + behind)) as file:
        names = [file[str(n)].attrs["name"] for n in range(4)]
        assert names == ["a?b", "?x", "\u00e9" * 512, ""]
        assert all(int(file[str(n)].attrs["flat_start"]) == 1 for n in range(4))
