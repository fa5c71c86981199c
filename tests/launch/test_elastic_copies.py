"""Servers that keep copies of each other's partitions are really killed: no step is lost, R51."""

import re

import pytest
from test_elastic import with_ulfm
from test_elastic_servers import BATCH, ONCE, STEPS, check, train
from tiers import exhaustive, tiers

#: Where ranks die: (ranks, deaths, settings, living ranks, workers).
MOMENTS = {
    "after an update": (4, "3:8:applied", {}, [0, 1, 2], 2),
    "the first update": (4, "2:1:applied", {}, [0, 1, 3], 2),
    "after a vote": (4, "2:7:voted", {}, [0, 1, 3], 2),
    "after an answer": (4, "2:19:answered", {}, [0, 1, 3], 2),
    "after some answers": (5, "4:20:answered", {}, [0, 1, 2, 3], 3),
    "when it has forwarded": (4, "3:8:forwarded", {}, [0, 1, 2], 2),
    "when it has an update": (4, "2:8:received", {}, [0, 1, 3], 2),
    "in a save": (4, "3:10:saving", {"save": True}, [0, 1, 2], 2),
    "rank 0, colocated": (4, "0:8:applied", {"servers": [0, 2], "placement": "colocated"},
                          [1, 2, 3], 3),
    "all colocated": (4, "2:8:forwarded", {"servers": 4, "placement": "colocated"},
                      [0, 1, 3], 3),
    "with a worker": (5, "4:8:applied,1:7:pushed", {}, [0, 2, 3], 2),
    "in the goodbye": (4, "2:1:closing", {}, [0, 1, 3], 2),
    "under SSP(0)": (5, "4:21:forwarded", {"mode": "ssp0"}, [0, 1, 2, 3], 3),
    "a second one later": (6, "5:6:applied,4:12:applied", {"servers": 3}, [0, 1, 2, 3], 3),
    "a second one in the repair": (6, "5:6:applied,3:1:meets", {"servers": 4}, [0, 1, 2, 4], 2),
    "a second one before it sends": (7, "6:6:applied,4:1:moving", {"servers": 4},
                                     [0, 1, 2, 3, 5], 3),
    "a second one when it has all": (7, "6:6:applied,4:1:moved", {"servers": 4},
                                     [0, 1, 2, 3, 5], 3),
    "a second one that serves again": (7, "6:6:applied,4:2:opened", {"servers": 4},
                                       [0, 1, 2, 3, 5], 3),
    "a worker in the repair": (6, "5:6:applied,1:1:moved", {"servers": 3}, [0, 2, 3, 4], 2),
    "a worker alone": (5, "1:7:pushed", {}, [0, 2, 3, 4], 2),
}  # fmt: skip


@with_ulfm
@pytest.mark.parametrize(
    "moment",
    tiers(MOMENTS, "after an update", "the first update", "after a vote", "after some answers",
          "when it has an update", "in a save", "rank 0, colocated", "all colocated",
          "with a worker", "in the goodbye", "under SSP(0)", "a second one later",
          "a second one in the repair", "a second one when it has all",
          "a second one that serves again", "a worker in the repair", "a worker alone"),
)  # fmt: skip
def test_a_server_with_a_copy_dies(tmp_path, moment):
    """BSP: each sample counts once and each step is done once, as in an undisturbed run."""
    ranks, deaths, settings, living, workers = MOMENTS[moment]
    found = train(tmp_path, ranks, deaths, **{"servers": 2, "replicas": 1, **settings})
    assert check(tmp_path, found, living, workers) == ONCE, found[0]
    servers = moment not in ("a worker alone",)
    told = re.findall(
        r"^mpidist: the partitions of server rank \d of \d on \S+ go on from their copy on rank \d "
        r"of \d on \S+$", found[0].stderr, re.M,
    )  # fmt: skip
    assert bool(told) == servers, found[0]


#: The same where pushes are applied at once.
ASYNCHRONOUS = {
    "after an update": (4, "3:20:applied", {}, [0, 1, 2]),
    "when it has forwarded": (4, "3:20:forwarded", {}, [0, 1, 2]),
    "when it has an update": (4, "2:20:received", {}, [0, 1, 3]),
    "when it has an acknowledgement": (4, "2:21:received", {}, [0, 1, 3]),
    "after an answer": (4, "2:20:answered", {}, [0, 1, 3]),
    "a second one later": (6, "5:10:applied,4:30:applied", {"servers": 3}, [0, 1, 2, 3]),
    "a second one before it sends": (7, "6:10:applied,4:1:moving", {"servers": 4},
                                     [0, 1, 2, 3, 5]),
    "a second one when it has all": (7, "6:10:applied,4:1:moved", {"servers": 4},
                                     [0, 1, 2, 3, 5]),
    "colocated": (4, "0:8:applied", {"servers": [0, 2, 3], "placement": "colocated"}, [1, 2, 3]),
}  # fmt: skip


#: Those of `make test`; the others are played in `make test-all`.
FIRST = [("when it has forwarded", "ssp"), ("when it has an acknowledgement", "asp")]
BOTH_MODES = [(moment, mode) for moment in ASYNCHRONOUS for mode in ("asp", "ssp")]


@with_ulfm
@pytest.mark.parametrize(
    ("moment", "mode"), [each if each in FIRST else exhaustive(*each) for each in BOTH_MODES]
)
def test_no_push_counts_twice(tmp_path, moment, mode):
    """A push that a server has not answered is sent again to those who lack it; none is lost."""
    ranks, deaths, settings, living = ASYNCHRONOUS[moment]
    slow = {"0": 0.004, "1": 0.001, "2": 0.002}
    settings = {"servers": 2, "replicas": 1, "mode": mode, "slow": slow, **settings}
    colocated = settings.get("placement") == "colocated"
    workers = len(living) if colocated else ranks - settings["servers"]
    found = train(tmp_path, ranks, deaths, **settings)
    _, _, total = check(tmp_path, found, living, workers)
    if not colocated:  # no worker has died
        assert total == STEPS * BATCH, found[0]
    if mode == "ssp":
        assert {facts[8] for facts in found[1].values()} <= {"0", "1", "2"}, found[0]


#: A server and the one that has its copy die: (deaths, settings).
BOTH = {
    "at once": "3:8:applied,4:8:applied",
    "one in the repair": "3:8:applied,4:1:meets",
    "one before it sends": "3:8:applied,4:1:moving",
}


@with_ulfm
@pytest.mark.parametrize("moment", tiers(BOTH, "at once", "one in the repair"))
def test_a_server_dies_with_its_copy(tmp_path, moment):
    """All ranks go back to the newest checkpoint; without one the run ends."""
    settings = {"servers": 3, "replicas": 1}
    found = train(tmp_path, 6, BOTH[moment], save=True, **settings)
    assert check(tmp_path, found, [0, 1, 2, 5], 3, back=True) == ONCE, found[0]
    done, told = train(tmp_path / "without", 6, BOTH[moment], **settings)
    assert (done.returncode, told) == (70, {}), done
    assert re.search(
        r"the partitions of server.* are lost; give checkpoint=..., from which the run", done.stderr
    ), done


@with_ulfm
@pytest.mark.exhaustive
def test_a_spare_steps_in_as_a_worker(tmp_path):
    found = train(tmp_path, 6, "4:8:applied", servers=2, replicas=1, spares=1)
    found[0].check()
    used = {tuple(map(int, facts[5:8])) for facts in found[1].values() if facts[4] == "used"}
    assert used == {ONCE}, found[0]
    assert sorted(found[1]) == [0, 1, 2, 3, 5], found[0]
