"""Open tables without MPI: the hash table, initial values, and a shard against a dict of rows."""

import numpy as np
import pytest

from mpidist import optim
from mpidist.errors import ConfigError
from mpidist.servers.consistency import ASP, BSP
from mpidist.servers.layout.placement import RowPolicy, place_tensors
from mpidist.servers.layout.routing import ShardPart, decode_parts, encode_parts, owned, route
from mpidist.servers.model_facts import Request, parse_model
from mpidist.servers.modes.stale_gradients import DelayCompensated
from mpidist.servers.rows import open_table
from mpidist.servers.rows.key_slots import KeyRows, KeySlots, mixed
from mpidist.servers.rows.key_values import initial_rows, owners
from mpidist.servers.rows.open_rows import OpenRows
from mpidist.servers.shards import KINDS, ServerShard

WIDTH, OPEN = 3, OpenRows()
ENDS = np.array([0, -1, 1, -(2**63), 2**63 - 1])


def test_the_hash_table_against_a_dict():
    """Random keys, added and removed in groups, beside those that were there before."""
    rng = np.random.default_rng(0)
    table, known = KeyRows(twice=((), "i8")), {}
    pool = np.concatenate([ENDS, rng.integers(-(2**63), 2**63 - 1, 995), np.arange(2, 1002)])
    for step in range(300):
        keys = rng.permutation(pool)[: rng.integers(0, 200)]
        found = table.find(keys)
        assert [known.get(key, -1) for key in keys.tolist()] == found.tolist()
        if step % 3 < 2:
            new = keys[found < 0]
            places = table.add(new)
            table.columns["twice"][places] = mixed(new).view(np.int64)
            known |= dict(zip(new.tolist(), places.tolist(), strict=True))
        else:
            table.remove(found[found >= 0])
            for key in keys[found >= 0].tolist():
                del known[key]
        assert len(table) == len(known) == len(set(known.values())) == table.live.sum()
        if step % 50 == 49:
            table.compacted()
            known = dict(zip(known, table.find(np.array(list(known))).tolist(), strict=True))
        keys, places = (np.array(list(each), np.int64) for each in (known, known.values()))
        assert (table.keys[places] == keys).all()
        assert (table.columns["twice"][places] == mixed(keys).view(np.int64)).all()
    assert table.capacity < 3 * len(pool)


def test_keys_of_one_cell_and_removed_ones():
    """All keys begin in the same cell; a removed one does not end the search for the others."""
    numbers = np.arange(200_000)
    same = numbers[(mixed(numbers) & np.uint64(1023)) == 7][:60]
    assert len(same) == 60
    slots = KeySlots()
    slots.add(same, np.arange(60))
    slots.remove(same[::2])
    assert slots.find(same).tolist() == [-1, *(n for i in range(1, 59, 2) for n in (i, -1)), 59]
    slots.add(same[::2], np.arange(100, 130))
    assert slots.find(same[::2]).tolist() == list(range(100, 130))
    for _ in range(150):  # cells of removed keys do not fill the table
        slots.remove(same)
        slots.add(same, np.arange(60))
    assert slots.nbytes < 10_000


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_initial_values_depend_on_seed_name_and_key(kind):
    keys = np.concatenate([ENDS, np.arange(2, 4000)])
    every = initial_rows(keys, 8, np.dtype("f4"), "e", (kind, 0.5), 3)
    some = initial_rows(keys[::-7].copy(), 8, np.dtype("f4"), "e", (kind, 0.5), 3)
    np.testing.assert_array_equal(some, every[::-7])
    assert every.dtype == "f4"
    assert np.isfinite(every).all()
    if kind in ("zeros", "constant"):
        assert (every == 0.5).all()
        return
    for name, seed in (("e", 4), ("f", 3)):
        assert (
            initial_rows(keys, 8, np.dtype("f4"), name, (kind, 0.5), seed) != every
        ).mean() > 0.99
    assert abs(every.mean()) < 0.01
    assert abs(every.std() - (0.5 if kind == "normal" else 0.5 / 3**0.5)) < 0.01
    assert len(np.unique(every)) > 0.99 * every.size
    assert abs(np.corrcoef(every.T) - np.eye(8)).max() < 0.06
    if kind == "uniform":
        assert abs(every).max() <= 0.5


def test_a_hash_deals_keys_by_the_shares():
    keys = np.arange(-40_000, 40_000, 3)
    parts = np.bincount(owners(keys, [0.5, 0.125, 0.375]), minlength=3) / len(keys)
    np.testing.assert_allclose(parts, [0.5, 0.125, 0.375], atol=0.01)
    assert (owners(keys, [1.0]) == 0).all()


def layout_of(servers, policy):
    rows = RowPolicy("open", "ranges", [policy.max_rows, policy.min_count])
    return place_tensors({"e": ((None, WIDTH), "f8"), "b": ((4,), "f8")}, servers, {"e": rows})


def shards_of(servers, optimizer, policy=OPEN, seed=1):
    layout = layout_of(servers, policy)
    inits = {"e": ("normal", 1.0)}
    return [ServerShard(layout, k, optimizer, inits, seed) for k in range(servers)]


def parts_of(shard, keys, gradient):
    """What arrives on one server of a push of `keys`."""
    tensor = [t.name for t in shard.layout.tensors].index("e")
    parts = route(shard.layout, shard.server, {tensor: keys})
    found = []
    for part in decode_parts(encode_parts(parts), shard.layout, shard.server):
        here = owned(shard.layout, part.piece, keys)
        found.append((part, gradient[here].ravel()))
    return found


def pull(shards, keys):
    out = np.full((len(keys), WIDTH), np.nan)
    for shard in shards:
        for part, _ in parts_of(shard, keys, out):
            shard.open[part.piece.tensor].read(
                part.rows, found := np.empty((len(part.rows), WIDTH))
            )
            out[owned(shard.layout, part.piece, keys)] = found
    return out


class Reference:
    """A dict of rows, each with an optimizer state of its own."""

    def __init__(self, optimizer, least):
        self.optimizer, self.least = optimizer, least
        self.rows, self.counts, self.touched, self.step = {}, {}, {}, 0

    def first(self, key):
        return initial_rows(np.array([key]), WIDTH, np.dtype("f8"), "e", ("normal", 1.0), 1)[0]

    def push(self, pushes, clock):
        total = {}
        for share, keys, gradient in pushes:
            for key, row in zip(keys.tolist(), gradient, strict=True):
                total[key] = total.get(key, 0) + share * row
                if key not in self.rows:
                    self.counts[key] = self.counts.get(key, 0) + 1
        for key, gradient in total.items():
            self.touched[key] = clock
            if key not in self.rows:
                if self.counts[key] < self.least:
                    continue
                del self.counts[key]
                parameters = {"x": self.first(key)}
                self.rows[key] = parameters, self.optimizer.init(parameters)
            parameters, state = self.rows[key]
            state["step"][...] = self.step
            state["progress"][...] = self.step
            self.optimizer.update({"x": gradient}, state, parameters)
        self.step += 1

    def drop(self, before):
        old = [key for key, clock in self.touched.items() if clock < before]
        count = sum(self.rows.pop(key, None) is not None for key in old)
        for key in old:
            del self.touched[key]
            self.counts.pop(key, None)
        return count

    def values(self, keys):
        rows = self.rows
        return np.array([rows[k][0]["x"] if k in rows else self.first(k) for k in keys.tolist()])


