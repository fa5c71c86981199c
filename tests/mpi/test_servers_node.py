"""Workers and servers of one host share memory: the same values, and no message with data."""

import os
import time
from pathlib import Path

import numpy as np
import pytest

import mpidist as md
from mpidist.errors import ConfigError
from mpidist.servers.consistency import Apply
from mpidist.servers.layout.placement import place_tensors
from mpidist.servers.modes.hosted_model import Push
from mpidist.servers.shards import ServerShard
from mpidist.servers.wire import node_share
from mpidist.servers.wire.due_actions import DueActions
from mpidist.servers.wire.node_share import NodePair
from mpidist.servers.wire.node_stream import COPIED, NodeClientStream


@pytest.fixture
def fails(monkeypatch):
    """Shared memory that no rank can get."""

    def no_memory(*_args):
        raise ConfigError("no memory shared by the ranks of a node: full")

    monkeypatch.setattr(node_share, "Segment", no_memory)


def steps(comm, size, *, servers=1, mode=None, placement="dedicated", count=4):
    """The parameters after some steps, the bytes in messages and in memory, and the transport."""
    optimizer = md.optim.momentum(0.1)
    with md.ServerGroup(comm, servers=servers, placement=placement) as group:
        client = group.add("m", {"x": np.zeros(size)}, optimizer=optimizer, consistency=mode)
        out, stats = {"x": np.zeros(size)}, None
        if client is not None:
            gradients = {"x": np.arange(size, dtype=float)}
            for _ in range(count):
                client.push_pull(gradients, out=out)
            group.barrier()
            client.pull(out=out)
            stats = client.stats
            assert (gradients["x"] == np.arange(size)).all()
    transports = {rank["transport"]["m"] for rank in group.report()["ranks"]}
    return out["x"].tobytes(), stats, transports


