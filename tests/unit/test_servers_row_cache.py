"""The row cache of a worker without MPI: which rows it forgets, and what own pushes change."""

import numpy as np
import pytest

from mpidist import optim
from mpidist.errors import ConfigError
from mpidist.servers.consistency import ASP, BSP, SSP
from mpidist.servers.layout.placement import place_tensors
from mpidist.servers.modes.stale_gradients import DropStale, KeepStale
from mpidist.servers.rows.cache_policy import RowCache, row_cache
from mpidist.servers.rows.row_cache import CachedTable, own_update

WIDTH = 2


def table(most):
    return CachedTable(place_tensors({"e": ((1000, WIDTH), "f4")}, 1).tensors[0], most)


def keep(cache, keys, now, has=0, came=0):
    keys = np.array(keys)
    cache.keep(keys, np.repeat(keys, WIDTH).reshape(-1, WIDTH).astype("f4"), has, came, now)


def good(cache, keys, clock=0, oldest=0, earliest=0, now=99):
    places, found = cache.look_up(np.array(keys), clock, oldest, earliest, now)
    values = cache.rows.columns["values"][places[found]]
    assert (values == np.array(keys)[found][:, None]).all()
    return found.tolist()


def test_the_least_recently_used_rows_go():
    cache = table(4)
    keep(cache, [1, 2, 3, 4], now=1)
    assert good(cache, [2, 4], now=2) == [True, True]
    keep(cache, [5, 6], now=3)
    assert good(cache, [1, 2, 3, 4, 5, 6], now=4) == [False, True, False, True, True, True]
    keep(cache, [2, 7], now=5)  # a row that is stored anew does not make room for another
    assert good(cache, [2, 7], now=6) == [True, True]
    assert len(cache.rows) == 4
    keep(cache, range(10, 20), now=7)
    assert good(cache, [10, 13, 14]) == [True, True, False]
    assert len(cache.rows) == 4


def test_a_table_against_a_dict():
    """Random rows: what is found is what was stored last, and no more than `most` are kept."""
    rng, cache, known = np.random.default_rng(0), table(50), {}
    for now in range(300):
        keys = np.unique(rng.zipf(1.3, 30) % 200)
        found = np.array(good(cache, keys, now=now))
        assert all(key in known for key in keys[found].tolist())
        keep(cache, keys[~found], now)
        known |= dict.fromkeys(keys.tolist())
        assert len(cache.rows) <= 50
    assert found.mean() > 0.3


def test_how_old_a_row_may_be():
    cache = table(9)
    keep(cache, [1], now=1, has=4, came=6)
    for clock, oldest, earliest, usable in [
        (6, 5, 5, True),  # this clock's own
        (7, 4, 6, True),
        (7, 5, 6, False),
        (7, 4, 7, False),
        (9, -1, 6, True),
    ]:
        assert good(cache, [1], clock, oldest, earliest) == [usable]


def test_own_pushes_have_the_bits_of_the_server():
    update = own_update(optim.sgd(0.1))
    rng, cache = np.random.default_rng(0), table(9)
    values, gradient = rng.standard_normal((2, 3, WIDTH)).astype("f4")
    cache.keep(np.array([3, 5, 8]), values, 0, 0, 1)
    expected = {"x": values.copy()}
    optim.sgd(0.1).update({"x": gradient}, optim.sgd(0.1).init(expected), expected, 0.25)
    more = np.concatenate([np.ones((1, WIDTH), "f4"), gradient])
    cache.wrote(np.array([2, 3, 5, 8]), more.ravel(), update, 0.25)
    cache.wrote(np.array([5]), np.ones(WIDTH, "f4"), update, 0.0)
    places = cache.rows.find(np.array([3, 5, 8]))
    assert cache.rows.columns["values"][places].tobytes() == expected["x"].tobytes()
    cache.wrote(np.array([5, 6]), np.ones(2 * WIDTH, "f4"), None, 0.25)
    assert cache.rows.find(np.array([3, 5, 8])).min() == -1
    assert len(cache.rows) == 2


@pytest.mark.parametrize(
    "optimizer",
    [optim.sgd(0.1, weight_decay=0.1), optim.sgd(lambda step: 0.1), optim.adagrad(0.1),
     optim.adam(0.1), optim.ftrl(0.1), optim.momentum(0.1), object()],
    ids=lambda optimizer: getattr(optimizer, "name", "own"),
)  # fmt: skip
def test_other_optimizers_make_a_worker_forget_its_rows(optimizer):
    assert own_update(optimizer) is None


def test_arguments():
    assert row_cache("m", None, BSP(), KeepStale()) is None
    assert row_cache("m", np.int64(7), SSP(2), KeepStale()) == RowCache(7)
    assert row_cache("m", RowCache(7, 3), ASP(), KeepStale()) == RowCache(7, 3)
    for given, mode, stale, text in [
        (
            7,
            ASP(),
            KeepStale(),
            r"ASP\(\) has no bound .* cache_rows=md.RowCache\(7, max_age=...\)",
        ),
        (7, SSP(2), DropStale(5), "do not know the age"),
        ("7", BSP(), KeepStale(), "cache_rows is '7'"),
        (True, BSP(), KeepStale(), "cache_rows is True"),
        (0, BSP(), KeepStale(), "cache_rows is 0"),
    ]:
        with pytest.raises(ConfigError, match=text) as error:
            row_cache("m", given, mode, stale)
        assert "\n" not in str(error.value)
    for given in (
        {"rows": 0},
        {"rows": 1.5},
        {"rows": 3, "max_age": -1},
        {"rows": 3, "max_age": 1.5},
    ):
        with pytest.raises(ConfigError, match=f"RowCache: {list(given)[-1]} is"):
            RowCache(**given)
