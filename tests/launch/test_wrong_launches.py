"""Real wrong launches: ranks as singletons, the launcher of another MPI, ranks that differ."""

import os
import sys

import pytest

from mpidist.launch.launchers import find_launcher, launch, launch_environment, launcher_kind
from mpidist.launch.processes import Started

PROGRAM = """
import os, sys
from mpidist.launch import start_checks, start_report
from mpidist.cli import main
from mpidist.errors import ConfigError
if "early" in sys.argv:  # as a command of ours does it
    try:
        start_checks.initialize(os.environ)
    except ConfigError as error:
        sys.exit(main._report(error))
from mpi4py import MPI
from mpidist.runtime.failure import install_hook
import mpidist as md
comm = MPI.COMM_WORLD
install_hook(comm)
facts = start_checks.versions_fingerprint()
if "old-numpy" in sys.argv and comm.rank == 1:
    facts.update(numpy="1.26.4", host="n2")
if "old-cpu" in sys.argv and comm.rank == 1:
    facts.update(CPU="x86_64 avx2", host="n2")
start_checks.check_launch(comm, os.environ, facts)
with md.Topology(comm) as topology:
    line = start_report.startup_line(comm, topology, os.environ, "model 2.3 MB")
if comm.rank == 0:
    print(line)
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    path = tmp_path_factory.mktemp("facts") / "program.py"
    path.write_text(PROGRAM)
    return str(path)


SRUN = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "{rank}"}
# PMI_FD is left out: with it Open MPI's library behaves the same, but mpi4py warns as well.
HYDRA = {"PMI_SIZE": "2", "PMI_RANK": "{rank}"}
MPIRUN = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "{rank}", "PMIX_RANK": "{rank}"}
#: What a launcher that is not understood tells, and how the program takes it.
KIND = launcher_kind(find_launcher())[0]
SINGLETONS = {
    "srun early": (SRUN, "early"),
    "srun late": (SRUN, "late"),
    "other": (HYDRA, "late") if KIND == "openmpi" else (MPIRUN, "early"),
}


def singletons(program, variables, word):
    """Start two processes of one rank each, as a launcher that is not understood would."""
    clean = launch_environment()
    jobs = [
        Started([sys.executable, program, word],
                env={**clean, **{key: value.format(rank=rank) for key, value in variables.items()}})
        for rank in range(2)
    ]  # fmt: skip
    return [job.finish(120) for job in jobs]


@pytest.fixture(scope="module")
def scenes(program):
    def play(name):
        return lambda _: singletons(program, *SINGLETONS[name])

    return {name: play(name) for name in SINGLETONS}


def told(runs):
    """What the first of them has said, the other being silent."""
    assert [run.returncode for run in runs] == [2, 2], runs
    assert [run.stdout for run in runs] == ["", ""]
    assert runs[1].stderr == "", "only the first process speaks"
    assert runs[0].stderr.startswith("mpidist: error: ")
    assert runs[0].stderr.count("\n") == 1
    return runs[0].stderr


@pytest.mark.parametrize("scene", ["srun early", "srun late"], indirect=True)
def test_n_singletons_under_srun(scene):
    """R97: srun without the right PMI; one line with the cure, exit code 2."""
    said = told(scene[0])
    assert "srun started 2 ranks" in said
    assert f"use srun --mpi={'pmix' if KIND == 'openmpi' else 'pmi2'}" in said


@pytest.mark.parametrize("scene", ["other"], indirect=True)
def test_library_of_the_other_mpi(scene, program):
    """The launcher's variables of the one MPI, the library of the other."""
    said = told(scene[0])
    if KIND == "openmpi":
        assert "MPICH's mpiexec started 2 ranks" in said
        assert "install mpidist[mpich]" in said
    else:
        assert "Open MPI's mpirun started 2 ranks" in said
        assert "install mpidist[openmpi]" in said
    # And with the true launcher of the other MPI, where a Python of it is named.
    other = "MPIDIST_TEST_MPICH" if KIND == "openmpi" else "MPIDIST_TEST_OPENMPI"
    if other in os.environ:
        launcher = find_launcher(os.environ[other])
        result = launch(2, [sys.executable, program, "early"], mpi=launcher, timeout=60)
        assert result.returncode == 2
        assert result.stderr.count("mpidist: error: ") == 1


def test_ranks_that_differ_are_named(program):
    """R90: all ranks stop with exit code 2, and one line names the host that differs."""
    result = launch(3, [sys.executable, program, "old-numpy"])
    assert result.returncode == 2
    assert result.stderr.count("the ranks do not run the same software: numpy ") == 1
    assert "but 1.26.4 on n2" in result.stderr
    assert "Traceback" not in result.stderr


def test_another_processor_is_only_a_note(program):
    result = launch(3, [sys.executable, program, "old-cpu"]).check()
    assert result.stderr.count("mpidist: note: ") == 1
    assert "CPU " in result.stderr


@pytest.mark.parametrize("word", ["early", "late"])
def test_startup_line(program, word):
    """R1, R95: hosts, ranks per host, devices, MPI, transport; no port or address was given."""
    result = launch(3, [sys.executable, program, word], env={"CUDA_VISIBLE_DEVICES": ""}).check()
    host = os.uname().nodename
    line = result.stdout.strip()
    assert line.startswith(f"mpidist 0.1.0: 3 ranks on 1 host ({host}), no GPU, ")
    assert line.endswith(", transport: shared memory, model 2.3 MB")
    assert result.stderr == ""
