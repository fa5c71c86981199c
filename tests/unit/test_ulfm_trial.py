"""Jobs that could not survive a death are refused before they begin: R48."""

import re
import stat

import pytest

from mpidist.elasticity.ulfm_trial import check_survival
from mpidist.errors import ConfigError
from mpidist.launch.environment import why_not_elastic


@pytest.fixture
def launcher(tmp_path, monkeypatch):
    """Return a function that makes a launcher which prints lines and counts its runs."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    runs = tmp_path / "runs"
    runs.touch()

    def make(*lines):
        path = tmp_path / "launcher"
        said = "".join(f"echo '{line}'\n" for line in lines)
        path.write_text(f"#!/bin/sh\necho run >>{runs}\necho 'no ft here' >&2\n{said}")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        return lambda version="5": check_survival([str(path), "-n", "2"], version)

    make.runs = lambda: len(runs.read_text().split())
    return make


def test_a_success_is_remembered_for_this_launcher_and_version(launcher):
    check = launcher("both ranks have begun", "one rank goes on")
    check()
    check()
    assert launcher.runs() == 1
    check("6")
    assert launcher.runs() == 2


def test_a_rank_that_does_not_go_on(launcher):
    check = launcher("both ranks have begun")
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"the other one did not go on .*printed: no ft here"):
            check()
    assert launcher.runs() == 2


def test_a_trial_that_does_not_begin_says_nothing(launcher):
    check = launcher("all slots are in use")
    check()
    check()
    assert launcher.runs() == 2


ULFM = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_MCA_mpi_ft_enable": "1"}
OPEN_MPI = "Open MPI v5.0.11, package: Open MPI x@y Distribution, ident: 5.0.11"


@pytest.mark.parametrize(
    ("library", "environ", "wanted"),
    [
        (OPEN_MPI, ULFM, "$"),
        (OPEN_MPI.replace("5.0.11", "5.1.0"), ULFM, "$"),
        (OPEN_MPI, {"OMPI_COMM_WORLD_SIZE": "2"}, "md.elastic: start the job with mpirun --w"),
        (OPEN_MPI.replace("5.0.11", "5.0.9"), ULFM, ".*5.0.11 or newer, and Open MPI v5.0.9 is"),
        ("MPICH Version: 4.3.0", ULFM, ".*5.0.11 or newer, and MPICH Version: 4.3.0 is not"),
        (OPEN_MPI, {"OMPI_MCA_mpi_ft_enable": "1", "SLURM_STEP_NUM_TASKS": "2"}, ".*srun ends"),
    ],
)  # fmt: skip
def test_who_cannot_survive_a_death(library, environ, wanted):
    text = why_not_elastic(library, environ)
    assert re.match(wanted, text), text
    assert not text or "mpidist launch" in text
