"""A process that a rank has forked may end in any way without an effect on the job."""

import os
import re
import subprocess
import sys

import pytest
from tiers import tiers

PROGRAM = """
import os, sys, threading, time
import numpy as np
from mpi4py import MPI
import mpidist as md

comm = MPI.COMM_WORLD if sys.argv[1] != "subset" else MPI.COMM_WORLD.Split(MPI.COMM_WORLD.rank % 2)
x = np.ones(1000)
with md.watch(comm, seconds=30), md.guard(comm, {}) as run:
    md.allreduce(comm, x)

    def deep():
        raise ValueError("in the child")

    def child():
        what = sys.argv[1]
        if what == "raise":
            deep()
        if what == "thread":
            thread = threading.Thread(target=deep)
            thread.start()
            thread.join()
            return
        if what == "interrupt":
            raise KeyboardInterrupt
        if what == "asleep":
            time.sleep(1000)
        if what == "config":
            raise md.ConfigError("bad input in the child")
        sys.exit({"0": 0, "1": 1, "subset": 3, "text": "said by the child"}[what])

    if MPI.COMM_WORLD.rank == 1:
        if sys.argv[2] == "fork":
            pid = os.fork()
            if not pid:
                child()
                sys.exit(0)
            if sys.argv[1] == "asleep":
                time.sleep(0.2)
                os.kill(pid, 15)
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        else:
            import multiprocessing
            process = multiprocessing.get_context("fork").Process(target=child)
            process.start()
            if sys.argv[1] == "asleep":
                time.sleep(0.2)
                process.terminate()
            process.join()
            code = process.exitcode
        print(f"<child {code}>", flush=True)
    time.sleep(0.3)
    y = md.allreduce(comm, np.ones(1000))
    assert not run.should_stop(1)
    print(f"<sum {y[0]:g}>", flush=True)
"""

#: What the child does, how it is made, and the code that its parent sees.
CHILDREN = [
    ("0", "fork", 0), ("1", "fork", 1), ("raise", "fork", 1), ("text", "fork", 1),
    ("thread", "fork", 0), ("interrupt", "fork", 130), ("config", "fork", 1),
    ("asleep", "fork", -15), ("subset", "fork", 3),
    ("0", "pool", 0), ("raise", "pool", 1), ("thread", "pool", 0), ("asleep", "pool", -15),
]  # fmt: skip

#: In jobs of their own: where no communicator of all ranks has been met before, and each way of
#: making a child in a job that has begun as a user's does.
ALONE = [("subset", "fork", 3), ("raise", "fork", 1), ("0", "pool", 0)]

#: Those that only `make test-all` plays.
FURTHER = [("1", "fork", 1), ("text", "fork", 1), ("thread", "fork", 0), ("config", "fork", 1),
           ("raise", "pool", 1), ("asleep", "pool", -15)]  # fmt: skip


@pytest.fixture(scope="module")
def ends(tmp_path_factory, launches, many, chosen):
    path = tmp_path_factory.mktemp("forks") / "program.py"
    path.write_text(PROGRAM)
    children = chosen("test_a_child_s_end_is_its_own", "each")
    wanted = {each: [path, *each[:2]] for each in children if each not in ALONE}
    alone = {each: (2, [sys.executable, path, *each[:2]]) for each in children if each in ALONE}
    return {**many(2, wanted), **launches(alone, timeout=60)}


@pytest.mark.parametrize("each", tiers(CHILDREN, *FURTHER), ids=lambda e: f"{e[1]}-{e[0]}")
def test_a_child_s_end_is_its_own(ends, each):
    done = ends[each]
    assert not done.timed_out, done.stderr
    assert done.returncode == 0, done.stderr
    assert re.findall(r"<child (-?\d+)>", done.stdout) == [str(each[2])], done.stderr
    total = 1 if each[0] == "subset" else 2
    assert done.stdout.count(f"<sum {total}>") == 2
    assert "ends the job" not in done.stderr
    # Its line and its message: told once, by the child.
    assert done.stderr.count("in the child") == 2 * (each[0] in ("raise", "thread", "config"))


def test_a_child_tells_mpidist_launch_nothing(tmp_path):
    """Its exit was told as that of the rank: a kill of the rank afterwards looked like an end."""
    program = tmp_path / "program.py"
    program.write_text(
        "import os, sys\n"
        "from pathlib import Path\n"
        "from mpidist.launch import heartbeat\n"
        "heartbeat.join()\n"
        "pid = os.fork()\n"
        "if not pid:\n"
        "    heartbeat.note_steps(5), heartbeat.hear(), heartbeat.fail()\n"
        "    sys.exit(0)\n"
        "os.waitpid(pid, 0)\n"
        "(sign,) = heartbeat.read_heartbeats(Path(os.environ[heartbeat.FOLDER]))\n"
        "print(sign.step, sign.left, sign.heard, sign.failed)\n"
    )
    done = subprocess.run(
        [sys.executable, str(program)],
        capture_output=True, text=True, timeout=60,
        env={**os.environ, "MPIDIST_ATTEMPT_FOLDER": str(tmp_path)},
    )  # fmt: skip
    assert done.stdout == "None False False False\n", done.stderr
