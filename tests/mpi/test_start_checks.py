"""The start checks compare the software of real ranks, and report differences on all ranks."""

import platform
from importlib.metadata import version

import pytest
from mpi4py import MPI

from mpidist.errors import ConfigError
from mpidist.launch import claims, start_checks


@pytest.mark.ranks(1)
def test_fingerprint_of_this_process(comm):
    """R90: every fact is found, and a process agrees with itself."""
    facts = start_checks.versions_fingerprint()
    for key in ("host", "mpidist", "Python", "numpy", "mpi4py", "MPI", "h5py", "CPU"):
        assert facts[key]
        assert facts[key] != "none", key
    for package in ("mpidist", "numpy", "mpi4py", "h5py"):
        assert facts[package] == version(package)
    assert facts["Python"] == ".".join(platform.python_version_tuple()[:2])
    assert facts["MPI"] == claims.mpi_name(MPI.Get_library_version())
    assert facts["CPU"].split()[0] == platform.machine()
    assert start_checks.compare([facts, facts]) is None


@pytest.mark.ranks(1, 2, 5)
def test_check_launch_passes_and_fails_on_all_ranks(comm):
    """R90: equal ranks pass; one that differs stops all of them with the same line."""
    start_checks.check_launch(comm, {})
    if comm.size == 1:
        return
    facts = start_checks.versions_fingerprint()
    if comm.rank == comm.size - 1:
        facts.update(h5py="0.1", host="odd")
    with pytest.raises(ConfigError, match=r"but 0\.1 on odd") as error:
        start_checks.check_launch(comm, {}, facts)
    assert len(set(comm.allgather(str(error.value)))) == 1
