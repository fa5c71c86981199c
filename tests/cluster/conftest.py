"""Fixtures: one Slurm cluster and one network for all tests here, and the two MPI libraries."""

import json
from pathlib import Path

import pytest
from interpreters import python_of
from onebox.network import shaped_network
from onebox.network import unavailable as no_network
from onebox.slurm import slurm_cluster
from onebox.slurm import unavailable as no_slurm
from same_bits import DIGITS, SETTINGS

from mpidist.launch.launchers import find_launcher, launch

#: What measures a network, or the time after a loss. Two of these never go side by side.
MEASURED = ("test_network", "test_node_lost", "test_hosts_lost", "test_elastic", "test_simulator")
#: Those that may take a number of seconds: all others have ended when they begin (`make test`).
TIMED = ("test_a_node_is_lost", "test_a_host_of_a_command_is_lost")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
    """Of those that share a cluster, the last ones take a node away from all jobs.

    Right before them is the test of the job that has been asleep meanwhile. What is measured ends.
    """

    def place(item):
        stem = item.path.stem
        if stem in MEASURED:
            return 3 + (item.name in TIMED)
        return 2 if stem == "test_recovery" else int(item.name.startswith("test_time_limit"))

    items.sort(key=place)


@pytest.fixture(scope="session")
def openmpi():
    return python_of("openmpi")


@pytest.fixture(scope="session")
def mpich():
    return python_of("mpich")


@pytest.fixture(scope="session")
def cluster(tmp_path_factory):
    if reason := no_slurm():
        pytest.skip(f"no Slurm cluster: {reason}")
    with slurm_cluster(nodes=4, directory=tmp_path_factory.mktemp("slurm"), gpus=2) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def undisturbed(openmpi, tmp_path_factory):
    """Summary of the run of `same_bits` that nobody disturbs, on one rank, without Slurm."""
    folder = tmp_path_factory.mktemp("undisturbed")
    words = [openmpi, "-m", "mpidist", "train", DIGITS, "--set", "out=run", *SETTINGS]
    launch(1, words, cwd=folder, mpi=find_launcher(openmpi), timeout=200).check()
    return json.loads((folder / "run" / "summary.json").read_text())


@pytest.fixture(scope="session")
def net():
    if reason := no_network():
        pytest.skip(f"no shaped network: {reason}")
    with shaped_network(hosts=4, rate="1gbit") as net:
        yield net


@pytest.fixture
def slow_net():
    """For two ranks on each host: more ranks than cores, so a link that they can fill."""
    if reason := no_network():
        pytest.skip(f"no shaped network: {reason}")
    with shaped_network(hosts=4, rate="200mbit") as net:
        yield net


@pytest.fixture(scope="session")
def programs():
    return Path(__file__).parent / "programs"
