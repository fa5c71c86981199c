"""Parts of a server group without MPI: roles, initial values, memory, selections of rows."""

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpidist import optim
from mpidist.errors import ConfigError, ProtocolError
from mpidist.launch.free_memory import available_memory
from mpidist.servers.balance.change_shares import Members, plan_shares
from mpidist.servers.balance.moved_arrays import PARAMETERS
from mpidist.servers.consistency import ASP, BSP
from mpidist.servers.layout.capacity import bytes_text, check_capacity, needed
from mpidist.servers.layout.placement import place_tensors
from mpidist.servers.layout.roles import choose_ranks
from mpidist.servers.layout.routing import data_bytes, decode_parts, encode_parts, route, views
from mpidist.servers.model_facts import Request, check_server_optimizer, parse_model
from mpidist.servers.protocol import MessagePool
from mpidist.servers.shards import ServerShard, initial, state_copies


def test_roles():
    """R17, R122, R151: any servers among any workers."""
    assert choose_ranks(4, 1, "dedicated") == ([3], [0, 1, 2])
    assert choose_ranks(4, 3, "dedicated") == ([1, 2, 3], [0])
    assert choose_ranks(4, [2, 0], "dedicated") == ([2, 0], [1, 3])
    assert choose_ranks(4, 2, "colocated") == ([2, 3], [0, 1, 2, 3])
    assert choose_ranks(1, 1, "colocated") == ([0], [0])


@pytest.mark.parametrize(
    ("size", "servers", "text"),
    [
        (4, 4, "4 servers leave 0 workers; use at most 3"),
        (4, 9, "9 servers leave 0 workers; use at most 3"),
        (1, 1, "1 server leaves 0 workers; start at least 2 ranks"),
        (4, -1, "servers=-1; expected at least 1"),
        (4, [], "expected distinct ranks in 0..3"),
        (4, [4], "expected distinct ranks in 0..3"),
    ],
)
def test_bad_roles(size, servers, text):
    with pytest.raises(ConfigError) as error:
        choose_ranks(size, servers, "dedicated")
    assert text in str(error.value)
    assert "\n" not in str(error.value)


def test_both_forms_of_a_model_agree():
    arrays = {"b": np.zeros(3), "a": np.zeros((2, 2), "f4")}
    spec = {"a": ((2, 2), "f4", ("normal", 2)), "b": ((3,), float, 1)}
    facts, inits = parse_model(Request("m", arrays, None, BSP()))
    assert inits is None
    also, inits = parse_model(Request("m", spec, None, BSP()))
    assert inits == {"a": ("normal", 2.0), "b": ("constant", 1.0)}
    assert facts == also


@pytest.mark.parametrize(
    "model", [[1], {1: np.zeros(2)}, {"x": ((2,),)}, {"x": ("ab", "f4")}, {"x": ((2,), "blue")}]
)
def test_bad_models(model):
    with pytest.raises(ConfigError):
        parse_model(Request("m", model, None, BSP()))


def test_optimizers_that_do_not_fit():
    with pytest.raises(ConfigError, match="has no init and update"):
        check_server_optimizer("m", None)
    whole = type("Lamb", (), {"init": dict, "update": dict, "elementwise": False})()
    with pytest.raises(ConfigError, match="Lamb needs whole tensors"):
        check_server_optimizer("m", whole)
    for make in optim.OPTIMIZERS.values():
        check_server_optimizer("m", make(0.1))


@given(st.integers(0, 200_000), st.integers(0, 3000), st.sampled_from(["normal", "uniform"]))
def test_initial_values_follow_from_position(start, count, kind):
    whole = np.empty(140_000)
    initial(whole, "w", 0, (kind, 2.0), 1)
    start = min(start, whole.size)
    count = min(count, whole.size - start)
    part = np.empty(count)
    initial(part, "w", start, (kind, 2.0), 1)
    assert (part == whole[start : start + count]).all()
    other = np.empty(100)
    for name, seed in (("v", 1), ("w", 2)):
        initial(other, name, 0, (kind, 2.0), seed)
        assert (other != whole[:100]).any()


def test_memory_of_a_container(tmp_path):
    """R12: the smallest of node, control group and its parents counts."""
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemTotal: 9000 kB\nMemAvailable:    8000 kB\n")
    assert available_memory(tmp_path) == 8000 * 1024
    (tmp_path / "proc/self/cgroup").write_text("4:memory:/job/step\n0::/job/step\n")
    v1 = tmp_path / "sys/fs/cgroup/memory/job/step"
    v1.mkdir(parents=True)
    (v1 / "memory.limit_in_bytes").write_text("900000\n")
    (v1 / "memory.usage_in_bytes").write_text("100000\n")
    assert available_memory(tmp_path) == 800_000
    v2 = tmp_path / "sys/fs/cgroup/job"
    (v2 / "step").mkdir(parents=True)
    (v2 / "step/memory.max").write_text("max\n")
    (v2 / "step/memory.current").write_text("5\n")
    (v2 / "memory.max").write_text("700000\n")
    (v2 / "memory.current").write_text("200000\n")
    assert available_memory(tmp_path) == 500_000
    # Cached files are not counted as used.
    (v2 / "memory.max").write_text("300000\n")
    (v2 / "memory.stat").write_text("anon 7\nactive_file 1000\ninactive_file 50000\n")
    assert available_memory(tmp_path) == 151_000
    (v1 / "memory.limit_in_bytes").write_text("110000\n")
    (v1 / "memory.stat").write_text("active_file 7\ntotal_active_file 20\n")
    assert available_memory(tmp_path) == 10_020
    assert available_memory(tmp_path / "nowhere") is None
    assert available_memory() > 0


def test_capacity_counts_servers_of_a_node_together():
    """R12: two servers of 60 on a node with 100 do not fit, on two nodes they do."""
    check_capacity(["m"], [(1, "a", 60, 100), (2, "b", 60, 100), (3, "c", 10**9, None)])
    with pytest.raises(ConfigError, match=r"server ranks 1, 2 on a need 120 B .* 100 B are avail"):
        check_capacity(["m"], [(1, "a", 60, 100), (2, "a", 60, 110)])
    assert bytes_text(3 * 2**40) == "3 TiB"
    assert [state_copies(make(0.1)) for make in optim.OPTIMIZERS.values()] == [0, 1, 2, 1, 2]


def test_held_pushes_are_counted():
    layout = place_tensors({"x": ((1 << 26,), "f4")}, 1)
    shard = 1 << 28
    held = needed(layout.bytes_of(0), 2, 8, BSP())
    free = needed(layout.bytes_of(0), 2, 8, ASP())
    assert held == shard * (1 + 2 + 1 + 8 + 1)
    streamed = needed(shard, 2, 8, BSP(), ahead=1 << 20)  # 1 MiB of each push, and of each answer
    assert streamed == shard * (1 + 2) + 8 * (2 << 20)
    assert needed(1 << 20, 2, 8, BSP(), ahead=1 << 20) == (1 << 20) * (2 + 2 + 8 + 8)
    assert free == shard * (1 + 2 + 1 + 1 + 1)


MODEL = {"e": ((30, 4), "f4"), "b": ((5,), "f8"), "s": ((), "f4")}


@given(st.integers(1, 4), st.lists(st.integers(0, 29), max_size=9), st.sets(st.sampled_from("bs")))
def test_selections_survive_the_wire(servers, rows, names):
    """R6: what is wanted is cut among the servers, each part once, in order."""
    layout = place_tensors(MODEL, servers)
    index = {t.name: i for i, t in enumerate(layout.tensors)}
    rows = np.array(rows, np.int64)
    wanted = {index["e"]: rows, **{index[name]: None for name in names}}
    found = []
    for server in range(servers):
        parts = route(layout, server, wanted)
        again = decode_parts(encode_parts(parts), layout, server)
        assert [(p.piece, None if p.rows is None else p.rows.tolist()) for p in parts] == [
            (p.piece, None if p.rows is None else p.rows.tolist()) for p in again
        ]
        buffer = np.zeros(data_bytes(layout, parts), np.uint8)
        for part, view in views(layout, parts, buffer, 0):
            assert view.size == part.elements(layout)
            assert view.ctypes.data % view.itemsize == 0
            if part.rows is not None:
                found += part.rows.tolist()
    assert sorted(found) == sorted(rows.tolist())


@pytest.mark.parametrize("words", [[7, -1], [0], [0, 3, 1], [0, -2], [0, 1, 99], [1, -1]])
def test_selections_of_something_else_are_refused(words):
    layout = place_tensors({"a": ((6,), "f4"), "b": ((6,), "f4")}, 2)
    with pytest.raises(ProtocolError, match="parameter server 0: selection"):
        decode_parts(np.array(words, np.int64), layout, 0)


