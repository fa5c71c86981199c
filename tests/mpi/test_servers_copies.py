"""Each server keeps a copy of the shard of the server before it, equal to the last bit: R51."""

import time
from collections import deque
from types import SimpleNamespace

import numpy as np
import pytest

import mpidist as md
from mpidist.servers.consistency import Answer, Apply
from mpidist.servers.layout.placement import place_tensors
from mpidist.servers.protocol import (
    ACKNOWLEDGE,
    COPY,
    HEADER_BYTES,
    NO_MORE,
    PUSH,
    Header,
    MessagePool,
)
from mpidist.servers.replicas.elastic_servers import ElasticServerGroup
from mpidist.servers.replicas.shard_copies import ShardCopies
from mpidist.servers.replicas.shard_ranges import all_ranges, pack, range_bytes
from mpidist.servers.shards import ServerShard
from mpidist.servers.votes import Votes
from mpidist.training.strategies import from_settings

SHAPES = {"w": ((60, 7), "f4"), "b": ((7,), "f4"), "s": ((), "f8")}
MODES = {
    "bsp": md.BSP(), "ssp0": md.SSP(0), "ssp": md.SSP(2), "asp": md.ASP(), "dssp": md.DSSP(1, 3),
}  # fmt: skip
OPTIMIZERS = {
    "sgd": lambda: md.optim.sgd(0.1), "momentum": lambda: md.optim.momentum(0.1, 0.9),
    "adam": lambda: md.optim.adam(0.01, weight_decay=0.1),
}  # fmt: skip


#: Half precision is added in single precision; Adam refuses it with its usual epsilon.
HALF = {**SHAPES, "h": ((50,), "f2")}


def arrays(*seed, shapes=SHAPES):
    rng = np.random.default_rng(seed)
    return {n: np.asarray(rng.standard_normal(s), d) for n, (s, d) in shapes.items()}


def contents(shard):
    ranges = all_ranges(shard)
    buffer = np.zeros(range_bytes(ranges), np.uint8)
    pack(ranges, buffer)
    return shard.server, shard.version, buffer.tobytes()


def run(
    comm, servers, mode, optimizer, placement="dedicated", replicas=True, steps=6, stale=None,
    weights=None,
):  # fmt: skip
    """Train; return the parameters of rank 0, and of each server its shard and its copy.

    `weights` has the shares of the servers from some steps on.
    """
    shapes = SHAPES if optimizer == "adam" else HALF
    params, rng = arrays(1, shapes=shapes), np.random.default_rng(comm.rank)
    with ElasticServerGroup(comm, servers=servers, placement=placement) as group:
        group.vote(copies=replicas)
        client = group.add(
            "m", params, optimizer=OPTIMIZERS[optimizer](), consistency=MODES[mode],
            global_batch=24, stale=stale,
        )  # fmt: skip
        group.fill_copies("m")
        comm.Barrier()
        if client is not None:
            client.pull(out=params)
            for step in range(steps):
                time.sleep(rng.uniform(0, 0.002))
                if step in (weights or {}):
                    group.repartition(weights=weights[step])
                samples = 0 if step == 3 else 3 + comm.rank
                client.push_pull(
                    arrays(comm.rank, step, shapes=shapes), out=params, samples=samples
                )
            group.barrier()
            client.pull(out=params)
        if not group.is_worker:
            group.serve()
        held = group.hosted("m")
    server, hosted = held or (None, None)
    mine = None if held is None else (contents(hosted.shard), hosted.copied)
    if replicas and len(group.server_ranks) > 1 and held is not None:
        assert not server.copies.pending
        assert (server.copies.sent > 0) == (server.copies.received > 0) is True
        mine = (*mine, contents(hosted.copy))
    return {n: a.copy() for n, a in params.items()}, [s for s in comm.allgather(mine) if s]


@pytest.mark.covering
@pytest.mark.ranks(4, 5)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("mode", MODES)
def test_copies_have_the_bits_of_the_shards(comm, mode, optimizer):
    for servers in (2, 3):
        _, held = run(comm, servers, mode, optimizer)
        for k, (shard, _, _) in enumerate(held):
            assert held[(k + 1) % servers][2] == shard, (mode, optimizer, servers, k)
        if mode in ("asp", "ssp", "dssp"):  # the copies know whose pushes they have
            assert all(copied == [6] * (comm.size - servers) for _, copied, _ in held)


