"""`mpidist launch` with a launcher that starts no ranks, is stopped, or waits for killed ranks."""

import json
import os
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

import pytest
from again import best_of_three
from supervised_jobs import children, finish, run, supervised
from until import holds_within, wait_until

from mpidist.launch import heartbeat
from mpidist.launch.launchers import find_launcher, launcher_kind
from mpidist.launch.process_table import stat_of
from mpidist.launch.processes import marked, mpi_segments

#: It tells, takes a step every 50 ms, and has its ranks hear SIGTERM without leaving.
STEPS = """
import os, sys, time
from mpi4py import MPI
import mpidist as md
comm, last = MPI.COMM_WORLD, int(sys.argv[1])
with md.guard(comm) as run:
    for step in range(last if os.environ["MPIDIST_ATTEMPT"] == "0" else 2):
        comm.Barrier()
        time.sleep(0.05)
        run.should_stop(step + 1)
"""
FOR_EVER, SHORT = 100_000, 5


def program(last=FOR_EVER):
    return [sys.executable, "-c", STEPS, str(last)]


def launcher(folder, text):
    """The words of a launcher that passes for this MPI's own, and does what `text` says."""
    real, path = find_launcher(), folder / "mpirun"
    path.write_text(
        f'#!/bin/sh\n[ "$1" = --version ] && exec {real} --version\nreal={real}\n{text}\n'
    )
    path.chmod(0o755)
    many = ":oversubscribe" if launcher_kind(real)[0] == "openmpi" else ""
    return ["--launcher", f"{path} --map-by {many}" if many else str(path)]


def ranks(folder, attempt=0):
    """What the ranks of an attempt have told, once both have made a step."""

    def begun():
        signs = [s for f in folder.glob(f".mpidist-launch-*/attempt-{attempt}")
                 for s in heartbeat.read_heartbeats(f)]  # fmt: skip
        return len(signs) == 2 and all(sign.step for sign in signs) and signs

    return wait_until(begun, otherwise="the ranks did not begin", every=0.005)


def test_it_starts_nothing(tmp_path):
    """Issue 10: stopped before it has begun; one line each time, and the third is the last."""
    words = [*launcher(tmp_path, "kill -STOP $$"), "--launcher-timeout", "2"]
    begin = time.monotonic()
    done = run(tmp_path, "-n", "2", *words, "--max-restarts", "0", code=143, program=program())
    assert time.monotonic() - begin < 60
    said = "attempt 0 is ended: the launcher has started nothing within 2 s\n"
    assert done.stderr.count(said) == 3
    assert done.stderr.count("mpidist launch: ") == 7
    assert done.stderr.endswith("attempt-2\n") or "3 times in a row" in done.stderr


def test_it_is_stopped_meanwhile(tmp_path):
    """Issue 10: nobody forwards signals or output any more; it is ended, and the job goes on."""
    job = supervised(tmp_path, "-n", "2", program=program())
    ranks(tmp_path)
    (pid,) = children(job.pid)
    os.kill(pid, signal.SIGSTOP)
    done = finish(job)
    assert done.stderr.count("is ended: the launcher is stopped (SIGSTOP), for 10 s\n") == 1


def test_it_is_stopped_and_a_rank_dies(tmp_path):
    """A stopped one ends nothing: there is nothing to wait for."""
    job = supervised(tmp_path, "-n", "2", program=program())
    signs = ranks(tmp_path)
    (pid,) = children(job.pid)
    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: stat_of(pid)[0] == "T")
    os.kill(signs[1].pid, signal.SIGKILL)
    done = finish(job, timeout=60)
    assert f"is ended: rank 1 on {os.uname().nodename} is dead\n" in done.stderr


def test_it_does_not_end(tmp_path):
    """Issue 10: it was waited for a minute."""
    text = '"$real" "$@"\nsleep 1000'
    words = [*launcher(tmp_path, text), "--launcher-timeout", "3", "--max-restarts", "0"]
    done = run(tmp_path, "-n", "2", *words, code=143, program=program(SHORT))
    assert "all ranks have left, and the launcher goes on for 3 s" in done.stderr


