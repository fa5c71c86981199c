"""Odd communicators, arrays, operations and weights raise a clear error or give right results."""

import inspect
from contextlib import suppress
from types import SimpleNamespace

import numpy as np
import pytest
from mpi4py import MPI
from test_allreduce import NAMES

import mpidist as md
from mpidist.collectives.engines.reductions import GOOD, resolve
from mpidist.errors import ConfigError, MpidistError

MODEL = SimpleNamespace(parameters={"w": np.ones(3)}, loss_and_gradients=None, predict=None)
DATA = (np.ones((4, 3)), np.ones(4))

#: Every public entry that takes a communicator, with arguments that are well.
ENTRIES = {
    "allreduce": lambda comm: md.allreduce(comm, np.ones(3)),
    "iallreduce": lambda comm: md.iallreduce(comm, np.ones(3)),
    "plan": lambda comm: md.plan(comm, np.ones(3)),
    "reduce_scatter": lambda comm: md.reduce_scatter(comm, np.ones(3)),
    "allgather": lambda comm: md.allgather(comm, np.ones(3)),
    "broadcast": lambda comm: md.broadcast(comm, np.ones(3)),
    "broadcast_parameters": lambda comm: md.broadcast_parameters(comm, {"w": np.ones(3)}),
    "reduce": lambda comm: md.reduce(comm, np.ones(3)),
    "gather": lambda comm: md.gather(comm, np.ones(3)),
    "scatter": lambda comm: md.scatter(comm, np.ones(3)),
    "Arena": lambda comm: md.Arena(comm, {"w": ((3,), "f4")}),
    "Topology": lambda comm: md.Topology(comm),
    "node_once": lambda comm: md.node_once(comm).__enter__(),
    "Gradients": lambda comm: md.Gradients(comm, {"w": np.ones(3)}),
    "CheckpointStore": lambda comm: md.CheckpointStore(comm, "nowhere"),
    "TieredStore": lambda comm: md.TieredStore(comm, "nowhere", local="nowhere-else"),
    "check_replicas": lambda comm: md.check_replicas(comm, {"w": np.ones(3)}),
    "guard": lambda comm: md.guard(comm).__enter__(),
    "watch": lambda comm: md.watch(comm),
    "ServerGroup": lambda comm: md.ServerGroup(comm),
    "parameter_server": lambda comm: md.parameter_server(
        comm, {"w": np.ones(3)}, optimizer=md.optim.sgd(0.1)
    ).__enter__(),
    "train": lambda comm: md.train(
        comm, MODEL, DATA, optimizer=md.optim.sgd(0.1), global_batch=2, steps=1
    ),
}


def freed(comm):
    other = comm.Dup()
    other.Free()
    return other


