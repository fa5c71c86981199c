"""md.watch in real hangs: it names the absent rank and each rank's line, and ends the job."""

import contextlib
import json
import os
import re
import signal
import socket
import sys
import tempfile
import time
from pathlib import Path

import pytest
from again import best_of_three
from until import holds_within, wait_until

from mpidist.launch.launchers import launch, start

PROGRAM = """
import os, sys, time
import numpy as np
from mpi4py import MPI
import mpidist as md
from mpidist import events
from mpidist.runtime.polling import wait_until

what, seconds = sys.argv[1], float(sys.argv[2])
comm = MPI.COMM_WORLD
x = np.ones(1000)

def exchange():
    comm.Allreduce(MPI.IN_PLACE, x)

def other_place():
    comm.Barrier()
    comm.Recv(x, source=0, tag=99)

def compute(rounds):
    total = 0
    for number in range(rounds):
        total += number
    return total

def forever():
    while True:
        pass

events.emit("started", rank=comm.rank)
watch = md.watch(comm, seconds=seconds, directory=sys.argv[3] if len(sys.argv) > 3 else None)
exchange()
print(f"<pid {comm.rank} {os.getpid()}>", flush=True)
if what == "stop":
    while True:
        exchange()
elif what == "loop":
    if comm.rank == 2:
        forever()
    exchange()
elif what == "polled":  # everybody waits politely, and Python runs all the time
    request = comm.Irecv(x, source=(comm.rank + 1) % comm.size)
    wait_until(request.Test)
elif what == "deadlock":
    other_place() if comm.rank == 1 else exchange()
elif what == "control":
    # Slower than `seconds` in every way that is no hang.
    if comm.rank == 0:
        end = time.monotonic() + 1.7 * seconds
        while time.monotonic() < end:
            compute(10_000)
    exchange()
    end = time.monotonic() + 1.7 * seconds
    going = np.ones(1)
    while going[0]:                         # native calls, always at the same line
        going[0] = time.monotonic() < end
        comm.Allreduce(MPI.IN_PLACE, going, MPI.MIN)
    if comm.rank == 1:
        compute(40_000_000)                 # one line of pure Python, for long
    wait_until(comm.Ibarrier().Test)
    for _ in range(2):
        time.sleep(seconds / 2)             # all are in a native call, but never for `seconds`
elif what == "leave":
    if comm.rank == 1:
        watch.stop()
        compute(2_000_000)
        watch.stop()
    else:
        watch.stop()
    with md.watch(comm, seconds=seconds):
        exchange()
"""
SECONDS = 1.5
HOST = socket.gethostname()


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    path = tmp_path_factory.mktemp("watch") / "program.py"
    path.write_text(PROGRAM)
    return str(path)


def boards():
    return set(Path("/dev/shm").glob(".mpidist*"))


@pytest.fixture(autouse=True)
def nothing_left_behind():
    before = boards()
    yield
    # Those of other jobs have a name while they begin.
    wait_until(lambda: boards() <= before, 10, otherwise=boards, every=0.1)


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def pids_of(job, n):

    def started():
        pids = dict(re.findall(r"<pid (\d+) (\d+)>", job.output()))
        return len(pids) == n and {int(rank): int(pid) for rank, pid in pids.items()}

    return wait_until(started, 150, otherwise=job.output, job=job.process)


def stop_rank(program, folder, *more):
    """Stop one of four ranks inside Allreduce: what was said, and seconds until all were gone."""
    job = start(4, [sys.executable, program, "stop", str(SECONDS), *more], cwd=folder)
    try:
        pids = pids_of(job, 4)
        time.sleep(0.3)
        with contextlib.suppress(ProcessLookupError):  # held up, and taken for absent before
            os.kill(pids[2], signal.SIGSTOP)
        began = time.monotonic()
        job.process.wait(60)
        holds_within(lambda: not any(alive(pid) for pid in pids.values()), 60)
        gone = time.monotonic() - began
    finally:
        result = job.finish(timeout=5)
    assert result.returncode == 70, result.stderr
    return result.stderr, gone


def test_stopped_rank_is_named_and_all_are_gone(program, tmp_path):
    """R56, R97: rank, host, condition and places; exit code 70; the stopped process is gone too."""

    def check(made):
        said, gone = made
        assert gone < SECONDS + 3
        assert said.count("mpidist: watch: nothing moved") == 1
        assert f"absent: rank 2 on {HOST} (stopped by a signal)" in said
        for rank in (0, 1, 3):
            assert re.search(
                rf"rank {rank} on {HOST} \w+ for \d s at .*program.py:\d+ in exchange", said
            )
            assert f"mpidist: watch: rank {rank} stands at" in said
        assert re.search(r"rank 2 on .* gave no sign for \d s; last seen at .*program.py", said)
        assert said.count("newest event: started rank=") == 4
        assert "in exchange\n    comm.Allreduce(MPI.IN_PLACE, x)" in said

    best_of_three(check, lambda: stop_rank(program, tmp_path))


@pytest.mark.exhaustive
def test_board_in_a_shared_folder(program, tmp_path):
    """The way of several hosts: a file in a folder, removed in the end."""

    def check(made):
        said, _ = made
        assert f"absent: rank 2 on {HOST}" in said

    best_of_three(check, lambda: stop_rank(program, tmp_path, str(tmp_path)))
    assert list(tmp_path.iterdir()) == []


#: What hangs, and what must be said of it.
HANGS = {
    "loop": ["not where the others wait: rank 2 on", "rank 2 on {} looping", "in forever"],
    "polled": ["all ranks wait at one place", "rank 0 on {} waiting"],
    "deadlock": ["not where the others wait: rank 1 on", "in other_place"],
}


