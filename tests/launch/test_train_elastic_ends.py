"""`md.train(elastic=)` at its begin and end, and when nobody has the state: R46, R48, R77."""

import re

import pytest
from test_elastic import launch_with_ulfm, with_ulfm
from test_train_elastic import check, train


@with_ulfm
def test_a_spare_alone_does_not_begin_anew(tmp_path):
    """R48: all ranks that trained are dead, and their steps with them: one line, exit code 70."""
    done, told = train(tmp_path, 3, "0:6:done,1:6:done", microbatches=12, spares=1)
    assert (done.returncode, told) == (70, {}), done
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("mpidist: ")]
    assert "all 2 ranks that trained have died" in line
    assert not (tmp_path / "rank-2").exists()


@with_ulfm
def test_a_death_before_the_first_step_counts(tmp_path):
    """R119: in the summary, in the line, and for `on_resize`."""
    found = train(tmp_path, 4, "1:0:opening", microbatches=12, save=True, resize=True)
    check(tmp_path, found, [0, 2, 3], 1)
    done, told = found
    assert {facts[5] for facts in told.values()} == {"[(4, 3)]"}, done
    assert re.search(r"rank 1 of 4 on \S+ died at step 0; 3 ranks go on after", done.stderr), done


@with_ulfm
def test_a_death_after_the_last_meeting_does_not_hang(tmp_path):
    """The others would wait for it in MPI_Finalize for ever."""
    found = train(tmp_path, 3, "1:0:exit", microbatches=12)
    check(tmp_path, found, [0, 1, 2], 0)


@with_ulfm
@pytest.mark.exhaustive
def test_a_spare_leaves_when_the_others_have_caught_an_error(tmp_path):
    """R48: and end their program with exit code 0."""
    raises = [[1, 6, "done", 0]]
    done, _ = train(tmp_path, 4, microbatches=12, spares=1, raises=raises, catch=True)
    done.check()
    caught = sorted(line for line in done.stdout.splitlines() if " caught " in line)
    assert [line[:14] for line in caught] == [f"rank {rank} caught " for rank in range(3)]


@with_ulfm
def test_an_error_of_one_rank_ends_the_job_with_spares(tmp_path):
    """R46: it is no death: the spare does not step in."""
    done, told = train(tmp_path, 4, microbatches=12, spares=1, raises=[[1, 6, "computed", 0]])
    assert (done.returncode, told) == (1, {}), done
    assert done.stderr.count("RuntimeError: no memory on rank 1") == 1
    assert not (tmp_path / "rank-3").exists()
    assert done.seconds < 30


ALONE = """
import os, signal, time
import numpy as np
from mpi4py import MPI
import mpidist as md

comm = MPI.COMM_WORLD
md.allreduce(comm, np.zeros(3))
if comm.rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
if comm.rank == 0:
    time.sleep(1)
    raise md.RankFailure("rank 1 of 4 has died")
if comm.rank == 2:
    comm.Recv(np.zeros(1), 3)
time.sleep(60)
"""


@with_ulfm
def test_a_rank_that_alone_learns_of_a_death_ends_the_job(tmp_path):
    """Without a group nobody goes on, and others may wait in MPI for ever."""
    (tmp_path / "program.py").write_text(ALONE)
    done = launch_with_ulfm(4, tmp_path / "program.py")
    assert done.returncode not in (0, None), done
    assert done.stderr.count("rank 1 of 4 has died") == 1, done
    assert done.seconds < 30


@with_ulfm
def test_ranks_whose_run_is_handed_over_do_not_go_on_with_it(tmp_path):
    """The rank that knew the decision has died; two attempts must not write to one run."""
    (tmp_path / "attempt-0").mkdir()
    done, told = train(
        tmp_path, 4, "1:6:done", microbatches=12, save=True, decides=[1, 6],
        variables={"MPIDIST_ATTEMPT_FOLDER": str(tmp_path / "attempt-0")},
    )  # fmt: skip
    assert (done.returncode, told) == (75, {}), done
    for rank in (0, 2, 3):
        assert int((tmp_path / f"rank-{rank}").read_text().split()[-1]) in (6, 7)
