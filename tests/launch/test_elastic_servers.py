"""Parameter servers of an elastic job when ranks are really killed: R26, R51, R54, R77."""

import json
import re
from functools import partial
from pathlib import Path

import pytest
from again import best_of_three
from test_elastic import launch_with_ulfm, with_ulfm
from tiers import exhaustive, tiers

PROGRAMS = Path(__file__).with_name("programs")
STEPS, BATCH = 20, 24
EPOCHS = STEPS * BATCH // 120
LINE = re.compile(
    r"rank (\d): (\d) ranks, (\d) workers, (\d) dead, (\d+) steps, (\w+) (\d+) to (\d+), "
    r"(\d+) in all, gap (\d+), mean (\d+)"
)


def train(folder, ranks, deaths, **settings):
    """Return the finished program, and what the living workers have printed."""
    folder.mkdir(exist_ok=True)
    words = PROGRAMS / "elastic_served.py", folder, json.dumps({"steps": STEPS, **settings})
    done = launch_with_ulfm(ranks, *words, DEATHS=deaths)
    found = [match.groups() for line in done.stdout.splitlines() if (match := LINE.match(line))]
    return done, {int(rank): facts for rank, *facts in found}


def check(folder, found, living, workers, back=False):
    """The living ranks are there, and their workers did each step once; return their counts."""
    done, told = found
    done.check()
    assert sorted(told) == living, done
    used = {tuple(facts[5:8]) for facts in told.values() if facts[4] == "used"}
    assert len(used) == 1, done
    for rank, facts in told.items():
        assert (facts[0], facts[1], facts[3]) == (str(len(living)), str(workers), str(STEPS)), done
        if facts[4] == "used":
            steps = [*map(int, (folder / f"rank-{rank}").read_text().split())]
            assert steps[-1] == STEPS
            if not back:
                assert steps == [*range(1, STEPS + 1)], (rank, steps)
                assert int(facts[9]) == STEPS, done  # the model's state: no step counts twice
    assert ("go back to step" in done.stderr) == back, done
    ((low, high, total),) = [tuple(map(int, each)) for each in used]
    assert high <= EPOCHS
    return low, high, total


ONCE = EPOCHS, EPOCHS, STEPS * BATCH

#: Where workers die under BSP: (deaths, settings, living ranks); the last ranks serve.
WORKERS = {
    "the first gradients": ("1:0:computed", {}, [0, 2, 3]),
    "a torn push": ("1:7:pushed", {"servers": 2}, [0, 2, 3, 4]),
    "a wait": ("2:5:waits", {}, [0, 1, 3]),
    "rank 0, the last step": (f"0:{STEPS}:done", {"servers": 2}, [1, 2, 3, 4]),
    "two at once": ("0:6:computed,1:6:computed", {}, [2, 3, 4]),
    "one after the other": ("1:6:computed,2:8:pushed", {"servers": 2}, [0, 3, 4]),
    "a goodbye": ("1:1:closing", {}, [0, 2, 3]),
    "a save": ("0:10:saving", {"save": True, "servers": 2}, [1, 2, 3, 4]),
    "with SSP(0)": ("1:7:pushed", {"servers": 2, "mode": "ssp0"}, [0, 2, 3, 4]),
}


@with_ulfm
@pytest.mark.parametrize(
    "moment",
    tiers(WORKERS, "the first gradients", "a wait", "rank 0, the last step", "one after the other",
          "a save", "with SSP(0)"),
)  # fmt: skip
def test_a_worker_dies(tmp_path, moment):
    """BSP: each sample counts once in each epoch, as in an undisturbed run."""
    deaths, settings, living = WORKERS[moment]
    ranks, workers = len(living) + deaths.count(",") + 1, len(living) - settings.get("servers", 1)
    found = train(tmp_path, ranks, deaths, **settings)
    assert check(tmp_path, found, living, workers) == ONCE, found[0]
    assert re.search(
        rf"^mpidist: rank \d of {ranks} on \S+.* died at step \d+; \d ranks go on",
        found[0].stderr,
        re.M,
    )


