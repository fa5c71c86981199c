"""If rank 1 gives a bad or different value, all ranks raise soon, and name rank and parameter.

The tests cover every parameter of the stores, of their methods, and of Topology, node_once and
broadcast_parameters (issue 9, A1). The communicator stays usable, so each test ends with a
collective call on it.
"""

import enum
import time

import numpy as np
import pytest

import mpidist as md
from mpidist.checkpoint.export.export_store import export
from mpidist.checkpoint.tiered import TieredStore
from mpidist.errors import MismatchError
from mpidist.runtime.topology import topology_of

SECONDS = 5.0


class Unshowable:
    """Neither its text nor its representation can be had."""

    def __repr__(self):
        raise RuntimeError("no repr")

    __str__ = __repr__


class Vague:
    def __bool__(self):
        raise RuntimeError("neither")


def all_raise(comm, call, *words, kinds=(md.MpidistError,)):
    """Every rank raises an error of mpidist within seconds that has all of `words`."""
    begin = time.monotonic()
    with pytest.raises(kinds) as caught:
        call()
    assert time.monotonic() - begin < SECONDS
    said = str(caught.value)
    assert "\n" not in said
    assert all(word in said for word in ("rank 1", *words)), said
    assert caught.value.everywhere
    everyone = comm.allgather((type(caught.value).__name__, said))
    assert len(set(everyone)) == 1, everyone
    x = np.ones(3)
    assert md.allreduce(comm, x)[0] == comm.size


#: Parameter, what the others give, what rank 1 gives instead.
STORE = [
    ("keep", 3, 0), ("keep", 3, -1), ("keep", 3, "3"), ("keep", 3, 2), ("keep", 3, None),
    ("keep", 3, Unshowable()), ("keep", 3, 10**5000),
    ("keep_every", None, 0), ("keep_every", None, 5), ("keep_every", 2, 2.5),
    ("writers", "all", "node"), ("writers", "all", 1), ("writers", 2, 1),
    ("writers", "all", "some"), ("writers", "all", np.zeros(2)),
    ("direct", True, False), ("direct", True, Vague()),
    ("sha256", False, True), ("sha256", False, Vague()),
]  # fmt: skip


@pytest.mark.ranks(3, further=(2,))
@pytest.mark.parametrize("name", sorted({name for name, _, _ in STORE}))
def test_parameters_of_a_store(comm, folder, name):
    for here, there in [(here, there) for other, here, there in STORE if other == name]:
        given = {name: there if comm.rank == 1 else here}
        all_raise(comm, lambda: md.CheckpointStore(comm, folder, **given), name)  # noqa: B023
        local = folder / "node"
        all_raise(comm, lambda: TieredStore(comm, folder, local=local, **given), name)  # noqa: B023


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize(
    "other", ["elsewhere", 5, None, Unshowable()], ids=lambda v: type(v).__name__
)
def test_the_path_of_a_store(comm, folder, other):
    there = folder / other if other == "elsewhere" else other
    path = there if comm.rank == 1 else folder
    all_raise(comm, lambda: md.CheckpointStore(comm, path), "path")
    all_raise(comm, lambda: TieredStore(comm, path, local=folder / "node"), "path")


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize(
    ("name", "there"), [("local_keep", 0), ("local_keep", 3), ("local_keep", None), ("local", 5),
                        ("local", "the shared one")], ids=str,
)  # fmt: skip
def test_parameters_of_a_tiered_store(comm, folder, name, there):
    arguments = {"local": folder / "node", "local_keep": 2}
    if comm.rank == 1:
        arguments[name] = folder if there == "the shared one" else there
    all_raise(comm, lambda: TieredStore(comm, folder, **arguments), name)


STEPS = [-1, 1.5, "3", 10**13, 10**5000, True, Unshowable(), 7]


@pytest.fixture(params=["plain", "tiered"])
def store(request, comm, folder):
    """Open store of either kind, in which step 3 and its parts lie."""
    if request.param == "plain":
        made = md.CheckpointStore(comm, folder / "store")
    else:
        made = TieredStore(comm, folder / "store", local=folder / "node")
    made.save(3, state_of(comm))
    made.wait()
    yield made
    made.close()


