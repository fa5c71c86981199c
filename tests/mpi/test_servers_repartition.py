"""Other servers and shares while a group trains (issue 13, R16, R22)."""

import numpy as np
import pytest

import mpidist as md
from mpidist.errors import ClosedError, ConfigError, MismatchError, MpidistError, ProtocolError

SGD = md.optim.sgd(1.0)
SHAPES = {"a": (300, 7), "b": (40,), "c": (3, 900), "empty": (0, 4), "scalar": ()}
TABLE = {"t": ((101, 3), "f4", "normal"), "u": ((64, 5), "f4", "normal")}


def gradients(rank, step):
    rng = np.random.default_rng((rank, step))
    return {n: np.asarray(rng.standard_normal(s), "f4") for n, s in SHAPES.items()}


def whole_state(comm, group, name):
    """The parameters and the optimizer's state, as {slot: {tensor: array}}, on all ranks."""
    held = group.shards(name) if group.is_server else {"parameters": [], "optimizer": {}}
    found = {}
    for served in comm.allgather({"parameters": held["parameters"], **held["optimizer"]}):
        for slot, pieces in served.items():
            for tensor, where, array in pieces:
                parts = [(where, array)] if np.ndim(where) == 0 else zip(where, array, strict=True)
                for start, part in parts:
                    found.setdefault((slot, tensor), []).append((start, part.tobytes()))
    return {key: b"".join(part for _, part in sorted(parts)) for key, parts in found.items()}


def run(comm, roles, changes, mode=None, optimizer=None, **more):
    """Train two models, with changes between; return all that was pulled, and the group."""
    seen, states = [], []
    model = {n: (s, "f4", "normal") for n, s in SHAPES.items()}
    optimizer = md.optim.adam(0.1) if optimizer is None else optimizer
    with md.ServerGroup(comm, **roles) as group:

        def look(tag):
            states.append([whole_state(comm, group, name) for name in ("m", "t")])

        client = group.add("m", model, optimizer=optimizer, consistency=mode, **more)
        other = group.add("t", TABLE, optimizer=SGD, rows="lazy", spread={"t": "rows"})
        if client is None:
            group.serve(look)
            return seen, group
        for part, change in enumerate([None, *changes]):
            if change:
                group.pause("look")
                look("look")
                group.repartition(**change)
                group.pause("look")
                look("look")
            for step in range(3):
                got = client.push_pull(gradients(comm.rank, (part, step)), samples=4)
                rows = np.arange(part, 101, 3)
                push = {"t": (rows, np.ones((rows.size, 3))), "u": (rows[:9], np.ones((9, 5)))}
                table = other.push_pull(push, what={"t": rows})
                seen += [*got.values(), *table.values()]
            seen += other.pull().values()
            group.barrier()
    assert all(before == after for before, after in zip(states[::2], states[1::2], strict=True))
    assert len(states) == 2 * sum(map(bool, changes))
    return seen, group


CASES = {
    "two": ({"servers": {2: 2, 3: 1}}, [{"weights": [1, 1]}, {"weights": [1, 5]}]),
    "none left": ({"servers": 2}, [{"weights": [0, 1]}, {"weights": [1, 0]}, {"servers": 2}]),
    "more": ({"servers": [3]}, [{"servers": {3: 1, 0: 2}}, {"servers": [1, 3]}]),
    "colocated": (
        {"servers": {0: 1, 1: 1}, "placement": "colocated"},
        [{"servers": "auto"}, {"servers": 1}, {"servers": [2, 0], "weights": [1, 3]}],
    ),
    "mixed": ({"servers": {0: 1, 3: 6}, "placement": [3]}, [{"servers": {0: 1, 1: 1, 2: 1}}]),
}


@pytest.mark.ranks(4)
@pytest.mark.parametrize("case", CASES)
def test_the_bits_of_a_run_without_changes(comm, case):
    """All state right after a change, and all that is pulled later; then the shares."""
    roles, changes = CASES[case]
    seen, group = run(comm, roles, changes)
    expected, _ = run(comm, roles, [None] * len(changes))
    assert len(seen) == len(expected)
    for mine, others in zip(seen, expected, strict=True):
        assert mine.tobytes() == others.tobytes()
    report = group.report()
    for served in (rank["server"] for rank in report["ranks"] if rank["server"]):
        assert {model["updates"] for model in served["models"].values()} == {3 * len(changes) + 3}
    for name in ("m", "t"):
        held = report["models"][name]["bytes"]
        for share, nbytes in zip(report["shares"], held, strict=True):
            assert nbytes == pytest.approx(share * sum(held), rel=0.15)


