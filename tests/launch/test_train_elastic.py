"""`md.train(elastic=)` with real kills: R26, R46, R48, R54, R77, R119, R140."""

import json
import re
import sys
from pathlib import Path

import pytest
from test_elastic import launch_with_ulfm, with_ulfm
from tiers import exhaustive, tiers

from mpidist.launch.launchers import launch

PROGRAM = str(Path(__file__).with_name("programs") / "elastic_train.py")
STEPS = 16
LINE = re.compile(
    r"rank (\d): (\d) ranks, (\d) dead, (\d+) steps, bits (.*) state (\w+) resizes (.*)"
)


def train(folder, ranks=4, deaths="", variables=None, **settings):
    """Return the finished program, and what each living rank has printed."""
    folder.mkdir(exist_ok=True)
    words = PROGRAM, folder, json.dumps({"steps": STEPS, **settings})
    done = launch_with_ulfm(ranks, *words, DEATHS=deaths, **(variables or {}))
    found = [match.groups() for line in done.stdout.splitlines() if (match := LINE.match(line))]
    return done, {int(rank): facts for rank, *facts in found}


def check(folder, found, living, dead):
    """Each living rank is there, has done each step once, and has the same bits; return them."""
    done, told = found
    done.check()
    assert sorted(told) == living, done
    assert len({facts[3] for facts in told.values()}) == 1, done
    for rank in living:
        assert told[rank][:3] == [str(len(living)), str(dead), str(STEPS)]
        steps = [*map(int, (folder / f"rank-{rank}").read_text().split())]
        assert steps == [*range(1, STEPS + 1)], (rank, steps)
    return {(facts[3], facts[4]) for facts in told.values()}


MOMENTS = {
    "the first gradients": ("2:0:computed", [0, 1, 3]),
    "a done step": ("0:7:done", [1, 2, 3]),
    "the last step": (f"3:{STEPS}:done", [0, 1, 2]),
    "two at once": ("1:5:computed,2:5:computed", [0, 3]),
    "one after the other": ("1:5:computed,0:6:done,3:6:computed", [2]),
    "when times are compared": ("1:10:times", [0, 2, 3]),
    "a save": ("0:10:saving", [1, 2, 3]),
    "the resize": ("1:4:done,0:4:resizing", [2, 3]),
}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    (bits,) = check(folder, train(folder, 3, microbatches=12), [0, 1, 2], 0)
    return bits


@with_ulfm
@pytest.mark.parametrize(
    "moment",
    tiers(MOMENTS, "a done step", "the last step", "two at once", "one after the other",
          "when times are compared"),
)  # fmt: skip
def test_the_bits_are_those_of_an_undisturbed_run(tmp_path, undisturbed, moment):
    """R46, R140: parameters, loss, accuracy and the model's state, whoever dies whenever."""
    deaths, living = MOMENTS[moment]
    more = {"resize": "resizing" in deaths, "save": "saving" in deaths}
    found = train(tmp_path, 4, deaths, microbatches=12, **more)
    bits = check(tmp_path, found, living, 4 - len(living))
    if "resizing" not in deaths:  # there the program has chosen another learning rate
        assert bits == {undisturbed}, found[0]
    (line, *_) = [line for line in found[0].stderr.splitlines() if "died at step" in line]
    assert line.startswith("mpidist: rank ")


@with_ulfm
@pytest.mark.parametrize("moment", ["computed", exhaustive("done")])
def test_a_stopped_rank_is_evicted(tmp_path, undisturbed, moment):
    """R45, R46: its node's ranks kill it after the deadline, and the bits stay right."""
    found = train(tmp_path, 3, microbatches=12, deadline=0.5, stopped=[1, 6, moment])
    assert check(tmp_path, found, [0, 2], 1) == {undisturbed}, found[0]
    text = r"rank 1 of 3 on \S+ was stopped for .* and is evicted at step 6; 2 ranks go on"
    assert re.search(text, found[0].stderr), found[0]


@with_ulfm
@pytest.mark.parametrize("moment", [exhaustive("computed"), "done"])
def test_a_rank_that_raises_is_evicted(tmp_path, undisturbed, moment):
    """R46: with ``on_exception="evict"`` the others go on, and the traceback is printed once."""
    settings = {"microbatches": 12, "on_exception": "evict", "raises": [[1, 6, moment, 0]]}
    found = train(tmp_path, 3, **settings)
    assert check(tmp_path, found, [0, 2], 1) == {undisturbed}, found[0]
    text = found[0].stderr
    assert text.count("RuntimeError: no memory on rank 1") == 1
    assert re.search(r"rank 1 of 3 on \S+ raised an exception and is evicted at step \d; 2", text)


RAISES = {
    "by default": ([[1, 0]], {"on_exception": "end"}),
    "most ranks": ([[0, 0], [1, 0], [2, 0]], {}),
    "in the repeated step": ([[2, 0], [1, 1]], {"resize": True}),
    "too few are left": ([[1, 0]], {"min_ranks": 3}),
}


