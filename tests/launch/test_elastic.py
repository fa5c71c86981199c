"""`md.elastic` when ranks are really killed by SIGKILL (R46, R48, R54, R77)."""

import math
import re
import sys
from pathlib import Path

import pytest
from tiers import exhaustive, tiers

from mpidist.launch.launchers import (
    find_launcher,
    launch,
    launch_environment,
    launcher_command,
    launcher_kind,
)
from mpidist.launch.processes import run

PROGRAM = str(Path(__file__).with_name("programs") / "elastic_loop.py")
STEPS = 12
OPEN_MPI = launcher_kind(find_launcher())[0] == "openmpi"
with_ulfm = pytest.mark.skipif(not OPEN_MPI, reason="no ULFM in this MPI")


def launch_with_ulfm(ranks, *words, **variables):
    launcher, *options = launcher_command(ranks)
    command = [launcher, "--with-ft", "ulfm", *options, sys.executable, *map(str, words)]
    return run(command, env=launch_environment(variables))


def elastic(ranks, mode, folder, *more, deaths=""):
    """Run the program with ULFM; return the outcome and the steps in each rank's log."""
    folder.mkdir(exist_ok=True)
    done = launch_with_ulfm(ranks, PROGRAM, mode, folder, *more, DEATHS=deaths)
    logs = {int(path.name): [*map(int, path.read_text().split())] for path in folder.iterdir()}
    return done, logs


def said(done, word="rank "):
    return sorted(line.strip() for line in done.stdout.splitlines() if line.startswith(word))


def check(found, living, dead):
    """All living ranks have the right state, and each of them did each step once at most."""
    done, logs = found
    done.check()
    assert said(done) == [f"rank {r} of {len(living)}, {dead} dead: right" for r in living], done
    for rank in living:
        assert logs[rank] == sorted(set(logs[rank])), (rank, logs[rank])
    steps = set().union(*(logs[rank] for rank in living))
    assert steps == set(range(STEPS))
    return done


CASES = {
    "auto 8 KB": (1000, "auto"),
    "auto 2 MB": (250_000, "auto"),
    "ring": (250_000, "ring"),
    "butterfly": (250_000, "butterfly"),
    "double_tree": (250_000, "double_tree"),
    "two_hop": (1000, "two_hop"),
    "single_copy": (250_000, "single_copy"),
    "native": (250_000, "native"),
    "native short": (100, "native"),
}


@with_ulfm
@pytest.mark.parametrize(
    "case",
    tiers(CASES, "auto 8 KB", "auto 2 MB", "butterfly", "two_hop", "single_copy", "native short"),
)
def test_a_rank_dies_in_each_algorithm(tmp_path, case):
    """R77: the tree, ring or barrier is made again from the living ranks; right bits."""
    done = check(elastic(4, "with", tmp_path, *CASES[case], deaths="2:6:in"), [0, 1, 3], 1)
    (line,) = [one for one in done.stderr.splitlines() if "died" in one]
    assert line.startswith("mpidist: rank 2 of 4 on ")
    assert "died at step 6; 3 ranks go on after" in line


@with_ulfm
@pytest.mark.parametrize(
    ("deaths", "living"),
    [
        pytest.param("0:0:before", [1, 2, 3], id="first step"),
        exhaustive("3:11:stuck", [0, 1, 2], id="last step"),
        exhaustive("1:3:before,2:3:before", [0, 3], id="two at once"),
        exhaustive("1:3:in,2:4:before,3:9:stuck", [0], id="all but one"),
        pytest.param("1:3:in,2:-1:resize", [0, 3], id="in the repair"),
        pytest.param("1:12:after", [0, 2, 3], id="at the end"),
    ],
)
def test_moments(tmp_path, deaths, living):
    """R48: no step is lost or done twice, whenever a rank dies."""
    check(elastic(4, "with", tmp_path, deaths=deaths), living, 4 - len(living))


@with_ulfm
def test_who_is_behind_gets_the_state_of_who_is_ahead(tmp_path):
    """R54: from peers, not from disk; the step that one rank has done is not repeated."""
    done, logs = elastic(4, "ahead", tmp_path)
    check((done, logs), [0, 2, 3], 1)
    assert [5 in logs[rank] for rank in (0, 2, 3)] == [True, False, False]