@pytest.mark.ranks(5)
@pytest.mark.parametrize(
    "stale", [md.DropStale(1), md.ScaleStale(2.0), md.DelayCompensated(0.5)], ids=repr
)
def test_copies_follow_what_is_done_with_old_gradients(comm, stale):
    _, held = run(comm, 2, "asp", "momentum", stale=stale)
    assert (held[1][2], held[0][2]) == (held[0][0], held[1][0])


@pytest.mark.ranks(4)
@pytest.mark.parametrize("mode", ["bsp", "ssp0"])
def test_copies_do_not_change_the_result(comm, mode):
    with_copies, held = run(comm, 2, mode, "momentum")
    without, held_without = run(comm, 2, mode, "momentum", replicas=False)
    assert [one[0] for one in held] == [one[0] for one in held_without]
    assert all((with_copies[n] == without[n]).all() for n in HALF)


@pytest.mark.covering
@pytest.mark.ranks(4, 5)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("placement", ["dedicated", "colocated"])
def test_copies_follow_other_shares(comm, mode, placement):
    """Each copy has the bits of its shard; under BSP, the parameters those of other shares."""
    weights = {1: [1, 3, 2], 2: [5, 1, 1], 3: [5, 1, 1], 5: [1e-9, 1, 2]}
    servers = 3 if placement == "colocated" or comm.size > 4 else 2
    weights = {step: each[:servers] for step, each in weights.items()}
    params, held = run(comm, servers, mode, "momentum", placement, weights=weights)
    for k, (shard, _, _) in enumerate(held):
        assert held[(k + 1) % servers][2] == shard, (mode, servers, k)
    if mode in ("bsp", "ssp0"):
        fixed, _ = run(comm, servers, mode, "momentum", placement)
        assert all((params[n] == fixed[n]).all() for n in HALF)
        without, _ = run(comm, servers, mode, "momentum", placement, False, weights=weights)
        assert all((without[n] == fixed[n]).all() for n in HALF)


@pytest.mark.ranks(4)
def test_wrong_shares_of_an_elastic_run(comm):
    with ElasticServerGroup(comm, servers=2) as group:
        group.vote(True, [0.25, 0.75])
        client = group.add("m", {"w": np.zeros(8)}, optimizer=md.optim.sgd(1.0))
        group.fill_copies("m")
        if client is not None:
            for wrong in ({"weights": [0, 1]}, {"servers": {0: 1, 3: 1}}, {"servers": 1}):
                with pytest.raises(md.ConfigError, match="in an elastic run the servers stay"):
                    group.repartition(**wrong)
            assert (client.push_pull({"w": np.ones(8)})["w"] == -1).all()
            group.repartition(servers={2: 3, 3: 1})
            assert (client.push_pull({"w": np.ones(8)})["w"] == -2).all()
            assert [one["share"] for one in group.load()] == [0.75, 0.25]
    if group.is_server:
        (part,) = group.hosted("m")[1].shard.parameters.values()
        assert part.size == (6 if comm.rank == 2 else 2)


@pytest.mark.covering
@pytest.mark.ranks(3, 4)
@pytest.mark.parametrize("mode", MODES)
def test_copies_of_servers_that_work_too(comm, mode):
    _, held = run(comm, comm.size, mode, "momentum", "colocated")
    for k, (shard, _, _) in enumerate(held):
        assert held[(k + 1) % comm.size][2] == shard, (mode, k)


@pytest.mark.covering
@pytest.mark.ranks(4, 5)
@pytest.mark.parametrize("mode", MODES)
def test_the_end_waits_for_the_last_updates(comm, mode):
    """Workers leave after a push without a pull; a long update is still on its way to the copy."""
    shapes = {"w": ((300_000 + 7,), "f4")}
    with ElasticServerGroup(comm, servers=2) as group:
        group.vote(copies=True)
        client = group.add(
            "m", shapes, optimizer=md.optim.momentum(0.1), consistency=MODES[mode], global_batch=8
        )
        group.fill_copies("m")
        if client is not None:
            client.push({"w": np.full(300_007, 1.0 + comm.rank)}, samples=2)
            client.clock()
        held = group.hosted("m")
    mine = held and (contents(held[1].shard), contents(held[1].copy))
    (one, other) = (each for each in comm.allgather(mine) if each)
    assert (one[1], other[1]) == (other[0], one[0])
    assert one[0][1] == (1 if mode == "bsp" else comm.size - 2)


@pytest.mark.ranks(3)
def test_one_server_has_no_copy(comm):
    _, held = run(comm, 1, "bsp", "sgd")
    assert len(held) == 1
    assert len(held[0]) == 2


