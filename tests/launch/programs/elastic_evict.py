"""An elastic loop in which ranks are stopped, hang or are slow: elastic_evict.py MODE DEADLINE.

FATES in the environment says who: "2:5:stop" stops rank 2 in step 5. PATIENCE is that many seconds
instead of the 5 s of deadline "stopped". Each rank prints at the end what it has.
"""

import ctypes
import os
import signal
import sys
import threading
import time

import numpy as np
from mpi4py import MPI

import mpidist as md
from mpidist.elasticity import deadline as deadlines
from mpidist.elasticity.slow_ranks import SlowRanks
from mpidist.fault_tolerance.stragglers import Stragglers
from mpidist.launch.process_table import is_running
from mpidist.runtime.ulfm import Membership

SAMPLES, STEPS, N = 24, 12, 1000
comm, world = MPI.COMM_WORLD, MPI.COMM_WORLD.rank
mode = sys.argv[1]
deadline = float(sys.argv[2]) if sys.argv[2][0].isdigit() else sys.argv[2]
fates = [one.split(":") for one in os.environ.get("FATES", "").split(",") if one]
deadlines.PATIENCE = float(os.environ.get("PATIENCE", deadlines.PATIENCE))
state = {"w": np.zeros(N)}
pids = comm.allgather(os.getpid())


def stop():
    os.kill(os.getpid(), signal.SIGSTOP)


def meets(fate):
    if fate == "stop":
        stop()
    elif fate == "later":  # while it waits for another rank
        threading.Timer(0.15, stop).start()
    elif fate == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fate[0].isdigit():
        time.sleep(float(fate))
    elif fate == "hang":
        time.sleep(60)
    elif fate == "long":
        time.sleep(2)
    elif fate == "lock":
        ctypes.PyDLL(None).sleep(60)  # without giving Python's lock away


def one_step(group, step):
    for rank, when, fate in fates:
        if (int(rank), int(when)) == (world, step):
            if fate == "save":
                with group.phase("save"):
                    time.sleep(2)
            meets(fate)
    mine = range(group.rank, SAMPLES, group.size)
    total = sum((np.arange(N) % 97 * (k + 1) + step for k in mine), np.zeros(N))
    if mode == "mpi":
        group.comm.Allreduce(MPI.IN_PLACE, total)
    else:
        md.allreduce(group.comm, total)
    state["w"] += total


def all_steps(group):
    for step in group.steps(0, STEPS):
        one_step(group, step)
        group.done(step)


def report(group):
    steps = np.arange(STEPS).sum() * SAMPLES + np.zeros(N)
    expected = np.arange(N) % 97 * (SAMPLES * (SAMPLES + 1) / 2) * STEPS + steps
    good = "right" if state["w"].tobytes() == expected.tobytes() else "wrong"
    left = sum(map(is_running, pids)) - group.size - group.spares
    told = f"{group.deaths} dead, {group.evicted} evicted, {left} left behind: {good}"
    print(f"rank {world} of {group.size}, {told}", flush=True)


if mode in ("with", "mpi"):
    with md.elastic(comm, state, deadline=deadline) as group:
        for step in group.steps(0, STEPS):
            with step:
                one_step(group, step)
    report(group)

elif mode == "few":
    with md.elastic(comm, state, min_ranks=comm.size, deadline=deadline) as group:
        for step in group.steps(0, STEPS):
            with step:
                one_step(group, step)

elif mode == "function":
    groups, settings = [], {"deadline": deadline, "spares": int(os.environ.get("SPARES", 0))}
    md.run_elastic(comm, lambda g: (groups.append(g), all_steps(g)), state, **settings)
    if groups:  # not on a spare that has not stepped in
        report(groups[-1])

elif mode == "shrink":
    # The rank is stopped when all have agreed on a death, and the others block in MPI's Shrink.
    agree, stops = Membership._agree, []

    def agree_and_stop(self, mine):
        found = agree(self, mine)
        if world == 2 and self.comm.size == comm.size and not stops:
            stops.append(1)
            stop()
        return found

    with md.elastic(comm, state, deadline=deadline) as group:
        Membership._agree = agree_and_stop
        for step in group.steps(0, STEPS):
            with step:
                one_step(group, step)
    report(group)

elif mode == "job":
    # Rank 0's child stops all ranks and continues them, as a batch system does.
    def stopped(group):
        if world == 0 and os.fork() == 0:
            for number in (signal.SIGSTOP, signal.SIGCONT):
                for pid in pids:
                    os.kill(pid, number)
                    time.sleep(0.02)
                time.sleep(2.0)
            os._exit(0)

    with md.elastic(comm, state, deadline=deadline) as group:
        for step in group.steps(0, STEPS):
            with step:
                if step == 5:
                    stopped(group)
                time.sleep(0.05 * (world == 3))  # so the others wait when they are stopped
                one_step(group, step)
    report(group)

elif mode == "slow":
    # A rank that is slow for 20 steps ends itself at the end of one, and that step is not repeated.
    STEPS = 30

    def work(group):
        windows = Stragglers(group.comm, crowded=frozenset())
        slow = SlowRanks(windows, 4.0, 1, group.watch.board, group.original_ranks)
        for step in group.steps(0, STEPS):
            time.sleep(0.03 if world == 1 else 0.002)
            one_step(group, step)
            group.done(step)
            windows.note(0.0, 0.03 if world == 1 else 0.002)
            slow.end_of_step()
        return group

    report(md.run_elastic(comm, work, state))