@with_ulfm
@pytest.mark.parametrize("deaths", [exhaustive("1:4:before"), "1:4:before,0:12:after"])
def test_a_function_that_begins_again(tmp_path, deaths):
    """`md.run_elastic`: arenas and collectives of the function are made anew by all ranks."""
    done, _ = elastic(4, "function", tmp_path, deaths=deaths)
    done.check()
    gone = [int(one.split(":")[0]) for one in deaths.split(",")]
    living = [rank for rank in range(4) if rank not in gone]
    wanted = f"of {len(living)}, {len(gone)} dead: right returned {len(living)}"
    assert said(done) == [f"rank {rank} {wanted}" for rank in living], done


@with_ulfm
def test_what_was_made_from_the_old_communicator_says_so(tmp_path):
    done, _ = elastic(3, "old", tmp_path, deaths="1:4:in")
    done.check()
    for name in ("comm", "plan", "arena", "free"):
        (line,) = said(done, f"{name} ")
        assert line.startswith(f"{name} ClosedError: "), line
        assert "a rank has died; group.comm is a new communicator" in line


@with_ulfm
def test_too_few_ranks_live(tmp_path):
    done, _ = elastic(3, "few", tmp_path, deaths="1:4:in")
    assert done.returncode == 70, done
    assert not done.timed_out
    assert done.stderr.count("only 2 ranks live, and min_ranks is 3") == 1, done.stderr


@with_ulfm
@pytest.mark.parametrize(
    "deaths",
    [exhaustive("", id="nobody died"), pytest.param("2:3:in", id="after a death")],
)
def test_an_exception_ends_the_job(tmp_path, deaths):
    """As without elasticity: a bad sample would kill rank after rank."""
    done, _ = elastic(4, "raises", tmp_path, deaths=deaths)
    assert done.returncode == 1, done
    assert done.stderr.count("ValueError: bad sample") == 1, done.stderr


@with_ulfm
def test_a_death_outside_a_step_ends_the_job(tmp_path):
    done, _ = elastic(3, "outside", tmp_path)
    assert done.returncode == 70, done
    assert "rank 1 of 3 on " in done.stderr
    assert "has died" in done.stderr


@with_ulfm
def test_a_death_in_the_making_of_the_group_ends_the_job(tmp_path):
    done, _ = elastic(3, "opening", tmp_path)
    assert done.returncode == 70, done
    assert "has died" in done.stderr
    assert "Traceback" not in done.stderr


@with_ulfm
@pytest.mark.parametrize(
    "n",
    [pytest.param(1, id="raise SystemExit(3)"), exhaustive(1000, id="sys.exit(3)")],
)
def test_the_exit_code_is_the_programs(tmp_path, n):
    done, _ = elastic(3, "code", tmp_path, n, deaths="1:4:in")
    assert done.returncode == 3, done
    assert said(done, "exit handler") == ["exit handler of before"] * 2


@with_ulfm
@pytest.mark.parametrize(
    ("code", "deaths"), [exhaustive(0, ""), (0, "1:4:in"), (7, ""), exhaustive(7, "1:4:in")]
)
def test_a_spare_leaves_with_the_others(tmp_path, code, deaths):
    """R48: the active ranks call `sys.exit`; the spare, which may have stepped in, exits too."""
    done, logs = elastic(3, "spare", tmp_path, code, deaths=deaths)
    assert done.returncode == code, done
    assert "Traceback" not in done.stderr
    assert logs[0][-1] == 8
    assert bool(logs[2]) == bool(deaths)


@with_ulfm
def test_an_elastic_loop_in_another(tmp_path):
    """Refused on all ranks, which end with the exit code of a wrong setting."""
    done, _ = elastic(2, "nested", tmp_path)
    assert done.returncode == 2, done
    assert done.stderr.count("this program is in an elastic loop already; use that one") == 1


@with_ulfm
def test_bad_settings_end_with_exit_code_2(tmp_path):
    """Also with ULFM, under which MPI_Abort would not end the other ranks."""
    done, _ = elastic(3, "many", tmp_path)
    assert done.returncode == 2, done
    assert done.stderr.count("min_ranks=9; expected 1 to 3") == 1


@with_ulfm
def test_a_step_that_is_not_done(tmp_path):
    done, _ = elastic(2, "forgotten", tmp_path)
    assert done.returncode == 1, done
    assert "step 0 has ended but is not done; use `with step:`" in done.stderr