#: What is given in place of a communicator: how it is made, and what the line says of it.
GIVEN = {
    "none": (lambda comm: None, "comm is None; expected an mpi4py communicator"),
    "array": (lambda comm: np.ones((2, 3), "f4"), r"shape \(2, 3\) and dtype float32; expected"),
    "module": (lambda comm: MPI, "comm is a value of type module; expected"),
    "class": (lambda comm: MPI.Intracomm, "comm is the class Intracomm; expected"),
    "group": (lambda comm: MPI.GROUP_NULL, "comm is a value of type Group; expected"),
    "null": (lambda comm: MPI.COMM_NULL, "comm is COMM_NULL: this rank is not in it"),
    "freed": (freed, "comm is COMM_NULL: this rank is not in it, or it has been freed"),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("given", GIVEN)
def test_what_is_no_communicator_is_told_in_one_line(comm, given):
    make, text = GIVEN[given]
    wrong = make(comm)
    for name, call in ENTRIES.items():
        with pytest.raises(ConfigError, match=text) as caught:
            call(wrong)
        assert str(caught.value).startswith(f"md.{name}: comm is "), name
        assert "\n" not in str(caught.value)


@pytest.mark.ranks(3)
def test_an_intercommunicator_is_refused(comm):
    """Its Allreduce gives each group the sum of the other; ours gave each group its own."""
    half = comm.Split(comm.rank % 2)
    inter = half.Create_intercomm(0, comm, 1 - comm.rank % 2)
    here, there = half.size, comm.size - half.size
    for name, call in ENTRIES.items():
        with pytest.raises(ConfigError) as caught:
            call(inter)
        text = str(caught.value)
        assert text.startswith(f"md.{name}: comm is an intercommunicator"), name
        assert f"({here} ranks here, {there} there)" in text
        assert "comm.Merge()" in text
    merged = inter.Merge()
    assert md.allreduce(merged, np.ones(2))[0] == comm.size
    for each in (merged, half):
        md.free(each)
        each.Free()
    inter.Free()


@pytest.mark.ranks(2)
def test_swapped_arguments(comm):
    with pytest.raises(ConfigError, match=r"md.allreduce: comm is an array .* first argument"):
        md.allreduce(np.ones(3), comm)
    with pytest.raises(ConfigError, match=r"md.free: comm is an array"):
        md.free(np.ones(3))
    assert md.allreduce(comm, np.ones(3))[0] == 2


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("op", ["sum", "mean"])
@pytest.mark.parametrize("algorithm", ["native", "node", "ring", "auto"])
def test_a_plan_takes_no_array(comm, op, algorithm):
    """`reduce(gradient)` is a slip: an argument is no weight and no divisor."""
    x = np.full(4, comm.rank + 1.0)
    with md.plan(comm, x, op, algorithm=algorithm) as reduce:
        with pytest.raises(TypeError, match="argument"):
            reduce(np.full(4, 100.0))
        reduce()
    total = comm.size * (comm.size + 1) / 2
    np.testing.assert_array_equal(x, total / comm.size if op == "mean" else total)


#: What may be given for anything, and is an array, a text of two lines or a long one, a class, ...
ANYTHING = {
    "array": np.arange(3.0), "numbers": np.arange(1, 3), "one": np.ones(1), "scalar": np.ones(()),
    "objects": np.array([None, 3], object), "texts": np.array(["a"]), "none": None, "float": 2.5,
    "nan": float("nan"), "inf": float("inf"), "bool": True, "below": -1, "large": 10**5000,
    "complex": 1j, "text": "x\ny", "long": "x" * 5000, "bytes": b"ab", "class": SimpleNamespace,
    "object": SimpleNamespace(), "function": len, "list": [1, 2], "set": {1, 2},
    "dict": {"a": np.ones((2, 2))}, "world": MPI.COMM_WORLD,
}  # fmt: skip
COLLECTIVES = (
    md.allreduce, md.iallreduce, md.plan, md.reduce_scatter, md.allgather, md.broadcast, md.reduce,
    md.gather, md.scatter,
)  # fmt: skip
PAIRS = [
    (call, name)
    for call in COLLECTIVES
    for name in inspect.signature(call).parameters
    if name not in ("comm", "x")
]


@pytest.mark.covering
@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize(("call", "name"), PAIRS, ids=lambda v: getattr(v, "__name__", v))
def test_anything_in_place_of_an_argument(comm, call, name):
    """It is understood, or told in one line of ours that can be read; NumPy's words are not."""
    for kind, value in ANYTHING.items():
        mine = comm.Dup()  # what the root alone refuses leaves the others in the call
        try:
            made = call(mine, np.ones(6), **{name: value})
            if call is md.iallreduce:
                made.wait()
        except MpidistError as error:
            text = str(error)
            assert "\n" not in text, kind
            assert len(text) < 500, kind
        with suppress(MpidistError):
            md.free(mine)
        comm.Barrier()


# ------------------------------------------------------------------------------------- arrays


def odd_offset(values):
    """The values in memory that begins at an odd address, as np.frombuffer gives it."""
    raw = bytearray(values.nbytes + 2)
    x = np.frombuffer(raw, values.dtype, values.size, offset=1)
    x[:] = values
    return x


def structured_field(values):
    records = np.zeros(values.size, [("flag", "u1"), ("value", values.dtype)])
    records["value"] = values
    return records["value"]


def odd_strides(values):
    raw = np.zeros((values.size + 1, values.itemsize + 3), np.uint8)
    x = np.ndarray(values.shape, values.dtype, raw, 1, (values.itemsize + 3,))
    x[:] = values
    return x


LAYOUTS = (odd_offset, structured_field, odd_strides)


@pytest.mark.covering
@pytest.mark.ranks(1, 3)
@pytest.mark.parametrize("where", ["everywhere", "on rank 1"])
def test_misaligned_arrays_in_every_algorithm(comm, where):
    """KeyError from native; and where one rank alone had one, the others waited for ever."""
    mine = where == "everywhere" or comm.rank == 1
    for dtype in ("f8", "i2", "c16", "f2"):
        for n in (0, 700):
            values = np.arange(n, dtype=dtype)
            for layout in LAYOUTS:
                for name in NAMES:
                    x = layout(values) if mine else values.copy()
                    assert not (mine and n and x.flags.aligned)
                    assert md.allreduce(comm, x, algorithm=name) is x
                    np.testing.assert_array_equal(x, values * comm.size)


@pytest.mark.ranks(3, further=(2,))
def test_misaligned_arrays_in_plans_and_handles(comm):
    for n in (5, 700):
        values = np.arange(n, dtype="f8")
        for layout in LAYOUTS:
            for name in NAMES:
                x = layout(values) if comm.rank else values.copy()
                with md.plan(comm, x, algorithm=name) as reduce:
                    for _ in range(2):
                        x[:] = values
                        assert reduce() is x
                        np.testing.assert_array_equal(x, values * comm.size)
            x, out = layout(values), layout(values)
            assert md.iallreduce(comm, x, out=out).wait() is out
            np.testing.assert_array_equal(out, values * comm.size)
            np.testing.assert_array_equal(x, values)


@pytest.mark.ranks(1, 2, 3)
def test_misaligned_arrays_in_the_other_collectives(comm):
    p, values = comm.size, np.arange(7, dtype="f8")
    for layout in LAYOUTS:
        x = layout(values) if comm.rank != 1 else values.copy()
        for name in ("auto", "native"):
            part = md.reduce_scatter(comm, x, algorithm=name)
            np.testing.assert_array_equal(md.allgather(comm, part, algorithm=name), values * p)
            np.testing.assert_array_equal(md.allgather(comm, x, algorithm=name), np.tile(values, p))
            whole = md.reduce(comm, x, algorithm=name)
            gathered = md.gather(comm, x, algorithm=name)
            if comm.rank == 0:
                np.testing.assert_array_equal(whole, values * p)
                np.testing.assert_array_equal(gathered, np.tile(values, p))
            block = md.scatter(comm, x if comm.rank == 0 else None, algorithm=name)
            np.testing.assert_array_equal(md.allgather(comm, block), values)
            y = layout(values if comm.rank == 0 else values * 0)
            md.broadcast(comm, y, algorithm=name)
            np.testing.assert_array_equal(y, values)
        params = {"a": layout(values + comm.rank), "b": values + comm.rank}
        md.broadcast_parameters(comm, params)
        np.testing.assert_array_equal(params["a"], values)


# --------------------------------------------------------------------------------- operations


@pytest.mark.ranks(1, 3)
def test_operations_of_mpi_and_average(comm):
    same = [
        (MPI.SUM, "sum"), (MPI.PROD, "prod"), (MPI.MIN, "min"), (MPI.MAX, "max"),
        ("average", "mean"),
    ]  # fmt: skip
    for op, name in same:
        # One rank may say it so and another so: it is one operation.
        said = op if comm.rank else name
        x = np.arange(4.0) + comm.rank
        expected = md.allreduce(comm, x.copy(), name, algorithm="naive")
        for algorithm in ("auto", "ring", "native"):
            for _ in range(2):
                np.testing.assert_array_equal(
                    md.allreduce(comm, x.copy(), said, algorithm=algorithm), expected
                )
        np.testing.assert_array_equal(md.iallreduce(comm, x.copy(), said).wait(), expected)
        np.testing.assert_array_equal(md.plan(comm, x.copy(), said)(), expected)
        block = md.reduce_scatter(comm, x, said)
        np.testing.assert_array_equal(md.allgather(comm, block), expected)
        whole = md.reduce(comm, x, said)
        if comm.rank == 0:
            np.testing.assert_array_equal(whole, expected)
    assert md.allreduce(comm, np.ones(2), "average", weight=comm.rank + 1)[0] == 1


REFUSED = [
    (np.subtract, "not associative and commutative"),
    (np.divide, "not associative and commutative"),
    (np.power, "not associative and commutative"),
    (np.arctan2, "not associative and commutative"),
    (MPI.LAND, "MPI.LAND is not supported; pass np.logical_and"),
    (MPI.MINLOC, "MPI.MINLOC is not supported; expected one of sum"),
    (max, "op max of type builtin_function_or_method is not known; expected one of sum"),
    (["sum"], r"op \['sum'\] of type list is not known"),
]  # fmt: skip


@pytest.mark.ranks(2)
def test_operations_that_depend_on_the_order_are_refused(comm):
    """20 by the ring and -40 by auto was np.subtract."""
    for op, text in REFUSED:
        for call in (md.allreduce, md.iallreduce, md.plan, md.reduce_scatter, md.reduce):
            for algorithm in ("auto", "ring" if call is not md.reduce else "tree"):
                with pytest.raises(ConfigError, match=text):
                    call(comm, np.arange(4.0), op, algorithm=algorithm)
    assert md.allreduce(comm, np.ones(3))[0] == 2


# ------------------------------------------------------------------------------------ weights


@pytest.mark.covering
@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("weight", [-1, float("nan"), float("inf"), -1e-9, "much"])
def test_a_bad_weight_on_one_rank_is_told_on_all(comm, weight):
    bad = comm.size - 1
    mine = weight if comm.rank == bad else 2.0
    told = "nan" if weight == "much" else float(weight)
    text = rf"rank {bad}: weight={told}; expected finite numbers of 0 or more"
    for algorithm in ("auto", "ring", "ordered"):
        with pytest.raises(ConfigError, match=text):
            md.allreduce(comm, np.ones(3), "mean", weight=mine, algorithm=algorithm)
    with pytest.raises(ConfigError, match=text):
        md.iallreduce(comm, np.ones(3), "mean", weight=mine).wait()
    if comm.size > 1:
        with pytest.raises(ConfigError, match=f"the weights of {comm.size} ranks; expected"):
            md.allreduce(comm, np.ones(3), "mean", weight=weight)
    # Nothing is lost by it: the communicator goes on.
    x = md.allreduce(comm, np.full(3, 1.0 + comm.rank), "mean", weight=comm.rank == 0)
    np.testing.assert_array_equal(x, 1)


@pytest.mark.ranks(1)
def test_which_ufuncs_are_taken(comm):
    """Of NumPy's those that stand in a list, for the elements that they keep; no others."""
    for dtype in map(np.dtype, ("?", "i1", "i4", "u8", "f2", "f4", "f8", "g", "c8", "c16", ">f4")):
        taken = set()
        for name in dir(np):
            ufunc = getattr(np, name)
            if isinstance(ufunc, np.ufunc):
                with suppress(ConfigError):
                    taken.add(resolve(ufunc, dtype).ufunc.__name__)
        # On truth values these two are "exclusive or" and its opposite.
        assert taken - set(GOOD) == ({"equal", "not_equal"} if dtype.kind == "b" else set())
        assert {"add", "multiply", "maximum", "fmin"} <= taken
        assert {"bitwise_or", "gcd"} <= taken or dtype.kind not in "iu"
        assert {"hypot", "logaddexp", "logaddexp2"} <= taken or dtype.kind != "f"


@pytest.mark.ranks(1)
def test_ufuncs_of_others_are_tried(comm):
    """Those of SciPy, where it is: the same answers as for NumPy's own."""
    special = pytest.importorskip("scipy.special")
    for name in ("xlogy", "binom", "beta", "jv"):
        with pytest.raises(ConfigError, match="associative and commutative"):
            resolve(getattr(special, name), np.dtype("f8"))
    with pytest.raises(ConfigError, match="returns Python objects"):
        resolve(np.frompyfunc(max, 2, 1), np.dtype("f8"))
    for op in (np.divmod, np.matmul, np.negative):
        with pytest.raises(ConfigError, match="is not a binary ufunc"):
            resolve(op, np.dtype("f8"))
    with pytest.raises(ConfigError, match="does not map two float64 to one float64"):
        resolve(np.bitwise_or, np.dtype("f8"))
