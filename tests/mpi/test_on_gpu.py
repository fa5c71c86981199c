"""Calls with device arrays, which `make test-gpu` runs on a GPU; with NumPy they run everywhere."""

import ml_dtypes
import numpy as np
import pytest
from mpi4py import MPI
from on_gpu import host, late, other_stream, same
from own_threads import in_threads

import mpidist as md
from mpidist.collectives.engines.node_barrier import memory_of
from mpidist.errors import ConfigError, MismatchError, MpidistError
from mpidist.runtime.context import of

ALGORITHMS = ("auto", "native", "ring", "butterfly", "ordered")


def total(comm, values):
    """The sum over the ranks of ``values + rank``."""
    return comm.size * values + sum(range(comm.size))


# ------------------------------------------------------------------------------------- collectives


@pytest.mark.ranks(2, 3)
def test_several_sums_in_flight(comm, xp):
    """Of all lengths and operations, that are waited for in another order than they were begun."""
    begun = []
    for k, n in enumerate((0, 1, 1000, 200_001)):
        values = np.arange(n, dtype="f4") % 100
        x, out = late(xp, values + comm.rank), xp.zeros(n, "f4")
        y, z = xp.asarray(values + comm.rank), xp.asarray(values + comm.rank)
        begun += [
            (md.iallreduce(comm, x, algorithm=ALGORITHMS[k]), x, total(comm, values)),
            (md.iallreduce(comm, y, "max", out=out), out, values + comm.size - 1),
            (md.iallreduce(comm, z, "mean", weight=comm.rank + 1), z, None),
        ]
    weights = np.arange(1, comm.size + 1)
    mean = np.average(np.arange(comm.size), weights=weights)
    for handle, x, expected in reversed(begun):
        assert handle.wait() is x
        assert handle.test()
        if expected is None:
            same(x, np.arange(x.size) % 100 + mean, rtol=1e-6)
        else:
            same(x, expected)


@pytest.mark.ranks(2, 3)
def test_a_plan_is_used_again_with_new_values(comm, xp):
    for algorithm in ALGORITHMS:
        for shape in ((), (0,), (5,), (300, 40)):
            values = np.full(shape, 2.0, "f4")
            x = xp.zeros(shape, "f4")
            with md.plan(comm, x, "mean", algorithm=algorithm) as reduce:
                for step in range(3):
                    x[...] = comm.rank + step
                    assert reduce() is x
                    same(x, values - 2 + step + (comm.size - 1) / 2)


@pytest.mark.ranks(2, 3)
def test_layouts_and_narrow_floats(comm, xp):
    """Strides, Fortran order, 0-d, empty; float16 and bfloat16 are added in float32."""
    plain = np.arange(24.0, dtype="f4").reshape(4, 6) + comm.rank
    expected = total(comm, np.arange(24.0, dtype="f4").reshape(4, 6))
    for algorithm in ALGORITHMS:
        wide = xp.zeros((4, 12), "f4")
        wide[:, ::2] = xp.asarray(plain)
        views = [wide[:, ::2], xp.asarray(np.asfortranarray(plain)), xp.asarray(plain.T.copy()).T]
        for view in views:
            md.allreduce(comm, view, algorithm=algorithm)
            same(view, expected)
        same(wide[:, 1::2], np.zeros((4, 6)))
        scalar, none = xp.asarray(np.array(comm.rank)), xp.zeros((0, 3))
        assert int(md.allreduce(comm, scalar, algorithm=algorithm)) == sum(range(comm.size))
        assert md.allreduce(comm, none, algorithm=algorithm) is none
        for dtype, big in ((np.float16, 2048), (ml_dtypes.bfloat16, 256)):
            x = xp.asarray(np.full(700, big if comm.rank == 0 else 1).astype(dtype))
            md.allreduce(comm, x, algorithm=algorithm)
            assert x.dtype == dtype
            assert (host(x).astype("f4") == float(dtype(big + comm.size - 1))).all()


@pytest.mark.ranks(2, 3)
def test_out_on_the_host_and_on_the_device(comm, xp):
    """`x` and `out` may be on different memories and have gaps; a wrong `out` is an error."""
    values = np.arange(40.0).reshape(5, 8)
    kinds = [np, xp]
    for algorithm in ("auto", "native", "ring"):
        for here in kinds:
            for there in kinds:
                x = here.asarray(values + comm.rank)
                out = there.zeros((5, 16))[:, ::2]
                assert md.allreduce(comm, x, out=out, algorithm=algorithm) is out
                same(out, total(comm, values))
                same(x, values + comm.rank)
    x = xp.asarray(values)
    for out in (xp.zeros((5, 8), "f4"), xp.zeros((8, 5)), np.broadcast_to(0.0, (5, 8))):
        with pytest.raises(ConfigError, match="out has shape"):
            md.allreduce(comm, x, out=out)
    locked = np.broadcast_to(values, (5, 8))
    mine = locked if comm.rank == 0 else xp.asarray(values)
    with pytest.raises(MpidistError, match="read-only"):
        md.allreduce(comm, mine)