@pytest.mark.ranks(2, 3, 5)
@pytest.mark.parametrize("size", [7, 100_000])
@pytest.mark.parametrize("placement", ["dedicated", "colocated"])
def test_all_data_go_through_memory(comm, size, placement):
    """Small and large models: the same values, and gradients are in no message."""
    servers = max(1, comm.size // 2)
    found, stats, transports = steps(comm, size, servers=servers, placement=placement)
    node_share.enabled = False
    try:
        expected, plain, why = steps(comm, size, servers=servers, placement=placement)
    finally:
        node_share.enabled = True
    assert found == expected
    assert transports == {"shared memory"}
    assert why == {"messages: switched off"}
    if stats is not None:
        assert plain["shared_bytes"] == 0
        large = size > 1000
        # The first push_pull of a small model is in messages, and so is its pull.
        assert stats["shared_bytes"] >= (4 if large else 3) * 8 * size
        if large:
            assert stats["bytes_sent"] < 1.1 * 8 * size  # the initial values
            assert plain["bytes_sent"] > 4 * 8 * size


@pytest.mark.ranks(3)
@pytest.mark.parametrize("mode", [md.ASP(), md.SSP(1), md.BackupWorkers(1)], ids=str)
def test_modes(comm, mode):
    """Small models of any mode are pushed through memory; sums of whole numbers are exact."""
    with md.ServerGroup(comm, servers=1) as group:
        client = group.add("m", {"x": np.zeros(5)}, optimizer=md.optim.sgd(1.0), consistency=mode)
        if client is not None:
            gradients, out = {"x": np.ones(5)}, {"x": np.zeros(5)}
            for _ in range(30):
                client.push_pull(gradients, out=out)
            group.barrier()
            client.pull(out=out)
            stats = client.stats
            assert stats["shared_bytes"] > 25 * 40
            if not isinstance(mode, md.BackupWorkers):
                assert (out["x"] == -30).all()


@pytest.mark.ranks(2)
def test_messages_are_not_overtaken(comm):
    """A push by a message, of which no answer comes, is handled before one in memory."""
    with md.ServerGroup(comm, servers=1) as group:
        one, two = (
            group.add(name, {"x": np.zeros(4)}, optimizer=md.optim.sgd(1.0), consistency=md.ASP())
            for name in ("one", "two")
        )
        if one is None:
            return
        gradients, out = {"x": np.ones(4)}, {"x": np.zeros(4)}
        for _ in range(2):
            one.push_pull(gradients, out=out)
        for step in range(3, 60):
            two.push({"x": np.full(4, 2.0)})
            two.clock()
            one.push_pull(gradients, out=out)
            assert (out["x"] == -step).all()
            if step % 5 == 0:
                assert (two.pull()["x"] == -2 * (step - 2)).all()


@pytest.mark.ranks(3)
@pytest.mark.parametrize("size", [5, 100_000])
def test_no_memory(comm, fails, size):
    """Without memory, messages are sent, and the report says why."""
    found, stats, transports = steps(comm, size)
    assert transports == {"messages: no memory shared by the ranks of a node: full"}
    if stats is not None:
        assert np.frombuffer(found)[1] < 0
        assert stats["shared_bytes"] == 0


@pytest.mark.ranks(2)
def test_no_file_and_models_that_come_and_go(comm):
    """Nothing has a name in /dev/shm; memory of a removed model is not used for another one."""

    def again(_tag=None):
        group.remove("a")
        return group.add("a", {"x": np.zeros(4)}, optimizer=md.optim.sgd(1.0))

    with md.ServerGroup(comm, servers=1) as group:
        client = group.add("a", {"x": np.zeros(3)}, optimizer=md.optim.sgd(1.0))
        if client is None:
            group.serve(on_pause=again)
            return
        for size in (3, 4):
            out, gradients = {"x": np.zeros(size)}, {"x": np.ones(size)}
            for _ in range(3):
                client.push_pull(gradients, out=out)
            assert (out["x"] == -3).all()
            if size == 3:
                group.pause("next")
                client = again()
        assert not list(Path("/dev/shm").glob(f"mpidist-{os.getpid()}-*"))


@pytest.mark.ranks(4)
@pytest.mark.parametrize("size", [5, 200_000])
def test_after_other_shares(comm, size):
    """Then messages are sent; a model that comes later is shared again."""

    def another(_tag=None):
        return group.add("b", {"x": np.zeros(4)}, optimizer=md.optim.sgd(1.0))

    with md.ServerGroup(comm, servers=2) as group:
        client = group.add("a", {"x": np.zeros(size)}, optimizer=md.optim.sgd(1.0))
        if client is None:
            group.serve(on_pause=another)
        else:
            out, gradients = {"x": np.zeros(size)}, {"x": np.ones(size)}
            for weights in (None, [1, 3]):
                if weights:
                    group.repartition(weights=weights)
                for _ in range(3):
                    client.push_pull(gradients, out=out)
            assert (out["x"] == -6).all()
            before = client.stats["shared_bytes"]
            client.push_pull(gradients, out=out)
            assert client.stats["shared_bytes"] == before > 0
            group.pause("add")
            client = another()
            out, gradients = {"x": np.zeros(4)}, {"x": np.ones(4)}
            for _ in range(3):
                client.push_pull(gradients, out=out)
            assert (out["x"] == -3).all()
            assert client.stats["shared_bytes"] > before
    for rank in group.report()["ranks"]:
        why = "messages: the servers have changed"
        assert rank["transport"] == {"a": why, "b": "shared memory"}


@pytest.mark.ranks(3)
def test_a_slow_reader_sees_one_version(comm, monkeypatch):
    """When BSP ends, another worker's update waits until the slow one has copied its answer."""
    size, take = 200_000, NodeClientStream._take

    def slowly(self, number):
        time.sleep(0.03)
        take(self, number)

    with md.ServerGroup(comm, servers=1) as group:
        client = group.add("m", {"x": np.zeros(size)}, optimizer=md.optim.sgd(1.0))
        if client is None:
            return
        if comm.rank == 0:
            monkeypatch.setattr(NodeClientStream, "_take", slowly)
        for step in range(6):
            if step == 2:
                client.consistency = md.ASP()
            seen = client.push_pull({"x": np.full(size, -1.0)})["x"]
            assert seen.min() == seen.max()
            if step < 2:
                seen = client.pull()["x"]
                assert seen.min() == seen.max() == step + 1
        group.barrier()
        assert (client.pull()["x"] == 6).all()


@pytest.mark.ranks(1)
def test_an_update_waits_for_readers(comm):
    """It is due only when each worker has copied all pieces that it may copy."""
    shard = ServerShard(place_tensors({"x": ((4,), "f8")}, 1), 0, md.optim.sgd(1.0), {}, 0)
    lines = [memoryview(np.zeros(64, np.uint8)).cast("q") for _ in range(2)]
    due = DueActions(shard, 8)
    due._readers.add(0, NodePair(lines[0], lines[1], None, None, [], {}), 3)
    push = Apply(0, ((0, Push(None, [], 1, 0)),))
    for copied in range(3):
        lines[0][COPIED] = copied
        assert list(due.ready([push] if not copied else [], lambda _: [])) == []
    lines[0][COPIED] = 3
    assert list(due.ready([], lambda _: [])) == [push]