@with_ulfm
@pytest.mark.parametrize("mode", ["asp", exhaustive("ssp"), "dssp"])
def test_asynchronous_workers_go_on_at_their_own_clocks(tmp_path, mode):
    """No push counts twice; what a dead worker had not pushed, when others had, may be lost."""
    slow = {"0": 0.004, "1": 0.001, "2": 0.002}
    found = train(tmp_path, 5, "1:7:pushed", servers=2, mode=mode, slow=slow)
    _, _, total = check(tmp_path, found, [0, 2, 3, 4], 2)
    assert total >= STEPS * BATCH - 8 * (STEPS if mode == "asp" else 3), found[0]
    if mode != "asp":
        assert {facts[8] for facts in found[1].values()} <= {"0", "1", "2"}, found[0]


@with_ulfm
@pytest.mark.parametrize("mode", [exhaustive("bsp"), "ssp"])
def test_a_save_point_that_only_some_have_reached(tmp_path, mode):
    """A worker dies in the pause for a save, while another worker is steps behind."""
    slow = {"0": 0.02}
    found = train(tmp_path, 5, "2:3:waits", servers=2, mode=mode, slow=slow, save=True)
    _, _, total = check(tmp_path, found, [0, 1, 3, 4], 2)
    assert total >= STEPS * BATCH - 8 * 3, found[0]


#: Where a rank dies in a run that is asked to stop at step 5, and stops after step 8, or after 9 if
#: a worker hears of it late: (deaths, who is asked).
STOPS = {
    "in the last step": ("1:7:pushed", 0),
    "in the last step, twice": ("1:7:pushed,2:8:pushed", 0),
    "the one that was asked": ("1:1:closing", 1),
    "in the last save": ("2:8:saving,2:9:saving", 0),
}


@with_ulfm
@pytest.mark.parametrize(
    "moment", tiers(STOPS, "in the last step", "in the last step, twice", "the one that was asked")
)
def test_a_death_while_the_run_stops(tmp_path, moment):
    """The run stops after a whole step, and what it has saved goes on without a lost sample."""
    deaths, asked = STOPS[moment]
    done, told = train(tmp_path, 5, deaths, servers=2, save=True, stop=[asked, 5])
    assert done.returncode == 75, done
    assert not told
    assert re.search("stopped at step [89]: .* the state was saved as", done.stderr), done
    done, told = train(tmp_path, 4, "", servers=2, save=True)
    assert {tuple(facts[5:8]) for facts in told.values() if facts[4] == "used"} == {
        tuple(map(str, ONCE))
    }, done


@with_ulfm
def test_a_bad_record_of_a_repeated_step_counts_once(tmp_path):
    done, _ = train(tmp_path, 5, "1:6:pushed", servers=2, rejects=[0, 6])
    done.check()
    assert re.findall(r"(\d+) skipped", done.stdout) == ["1"] * 4, done


@with_ulfm
def test_all_workers_raise(tmp_path):
    """R46: the mistake is in the program, so nobody is evicted, however many servers there are."""

    def not_held_up(run):
        """Open MPI's launcher may keep a lock for ever when several ranks end (docs/errors.md)."""
        assert not run[0].timed_out, run[0]
        return run

    play = partial(train, tmp_path, 5, "", servers=3, raises=6, on_exception="evict")
    done, told = best_of_three(not_held_up, play)
    assert (done.returncode, told) == (1, {}), done
    assert done.stderr.count("RuntimeError: no memory on rank") == 1
    assert "ends itself" not in done.stderr, done


