"""Run tests at many numbers of ranks in one launch: ``mpiexec -n 9 python -m pytest tests/mpi``.

``@pytest.mark.ranks(1, 2, 3)`` runs a test once for each size; its fixture ``comm`` is a
communicator of the first n ranks of the world. The sizes of ``further=`` are cases that only
``make test-all`` and CI run; of a test with ``@pytest.mark.covering`` these are all but so many as
have each size and each value of its parameters once. The other ranks pass over the test, and sleep
until a test needs them. A failure on any rank fails the test on all its ranks; rank 0, which
is in each test, reports it once, and names the rank. If a test hangs, each of its ranks prints its
stack, and the whole job ends.
"""

import faulthandler
import functools
import importlib.util
import os
import re
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
from covering import mark_the_rest
from meeting import Meeting, sleep_until
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
#: For what ranks tell each other about the tests: no test sees it.
CONTROL = WORLD.Dup()
#: By size, the first ranks of the world; MPI.COMM_NULL on a rank that is not among them.
FIRST = {n: CONTROL.Split(0 if WORLD.rank < n else MPI.UNDEFINED) for n in range(1, WORLD.size + 1)}
#: Where these ranks meet before and after each test.
MEETING = {n: Meeting(first) for n, first in FIRST.items() if first != MPI.COMM_NULL}


@pytest.hookimpl(trylast=True)
def pytest_configure(config):
    # It would start and stop a clock for each test, which is two threads, and stop ours.
    config.pluginmanager.unregister(name="faulthandler")
    if WORLD.rank:
        # One report is enough. Stacks of a hang still come from every rank: they go to stderr.
        reporter = config.pluginmanager.get_plugin("terminalreporter")
        reporter._tw._file = open(os.devnull, "w")  # noqa: SIM115, PTH123


def pytest_generate_tests(metafunc):
    if "comm" in metafunc.fixturenames:
        marker = metafunc.definition.get_closest_marker("ranks")
        sizes = marker.args if marker else (WORLD.size,)
        further = marker.kwargs.get("further", ()) if marker else ()
        sizes = [*sizes, *(pytest.param(n, marks=pytest.mark.exhaustive) for n in further)]
        metafunc.parametrize("comm", sizes, indirect=True, ids=lambda n: f"n{n}")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(items):
    """Leave out what this rank has no part in; a skip is rank 0's, and what needs no ranks."""
    mark_the_rest(items)  # before ``-m`` chooses, and while all ranks have all tests
    yield

    def ranks(item):
        size = item.callspec.params.get("comm", 1) if hasattr(item, "callspec") else 1
        return size if size in FIRST else 1

    items[:] = [item for item in items if WORLD.rank < ranks(item)]


@functools.cache
def most_ranks(path):
    """The most ranks that a test of a file may need, as its text says; else all there are."""
    most = 1
    for sizes in re.findall(r"\branks\(([^)]*)", path.read_text(encoding="utf-8")):
        if re.search(r"[^\d\s,(]", sizes.replace("further=", "")):
            return WORLD.size
        most = max(most, *map(int, re.findall(r"\d+", sizes)))
    return most


class Unread(pytest.File):
    """A file without a test for this rank, which need not import it: most ranks run few tests."""

    def collect(self):
        return []


@pytest.hookimpl(tryfirst=True)
def pytest_pycollect_makemodule(module_path, parent):
    named = any("::" in word for word in parent.config.args)
    if not named and WORLD.rank >= most_ranks(module_path):
        return Unread.from_parent(parent, path=module_path)
    return None


_watched = -HANG_SECONDS


def watch():
    """Let a rank that does not come here again for HANG_SECONDS print its stack and end the job."""
    global _watched
    # Seldom, for each time starts a thread and waits for the end of another.
    if time.monotonic() - _watched > HANG_SECONDS / 10:
        _watched = time.monotonic()
        faulthandler.dump_traceback_later(HANG_SECONDS, exit=True, file=STDERR)


def ended():
    """Whether rank 0 will begin no other test: there was one failure with ``-x``, or Ctrl-C.

    It also lets MPI go on with what others want of this rank, and so is called while ranks meet.
    """
    return CONTROL.Iprobe(source=0)