@pytest.mark.ranks(2, 3)
def test_one_rank_has_its_array_on_the_host(comm, xp):
    """The messages are the same: each rank copies for itself."""
    here = np if comm.rank == 0 else xp
    for algorithm in ALGORITHMS:
        for n in (1, 300, 30_000):
            values = np.arange(n, dtype="f8")
            x = here.asarray(values + comm.rank)
            md.allreduce(comm, x, algorithm=algorithm)
            same(x, total(comm, values))
            assert isinstance(x, here.ndarray)
    values = np.arange(12.0).reshape(6, 2)
    x = here.asarray(values + comm.rank)
    md.broadcast(comm, x, root=comm.size - 1)
    same(x, values + comm.size - 1)
    block = here.asarray(np.full((2, 3), comm.rank))
    same(md.allgather(comm, block)[-1], np.full(3, comm.size - 1))
    gathered = md.gather(comm, block, root=comm.size - 1)
    assert (gathered is None) == (comm.rank < comm.size - 1)
    rows = here.asarray(np.arange(comm.size * 2)) if comm.rank == 0 else None
    same(md.scatter(comm, rows, out=here.zeros(2, int)), [2 * comm.rank, 2 * comm.rank + 1])


@pytest.mark.ranks(2, 3)
def test_what_differs_is_an_error_of_all_ranks(comm, own, xp):
    """The dtype of one rank; gradients of which one is on the host; half of a model."""
    x = xp.zeros(5, "f4" if comm.rank else "f8")
    with pytest.raises(MismatchError, match="float64"):
        md.allreduce(own, x)
    if xp is np:
        return
    here = np if comm.rank == 0 else xp
    with pytest.raises(MismatchError, match="memory"):
        md.Gradients(comm, {"w": here.zeros(3, "f4")})
    with pytest.raises(ConfigError, match="one is on the host, one on a device"):
        md.Gradients(comm, {"w": np.zeros(3, "f4"), "b": xp.zeros(3, "f4")})
    half = {"w": xp.ones(3, "f4"), "b": np.ones(3, "f4")}
    md.check_replicas(comm, half)
    md.broadcast_parameters(comm, half)


# ----------------------------------------------------------------------------- streams and threads


@pytest.mark.ranks(2, 3)
def test_a_stream_of_the_program(comm, xp):
    """What the stream has still to write is summed, and its next kernel sees the sum."""
    values = np.arange(5000.0)
    for algorithm in ("auto", "native", "ring"):
        with other_stream(xp):
            x, y = late(xp, values + comm.rank), late(xp, values + comm.rank)
            md.allreduce(comm, x, algorithm=algorithm)
            doubled = x * 2
            out = late(xp, np.zeros(5000))
            md.allreduce(comm, y, "mean", out=out, algorithm=algorithm)
            handle = md.iallreduce(comm, late(xp, values + comm.rank), algorithm=algorithm)
            summed = handle.wait() + 0
            block = md.reduce_scatter(comm, late(xp, values + comm.rank)) * 1
            rows = md.allgather(comm, late(xp, values[:7] + comm.rank)) * 1
            given = late(xp, values + comm.rank)
            md.broadcast(comm, given, root=0)
            same(doubled, 2 * total(comm, values))
            same(out, total(comm, values) / comm.size, rtol=1e-12)
            same(summed, total(comm, values))
            same(block, np.array_split(total(comm, values), comm.size)[comm.rank])
            same(rows, np.concatenate([values[:7] + rank for rank in range(comm.size)]))
            same(given, values)
            md.check_replicas(comm, {"x": late(xp, values), "y": given})


@pytest.mark.ranks(2, 3)
def test_threads_on_communicators_of_their_own(comm, xp):
    if MPI.Query_thread() != MPI.THREAD_MULTIPLE:
        pytest.skip("no GPU: this MPI gives no THREAD_MULTIPLE")

    def work(mine, seed):
        rng = np.random.default_rng(seed)
        with other_stream(xp):
            for _ in range(12):
                values = np.arange(int(rng.integers(1, 6000)), dtype="f4")
                x = xp.asarray(values + comm.rank)
                if rng.integers(2):
                    md.allreduce(mine, x)
                else:
                    md.iallreduce(mine, x).wait()
                same(x, total(comm, values))

    in_threads(comm, 2, work)


# ------------------------------------------------------------------------------------- gradients

