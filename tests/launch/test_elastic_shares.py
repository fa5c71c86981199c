"""Servers of an elastic job with shares, which change while ranks are killed: R22, R51."""

import re

import pytest
from test_elastic import with_ulfm
from test_elastic_servers import BATCH, ONCE, STEPS, check, train
from tiers import exhaustive, tiers

THREE = {"shares": [[3, 1], [4, 2], [5, 5]], "every": 3}
COLOCATED = {"shares": [[0, 1], [2, 4], [3, 2]], "placement": "colocated", "every": 3}
MIXED = {"shares": [[0, 1], [3, 4]], "placement": [3], "every": 3}

#: Where ranks die in a run whose shares change every 3 clocks: (deaths, settings, living ranks,
#: workers). Servers keep copies.
MOMENTS = {
    "before, a server": ("4:2:applied", THREE, [0, 1, 2, 3, 5], 3),
    "at the beginning, a server": ("5:2:dividing", THREE, [0, 1, 2, 3, 4], 3),
    "before it sends": ("4:2:filling", THREE, [0, 1, 2, 3, 5], 3),
    "when it has all": ("3:1:filled", THREE, [0, 1, 2, 4, 5], 3),
    "when all have all": ("3:2:committing", THREE, [0, 1, 2, 4, 5], 3),
    "when one rank knows": ("0:2:telling", THREE, [1, 2, 3, 4, 5], 2),
    "when one rank knows, colocated": ("0:1:telling", COLOCATED, [1, 2, 3], 3),
    "after, a server": ("3:8:applied", THREE, [0, 1, 2, 4, 5], 3),
    "a server and then another": ("5:1:filled,3:1:opened", THREE, [0, 1, 2, 4], 3),
    "a worker": ("1:2:dividing", THREE, [0, 2, 3, 4, 5], 2),
    "some only serve": ("3:1:committing", MIXED, [0, 1, 2], 3),
}


@with_ulfm
@pytest.mark.parametrize(
    "moment",
    tiers(MOMENTS, "before, a server", "at the beginning, a server", "before it sends",
          "when it has all", "when all have all", "when one rank knows",
          "when one rank knows, colocated", "after, a server", "a worker"),
)  # fmt: skip
def test_a_rank_dies_while_shares_change(tmp_path, moment):
    """BSP with copies: each sample counts once and each step is done once."""
    deaths, settings, living, workers = MOMENTS[moment]
    ranks = 4 if "placement" in settings else 6
    found = train(tmp_path, ranks, deaths, **{"replicas": 1, **settings})
    assert check(tmp_path, found, living, workers) == ONCE, found[0]


@with_ulfm
@pytest.mark.parametrize(
    ("moment", "mode"),
    [
        ("before it sends", "asp"), exhaustive("before it sends", "ssp"),
        ("when one rank knows", "ssp"), exhaustive("when one rank knows", "asp"),
        exhaustive("when all have all", "asp"), exhaustive("when all have all", "ssp"),
    ],
)  # fmt: skip
def test_the_same_where_pushes_are_applied_at_once(tmp_path, moment, mode):
    deaths, settings, living, workers = MOMENTS[moment]
    settings = {**settings, "mode": mode, "slow": {"0": 0.004, "2": 0.002}, "replicas": 1}
    found = train(tmp_path, 6, deaths, **settings)
    _, _, total = check(tmp_path, found, living, workers)
    assert total == STEPS * BATCH or workers == 2, found[0]
    assert total >= STEPS * BATCH - 8, found[0]


@with_ulfm
@pytest.mark.exhaustive
@pytest.mark.parametrize("moment", ["1:2:dividing", "0:1:telling", "2:2:telling"])
def test_a_worker_dies_and_there_are_no_copies(tmp_path, moment):
    found = train(tmp_path, 5, moment, shares=[[3, 1], [4, 3]], every=4)
    living = [rank for rank in range(5) if rank != int(moment[0])]
    assert check(tmp_path, found, living, len(living) - 2) == ONCE, found[0]


@with_ulfm
def test_a_server_dies_and_there_are_no_copies(tmp_path):
    found = train(tmp_path, 5, "4:2:filled", shares=[[3, 1], [4, 3]], every=4, save=True)
    assert check(tmp_path, found, [0, 1, 2, 3], 3, back=True) == ONCE, found[0]
    assert re.search(
        "server rank 4 of 5 on .* are lost; all ranks go back to step 5", found[0].stderr
    )


@with_ulfm
def test_balanced_shares_and_a_spare(tmp_path):
    settings = {"servers": "auto", "placement": "colocated", "replicas": 1, "spares": 1, "every": 5}
    found = train(tmp_path, 5, "1:6:computed", **settings)
    found[0].check()
    assert sorted(found[1]) == [0, 2, 3, 4], found[0]
    used = {tuple(map(int, facts[5:8])) for facts in found[1].values() if facts[4] == "used"}
    assert used == {ONCE}, found[0]
