"""Public classes: equal arguments of similar classes, return types, and reprs (issue 11)."""

import inspect

import numpy as np
import pytest

import mpidist as md
from mpidist.checkpoint.write.shard_writer import WriteOptions
from mpidist.errors import ConfigError


def signatures(kind):
    """Public method -> its parameters, and those of the class itself."""
    methods = {
        name: list(inspect.signature(method).parameters.values())
        for name, method in inspect.getmembers(kind, inspect.isfunction)
        if not name.startswith("_")
    }
    return {"": list(inspect.signature(kind).parameters.values()), **methods}


@pytest.mark.ranks(1)
def test_a_tiered_store_takes_what_a_store_takes(comm):
    """The same parameters by name, kind, default and type.

    Besides, it has `local`, `local_keep`, and the calls for copies that only nodes keep.
    """
    plain, tiered = signatures(md.CheckpointStore), signatures(md.TieredStore)
    own = [each.name for each in tiered[""] if each.name.startswith("local")]
    assert own == ["local", "local_keep"]
    tiered[""] = [each for each in tiered[""] if each.name not in own]
    assert {"restore", "save", "close"} < set(plain)
    copies = {name: tiered.pop(name) for name in ("hold", "stop_holding")}
    assert [each.name for each in copies["hold"]] == ["self", "step", "state"]
    assert tiered == plain


@pytest.mark.ranks(2)
def test_a_tiered_store_writes_and_reads_its_shared_folder_as_asked(comm, folder):
    """SHA-256 of shards is kept; without `verify` numbers are taken as they are."""
    state = {"w": np.arange(4000.0)}
    for sha256 in (False, True):
        path = folder / f"shared-{sha256}"
        with md.TieredStore(
            comm, path, local=folder / "node", sha256=sha256, direct=False
        ) as store:
            assert store.shared._place.how == WriteOptions(direct=False, sha256=sha256)
            store.save(1, state)
        tables = list(path.glob("step-*/*.table"))
        assert tables
        absent = [b'"sha256":null' in table.read_bytes() for table in tables]
        assert absent == [not sha256] * len(tables)
    comm.Barrier()
    if comm.rank == 0:
        shard = next(path.glob("step-*/shard-00000.h5"))
        with shard.open("r+b") as file:
            file.seek(512)  # where numbers begin (docs/checkpoints.md)
            file.write(np.float64(-7.0).tobytes())
    comm.Barrier()
    with md.TieredStore(comm, path, local=folder / "node") as store:
        like = {"w": np.zeros(4000)}
        with pytest.raises(md.CheckpointError):
            store.restore(like, 1)
        _, found = store.restore(like, 1, verify=False)
        assert found["w"][0] == -7.0
        assert (found["w"][1:] == state["w"][1:]).all()


@pytest.mark.ranks(1)
def test_every_public_name_is_there(comm):
    """Each is what its name says: a class begins with a capital letter, a function does not."""
    for module in (md, md.data, md.models, md.optim):
        assert dir(module) == sorted(set(module.__all__))
        for name in module.__all__:
            value = getattr(module, name)
            if inspect.isclass(value):
                assert name[0].isupper(), name
                assert value.__name__ == name
            elif inspect.isfunction(value):
                assert name[0].islower(), name


@pytest.mark.ranks(2)
def test_types_of_what_functions_return(comm):
    """For type hints: the classes of handles, plans, clients, guards and watches."""
    x = np.ones(3)
    handle = md.iallreduce(comm, x)
    assert type(handle) is md.Handle
    assert handle.wait() is x
    with md.plan(comm, x) as plan:
        assert type(plan) is md.Plan
    with md.guard(comm, signals=()) as guard:
        assert type(guard) is md.Guard
    with md.watch(comm, seconds=100) as watch:
        assert type(watch) is md.Watch
    with md.ServerGroup(comm, servers=1) as group:
        client = group.add("model", {"w": np.zeros(4)}, optimizer=md.optim.sgd(0.1))
        if client is not None:
            client.close()
    assert sorted(comm.allgather(type(client).__name__)) == ["Client", "NoneType"]
    assert client is None or type(client) is md.Client


def one_line(text):
    assert "\n" not in text
    assert " at 0x" not in text, "an address helps nobody"
    assert len(text) < 400
    return text


@pytest.mark.ranks(1, 4)
def test_repr_of_a_topology(comm):
    with md.Topology(comm, ranks_per_node=2) as topology:
        text = one_line(repr(topology))
        assert text.startswith(f"<Topology: {topology.describe()}; rank {comm.rank} is local rank")
        assert text.endswith(f"local rank {comm.rank % 2} of node {comm.rank // 2}>")
    assert repr(topology).endswith("; closed>")


@pytest.mark.ranks(1, 4)
def test_repr_of_an_arena(comm, monkeypatch):
    spec = {"w": ((20, 3), "f4"), "b": ((3,), "f4"), "n": ((), "i8")}
    with md.Arena(comm, spec, ranks_per_node=2) as arena:
        where = "in memory that 2 ranks of a node share" if comm.size > 1 else "of one rank"
        assert one_line(repr(arena)) == f"<Arena: 3 tensors of 63 float32, 1 int64, {where}>"
    assert one_line(repr(arena)) == f"<Arena: {arena.label}, closed>"

    def refused(*arguments):
        raise ConfigError("no memory shared:\nnone left " + 300 * "!")

    monkeypatch.setattr("mpidist.runtime.node_memory.arena.Segment", refused)
    with md.Arena(comm, {"w": ((20, 3), "f4")}) as arena:
        text = one_line(repr(arena))
        assert text.startswith("<Arena: 1 tensor of 60 float32, private: no memory shared: none")


@pytest.mark.ranks(1, 2)
def test_repr_of_stores(comm, folder):
    path, local = folder / "shared", folder / "node"
    options = "writers='all', direct=True, sha256=False, fresh=False"
    with md.CheckpointStore(comm, path, keep=5, keep_every=10) as store:
        said = f"<CheckpointStore {str(path)!r}: keep=5, keep_every=10, {options}"
        assert one_line(repr(store)) == f"{said}>"
        store.save_async(30, {"w": np.ones(3)})
        assert one_line(repr(store)) == f"{said}; saving step 30>"
        store.wait()
        assert repr(store) == f"{said}>"
    assert one_line(repr(store)) == f"{said}; closed>"
    options = f"keep=3, keep_every=None, {options}"
    with md.TieredStore(comm, folder / "other", local=local) as store:
        said = (
            f"<TieredStore {str(folder / 'other')!r}: local={str(local)!r}, local_keep=2, {options}"
        )
        assert one_line(repr(store)) == f"{said}>"
    assert one_line(repr(store)) == f"{said}; closed>"
