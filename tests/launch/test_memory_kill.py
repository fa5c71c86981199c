"""If the kernel kills a rank because memory is exhausted, `mpidist launch` reports this cause."""

import contextlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from again import best_of_three
from tiers import exhaustive
from until import wait_until

from mpidist.launch.control_groups import group_of

LIMIT = 400 << 20

PROGRAM = """
import sys, time
import numpy as np
from mpi4py import MPI
import mpidist as md

comm = MPI.COMM_WORLD
with md.guard(comm, {}) as run:
    md.allreduce(comm, np.ones(3))
    held = []
    while comm.rank == 1:
        held.append(np.ones(8 << 20, np.uint8))
        time.sleep(float(sys.argv[1]))
    md.allreduce(comm, np.ones(3))
"""


@pytest.fixture
def small_group():
    """A control group of a few hundred megabytes; skipped where none can be made."""
    mine = group_of()
    folder = mine.folder / f"mpidist-test-{os.getpid()}" if mine else Path("/nowhere/at/all")
    limit = "memory.limit_in_bytes" if mine and mine.top.name == "memory" else "memory.max"
    try:
        folder.mkdir()
        (folder / limit).write_text(str(LIMIT))
    except OSError as error:
        with contextlib.suppress(OSError):
            folder.rmdir()
        pytest.skip(f"no control group can be made here: {error}")
    yield folder

    def removed():
        with contextlib.suppress(OSError):  # its last processes are being buried
            folder.rmdir()
        return not folder.exists()

    wait_until(removed, 10, otherwise=folder)


@pytest.mark.parametrize("pause", ["0.03", exhaustive("0")])
def test_a_kill_for_memory_names_rank_peak_and_limit(tmp_path, small_group, pause):
    """Slowly, so that its last beat knows of the memory; and between two beats.

    The kernel may kill the other one too, while the first still gives its memory back, and then
    that one is gone first: so usually, not always, it is the one that took the memory.
    """
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    words = [sys.executable, "-m", "mpidist", "launch", "-n", "2", "--max-restarts", "0"]

    def play():
        control = tmp_path / f"control-{len(list(tmp_path.iterdir()))}"
        done = subprocess.run(
            ["/bin/sh", "-c", f'echo $$ > {small_group}/cgroup.procs && exec "$@"', "sh",
             *words, "--control", str(control), "--", sys.executable, str(program), pause],
            capture_output=True, text=True, timeout=60, cwd=tmp_path,
        )  # fmt: skip
        return done, control

    def check(played):
        done, control = played
        assert done.returncode not in (0, 2), done.stderr
        found = re.search(
            r"mpidist launch: attempt 0 on 2 ranks: .*rank 1 on \S+ was killed by the kernel for "
            r"lack of memory: it used (\S+) GiB at its last heartbeat, and the limit of its "
            r"control group is 0\.391 GiB",
            done.stderr,
        )
        assert found, done.stderr
        assert pause == "0" or 0.1 < float(found[1]) < 0.4
        assert done.stderr.count("lack of memory") == 1
        assert "lack of memory" in (control / "history.jsonl").read_text()

    best_of_three(check, play)
