"""Find the Python executables with Open MPI and with MPICH on which the cluster tests run.

The variables ``MPIDIST_TEST_OPENMPI`` and ``MPIDIST_TEST_MPICH`` each name a Python executable
whose environment has mpidist and that MPI library. If a variable is not set, the running
interpreter is used for the MPI library that it has.
"""

import os
import sys
from pathlib import Path

import pytest

from mpidist.launch.launchers import find_launcher, launch_environment, launcher_kind

ROOT = Path(__file__).parents[2]


def python_of(kind):
    """The Python executable for "openmpi" or "mpich", or a skip that says what to set."""
    variable = f"MPIDIST_TEST_{kind.upper()}"
    # Not resolved: following a virtual environment's symlink leaves the environment.
    python = Path(os.environ.get(variable, sys.executable)).absolute()
    found = launcher_kind(find_launcher(python))[0]
    if found != kind:
        pytest.skip(f"{python} has {found}: set {variable} to a Python with {kind}")
    return python


def job_environment(python):
    """What a user's shell has after activating the environment of `python`."""
    env = launch_environment(mpi=find_launcher(python))
    return {
        **{k: v for k, v in env.items() if k.startswith("OMPI_")},
        "PATH": f"{python.parent}:{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }
