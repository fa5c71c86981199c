"""The start checks compare the software of real ranks, and report differences on all ranks."""

import platform
import signal
import sys
from argparse import Namespace
from importlib.metadata import version
from types import SimpleNamespace

import pytest
from mpi4py import MPI

from mpidist import runtime
from mpidist.cli import bench, train
from mpidist.cli.start import start_ranks
from mpidist.errors import ConfigError, MpidistError
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


@pytest.mark.ranks(2)
@pytest.mark.parametrize("odd", [0, 1])
def test_a_command_whose_hook_cannot_be_imported_on_one_rank(comm, monkeypatch, capfd, odd):
    """Without the hook, an exception would leave the other ranks waiting; rank 0 has printed it."""
    monkeypatch.setattr(start_checks, "initialize", lambda _: SimpleNamespace(COMM_WORLD=comm))
    if comm.rank == odd:
        monkeypatch.delattr(runtime, "failure")
        monkeypatch.setitem(sys.modules, "mpidist.runtime.failure", None)
    with pytest.raises(ConfigError, match=rf"rank {odd} on .*import of mpidist.runtime.failure"):
        start_ranks({})
    assert ("ModuleNotFoundError" in capfd.readouterr().err) == (comm.rank == odd == 0)


def test_an_import_that_fails_before_mpi_starts(monkeypatch):
    """The error says that the other ranks wait in MPI_Init."""
    monkeypatch.setattr(signal, "pthread_sigmask", lambda *_: None)
    monkeypatch.setitem(sys.modules, "mpidist.training.job", None)
    with pytest.raises(MpidistError, match=r"^ModuleNotFoundError: .*training\.job") as error:
        train.run(Namespace(job="none.toml", settings=[]))
    assert error.value.awaited


@pytest.mark.ranks(1, 2)
def test_ranks_of_a_benchmark_check_the_file_for_its_rows(comm, tmp_path, monkeypatch):
    """A single rank under a launcher, too."""
    monkeypatch.setattr(bench, "start_ranks", lambda _: comm)
    monkeypatch.setattr(bench.step, "run", lambda *_: pytest.fail("the benchmark began"))
    with pytest.raises(ConfigError, match=r"--json .*rows: expected a file in a folder that"):
        bench.run(SimpleNamespace(what="step", json=str(tmp_path / "no" / "rows")))
