"""Options for all tests: which real data to use, and whether a skipped test counts as a failure."""

import contextlib
import gc
import os
import re
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from mpidist.launch.claims import claimed_size
from mpidist.launch.processes import kill_all

#: A skip whose reason starts with one of these is expected everywhere, also in CI.
EXPECTED_SKIPS = (
    "no GPU", "no PyTorch here", "no JAX here", "no parallel HDF5 here", "no hdf5plugin here",
    "no ULFM in this MPI", "this MPI has ULFM",  # each runs on the other MPI
)  # fmt: skip

#: Scenes that are played at a time: each waits half of its time for a launcher or a batch system.
AT_ONCE = 3

# No deadline per example nor for drawing them, for other work on the machine is no failure of ours;
# and the same examples in each run, so that a failure belongs to the change that it is seen with.
settings.register_profile(
    "steady", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("steady")

# What this machine has measured before must not decide what is tested; children inherit it.
os.environ["MPIDIST_SELECTION_CACHE"] = "0"
# What `mpidist launch --elastic` has tried is kept between runs, but not in the home of the user.
os.environ.setdefault("XDG_CACHE_HOME", str(Path(__file__).parents[1] / ".pytest_cache"))

# UCX, which the wheels of both MPIs load, changes the functions of the C library that give memory
# back, and waits 40 ms for that at each start. Only memory that a network card reads needs it.
os.environ.setdefault("UCX_MEM_EVENTS", "n")

# Open MPI's transport over libfabric sleeps for a second where it is not wanted, that is, in each
# MPI_Init on one machine.
os.environ.setdefault("OMPI_MCA_btl", "^ofi")

# Without byte code each of the thousand processes that are started here would compile everything
# again: 0.2 s of CPU for a small program, 0.35 s for `mpidist train`.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# And with this the words of one line are several writes, between which other ranks write theirs.
os.environ.pop("PYTHONUNBUFFERED", None)


def pytest_configure():
    """Ended by SIGTERM, as by Ctrl-C: what threads of ours have started ends as well."""

    def stop(*_):
        kill_all()
        raise KeyboardInterrupt

    # A rank's signals are its launcher's, and handlers belong to the main thread.
    if claimed_size(os.environ) is None:
        signal.signal(signal.SIGTERM, stop)
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a job behind `&` ignores it


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Nothing of what is collected goes before the end: no search for garbage among all of it.

    That is a third of the time of the collection, in each worker and rank.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def unmapped_segments(since):
    """Files of shared memory that an MPI library has made since then, and no other process maps."""
    mapped = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        if maps.parent.name == str(os.getpid()):
            continue  # Open MPI leaves the file of a process without a launcher behind
        with contextlib.suppress(OSError):
            mapped |= set(re.findall(r"/dev/shm/\S+", maps.read_text(errors="replace")))
    files = [*Path("/dev/shm").glob("sm_segment.*"), *Path("/dev/shm").glob("mpich_shm_*")]
    with contextlib.suppress(FileNotFoundError):
        return {file for file in files if file.stat().st_mtime > since and str(file) not in mapped}
    return set()


def pytest_sessionstart(session):
    session.config.began = time.time()


def pytest_sessionfinish(session):
    """Remove what killed processes without a launcher leave in /dev/shm: 16 MiB of a name each."""
    if hasattr(session.config, "workerinput") or claimed_size(os.environ) is not None:
        return
    left = unmapped_segments(session.config.began)
    if left:
        time.sleep(1)  # who has just made one has mapped it by now
        for file in left & unmapped_segments(session.config.began):
            file.unlink(missing_ok=True)


def pytest_addoption(parser):
    parser.addoption(
        "--fail-on-skip", action="store_true", help="an unexpected skip is a failure (CI)"
    )


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    outcome = yield
    report = outcome.get_result()
    expected = hasattr(report, "wasxfail")
    if report.skipped and not expected and item.config.getoption("--fail-on-skip"):
        reason = str(call.excinfo.value) if call.excinfo else str(report.longrepr)
        if not any(expected in reason for expected in EXPECTED_SKIPS):
            report.outcome = "failed"
            report.longrepr = f"unexpected skip: {reason}"


def shared_data() -> Path | None:
    """The folder with real data sets beside the clone, or None."""
    root = Path(os.environ.get("MPIDIST_TEST_DATA", Path(__file__).parents[2] / "shared" / "data"))
    return root if root.is_dir() else None


@pytest.fixture(scope="session")
def data_dir():
    root = shared_data()
    if root is None:
        pytest.skip("no real data: set MPIDIST_TEST_DATA to a folder with mnist10k/")
    return root


@pytest.fixture(scope="module")
def played(request, scenes, tmp_path_factory):
    """What becomes of the scenes that the tests of this module ask for, side by side."""
    items = [item for item in request.session.items if item.module is request.module]
    params = [item.callspec.params for item in items if hasattr(item, "callspec")]
    wanted = {given["scene"] for given in params if "scene" in given}
    # In the order of `scenes`: the longest may stand first there.
    folders = {name: tmp_path_factory.mktemp("scene") for name in scenes if name in wanted}
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return {
            name: (pool.submit(scenes[name], folder), folder) for name, folder in folders.items()
        }


@pytest.fixture
def scene(request, played):
    """What came of one of the module's `scenes`, which are functions of a folder; and that folder.

    Named by ``parametrize("scene", [name], indirect=True)``. What a scene raises is raised in its
    test.
    """
    future, folder = played[request.param]
    return future.result(), folder