@with_ulfm
def test_the_page(tmp_path):
    """The first block of docs/elastic.md as it stands; the others with what they take as given."""
    page = (Path(__file__).parents[2] / "docs" / "elastic.md").read_text(encoding="utf-8")
    first, second, third = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    given = """
state = {"weights": np.zeros(1000)}
def fill(x, rank, size, step):
    x[...] = sum(np.sin(np.arange(1000) * k + step) / 60 for k in range(rank, 60, size))
def update(state, x):
    state["weights"] -= 0.1 * x
"""
    served = """
state = {"weights": np.zeros(1000)}
def gradients(workers, step):
    x = np.zeros(1000)
    fill(x, workers.rank, workers.size, step)
    return {"weights": x * workers.size}
"""
    last = "\nif comm.rank == 0: print('and', *[f'{w:.6f}' for w in state['weights'][1:2]])\n"
    path = tmp_path / "elastic_loop.py"
    third = third.replace("steps(0, 1000", "steps(0, 50")  # each step needs both ranks in turn
    path.write_text(first + given + second + last + served + third + last)
    lines = launch_with_ulfm(2, path).check().stdout.splitlines()
    assert lines[0].startswith("2 ranks, weights[1] = ")
    assert lines[1].split()[1] == lines[0].split()[-1]
    wanted = -0.1 * sum(math.sin(k + step) / 60 for k in range(60) for step in range(50))
    assert lines[2].split()[1] == f"{wanted:.6f}"


@with_ulfm
@pytest.mark.parametrize(
    ("mode", "code", "words"),
    [
        ("early", 1, "md.elastic: the end of the steps before"),
        exhaustive("start", 1, "raised TypeError: 'str' object cannot be"),
        ("later", 1, "ValueError: bad sample"),
        exhaustive("exits", 1, "rank 1 left after"),
        ("lazy", 1, "a differs: rank 0: float64 (1000,), rank 1: nothing"),
    ],
)
def test_one_rank_does_something_else(tmp_path, mode, code, words):
    """It ends the job in one error on all ranks, and nobody waits for ever."""
    done, _ = elastic(4, mode, tmp_path)
    assert not done.timed_out, done
    assert done.returncode == code, done
    assert done.stderr.count(words) == 1, done.stderr


@with_ulfm
def test_a_communicator_with_a_topology(tmp_path):
    check(elastic(4, "ring", tmp_path), [0, 1, 3], 1)


@with_ulfm
@pytest.mark.exhaustive
def test_deaths_while_the_others_make_a_communicator(tmp_path):
    """The second shrink does not wait for the communicator that was broken off."""
    found = elastic(4, "duplicates", tmp_path, deaths="3:1:stuck,2:3:stuck")
    assert not found[0].timed_out, found[0]
    check(found, [0, 1], 2)


@with_ulfm
def test_what_a_death_broke_off_is_not_believed(tmp_path):
    """MPI's own allgathers may return success with incomplete data; on a group they raise."""
    check(elastic(5, "raw", tmp_path, deaths="3:1:stuck,2:4:stuck"), [0, 1, 4], 2)


@with_ulfm
def test_deaths_leave_nothing_open(tmp_path):
    """Shared memory, files and communicators of the ranks of before are gone in the next step."""
    found = elastic(
        5, "flat", tmp_path, *CASES["single_copy"], deaths="4:1:stuck,3:4:stuck,2:7:stuck"
    )
    done = check(found, [0, 1], 3)
    told = [[*map(int, re.findall(r"\d+", line))] for line in said(done, "at ")]
    _, shared, files, communicators = zip(*sorted(told), strict=True)
    assert set(shared) == {2}  # the board of the node, and the memory of its sums
    assert files[-1] <= files[0]
    assert set(communicators) == {3}  # all that a repair makes on one node


def test_refused_without_ulfm(tmp_path):
    """On all ranks, before any step, in one line, with what works."""
    done = launch(2, [sys.executable, PROGRAM, "with", str(tmp_path)])
    assert done.returncode == 2, done
    (line,) = [one for one in done.stderr.splitlines() if one.startswith("mpidist: error")]
    assert "mpidist launch" in line
    assert ("mpirun --with-ft ulfm" if OPEN_MPI else "needs Open MPI 5.0.11 or newer") in line


def test_one_rank_needs_no_ulfm(tmp_path):
    command = [sys.executable, PROGRAM]
    done = run([*command, "with", str(tmp_path)], env=launch_environment()).check()
    assert said(done) == ["rank 0 of 1, 0 dead: right"]
    done = run([*command, "raises", str(tmp_path)], env=launch_environment())
    assert done.returncode == 1
    assert done.stderr.count("ValueError: bad sample") == 1
    assert "excepthook" not in done.stderr