def state_of(comm, **extras):
    mine = np.full(4, float(comm.rank))
    return {"w": np.ones(5), "part": md.Shard(mine, (4 * comm.size,), 4 * comm.rank), **extras}


@pytest.mark.covering
@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("method", ["save", "save_async", "restore", "verify"])
def test_steps(comm, store, method):
    state, call = state_of(comm), getattr(store, method)
    for step in STEPS:
        given = step if comm.rank == 1 else 3
        arguments = {
            "save": (given, state), "save_async": (given, state), "restore": (state, given),
            "verify": (given,),
        }[method]  # fmt: skip
        all_raise(comm, lambda: call(*arguments), "step")  # noqa: B023
    assert store.all_steps() == [3]
    assert store.restore(state)[0] == 3


@pytest.mark.ranks(3, further=(2,))
def test_restore_of_none_and_of_a_step(comm, store):
    """None is a step of its own: it means the newest."""
    all_raise(comm, lambda: store.restore(state_of(comm), 3 if comm.rank == 1 else None), "step")
    all_raise(comm, lambda: store.verify(3 if comm.rank == 1 else None), "step")


@pytest.mark.ranks(3, further=(2,))
def test_how_a_restore_reads(comm, store):
    for verify in (False, Vague()):
        given = verify if comm.rank == 1 else True
        all_raise(comm, lambda: store.restore(verify=given), "verify")  # noqa: B023


@pytest.mark.ranks(2, further=(3,))
def test_what_a_restore_fills(comm, store):
    """A state that cannot be filled, or of another model, on one rank."""
    fixed = state_of(comm)
    fixed["w"].flags.writeable = False
    for like in (None, 5, {"w": None}, fixed, {3: 4}, {"w": np.ones(6)}, {"x": np.ones(5)}):
        given = like if comm.rank == 1 else state_of(comm)
        begin = time.monotonic()
        with pytest.raises(md.MpidistError) as caught:
            store.restore(given)
        assert time.monotonic() - begin < SECONDS
        assert len(set(comm.allgather(str(caught.value)))) == 1
    assert store.restore(state_of(comm))[0] == 3


@pytest.mark.covering
@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize(
    ("like", "text"),
    [({"w": np.ones(6)}, "w has shape (5,) in the checkpoint, (6,) on rank 1"),
     ({"w": np.ones(5, "f4")}, "w has dtype <f8 in the checkpoint, <f4 on rank 1"),
     ({"w": 3}, "w is an array in the checkpoint, int on rank 1"),
     ({"w": np.ones(5), "x": np.ones(2)}, "x is missing in the checkpoint, an array on rank 1"),
     ({"w": md.Shard(np.ones(2), (7,), 0)}, "w has shape (5,) in the checkpoint, (7,) on rank 1")],
    ids=["shape", "dtype", "kind", "name", "shard"],
)  # fmt: skip
def test_who_wants_to_fill_something_else_is_named(comm, store, like, text):
    """With what it has, and what is expected."""
    all_raise(comm, lambda: store.restore(like if comm.rank == 1 else state_of(comm)), text)
    everyone_else = like if comm.rank != 1 else state_of(comm)
    others = text.replace("rank 1", "rank 0" if comm.size == 2 else "ranks 0,2")
    with pytest.raises(md.MpidistError) as caught:
        store.restore(everyone_else)
    assert others in str(caught.value)
    assert store.restore(state_of(comm))[0] == 3


class Number(enum.IntEnum):
    """Known to this module only, as one of a user's script."""

    ONE = 1


def local_enum():
    class Local(enum.IntEnum):
        ONE = 1

    return Local.ONE


class Text(str):
    def __repr__(self):
        raise RuntimeError("no repr")


class Float(float):
    def __repr__(self):
        raise RuntimeError("no repr")


class Table(dict):
    def items(self):
        raise RuntimeError("no items")


#: Extras that differ: of the others, of rank 1.
DIFFERING = [
    (1, 10**5000), (1, Unshowable()), (1, 2), (1, 1.5), ("a", Text("b")), (1, len), (1, True),
    ({"a": 1}, Table(a=1)), ([1], [10**5000]), (None, 0.0), (1.0, float("nan")),
]  # fmt: skip


