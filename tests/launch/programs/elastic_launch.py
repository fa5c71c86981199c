"""A loop under ``mpidist launch --elastic``: elastic_launch.py MODE.

In the first attempt something happens in step 5; the attempts after it are undisturbed. Each rank
that comes to the end prints the numbers of its attempt, and whether its sum is right.
"""

import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
from mpi4py import MPI

import mpidist as md
from mpidist.checkpoint.memory_copies import MemoryCopies, open_with_copies
from mpidist.elasticity import repair_deadline
from mpidist.launch.environment import memory_folder
from mpidist.runtime.ulfm import Membership

comm, mode = MPI.COMM_WORLD, sys.argv[1]
first = os.environ.get("MPIDIST_ATTEMPT", "0") == "0"
STEPS, victim = 10, comm.rank == 1
state = {"w": np.zeros(100)}


def die(number=signal.SIGKILL):
    os.kill(os.getpid(), number)


def hang():
    time.sleep(100)


if mode == "early" and first and victim:
    die()
if mode == "hang" and first:
    repair_deadline.PHASES["REBUILD"] = 0.3
    opened = Membership.open
    Membership.open = lambda self: opened(self) if len(self.names) == comm.size else hang()

begin, copies = 0, None
if mode == "copies":
    store = open_with_copies(comm, "checkpoints", memory_folder())
    Path("memory-folder").write_text(str(memory_folder()))
    copies = MemoryCopies(store, 2)
    with suppress(md.NoCheckpoint):
        begin, found = store.restore(state)
        print(f"resumed at {begin}, checkpoints {store.all_steps()}", flush=True)

with md.elastic(comm, state, min_ranks=comm.size if mode == "few" and first else 1) as group:
    for step in group.steps(begin, STEPS):
        with step:
            if step == 5 and first:
                if mode in ("all", "copies") or (victim and mode in ("one", "few", "hang")):
                    die()
                if mode == "stopped" and victim:
                    die(signal.SIGSTOP)
                if mode == "raises" and victim:
                    raise ValueError("bad sample")
            state["w"] += md.allreduce(group.comm, np.ones(100)) / group.size
        if copies is not None:
            copies.keep(comm, group.step, lambda: state)
right = "right" if np.array_equal(state["w"], np.full(100, float(STEPS))) else "wrong"
print(f"attempt {int(not first)}: {group.size} of {comm.size} ranks, {right}", flush=True)
if mode == "code":
    sys.exit(75)
