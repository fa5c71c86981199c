"""The real Lmod loads the modulefile."""

import os
import subprocess
from pathlib import Path

import pytest
from interpreters import ROOT, job_environment

INIT = next(
    (p for p in map(Path, ("/usr/share/lmod/lmod/init/bash", "/etc/profile.d/lmod.sh"))
     if p.exists()), None,
)  # fmt: skip
pytestmark = [
    pytest.mark.slurm,
    pytest.mark.skipif(INIT is None, reason="no Lmod: apt-get install lmod"),
]


def shell(commands, **variables):
    """Run bash with Lmod and the module path set; return the process."""
    clean = {"HOME": os.environ.get("HOME", "/"), "PATH": "/usr/bin:/bin", "USER": "user"}
    script = f". {INIT}; module use {ROOT}/jobs/modulefiles; {commands}"
    return subprocess.run(
        ["bash", "-c", script], env={**clean, **variables},
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip


def prefix_of(python):
    return str(python.parent.parent)


def test_load_gives_the_command(openmpi):
    """R91: `module load mpidist`, then `mpidist --version` and `--help`, with no activation."""
    prefix = prefix_of(openmpi)
    done = shell(
        "module load mpidist && command -v mpidist && mpidist --version && mpidist --help",
        MPIDIST_PREFIX=prefix,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == f"{prefix}/bin/mpidist"
    assert "train" in done.stdout


@pytest.mark.parametrize(
    ("name", "default", "own"),
    [("OMP_NUM_THREADS", "1", "6"), ("SLURM_PMIX_FENCE", "ring", "tree")],
)
def test_variables_have_defaults_and_come_back(openmpi, name, default, own):
    """R91: one thread for each rank, and whole barriers at the start of Open MPI's ranks."""
    commands = f"module load mpidist; echo ${name}; module unload mpidist; "
    commands += f"echo ${{{name}-unset}}; command -v mpidist || echo no command"
    prefix = prefix_of(openmpi)
    done = shell(commands, MPIDIST_PREFIX=prefix)
    assert done.stdout.split("\n")[:3] == [default, "unset", "no command"], done.stderr
    done = shell(commands, MPIDIST_PREFIX=prefix, **{name: own})
    assert done.stdout.split("\n")[:2] == [own, own], done.stderr


def test_help_and_family(openmpi):
    commands = "module help mpidist; module load mpidist; echo family $LMOD_FAMILY_MPIDIST"
    done = shell(commands, MPIDIST_PREFIX=prefix_of(openmpi))
    text = done.stdout + done.stderr
    assert "mpirun -n 8 mpidist train JOB.toml" in text
    assert "family mpidist" in text


def test_without_an_mpi_it_asks_for_one(tmp_path):
    """A prefix without an mpiexec of its own needs the site's MPI module first."""
    done = shell("module load mpidist && echo loaded", MPIDIST_PREFIX=str(tmp_path))
    assert "loaded" not in done.stdout
    assert "At least" in done.stderr
    assert "openmpi" in done.stderr


def test_site_line_of_a_batch_script(cluster, openmpi, tmp_path):
    """R91: the commented line of the batch scripts is all that a site with the module needs."""
    text = (ROOT / "jobs" / "allreduce.sbatch").read_text()
    line = "# module load mpidist"
    assert line in text
    script = tmp_path / "allreduce.sbatch"
    script.write_text(
        text.replace(line, f". {INIT}; module use {ROOT}/jobs/modulefiles\n{line[2:]}")
    )
    env = {
        **job_environment(openmpi),
        "PATH": "/usr/bin:/bin",
        "MPIDIST_PREFIX": prefix_of(openmpi),
    }
    job = cluster.sbatch(
        *(script, ROOT / "jobs" / "digits.toml", "--set", "steps=2", "--set", "optimizer.lr=0.02"),
        options=["--ntasks-per-node=1"], env=env, cwd=tmp_path, timeout=120,
    )  # fmt: skip
    assert (job.state, job.exit_code) == ("COMPLETED", 0), job.output
    assert "4 ranks on 4 hosts" in job.output
