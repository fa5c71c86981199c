"""One Slurm cluster and one network for all tests here, and the two MPIs to run on them."""

from pathlib import Path

import pytest
from interpreters import python_of

from mpidist.testing import shaped_network, slurm_cluster
from mpidist.testing.network import unavailable as no_network
from mpidist.testing.slurm import unavailable as no_slurm


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


@pytest.fixture
def programs():
    return Path(__file__).parent / "programs"