@pytest.mark.parametrize("make", optim.OPTIMIZERS.values(), ids=list(optim.OPTIMIZERS))
@pytest.mark.parametrize(("servers", "least"), [(1, 1), (3, 2), (5, 3)])
def test_random_pushes_and_drops_against_a_dict(make, servers, least):
    optimizer = make(0.1)
    rng = np.random.default_rng(servers)
    shards, reference = (
        shards_of(servers, optimizer, OpenRows(None, least)),
        Reference(optimizer, least),
    )
    pool = np.concatenate([ENDS, rng.integers(-(2**63), 2**63 - 1, 55)])
    for clock in range(21):
        pushes = []
        for share in (0.5, 0.25, 0.25):
            keys = np.sort(rng.permutation(pool)[: rng.integers(0, 25)])
            pushes.append((share, keys, rng.standard_normal((len(keys), WIDTH))))
        for shard in shards:
            shard.clock = clock
            parts = [(share, parts_of(shard, keys, g.copy())) for share, keys, g in pushes]
            assert shard.apply(parts)
        reference.push(pushes, clock)
        if clock % 7 == 6:
            dropped = sum(t.drop(clock - 1) for shard in shards for t in shard.open.values())
            assert dropped == reference.drop(clock - 1)
        np.testing.assert_allclose(
            pull(shards, pool), reference.values(pool), rtol=1e-12, atol=1e-12
        )
        facts = [t.facts() for shard in shards for t in shard.open.values()]
        assert sum(one["rows"] for one in facts) == len(reference.rows)
        assert sum(one["waiting"] for one in facts) == len(reference.counts)
    assert len(reference.rows) > 5
    assert all(shard.version == 21 for shard in shards)


@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 1), (1, 5)])
def test_saved_tables_restart_on_other_servers(before, after):
    """Keys, values, state, ages and counts; training then goes on with the same values."""
    optimizer, policy, rng = optim.adam(0.1), OpenRows(None, 2), np.random.default_rng(2)
    pool = rng.integers(-(2**63), 2**63 - 1, 60)

    def push(shards, keys, clock):
        for shard in shards:
            shard.clock = clock
            shard.apply([(1.0, parts_of(shard, keys, np.ones((len(keys), WIDTH))))])

    def saved(shards):
        exports = [shard.export() for shard in shards]
        slots = exports[0]["optimizer"]
        return {
            **exports[0],
            "parameters": [one for export in exports for one in export["parameters"]],
            "counts": [one for export in exports for one in export["counts"]],
            "optimizer": {s: [p for e in exports for p in e["optimizer"][s]] for s in slots},
        }

    old, new = (shards_of(servers, optimizer, policy) for servers in (before, after))
    for clock in range(12):
        push(old, np.unique(pool[clock : clock + 20]), clock)
    state = saved(old)
    for shard in new:
        shard.clock = 3
        shard.load(state)
    for shards in (old, new):
        push(shards, np.unique(pool[25:45]), shards[0].clock + 1)
    np.testing.assert_array_equal(pull(old, pool), pull(new, pool))
    facts = [[t.facts() for s in shards for t in s.open.values()] for shards in (old, new)]
    for count in ("rows", "waiting"):
        assert sum(f[count] for f in facts[0]) == sum(f[count] for f in facts[1]) > 0
    dropped = [
        sum(t.drop(shards[0].clock - 5) for s in shards for t in s.open.values())
        for shards in (old, new)
    ]
    assert dropped[0] == dropped[1] > 0
    for key, text in (("parameters", "parameters of 'e' are not"), ("optimizer", "'mean' of 'e'")):
        less = {**state, key: type(state[key])()}
        with pytest.raises(ConfigError, match=text):
            new[0].load(less)
    small = shards_of(after, optimizer, OpenRows(after, 1))
    with pytest.raises(ConfigError, match="may have 1 "):
        [shard.load(state) for shard in small]


def test_a_server_has_at_most_its_share(monkeypatch):
    (shard,) = shards_of(1, optim.sgd(0.1), OpenRows(10))
    ones = np.ones((9, WIDTH))
    shard.apply([(1.0, parts_of(shard, np.arange(9), ones))])
    before = pull([shard], np.arange(12))
    with pytest.raises(
        ConfigError, match=r"server 0 has 9 rows and may have 10 .*max_rows=10"
    ) as e:
        shard.apply([(1.0, parts_of(shard, np.arange(3, 12), ones))])
    assert "\n" not in str(e.value)
    np.testing.assert_array_equal(pull([shard], np.arange(12)), before)
    shard.apply([(1.0, parts_of(shard, np.arange(1, 10), ones))])
    assert shard.open[1].rows.capacity == 10
    (free,) = shards_of(1, optim.sgd(0.1))
    monkeypatch.setattr(open_table, "_FEW", 0)
    monkeypatch.setattr(open_table, "available_memory", lambda: 1500)
    with pytest.raises(ConfigError, match="room for 64 takes 1536 bytes and 1500 are available"):
        free.apply([(1.0, parts_of(free, np.arange(9), ones))])