@pytest.fixture
def comm(request):
    size = request.param
    if size not in FIRST:
        pytest.skip(f"needs {size} ranks, launched with {WORLD.size}")

    def look():
        watch()
        if ended():
            pytest.exit("rank 0 has ended the tests", 1)

    MEETING[size].meet(None, look)
    comm = FIRST[size].Dup()
    yield comm
    if not hasattr(request.node, "mpi_failed"):
        # Another fixture has failed here, or left the test out: those who run it hear so.
        tell(request.node, getattr(request.node, "mpi_setup", ("fail", "broken off before it")))
    if not request.node.mpi_failed:
        from mpidist.runtime.context import free

        free(comm)
        comm.Free()


@pytest.fixture
def own(comm):
    """A communicator that a test may break."""
    made = comm.Dup()
    yield made
    md.free(made)
    made.Free()


@pytest.fixture
def folder(comm):
    """A folder that all ranks see, made and removed by rank 0."""
    made = tempfile.mkdtemp(prefix="mpidist-test-") if comm.rank == 0 else None
    made = comm.bcast(made)
    yield Path(made)
    comm.Barrier()
    if comm.rank == 0:
        shutil.rmtree(made)


@pytest.fixture
def place(comm, folder):
    """A `tiers.Place` whose store holds step 1, left by a job that did not end well."""
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


def show(failure):
    """Return a function that shows a failure when others have waited for this rank for long."""
    late = time.monotonic() + HANG_SECONDS / 2

    def look():
        nonlocal late
        ended()
        if failure and time.monotonic() > late:
            late = float("inf")
            STDERR.write(f"rank {WORLD.rank} failed, the others still run:\n{failure[1]}\n")
            STDERR.flush()

    return look


def tell(item, mine):
    """Meet the other ranks behind a test, and hear what each has to tell: `mine`, or None."""
    size = item.callspec.params["comm"]
    # A rank that failed tells why before the job is ended, if others wait for it for ever.
    told = MEETING[size].meet(mine, show(mine))
    everyone = FIRST[size].allgather(mine) if told else [None] * size
    item.mpi_failed = any(kind == "fail" for kind, _ in filter(None, everyone))
    return everyone


def pytest_runtest_makereport(item, call):
    """Keep why a fixture has failed: the other ranks run the test meanwhile."""
    if call.when == "setup" and call.excinfo is not None:
        skipped = call.excinfo.errisinstance(pytest.skip.Exception)
        told = call.excinfo.value if skipped else call.excinfo.getrepr(style="native")
        item.mpi_setup = "skip" if skipped else "fail", str(told)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    if "comm" not in pyfuncitem.funcargs:
        return None
    names = pyfuncitem._fixtureinfo.argnames
    mine = None
    watch()
    try:
        pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names})
    except pytest.skip.Exception as skip:
        mine = ("skip", str(skip))
    except BaseException:
        mine = ("fail", traceback.format_exc())
    everyone = tell(pyfuncitem, mine)
    failures = {r: e[1] for r, e in enumerate(everyone) if e and e[0] == "fail"}
    if failures:
        first = min(failures)
        same = sorted(failures)
        pytest.fail(f"failed on ranks {same}; rank {first} says:\n{failures[first]}", pytrace=False)
    skips = [text for e in everyone if e for kind, text in [e] if kind == "skip"]
    if skips:
        pytest.skip(skips[0])
    return True


_status = 0


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session, exitstatus):
    """All ranks end with one status; those that have no part in the last tests wait for its end."""
    global _status
    faulthandler.cancel_dump_traceback_later()
    if WORLD.rank == 0:
        for rank in range(1, WORLD.size):
            CONTROL.send(None, rank)
    else:
        sleep_until(ended)
        CONTROL.recv(source=0)
    # Other ranks may have found no test for themselves.
    mine = 0 if WORLD.rank and exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED else exitstatus
    session.exitstatus = _status = CONTROL.allreduce(int(mine), MPI.MAX)


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config):
    """End a failed session at once: what its tests left behind may never be finalised."""
    sys.stdout.flush()
    sys.stderr.flush()
    if _status:
        WORLD.Barrier()
        os._exit(_status)
