"""Run tests at many numbers of ranks in one launch: ``mpiexec -n 9 python -m pytest tests/mpi``.

``@pytest.mark.ranks(1, 2, 3)`` runs a test once for each size; its fixture ``comm`` is a split of
the world to the first n ranks. Ranks that are not in ``comm`` wait. A failure on any rank fails the
test on all ranks; rank 0 reports it once, and names the rank. If a test hangs, each rank prints its
stack, and the whole job ends.
"""

import faulthandler
import importlib.util
import os
import shutil
import sys
import tempfile
import time
import traceback
from pathlib import Path

import fake_torch
import numpy as np
import pytest
import tiers
from mpi4py import MPI

import mpidist as md
from mpidist.collectives import selection
from mpidist.collectives.engines import executor, native
from mpidist.runtime import polling

WORLD = MPI.COMM_WORLD
#: The real stderr, under ``--capture=sys``: stacks of a hang must not end in a captured file.
STDERR = os.fdopen(os.dup(2), "w")
#: Ranks look around sooner than in earnest: most of what is tested here is what they find then.
polling.PATIENCE = 0.05
#: What cannot be sent any more is given up sooner, too.
executor.GRACE = native.GRACE = 0.3
HANG_SECONDS = float(os.environ.get("MPIDIST_TEST_HANG", "180"))


@pytest.hookimpl(trylast=True)
def pytest_configure(config):
    if WORLD.rank:
        # One report is enough. Stacks of a hang still come from every rank: they go to stderr.
        reporter = config.pluginmanager.get_plugin("terminalreporter")
        reporter._tw._file = open(os.devnull, "w")  # noqa: SIM115, PTH123


def pytest_generate_tests(metafunc):
    if "comm" in metafunc.fixturenames:
        marker = metafunc.definition.get_closest_marker("ranks")
        sizes = marker.args if marker else (WORLD.size,)
        metafunc.parametrize("comm", sizes, indirect=True, ids=lambda n: f"n{n}")


@pytest.fixture
def comm(request):
    size = request.param
    if size > WORLD.size:
        pytest.skip(f"needs {size} ranks, launched with {WORLD.size}")
    comm = WORLD.Split(0 if WORLD.rank < size else MPI.UNDEFINED)
    yield comm
    if comm != MPI.COMM_NULL and not getattr(request.node, "mpi_failed", False):
        from mpidist.runtime.context import free

        free(comm)
        comm.Free()


@pytest.fixture
def own(comm):
    """A communicator that a test may break."""
    if comm == MPI.COMM_NULL:
        yield None
        return
    made = comm.Dup()
    yield made
    md.free(made)
    made.Free()


@pytest.fixture
def folder(comm):
    """A folder that all ranks see, made and removed by rank 0."""
    if comm == MPI.COMM_NULL:
        yield None
        return
    made = tempfile.mkdtemp(prefix="mpidist-test-") if comm.rank == 0 else None
    made = comm.bcast(made)
    yield Path(made)
    comm.Barrier()
    if comm.rank == 0:
        shutil.rmtree(made)


@pytest.fixture
def place(comm, folder):
    """A `tiers.Place` whose store holds step 1, left by a job that did not end well."""
    if not comm:
        return None
    place = tiers.Place(comm, folder)
    store = place.store()
    store.save(1, tiers.state_of(comm, 1))
    store.wait()
    store.__exit__(KeyError, None, None)
    comm.Barrier()
    return place


@pytest.fixture(params=["numpy", "cupy"])
def xp(request):
    """The array namespace: every test that takes it runs on NumPy, and on CuPy where a GPU is."""
    if request.param == "numpy":
        return np
    try:
        import cupy

        cupy.cuda.runtime.getDeviceCount()
    except Exception as error:
        pytest.skip(f"no GPU: {type(error).__name__}")
    return cupy


@pytest.fixture(params=["stand-in", "torch"])
def torch(request, monkeypatch):
    """A stand-in for PyTorch, and PyTorch itself where it is installed."""
    if request.param == "stand-in":
        return fake_torch.install(monkeypatch)
    if importlib.util.find_spec("torch") is None:
        pytest.skip("no PyTorch here, which is no dependency: pip install torch")
    import torch

    return torch


@pytest.fixture(autouse=True)
def brief_measuring(request, monkeypatch):
    """ "auto" makes one round of one call: only test_selection asks which algorithm is fast."""
    if request.module.__name__ != "test_selection":
        for name, least in [("BUDGET", 0.0), ("LEAST_ROUNDS", 1), ("TIMING", 0.0)]:
            monkeypatch.setattr(selection, name, least)


def wait_asleep(failure):
    """Wait for all ranks without a core: those outside a test wait as long as it runs.

    A rank that failed while others still wait for it shows its traceback before the job is ended.
    """
    request, shown = WORLD.Ibarrier(), time.monotonic() + HANG_SECONDS / 2
    while not request.Test():
        time.sleep(0.001)
        if failure and time.monotonic() > shown:
            STDERR.write(f"rank {WORLD.rank} failed, the others still run:\n{failure[1]}\n")
            STDERR.flush()
            failure = None


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    comm = pyfuncitem.funcargs.get("comm")
    if comm is None:
        return None
    names = pyfuncitem._fixtureinfo.argnames
    mine = None
    faulthandler.dump_traceback_later(HANG_SECONDS, exit=True, file=STDERR)
    try:
        if comm != MPI.COMM_NULL:
            pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names})
    except pytest.skip.Exception as skip:
        mine = ("skip", str(skip))
    except BaseException:
        mine = ("fail", traceback.format_exc())
    wait_asleep(mine)
    everyone = WORLD.allgather(mine)
    faulthandler.cancel_dump_traceback_later()
    failures = {
        r: text for r, (kind, text) in enumerate(e or ("", "") for e in everyone) if kind == "fail"
    }
    if failures:
        pyfuncitem.mpi_failed = True
        first = min(failures)
        same = sorted(failures)
        pytest.fail(f"failed on ranks {same}; rank {first} says:\n{failures[first]}", pytrace=False)
    skips = [text for e in everyone if e for kind, text in [e] if kind == "skip"]
    if skips:
        pytest.skip(skips[0])
    return True


_status = 0


def pytest_sessionfinish(session, exitstatus):
    global _status
    _status = int(exitstatus)


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config):
    """End a failed session at once: what its tests left behind may never be finalised."""
    sys.stdout.flush()
    sys.stderr.flush()
    if _status:
        WORLD.Barrier()
        os._exit(_status)