def test_counts_of_rare_keys_are_bounded():
    """Keys without a row take no more memory than rows may; the oldest counts are forgotten."""
    (shard,) = shards_of(1, optim.sgd(0.1), OpenRows(100, 3))
    for clock in range(50):
        shard.clock = clock
        keys = np.concatenate([[-5], np.arange(20 * clock, 20 * clock + 20)])
        shard.apply([(1.0, parts_of(shard, keys, np.ones((21, WIDTH))))])
    facts = shard.open[1].facts()
    assert facts["rows"] == 1
    assert 50 <= facts["waiting"] <= 121
    assert facts["bytes"] < 40_000


def test_dropped_rows_give_memory_back_and_begin_anew():
    optimizer = optim.momentum(0.1)
    (shard,) = shards_of(1, optimizer)
    keys = np.arange(5000)
    for clock in range(2):
        shard.clock = clock
        shard.apply([(1.0, parts_of(shard, keys[: 5000 - 4900 * clock],
                                    np.ones((5000 - 4900 * clock, WIDTH))))])  # fmt: skip
    large, kept = shard.open[1].facts()["bytes"], pull([shard], keys[:100])
    assert shard.open[1].drop(1) == 4900
    assert shard.open[1].facts()["bytes"] < large / 10
    np.testing.assert_array_equal(pull([shard], keys[:100]), kept)
    (fresh,) = shards_of(1, optimizer)
    np.testing.assert_array_equal(pull([shard], keys[100:]), pull([fresh], keys[100:]))
    for one in (shard, fresh):
        one.apply([(1.0, parts_of(one, keys[200:300], np.ones((100, WIDTH))))])
    np.testing.assert_array_equal(pull([shard], keys[200:300]), pull([fresh], keys[200:300]))
    # places of removed rows are taken again, with the optimizer's first state
    shard.open[1].rows.remove(shard.open[1].rows.find(keys[:50]))
    for one in (shard, fresh):
        one.apply([(1.0, parts_of(one, keys[400:450], np.ones((50, WIDTH))))])
    np.testing.assert_array_equal(pull([shard], keys[400:450]), pull([fresh], keys[400:450]))


@pytest.mark.parametrize(
    ("model", "given", "text"),
    [
        ({"e": ((None, 2), "f4")}, {}, r"'e' has shape \(None, 2\) and rows 'dense'; give the"),
        ({"e": ((4, 2), "f4")}, {"rows": "open"}, "rows open; an open table is"),
        ({"e": np.ones((4, 2))}, {"rows": {"e": OpenRows()}}, "rows open; an open table is"),
        ({"e": ((4, None), "f4")}, {}, "NoneType"),
        (
            {"e": ((None, 2), "f4")},
            {"rows": "open", "stale": DelayCompensated(0.1), "consistency": ASP()},
            "of which servers keep no copies",
        ),
    ],
)
def test_wrong_models_with_open_rows(model, given, text):
    settings = {"consistency": BSP(), **given}
    with pytest.raises(ConfigError, match=text) as error:
        parse_model(Request("m", model, None, **settings))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("given", [{"max_rows": 0}, {"min_count": 0}, {"min_count": 2.0},
                                   {"max_rows": True}, {"max_rows": 2**31}])  # fmt: skip
def test_wrong_policies(given):
    with pytest.raises(ConfigError, match=f"OpenRows: {next(iter(given))} is"):
        OpenRows(**given)


def test_a_message_for_the_whole_of_an_open_table_is_refused():
    layout = layout_of(2, OpenRows())
    for words, ok in (([1, 1, 5], True), ([1, -1], False)):
        server = int(owners(np.array([5]), layout.shares)[0])
        if ok:
            (part,) = decode_parts(np.array(words), layout, server)
            assert isinstance(part, ShardPart)
        for k in (server, 1 - server) if not ok else (1 - server,):
            with pytest.raises(Exception, match="selection asks for"):
                decode_parts(np.array(words), layout, k)