def test_the_others_are_not_waited_for(tmp_path):
    """R140: a killed rank is seen at once. Open MPI alone waits half a second for the others."""

    def once():
        folder = tmp_path / str(time.monotonic_ns())
        folder.mkdir()
        job = supervised(folder, "-n", "2", program=program())
        signs = ranks(folder)
        time.sleep(1.0)
        start = time.monotonic()
        os.kill(signs[1].pid, signal.SIGKILL)
        again = next(folder.glob(".mpidist-launch-*")) / "attempt-1"
        holds_within(again.exists, 20, every=0.002)
        seconds = time.monotonic() - start
        finish(job)
        return seconds

    def soon(seconds):
        assert seconds < 0.5

    best_of_three(soon, once)


CHOOSES = """
import json, os
import numpy as np
from mpi4py import MPI
import mpidist as md
from mpidist.collectives import selection
comm = MPI.COMM_WORLD
md.allreduce(comm, np.ones(50_000, np.float32))
if comm.rank == 0:
    print(json.dumps(selection.table(comm)) + chr(10), end="", flush=True)
comm.Barrier()
if os.environ["MPIDIST_ATTEMPT"] == "0":
    os._exit(9)
"""


def test_choices_are_kept_over_attempts(tmp_path):
    """Issue 10: what has been measured once is not measured again, clear or not."""
    done = run(
        tmp_path, "-n", "2", program=[sys.executable, "-c", CHOOSES],
        XDG_CACHE_HOME=str(tmp_path / "new"), MPIDIST_SELECTION_CACHE="1",
    )  # fmt: skip
    first, again = (json.loads(line) for line in done.stdout.splitlines())
    assert {entry.pop("from") for entry in first.values()} == {"measured"}
    assert {entry.pop("from") for entry in again.values()} == {"cache"}
    assert {key: {**entry, "time": again[key]["time"]} for key, entry in first.items()} == again
    assert not list(tmp_path.glob(".mpidist-launch-*"))


KILLED_AT_ITS_END = """
import atexit, os, signal
from mpi4py import MPI
import mpidist as md
comm = MPI.COMM_WORLD
with md.guard(comm):
    comm.Barrier()
if os.environ["MPIDIST_ATTEMPT"] == "0" and comm.rank == 1:
    MPI.Finalize = None
    atexit.register(os.kill, os.getpid(), signal.SIGKILL)
"""
KILLED_IN_INIT = """
import os, signal, threading, time
if os.environ["MPIDIST_ATTEMPT"] == "0" and "1" in (
    os.environ.get("OMPI_COMM_WORLD_RANK"), os.environ.get("PMI_RANK")
):
    import mpi4py
    mpi4py.rc.initialize = False
    from mpi4py import MPI
    if os.fork() == 0:
        time.sleep(0.004)
        os.kill(os.getppid(), signal.SIGKILL)
        os._exit(0)
    MPI.Init()
    time.sleep(100)
from mpi4py import MPI
import mpidist as md
with md.guard(MPI.COMM_WORLD):
    pass
"""


@pytest.mark.parametrize("text", [KILLED_IN_INIT, KILLED_AT_ITS_END], ids=["init", "end"])
def test_killed_where_nobody_tells_yet_or_any_more(tmp_path, text):
    """The launcher sees it; the next attempt comes to its end, and nothing stays behind."""
    sessions, segments = Path(tempfile.mkdtemp()), set()  # a short name: there are sockets in it
    try:
        program = [sys.executable, "-c", text]
        job = supervised(tmp_path, "-n", "2", program=program, TMPDIR=str(sessions))
        while job.process.poll() is None:
            segments |= mpi_segments(marked(job.mark))
        done = finish(job)
        assert done.stderr.count("mpidist launch: attempt 0 on 2 ranks") == 1
        assert list(sessions.iterdir()) == []
        assert [path for path in segments if path.exists()] == []
    finally:
        shutil.rmtree(sessions)


def test_transports_on_one_host(tmp_path, monkeypatch):
    """Open MPI waits a second for a transport that one host does not use; a choice stays."""
    monkeypatch.delenv("OMPI_MCA_btl", raising=False)  # the tests' own choice
    tell = "import json, os; print(json.dumps(os.environ.get('OMPI_MCA_btl')))"
    openmpi = launcher_kind(find_launcher())[0] == "openmpi"
    for given, seen in ((None, "^ofi" if openmpi else None), ("self,sm", "self,sm")):
        more = {} if given is None else {"OMPI_MCA_btl": given}
        done = run(tmp_path, "-n", "2", program=[sys.executable, "-c", tell], **more)
        assert [json.loads(line) for line in done.stdout.split()] == [seen, seen]