#: Where servers die: (ranks, deaths, settings, living ranks, workers).
SERVERS = {
    "after an update": (5, "4:8:applied", {"servers": 2}, [0, 1, 2, 3], 3),
    "after a vote": (5, "3:7:voted", {"servers": 2}, [0, 1, 2, 4], 3),
    "after an answer": (4, "3:19:answered", {}, [0, 1, 2], 2),
    "in a save": (5, "4:10:saving", {"servers": 2}, [0, 1, 2, 3], 3),
    "rank 0, colocated": (4, "0:8:applied", {"servers": [0, 2], "placement": "colocated"},
                          [1, 2, 3], 3),
    "with a worker": (5, "4:8:applied,1:7:pushed", {"servers": 2}, [0, 2, 3], 2),
    "in the goodbye": (5, "3:1:closing", {"servers": 2}, [0, 1, 2, 4], 3),
    "under SSP": (5, "4:20:applied", {"servers": 2, "mode": "ssp"}, [0, 1, 2, 3], 3),
}  # fmt: skip


@with_ulfm
@pytest.mark.parametrize(
    "moment",
    tiers(SERVERS, "after an update", "after a vote", "after an answer", "with a worker",
          "in the goodbye", "under SSP"),
)  # fmt: skip
def test_a_server_dies(tmp_path, moment):
    """All ranks go back to the newest checkpoint, and no sample is lost or counted twice."""
    ranks, deaths, settings, living, workers = SERVERS[moment]
    found = train(tmp_path, ranks, deaths, save=True, **settings)
    assert check(tmp_path, found, living, workers, back=True) == ONCE, found[0]
    text = (
        r"the partitions of server rank \d of \d on \S+ are lost; all ranks go back to step \d+ of "
    )
    assert re.search(text, found[0].stderr), found[0]


@with_ulfm
@pytest.mark.parametrize(
    ("deaths", "settings", "text"),
    [
        ("3:8:applied", {}, "died, and with it the partitions it served; give checkpoint="),
        exhaustive("3:3:applied", {"save": True}, "saved has no checkpoint yet"),
        ("0:5:done,1:5:done,2:5:done", {}, "all workers died; a run with parameter servers needs"),
        exhaustive("0:5:done,1:5:done", {"spares": 1}, "and the spares do not have their state"),
    ],
)
def test_what_cannot_go_on_says_what_is_lost(tmp_path, deaths, settings, text):
    done, told = train(tmp_path, 4, deaths, **settings)
    assert done.returncode == 70, done
    assert not told
    assert text in done.stderr, done


@with_ulfm
def test_a_spare_steps_in_and_a_stopped_worker_is_evicted(tmp_path):
    settings = {"spares": 1, "deadline": 0.5, "stopped": [1, 6, "done"]}
    done, told = train(tmp_path, 5, "", **settings)
    done.check()
    assert sorted(told) == [0, 2, 3, 4], done
    assert {tuple(facts[5:8]) for facts in told.values() if facts[4] == "used"} == {
        tuple(map(str, ONCE))
    }, done
    assert "is evicted at step 6; 4 ranks go on, with a spare" in done.stderr


@with_ulfm
@pytest.mark.parametrize(
    ("placement", "deaths"), [exhaustive("dedicated", "1:6"), ("colocated", "0:6,4:9")]
)
def test_a_function_that_makes_its_own_servers(placement, deaths):
    """`on_resize` is called on servers, too, and each step counts once."""
    done = launch_with_ulfm(5, PROGRAMS / "elastic_own_servers.py", placement, DEATHS=deaths)
    done.check()
    told = sorted(line for line in done.stdout.splitlines() if line.startswith("rank "))
    if placement == "colocated":
        assert told == [f"rank {r}: [5, (5, 4), (4, 3)], w [20.0]" for r in (1, 2, 3)], done
    else:
        workers = [f"rank {r}: [5, (5, 4)], w [20.0]" for r in (0, 2)]
        assert told[:2] == workers, done
        assert all(f"rank {r}: [5, (5, 4)]" in told[r - 1] for r in (3, 4)), done