@with_ulfm
@pytest.mark.parametrize("case", tiers(RAISES, "too few are left"))
def test_an_exception_that_ends_the_job(tmp_path, case):
    """A mistake in the program or in the data must not kill rank after rank."""
    who, settings = RAISES[case]  # the ranks, and how many are evicted before they raise in step 6
    raises = [[rank, 6, "computed", evicted] for rank, evicted in who]
    done, told = train(tmp_path, 3, **{"on_exception": "evict", "raises": raises, **settings})
    assert (done.returncode, told) == (1, {}), done
    evicted = sum(evicted for _, evicted in who)
    assert done.stderr.count("RuntimeError: no memory") == 1 + evicted, done
    assert done.stderr.count("and is evicted") == evicted


@with_ulfm
@pytest.mark.parametrize(
    "deaths",
    [*map(exhaustive, ["", "1:6:computed", "3:6:by rank 0"]), "0:4:done,2:9:computed"],
)
def test_spares_keep_the_number_of_ranks(tmp_path, undisturbed, deaths):
    """R48: a spare steps in, also for rank 0; a spare that does not gets the same summary."""
    dead = {int(one[0]) for one in deaths.split(",") if one}
    done, told = train(tmp_path, 5, deaths, microbatches=12, spares=2)
    done.check()
    living = sorted({*range(5)} - dead)
    assert sorted(told) == living, done
    assert {facts[3] for facts in told.values()} == {undisturbed[0]}, done
    assert {(facts[0], facts[1]) for facts in told.values()} == {("3", str(len(dead)))}, done
    for rank in range(3 if 3 in dead else 3 + len(dead)):
        if rank not in dead:
            steps = [*map(int, (tmp_path / f"rank-{rank}").read_text().split())]
            assert steps == [*range(steps[0], STEPS + 1)]
            assert (steps[0] == 1) == (rank < 3)
    assert done.stderr.count("3 ranks go on, with a spare, after") == len(dead - {3})


@with_ulfm
def test_on_resize_is_called_once_for_each_change(tmp_path):
    """R119: the function may set another optimizer, which later deaths keep."""
    done, told = train(tmp_path, 4, "3:4:done,2:9:computed", microbatches=12, resize=True)
    check(tmp_path, (done, told), [0, 1], 2)
    assert {facts[5] for facts in told.values()} == {"[(4, 3), (3, 2)]"}, done


@with_ulfm
@pytest.mark.parametrize("algorithm", ["ring", exhaustive("double_tree"), exhaustive("native")])
def test_without_microbatches_the_run_is_one_that_begins_smaller(tmp_path, algorithm):
    """R46: from the step of the death on, the bits are those of a run that resumes on 3 ranks."""
    killed = train(tmp_path / "killed", 4, "3:5:computed", algorithm=algorithm)
    bits = check(tmp_path / "killed", killed, [0, 1, 2], 1)
    folder = tmp_path / "resumed"
    first, _ = train(folder, 4, steps=5, save=True, algorithm=algorithm, elastic=False)
    first.check()
    second, told = train(folder, 3, save=True, algorithm=algorithm, elastic=False)
    second.check()
    assert {facts[3].split()[0] for facts in told.values()} == {b[0].split()[0] for b in bits}


@with_ulfm
def test_a_request_to_stop_is_not_lost(tmp_path):
    """A signal and a death in the same step: the living ranks save, and leave with code 75."""
    done, told = train(tmp_path, 4, "2:6:done", microbatches=12, save=True, stop=[1, 6])
    assert (done.returncode, told) == (75, {}), done
    assert "SIGUSR1 on rank 1" in done.stderr
    assert "the state was saved as step" in done.stderr
    done, told = train(tmp_path, 2, microbatches=12, save=True, elastic=False)
    done.check()
    assert sorted(told) == [0, 1]


@with_ulfm
@pytest.mark.exhaustive
@pytest.mark.parametrize("deaths", ["", "2:6:done"])
def test_a_request_to_stop_reaches_a_spare(tmp_path, deaths):
    """R48: the spare, which may have stepped in, leaves with the others and their code."""
    done, told = train(tmp_path, 4, deaths, microbatches=12, save=True, stop=[1, 6], spares=1)
    assert (done.returncode, told) == (75, {}), done
    assert "the state was saved as step" in done.stderr


def test_a_job_without_ulfm_is_refused(tmp_path):
    """On all ranks, before the first step, in one line that says what works."""
    words = [sys.executable, PROGRAM, tmp_path, json.dumps({"steps": 4})]
    done = launch(2, words, env={"DEATHS": ""})
    assert done.returncode == 2, done
    (line,) = [line for line in done.stderr.splitlines() if "mpidist: error" in line]
    assert "mpidist launch" in line