SHAPES = {"a": (7, 3), "b": (5,), "c": (400, 10), "d": (), "none": (0, 2)}


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("ranks_per_node", [None, 1])
def test_gradients(comm, xp, ranks_per_node):
    """Of several dtypes, on one node and on faked ones; on a device nothing leaves early."""
    memory_of(of(comm), ranks_per_node)
    kinds = {"c": "f8", "b": "f2"}
    model = {name: xp.zeros(shape, kinds.get(name, "f4")) for name, shape in SHAPES.items()}
    shares = np.arange(1, comm.size + 1) / sum(range(1, comm.size + 1))
    gradients = md.Gradients(comm, model, bucket_bytes=100)
    assert gradients.overlapping is (xp is np and ranks_per_node == 1)
    for step in range(3):
        gradients.begin(shares[comm.rank])
        for name in reversed(SHAPES):
            assert isinstance(gradients.views[name], xp.ndarray)
            with other_stream(xp) if step == 2 else other_stream(np):
                gradients.views[name][...] = late(xp, np.array(comm.rank + step, "f4"))
                if xp is not np:
                    xp.cuda.get_current_stream().synchronize()
            gradients.ready(name)
        gradients.reduce(comm.rank + 0.5, comm.rank == 1)
        mean = (shares * (np.arange(comm.size) + step)).sum()
        for name, view in gradients.views.items():
            assert view.dtype == model[name].dtype
            same(view, np.full(SHAPES[name], mean), rtol=1e-3)
        assert float(gradients.extras[0]) == sum(range(comm.size)) + 0.5 * comm.size
        assert bool(gradients.extras[1] == 1)
        md.check_replicas(comm, gradients.views)
    gradients.close()


# ------------------------------------------------------------------------------------ checkpoints


def state_of(comm, xp, add=0):
    """Whole arrays of several layouts, a piece of this rank, and plain values."""
    values = np.arange(30.0, dtype="f4").reshape(5, 6) + add
    wide = xp.zeros((5, 12), "f4")
    wide[:, ::2] = xp.asarray(values)
    piece = xp.asarray(values[:1] + 100 * comm.rank)
    return {
        "w": xp.asarray(values), "turned": xp.asarray(values.T.copy()).T, "gaps": wide[:, ::2],
        "loss": xp.asarray(np.array(2.5 + add)), "none": xp.zeros((0, 3)), "step": 7,
        "half": xp.asarray(values.astype("f2")), "large": xp.asarray(np.full(70_000, 1.0 + add)),
        "box": md.Shard(piece, (comm.size, 6), (comm.rank, 0)),
    }  # fmt: skip


def change(state, factor):
    """Let the arrays change while a save of them may still be written."""
    for leaf in state.values():
        array = getattr(leaf, "array", leaf)
        if hasattr(array, "shape"):
            array *= factor


def check_loaded(ranks, found, add=0):
    values = np.arange(30.0, dtype="f4").reshape(5, 6) + add
    for name in ("w", "turned", "gaps", "half"):
        same(found[name], values)
    assert float(found["loss"]) == 2.5 + add
    assert (found["none"].shape, found["step"]) == ((0, 3), 7)
    same(found["large"], np.full(70_000, 1.0 + add))
    if "box" in found:
        box = np.concatenate([values[:1] + 100 * rank for rank in range(ranks)])
        same(found["box"], box)


@pytest.mark.ranks(2, 3)
def test_checkpoints(comm, folder, xp):
    """Saved from a device, in the background too; loaded to both, on fewer ranks, as at the save.

    The arrays change in a stream that is still busy when the save begins, and at once after it.
    """
    with other_stream(xp), md.CheckpointStore(comm, folder) as store:
        state = state_of(comm, xp)
        store.save(1, state)
        for step in (2, 3):
            state = state_of(comm, xp, step)
            state["w"] = late(xp, host(state["w"]))
            store.save_async(step, state)
            change(state, 0)
        store.wait()
    with other_stream(xp), md.TieredStore(comm, folder / "t", local=folder / "node") as tiered:
        state = state_of(comm, xp, 4)
        tiered.save_async(4, state)
        change(state, 0)
        found = tiered.restore(state)[1]
        check_loaded(comm.size, {**found, "box": np.concatenate(comm.allgather(
            host(found["box"].array)
        ))}, 4)  # fmt: skip
    check_loaded(comm.size, md.load(folder, 1))
    for step in (2, 3):
        check_loaded(comm.size, md.load(folder, step), step)
    few = comm.Split(0 if comm.rank < comm.size - 1 else MPI.UNDEFINED)
    if few != MPI.COMM_NULL:
        for module in (xp, np):
            with other_stream(xp), md.CheckpointStore(few, folder) as store:
                like = state_of(few, module, 50)
                like["box"] = module.zeros((comm.size, 6), "f4")
                step, found = store.restore(like)
                doubled = found["w"] * 2
                assert step == 3
                assert found["w"] is like["w"]
                assert isinstance(found["turned"], module.ndarray)
                check_loaded(comm.size, found, 3)
                same(doubled, 2 * host(found["w"]))
        md.free(few)
        few.Free()