@pytest.mark.ranks(3)
@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"servers": 2}, "replicas=1 needs elastic: otherwise the job ends when a server dies"),
        ({"servers": 1, "elastic": True}, "replicas=1 needs at least 2 servers, got servers=1"),
        ({"servers": [0], "elastic": True}, "replicas=1 needs at least 2 servers, got servers=1"),
    ],
)
def test_what_copies_need_is_said_on_all_ranks(comm, settings, words):
    model = md.models.mlp([4, 2])
    strategy = md.ParameterServer(settings["servers"], replicas=1)
    with pytest.raises(md.ConfigError, match=words):
        md.train(
            comm, model, (np.eye(4), np.zeros(4, "i8")), optimizer=md.optim.sgd(0.1), steps=1,
            global_batch=4, strategy=strategy, elastic=settings.get("elastic", False),
        )  # fmt: skip
    assert comm.allreduce(1) == comm.size


@pytest.mark.parametrize("replicas", [2, -1, 0.5, "one", None, True])
def test_how_many_copies(replicas):
    with pytest.raises(md.ConfigError, match=r"replicas=.*: expected 0 or 1: how many copies"):
        md.ParameterServer(3, replicas=replicas)


def test_the_key_of_a_job_file():
    given = from_settings("parameter_server", {"servers": 2, "replicas": 1})
    assert (given.servers, given.replicas) == (2, 1)
    for servers in (1, [4]):
        with pytest.raises(md.ConfigError, match="replicas=1 needs at least 2 servers"):
            from_settings("parameter_server", {"servers": servers, "replicas": 1})


class FakeLink:
    """A link that notes what is sent, and to which nothing comes."""

    def __init__(self):
        self.pool, self.sent, self.told, self.tag = MessagePool(4), [], [], 0
        self.comm = SimpleNamespace(Iprobe=lambda *_: False)

    def send(self, buffer, nbytes, rank, tag):
        self.sent.append((rank, tag, buffer[:nbytes].copy()))

    def tell(self, flags, rank, tag):
        self.told.append((flags, rank, tag))

    def received(self, nbytes):
        pass


def arrived(flags, **fields):
    header = Header(flags, **fields)
    return SimpleNamespace(header=header, buffer=np.zeros(256, np.uint8)[:HEADER_BYTES], source=1)


def test_a_vote_waits_for_the_copy():
    """Else a server that dies after its vote could take gradients away that others apply."""
    link, here = FakeLink(), set()
    votes = Votes(link, [1, 2], SimpleNamespace(has=lambda *one: one in here))
    answer = Answer(0, 0, None)
    assert votes.released(0, [Apply(7, ()), answer]) == []
    votes._heard[0, 7] = 2  # all others have voted
    assert (votes.listen(), link.sent) == ([], [])
    here.add((0, 7))
    assert votes.listen() == [(0, [Apply(7, ()), answer])]
    assert [(rank, vote.view(np.int64).tolist()) for rank, _, vote in link.sent] == [
        (1, [0, 7]), (2, [0, 7]),
    ]  # fmt: skip
    assert not votes.pending


@pytest.mark.parametrize("mode", ["asp", "bsp"])
def test_an_answer_waits_for_the_copy(mode):
    """Under ASP the next server must have the updates first; under BSP it has voted for them."""
    link, merged = FakeLink(), deque()
    layout = place_tensors({"w": ((4,), "f8")}, 1)
    shard = ServerShard(layout, 0, md.optim.sgd(0.1), {}, 0)
    model = SimpleNamespace(
        shard=shard, copy=shard, merged=merged, copied=[0],
        gate=SimpleNamespace(consistency=MODES[mode]), merge=lambda action: None,
    )  # fmt: skip
    copies = ShardCopies(link, 1, 1, [model])
    assert not copies.answered_later(model, "first")
    push = Apply(0, ((0, None),))
    copies.forward(0, [push])
    assert (len(link.sent), merged.pop()) == (1, None)
    assert copies.answered_later(model, "second") == (mode == "asp")
    assert copies.listen() == []
    if mode == "asp":
        copies._arriving[1] = SimpleNamespace(test=lambda: True, **vars(arrived(ACKNOWLEDGE)))
        assert copies.listen() == ["second"]
    assert copies.pending  # the server before may send more
    copies._take(arrived(PUSH, clock=3, samples=0))
    told = [(ACKNOWLEDGE, 1, COPY)] if mode == "asp" else []
    assert (link.told, copies.has(0, 3)) == (told, mode == "bsp")
    assert model.copied == [4 if mode == "asp" else 0]
    copies._take(arrived(NO_MORE))
    assert not copies.pending
    copies.end()
    copies.end()
    assert link.told == [*told, (NO_MORE, 1, COPY)]