@pytest.fixture(scope="module")
def hangs(program, launches):
    """What came of each, and how to launch one again."""
    jobs = {what: (3, [sys.executable, program, what, str(SECONDS)]) for what in HANGS}
    return launches(jobs), lambda what: launches({what: jobs[what]})[what]


@pytest.mark.parametrize("what", HANGS)
def test_other_hangs(hangs, what):
    """R56: an endless loop, a wait of ours that cannot end, ranks in different calls."""
    ends, again = hangs

    def check(end):
        assert end.returncode == 70, end.stderr
        assert end.stderr.count("mpidist: watch: nothing moved") == 1
        for word in HANGS[what]:
            assert word.format(HOST) in end.stderr, end.stderr

    best_of_three(check, lambda: again(what), ends[what])


@pytest.mark.exhaustive
def test_slow_is_not_a_hang(program):
    """A rank that computes, native calls in a loop, a long loop in one line: no false alarm.

    Where a rank is held up for `seconds` by other work that is one, so with more of them again.
    """
    seconds = iter((SECONDS, 2 * SECONDS, 4 * SECONDS))

    def check(end):
        assert (end.returncode, end.stderr) == (0, "")

    best_of_three(
        check,
        lambda: launch(3, [sys.executable, program, "control", str(next(seconds))], timeout=240),
    )


def test_stop_twice_and_watch_again(program):
    result = launch(3, [sys.executable, program, "leave", "10"], timeout=120).check()
    assert result.stderr == ""


def hang(folder, text, fault):
    """Run a program on three ranks, of which one stops, to its end; by rank, what it wrote."""
    folder = Path(tempfile.mkdtemp(dir=folder))
    (folder / "program.py").write_text(text)
    command = [sys.executable, str(folder / "program.py"), str(folder / "hang")]
    env = {"MPIDIST_TESTING": "1", "MPIDIST_FAULT": fault}
    result = launch(3, command, env=env, timeout=150)
    assert result.returncode == 70, result.stderr
    # Rank 1 stands still and cannot write, unless the launcher wakes it up to end it.
    dumps = {int(path.stem[5:]): path for path in (folder / "hang").glob("hang-*.json")}
    return {rank: json.loads(path.read_text()) for rank, path in dumps.items() if rank != 1}


def test_the_last_operations_are_written_down(tmp_path):
    """Of every rank that can still write: 256 operations by number, events, stacks; no values."""

    def check(dumps):
        assert set(dumps) == {0, 2}
        for rank, facts in dumps.items():
            assert facts["absent"] == [1]
            (comm,) = facts["communicators"]
            numbers, texts = zip(*comm["operations"], strict=True)
            assert len(numbers) == 256
            assert numbers == tuple(range(comm["begun"] - 255, comm["begun"] + 1))
            assert "broadcast" in texts[-1]
            assert all("allreduce" in text for text in texts[-250:-1])
            assert ["started", {"rank": rank}] in [event[1:] for event in facts["events"]]
            assert any("broadcast" in line for stack in facts["stacks"].values() for line in stack)
        assert dumps[0]["communicators"][0]["begun"] == comm["begun"]

    best_of_three(check, lambda: hang(tmp_path, HANGING, "stop@broadcast:1,rank=1"))


HANGING = """
import sys
import numpy as np
from mpi4py import MPI
import mpidist as md
from mpidist import events
from mpidist.launch.fault_points import fault_point

comm = MPI.COMM_WORLD
events.emit("started", rank=comm.rank)
with md.watch(comm, seconds=2, dumps=sys.argv[1]):
    fault_point("begin")
    x = np.ones(10)
    for _ in range(400):
        md.allreduce(comm, x, algorithm="ring")
    md.broadcast(comm, x, root=1)
"""


def test_the_last_operations_of_servers_and_workers_are_written_down(tmp_path):
    """Issue 4 point 7: who was asked for what, and for how long nobody has answered.

    Rank 1 stands still before it pushes, so server 2 holds what rank 0 asks for.
    """

    def check(dumps):
        worker, server = dumps[0], dumps[2]
        for facts in (worker, server):
            assert facts["absent"] == [1]
            (trail,) = facts["parameter_servers"]
            (waiting,) = trail["waiting"]
            assert 1 < waiting.pop("seconds") < 60
            name = "push+clock+pull" if facts is worker else "serve push+clock+pull"
            peer = 2 if facts is worker else 0
            assert waiting == {"operation": name, "model": "model", "clock": 200, "peer": peer}
            assert (len(trail["operations"]) == 256) == (facts is server)
            ago, texts = zip(*trail["operations"], strict=True)
            assert list(ago) == sorted(ago, reverse=True)
            assert texts[-1] == f"{name} of 'model', clock 200, rank {peer}"
        assert trail["clocks"] == {"model": {"0": 201, "1": 200}}
        assert "apply of 'model', clock 199, all" in texts
        assert "serve push+clock+pull of 'model', clock 199, rank 1" in texts

    best_of_three(check, lambda: hang(tmp_path, SERVING, "stop@mine:200,rank=1"))


SERVING = """
import sys
import numpy as np
from mpi4py import MPI
import mpidist as md
from mpidist.launch.fault_points import fault_point

comm = MPI.COMM_WORLD
w = {"w": np.zeros(10)}
with md.watch(comm, seconds=2, dumps=sys.argv[1]):
    with md.parameter_server(comm, w, optimizer=md.optim.sgd(0.1)) as client:
        for step in range(400 if client else 0):
            fault_point("mine", step)
            client.push_pull({"w": np.ones(10)}, out=w)
"""