@pytest.mark.covering
@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("method", ["save", "save_async"])
def test_extras_that_differ(comm, store, method):
    for here, there in DIFFERING:
        state = state_of(comm, extra=there if comm.rank == 1 else here)
        words = [] if isinstance(there, Table) else ["extra"]
        all_raise(comm, lambda: getattr(store, method)(4, state), *words)  # noqa: B023
    assert store.all_steps() == [3]
    assert store.restore(state_of(comm))[0] == 3


#: Extras that mean the same.
EQUAL = [
    (1, Number.ONE), (1, local_enum()), ("a", Text("a")), (1.5, Float(1.5)),
    ([1, 2], (1, Number.ONE + 1)), ({"k": [1]}, {Text("k"): [local_enum()]}),
]  # fmt: skip


@pytest.mark.ranks(2, further=(3,))
def test_extras_that_mean_the_same_are_saved_as_exact_values(comm, store):
    """Whatever subclass they are of, also one that no other process knows: told apart by value."""
    for number, (here, there) in enumerate(EQUAL):
        store.save(4 + number, state_of(comm, extra=there if comm.rank == 1 else here))
        step, state = store.restore(state_of(comm))
        assert step == 4 + number
        assert repr(state["extra"]) == repr(here)


@pytest.mark.ranks(2, 3)
def test_a_store_that_one_rank_has_closed(comm, folder):
    """What it raises there the others hear; nobody waits."""
    store = md.CheckpointStore(comm, folder)
    store.save(1, state_of(comm))
    if comm.rank == 1:
        store.close()
    with pytest.raises(md.MpidistError, match="closed"):
        store.save(2, state_of(comm))
    with pytest.raises(MismatchError, match=r"rank 1 .*closed"):
        md.allreduce(comm, np.ones(3))
    store.close()


@pytest.mark.covering
@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize(
    ("name", "there"), [("path", "elsewhere"), ("path", 5), ("out", "b.npz"), ("out", None),
                        ("step", 2), ("step", -1), ("step", Unshowable())],
    ids=lambda v: type(v).__name__,
)  # fmt: skip
def test_export(comm, folder, name, there):
    with md.CheckpointStore(comm, folder / "store") as store:
        store.save(1, state_of(comm))
    arguments = {"path": folder / "store", "out": folder / "a.npz", "step": 1}
    if comm.rank == 1:
        arguments[name] = folder / there if isinstance(there, str) else there
    path, out, step = arguments["path"], arguments["out"], arguments["step"]
    all_raise(comm, lambda: export(comm, path, out, step=step), name)
    assert not (folder / "a.npz").exists()


@pytest.mark.ranks(3, further=(2,))
@pytest.mark.parametrize("here", [None, 2])
def test_ranks_per_node(comm, here):
    for there in (0, -1, 2.5, "2", 3, Unshowable(), 10**5000, [1]):
        given = there if comm.rank == 1 else here

        def work(given=given):
            with md.node_once(comm, ranks_per_node=given):
                raise AssertionError("nobody comes here")

        all_raise(comm, lambda: md.Topology(comm, given), "ranks_per_node")  # noqa: B023
        all_raise(comm, work, "ranks_per_node")
        topology_of(comm)  # one that is there changes nothing
        all_raise(comm, work, "ranks_per_node")


@pytest.mark.covering
@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize(
    ("params", "root", "word"),
    [(None, 1, "root"), (None, 9, "root"), (None, "0", "root"), (None, Unshowable(), "root"),
     (5, 0, "mapping"), ({"a": [1]}, 0, "'a'"), ({"b": np.ones(3)}, 0, "'a'"),
     ({"a": np.ones(4)}, 0, "'a'"), ({"a": np.ones(3, "f4")}, 0, "'a'")],
    ids=lambda v: type(v).__name__,
)  # fmt: skip
def test_broadcast_parameters(comm, params, root, word):
    a = np.full(3, float(comm.rank))
    given, at = ({"a": a} if params is None else params, root) if comm.rank == 1 else ({"a": a}, 0)
    all_raise(comm, lambda: md.broadcast_parameters(comm, given, root=at), word)
    assert (a == comm.rank).all()
    md.broadcast_parameters(comm, {"a": a}, root=1)
    assert (a == 1).all()