def test_a_shard_of_every_cut_moves_alike():
    """Optimizers on pieces give the bits of the whole, and shards move between cuts."""
    specs = {"w": ((50, 3), "f4"), "b": ((7,), "f8")}
    inits = {"w": ("normal", 1.0), "b": ("constant", 1.0)}
    optimizer = optim.adam(0.1)
    rng = np.random.default_rng(0)
    grads = {
        name: rng.standard_normal(shape).astype(d).ravel() for name, (shape, d) in specs.items()
    }

    def shards(servers):
        layout = place_tensors(specs, servers)
        return [ServerShard(layout, s, optimizer, inits, 0) for s in range(servers)]

    def step(every):
        for shard in every:
            layout = shard.layout
            parts = route(layout, shard.server, dict.fromkeys(range(len(layout.tensors))))
            data = [
                (p, grads[layout.tensors[p.piece.tensor].name][p.piece.start : p.piece.stop].copy())
                for p in parts
            ]
            assert shard.apply([(1.0, data)])

    def gathered(every):
        whole = {name: np.empty(int(np.prod(shape)), d) for name, (shape, d) in specs.items()}
        for shard in every:
            for name, start, array in shard.export()["parameters"]:
                whole[name][start : start + array.size] = array
        return {name: value.tobytes() for name, value in whole.items()}

    one, three = shards(1), shards(3)
    for every in (one, three):
        step(every)
        step(every)
    assert gathered(one) == gathered(three)
    two = shards(2)
    saved = [shard.export() for shard in three]
    merged = {**saved[0], "parameters": [], "optimizer": {"mean": [], "square": []}}
    for shard in saved:
        merged["parameters"] += shard["parameters"]
        for slot in merged["optimizer"]:
            merged["optimizer"][slot] += shard["optimizer"].get(slot, [])
    for shard in two:
        shard.load(merged)
    step(one)
    step(two)
    assert gathered(one) == gathered(two)
    assert two[0].version == 3
    assert not two[0].apply([(0.0, [])])
    assert not two[0].apply([(1.0, [])], 0.0)


def test_messages_share_buffers():
    """A shorter message takes a longer one's buffer, and no more than `keep` stay."""
    pool = MessagePool(keep=2)
    long, short = pool.take(100_000), pool.take(10)
    assert (long.size, short.size) == (100_000, 10)
    owner = long.base
    pool.give(long)
    assert pool.take(60_000).base is owner
    pool.give(owner[:1])
    for size in (5000, 9000, 20_000):
        pool.give(pool.take(size))
    taken = [pool.take(1) for _ in range(3)]
    for buffer in taken:
        pool.give(buffer)
    assert len(pool._idle) == 2
    assert sum(buffer.size for buffer in pool._idle) < 100_000 + 3 * 4096


@pytest.mark.parametrize("elastic", [False, True])
def test_other_shares_count_all_models_together(elastic):
    """Each of them would fit: 3 models of 80 bytes, of which the second server gets 40 more."""
    models = ("a", "b", "c")
    layouts = {name: place_tensors({"w": ((10,), "f8")}, [1.0, 0.0]) for name in models}
    facts = {"version": 0, "ages": [0], "gate": {}, "changes": {}, "scalars": []}
    held = [{name: {**facts, "slots": slots} for name in models}
            for slots in ({0: {PARAMETERS: "float64"}}, {})]  # fmt: skip

    def plan(free):
        def run_on_all(doing, local, decide):
            asked, node = (None, [0.5, 0.5]), ("host", free)
            return decide([
                {"asked": asked, "node": node, "served": {}},
                *({"asked": None, "node": (f"host {k}", free), "served": held[k]} for k in (0, 1)),
            ])  # fmt: skip

        link = SimpleNamespace(run_on_all=run_on_all)
        members = Members(link, None, layouts, [], [1, 2], [0], [1.0, 0.0], elastic=elastic)
        return plan_shares(members, None)

    # A part, the same in memory that is shared, and one array more; in elastic runs only the part.
    need = 3 * 40 if elastic else 3 * (40 + 40) + 40
    assert plan(need).shares == [0.5, 0.5]
    with pytest.raises(ConfigError, match=f"'a' and 2 more do not fit: .* need {need} B"):
        plan(need - 1)
