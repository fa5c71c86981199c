"""Models that come and go while others train (R72)."""

import gc
from pathlib import Path

import numpy as np
import pytest

import mpidist as md
from mpidist.errors import ClosedError, ConfigError, MismatchError, MpidistError, ProtocolError

SGD = md.optim.sgd(1.0)
ROLES = [
    {"servers": 1},
    {"servers": 2},
    {"servers": 3, "placement": "colocated"},
    {"servers": "auto", "placement": [2]},
]


def run(comm, roles, change, steps=3):
    """Train model "a"; `change(group)` is called on all ranks in a pause, then train it again."""
    with md.ServerGroup(comm, **roles) as group:
        client = group.add("a", {"w": np.zeros(50)}, optimizer=SGD)
        seen = []
        if client is None:
            group.serve(on_pause=lambda tag: seen.append(change(group)))
        else:
            for _ in range(steps):
                client.push_pull({"w": np.ones(50)})
            group.pause("change")
            seen.append(change(group))
            for _ in range(steps):
                out = client.push_pull({"w": np.ones(50)})
            assert out["w"].tolist() == [-2.0 * steps] * 50
            other = seen[0]
            if other is not None:
                for _ in range(steps):
                    out = other.push_pull({"v": np.ones((9, 3))})
                assert (out["v"] == 1 - steps).all()
                assert other.finished == steps
    return group


@pytest.mark.covering
@pytest.mark.ranks(3, 4)
@pytest.mark.parametrize("roles", ROLES, ids=str)
def test_a_model_is_added_while_another_trains(comm, roles):
    new = {"v": ((9, 3), "f4", 1.0)}
    group = run(comm, roles, lambda group: group.add("b", new, optimizer=md.optim.sgd(1.0)))
    assert set(group.report()["models"]) == {"a", "b"}


@pytest.mark.covering
@pytest.mark.ranks(3, 4)
@pytest.mark.parametrize("roles", ROLES, ids=str)
def test_a_model_is_removed_while_another_trains(comm, roles):
    """A call on it is refused on its worker; the name may be used again."""

    def change(group):
        first = group.add("b", {"v": np.zeros(7)}, optimizer=md.optim.adam(0.1))
        group.remove("b")
        if first is not None:
            for call in (first.pull, first.clock, lambda: first.push({"v": np.ones(7)})):
                with pytest.raises(ClosedError, match="'b': the model was removed from its group"):
                    call()
            first.close()
        if group.is_server:
            with pytest.raises(ConfigError, match="no model 'b' here"):
                group.shards("b")
        return group.add("b", {"v": ((9, 3), "f4", 1.0)}, optimizer=SGD)

    group = run(comm, roles, change)
    assert set(group.report()["models"]) == {"a", "b"}
    served = [rank["server"] for rank in group.report()["ranks"] if rank["server"]]
    assert all(set(one["models"]) == {"a", "b", "b (removed)"} for one in served)
    assert all(one["models"]["b"]["updates"] == 3 for one in served)


@pytest.mark.ranks(3)
@pytest.mark.parametrize(
    ("name", "kind", "text"),
    [
        ("c", ConfigError, "remove 'c': the group has no model of that name"),
        (3, ConfigError, "remove 3: the group has no model of that name"),
        ("a", MismatchError, "name differs"),
    ],
)
def test_one_rank_removes_another(comm, name, kind, text):
    """The same error on all ranks, and the group lives on."""

    def change(group):
        group.add("b", {"v": np.zeros(7)}, optimizer=SGD)
        with pytest.raises(kind, match=text) as caught:
            group.remove(name if comm.rank == 1 else "b")
        said = comm.allgather(str(caught.value).split(": ", 1)[1])
        assert said == [said[0]] * comm.size
        group.remove("b")

    run(comm, {"servers": 1}, change)


@pytest.mark.ranks(3)
def test_not_without_a_pause(comm):
    """Refused on the caller, before any message; the group lives on."""
    with md.ServerGroup(comm) as group:
        client = group.add("a", {"w": np.zeros(50)}, optimizer=SGD)
        if client is not None:
            for _ in range(2):
                client.push_pull({"w": np.ones(50)})
                with pytest.raises(ProtocolError, match="the workers have begun; call group"):
                    group.add("b", {"v": np.zeros(7)}, optimizer=SGD)
                with pytest.raises(ProtocolError, match="remove 'a': the workers have begun"):
                    group.remove("a")
            assert client.pull()["w"].tolist() == [-2.0] * 50


@pytest.mark.ranks(3)
@pytest.mark.parametrize("roles", [ROLES[0], ROLES[2]], ids=str)
@pytest.mark.parametrize("odd", ["nothing", "remove"])
def test_one_rank_does_something_else(comm, roles, odd):
    """Worker 0 trains on, or removes a model, while the others add one: an error, no hang."""
    own = comm.Dup()

    def change(group):
        if comm.rank:
            return group.add("b", {"v": np.zeros(7)}, optimizer=SGD)
        return group.remove("a") if odd == "remove" else None

    with pytest.raises(MpidistError):
        run(own, roles, change)
    md.free(own)
    own.Free()


def shared_bytes():
    """Bytes of the files without a name that this process has mapped: memory that ranks share."""
    gc.collect()
    found = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "/dev/shm/" in line and line.endswith("(deleted)"):
            start, stop = line.split()[0].split("-")
            found += int(stop, 16) - int(start, 16)
    return found


@pytest.mark.ranks(2, further=(3,))
def test_a_removed_model_frees_shared_memory(comm):
    """Also if the model is small, and its messages are in memory."""
    with md.ServerGroup(comm, servers=1) as group:
        first = group.add("first", {"w": np.zeros(10)}, optimizer=SGD)
        before = shared_bytes()

        def change(_):
            for size in (10_000, 1_000_000):
                sizes, client = [], group.add("other", {"v": np.zeros(size)}, optimizer=SGD)
                sizes.append(shared_bytes())
                group.remove("other")
                assert shared_bytes() == before
                assert sizes[0] >= before + 8 * size, group.transports
                assert client is None or client.removed

        if first is None:
            group.serve(on_pause=change)
        else:
            group.pause("change")
            change("change")
            out = first.push_pull({"w": np.ones(10)})
            assert (out["w"] == -1).all()
