"""`mpidist.launch.launchers`: a launch ends, returns all its output, leaves nothing behind."""

import os
import signal
import socket
import subprocess
import sys
import uuid
from pathlib import Path

import pytest
from python_path import python_path
from until import wait_until

from mpidist.errors import ConfigError
from mpidist.launch.launchers import (
    find_launcher,
    launch,
    launcher_command,
    launcher_kind,
    start,
)
from mpidist.launch.processes import marked, mpi_segments

WAITING = """
import time
from mpi4py import MPI
MPI.COMM_WORLD.Barrier()
print("here", flush=True)
time.sleep(100)
"""


def test_ranks_see_each_other(monkeypatch):
    monkeypatch.delenv("OMPI_MCA_btl", raising=False)  # these tests set it for all launches
    code = """import os; from mpi4py import MPI
assert os.environ["OMPI_MCA_btl"] == "^ofi"
print(MPI.COMM_WORLD.allreduce(MPI.COMM_WORLD.rank))"""
    done = launch(3, [sys.executable, "-c", code]).check()
    # Not split(): lines of different ranks may run into each other.
    assert done.stdout.count("3") == 3


def test_exit_code_and_both_outputs():
    code = "import sys; print('out'); print('err', file=sys.stderr); sys.exit(5)"
    done = launch(1, [sys.executable, "-c", code])
    assert (done.returncode, done.timed_out) == (5, False)
    assert "out" in done.stdout
    assert "err" in done.stderr
    with pytest.raises(RuntimeError, match="exited with 5"):
        done.check()


def test_deadline_leaves_no_process_and_no_shared_memory():
    job = start(3, [sys.executable, "-c", WAITING])
    wait_until(lambda: job.output().count("here") == 3)
    segments = mpi_segments(marked(job.mark))
    done = job.finish(0.5)
    assert (done.timed_out, done.returncode) == (True, 124)
    assert marked(job.mark) == []
    assert [s for s in segments if s.exists()] == []


def test_ranks_of_a_killed_launcher_are_ended():
    job = start(2, [sys.executable, "-c", WAITING])
    wait_until(lambda: job.output().count("here") == 2)
    job.process.send_signal(signal.SIGKILL)
    assert job.finish(10).returncode == -signal.SIGKILL
    assert marked(job.mark) == []


def test_a_killed_launcher_leaves_no_session(tmp_path):
    job = start(1, [sys.executable, "-c", WAITING], env={"TMPDIR": str(tmp_path)})
    wait_until(lambda: job.output().count("here") == 1)
    job.process.send_signal(signal.SIGKILL)
    assert job.finish(10).returncode == -signal.SIGKILL
    assert list(tmp_path.glob(f"*.{job.pid}")) == []


def test_a_session_left_by_the_same_number_does_not_matter(tmp_path):
    """Open MPI's launcher refuses to start where a killed one of its number has left its files."""
    last = int(Path("/proc/loadavg").read_text().split()[-1])
    host = socket.gethostname().partition(".")[0]
    for pid in range(last, last + 3000):
        (tmp_path / f"ompi.{pid}").mkdir()
        (tmp_path / f"ompi.{pid}" / f"pmix.{host}.tool.{pid}").touch()
    done = launch(1, ["true"], env={"TMPDIR": str(tmp_path)}).check()
    assert done.stderr == ""


SCENE = """
import time
import pytest
from mpidist.launch.launchers import launch

@pytest.fixture(scope="module")
def scenes():
    return {"waits": lambda folder: launch(2, ["sleep", "100"], timeout=90)}

@pytest.mark.parametrize("scene", ["waits"], indirect=True)
def test_it(scene):
    pass
"""


def test_a_pytest_that_is_ended_takes_its_scenes_along(tmp_path):
    """Threads play them; nobody may be left who waits for ranks that wait for nobody."""
    (tmp_path / "test_scene.py").write_text(SCENE)
    mark = uuid.uuid4().hex
    env = {**os.environ, "PYTHONPATH": python_path(), "SCENE_MARK": mark}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "conftest", "-p", "no:cacheprovider"]
    with subprocess.Popen([*command, tmp_path], env=env, stdout=subprocess.DEVNULL) as child:
        wait_until(lambda: len(marked(mark, "SCENE_MARK")) >= 4)  # itself, the launcher, two ranks
        child.send_signal(signal.SIGTERM)
        assert child.wait(30) == pytest.ExitCode.INTERRUPTED
    assert not marked(mark, "SCENE_MARK")


def test_environment_is_added_and_the_launcher_named():
    code = "import os; print(os.environ['MINE'], 'PATH' in os.environ, os.environ['OMPI_MCA_btl'])"
    asked = {"MINE": "7", "OMPI_MCA_btl": "self"}
    done = launch(1, [sys.executable, "-c", code], env=asked, mpi=find_launcher()).check()
    assert done.stdout.split() == ["7", "True", "self"]
    assert done.args[0] == str(find_launcher())
    assert launcher_command(2)[-2:] == ["-n", "2"]


@pytest.mark.parametrize("asked", [False, True])
def test_byte_code_is_written_unless_that_is_asked_for(monkeypatch, asked):
    """Issue 11: 0.35 s of every start of a rank go into compiling what was compiled before."""
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    env = {"PYTHONDONTWRITEBYTECODE": "1"} if asked else {}
    code = "import sys; print(sys.dont_write_bytecode)"
    assert launch(1, [sys.executable, "-c", code], env=env).check().stdout.split() == [str(asked)]


def test_more_ranks_than_cores_give_way_while_they_wait():
    """Else who waits keeps a core from the rank it waits for: tests take many times as long."""
    code = "import os; print(*(k for k in os.environ if 'YIELD' in k.upper()))"
    cores = len(os.sched_getaffinity(0))
    done = launch(cores + 1, [sys.executable, "-c", code]).check()
    wanted = {
        "openmpi": ["OMPI_MCA_mpi_yield_when_idle"],
        "mpich": ["MPIR_CVAR_ENABLE_HEAVY_YIELD", "MPIR_CVAR_POLLS_BEFORE_YIELD"],
    }[launcher_kind(find_launcher())[0]]
    for name in wanted:
        assert done.stdout.count(name) == cores + 1


def test_what_is_no_launcher_is_named():
    with pytest.raises(
        ConfigError, match=r"/bin/true --version says .* expected Open MPI or MPICH"
    ):
        launcher_kind("/bin/true")