MODES = [md.BSP(), md.SSP(0), md.SSP(2), md.DSSP(1, 3), md.ASP(), md.BackupWorkers(1)]


@pytest.mark.ranks(4)
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_every_mode_goes_on(comm, mode, monkeypatch):
    """Exact sums of pushes, before the first server has nothing, without it, and with it again."""
    monkeypatch.setattr("mpidist.servers.wire.wire_pieces.PIECE_BYTES", 256)
    monkeypatch.setattr("mpidist.servers.wire.wire_pieces.NODE_PIECE_BYTES", 512)
    changes = [{"weights": [1, 3]}, {"weights": [0, 1]}, {"servers": {2: 1, 3: 1, 0: 2}}]
    with md.ServerGroup(comm, servers=2) as group:
        client = group.add("m", {"w": np.zeros(999)}, optimizer=SGD, consistency=mode)
        if client is not None:
            out, push = {"w": np.empty(999)}, {"w": np.ones(999)}
            for change in [*changes, None]:
                for step in range(4):
                    if step == 2:  # in three calls
                        client.push(push)
                        client.clock()
                        client.pull(out=out)
                    else:
                        client.push_pull(push, out=out)
                clocks = group.workers.allgather(client.finished) if change == changes[0] else []
                while len(clocks) and client.finished < max(clocks):
                    client.push_pull(push, out=out)
                assert (out["w"] == out["w"][0]).all() or mode.bound != 0
                if change is not None:
                    group.repartition(**change)
            group.barrier()
            client.pull(out=out)
            assert len(client.versions) == 3
            if not isinstance(mode, md.BackupWorkers):
                assert out["w"].tolist() == [-16.0] * 999
    served = [rank["server"]["models"]["m"] for rank in group.report()["ranks"] if rank["server"]]
    assert len(served) == 3
    for one in served:
        assert max(one["gaps"]) <= (mode.bound or 16) or mode.bound is None
        if isinstance(mode, md.BackupWorkers):
            assert one["updates"] == max(one["clocks"]) >= 16
        else:
            assert one["updates"] == 16 * (1 if mode.merges else 2)
            assert one["clocks"] == [16, 16]


@pytest.mark.ranks(3)
@pytest.mark.parametrize(
    "more",
    [
        {"stale": md.DelayCompensated(0.5)},
        {"optimizer": md.optim.ftrl(0.1)},
        {"optimizer": md.optim.momentum(0.1), "stale": md.ScaleStale(2)},
    ],
    ids=str,
)
def test_what_servers_keep_for_asynchronous_workers_moves(comm, more):
    """One worker, so that its updates are repeatable; ages and pulled parameters go on."""
    roles, changes = {"servers": 2}, [{"weights": [3, 1]}, {"servers": {0: 3, 1: 1, 2: 0}}]
    seen, _ = run(comm, roles, changes, md.ASP(), global_batch=8, **more)
    expected, _ = run(comm, roles, [None, None], md.ASP(), global_batch=8, **more)
    assert [a.tobytes() for a in seen] == [a.tobytes() for a in expected]


@pytest.mark.ranks(3)
def test_parameters_that_a_worker_has_not_pulled(comm):
    """What it has pulled moves; the rest counts as pulled at the change, so it is not corrected."""
    model = {"a": ((100,), "f8", 1.0), "b": ((100,), "f8", 1.0)}
    with md.ServerGroup(comm, servers=2) as group:
        client = group.add(
            "m", model, optimizer=SGD, consistency=md.ASP(), stale=md.DelayCompensated(1.0)
        )
        if client is not None:
            client.pull("a")
            ones = {name: np.ones(100) for name in model}
            client.push(ones)
            client.clock()
            group.repartition(weights=[3, 1])
            out = client.push_pull(ones)
            # Gradient 1 - 1 * 1 * 1 where the parameter has moved by -1 since the pull, else 1.
            assert out["a"].tolist() == [0.0] * 100
            assert out["b"].tolist() == [-1.0] * 100


WRONG = [
    ({"weights": [1, 2]}, MismatchError, "weights differs"),
    ({"weights": [1, -1]}, ConfigError, "weights=.*expected finite numbers"),
    ({"weights": [0, 0]}, ConfigError, "with a sum above 0"),
    ({"weights": "12"}, ConfigError, "expected one number for each server"),
    ({"weights": [1]}, MismatchError, "weights differs"),
    ({"servers": {9: 1}}, MismatchError, "servers differs"),
    ({"servers": "all"}, ConfigError, "servers='all'"),
    ({}, ConfigError, "give servers=, or weights="),
]
ALL_WRONG = [
    ({"weights": [1]}, ConfigError, "1 weights for 2 servers"),
    ({"servers": {9: 1}}, ConfigError, "expected distinct ranks in 0..3"),
    ({"servers": {1: 1}, "weights": [1]}, ConfigError, "servers has shares already"),
    ({"servers": 5}, ConfigError, "5 servers do not fit 4 ranks"),
]


@pytest.mark.ranks(4)
def test_wrong_calls(comm):
    """The same error on all workers, of one wrong rank or all; then the group does as before."""
    cases = [(case, {1}) for case in WRONG] + [(case, {0, 1}) for case in ALL_WRONG]
    with md.ServerGroup(comm, servers=2) as group:
        client = group.add("m", {"w": np.zeros(99)}, optimizer=SGD)
        if client is None:
            with pytest.raises(ProtocolError, match="is no worker; the workers call it"):
                group.repartition(weights=[1, 1])
        else:
            for step, ((wrong, kind, text), where) in enumerate(cases):
                with pytest.raises(kind, match=text) as caught:
                    group.repartition(**(wrong if comm.rank in where else {"weights": [2, 1]}))
                said = group.workers.allgather(str(caught.value).split(": ", 2)[-1])
                assert said[0] == said[1]
                out = client.push_pull({"w": np.ones(99)})
                assert out["w"].tolist() == [-1.0 - step] * 99
            with pytest.raises(ProtocolError, match="add 'n': the workers have begun"):
                group.add("n", {"v": np.zeros(7)}, optimizer=SGD)
    assert group.shares == [0.5, 0.5]
    with pytest.raises(ClosedError, match="closed"):
        group.repartition(weights=[1, 1])


@pytest.mark.ranks(3)
@pytest.mark.parametrize("other", ["pause", "train", "leave"])
def test_a_worker_that_has_not_come(comm, other):
    """An error on all ranks that says who waits for whom."""
    own = comm.Dup()

    def work():
        with md.ServerGroup(own) as group:
            client = group.add("m", {"w": np.zeros(99)}, optimizer=SGD)
            if client is None:
                group.serve(lambda tag: None)
            elif comm.rank == 0:
                group.repartition(servers=[0])
            elif other == "pause":
                group.pause("x")
            elif other == "train":
                client.push_pull({"w": np.ones(99)})

    with pytest.raises(MpidistError) as caught:
        work()
    text = {"pause": "different", "train": "wait for each other", "leave": "left the group"}[other]
    assert text in str(caught.value)
    md.free(own)
    own.Free()


@pytest.mark.ranks(2)
def test_state_that_cannot_be_divided(comm):
    """Refused on all ranks before anything moves."""

    class Norms:
        elementwise = True

        def init(self, parameters):
            return {"norms": {"all": np.zeros(3)}}

        def update(self, gradients, state, parameters):
            for name, gradient in gradients.items():
                parameters[name] -= gradient

    with md.ServerGroup(comm, servers=1, placement="colocated") as group:
        client = group.add("m", {"w": np.zeros(99)}, optimizer=Norms())
        client.push_pull({"w": np.ones(99)})
        with pytest.raises(ConfigError, match=r"'norms/all' has shape \(3,\), and not one"):
            group.repartition(servers=2)
        assert client.push_pull({"w": np.ones(99)})["w"].tolist() == [-2.0] * 99
