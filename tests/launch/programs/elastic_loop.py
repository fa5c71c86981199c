"""Run an elastic loop whose result is known: elastic_loop.py MODE OUT [n [algorithm]].

The environment variable `deaths` says which rank is killed: "1:5:in" means rank 1, in step 5,
during its allreduce. Each rank writes the steps that it has done to OUT/RANK, and at the end prints
its result.
"""

import atexit
import gc
import os
import signal
import sys
import threading
import time
from pathlib import Path

import numpy as np
from mpi4py import MPI

import mpidist as md
from mpidist.elasticity import elastic_group

if sys.argv[1] == "code":
    atexit.register(print, "exit handler of before", flush=True)
SAMPLES, STEPS = 24, 12
mode, out = sys.argv[1], Path(sys.argv[2])
n = int(sys.argv[3]) if len(sys.argv) > 3 else 1000
algorithm = sys.argv[4] if len(sys.argv) > 4 else "auto"
comm, world = MPI.COMM_WORLD, MPI.COMM_WORLD.rank
deaths = [tuple(one.split(":")) for one in os.environ.get("DEATHS", "").split(",") if one]


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def fate(step, where):
    for rank, when, place in deaths:
        if (int(rank), int(when)) == (world, step) and place.startswith(where):
            if place == "in":  # some time in the sum
                threading.Timer(0.002, die).start()
            elif place.startswith("stuck"):  # the others wait before it dies
                time.sleep(0.3)
                die()
            else:
                die()


def gone(step):
    return [int(rank) for rank, when, _ in deaths if int(when) <= step]


def part(rank, size, step):
    """Whole numbers: every order of additions gives the same bits."""
    numbers, mine = np.arange(97), range(rank, SAMPLES, size)
    return np.resize(sum(((numbers * (k + 1) + step) % 89 for k in mine), np.zeros(97)), n)


def expected(steps=STEPS):
    return sum((part(0, 1, step) for step in range(steps)), np.zeros(n))


state = {"w": np.zeros(n), "more": {"count": 0}}
log = (out / str(world)).open("a", buffering=1)


def apply(step, total):
    state["w"] += total
    state["more"]["count"] += 1
    log.write(f"{int(step)}\n")


def one_step(group, step):
    fate(step, "before")
    total = part(group.rank, group.size, step)
    fate(step, "in")
    fate(step, "stuck")
    if any((int(when), place, group.deaths) == (step, "in", 0) for _, when, place in deaths):
        for _ in range(10_000):  # sums that nobody needs, until the timer ends one rank
            md.allreduce(group.comm, total.copy(), algorithm=algorithm)
    md.allreduce(group.comm, total, algorithm=algorithm)
    apply(step, total)


def all_steps(group):
    for step in group.steps(0, STEPS):
        with step:
            one_step(group, step)


def report(group, more=""):
    good = state["w"].tobytes() == expected().tobytes() and state["more"]["count"] == STEPS
    told = f"{'right' if good else 'wrong'} {more}"
    print(f"rank {world} of {group.size}, {group.deaths} dead: {told}", flush=True)


if mode == "with":
    with md.elastic(comm, state) as group:
        group.on_resize(lambda old, new: fate(-1, "resize"))
        all_steps(group)
        fate(STEPS, "after")
    report(group)

elif mode == "ahead":
    # Rank 0 has done a step when a rank dies, and the others have not: they get rank 0's state.
    with md.elastic(comm, state) as group:
        for step in group.steps(0, STEPS):
            with step:
                total = part(group.rank, group.size, step)
                md.allreduce(group.comm, total)
                if step == 5 and group.deaths == 0:
                    if world == 0:
                        apply(step, total)
                        group.done(step)
                    if world == 1:
                        time.sleep(0.2)
                        die()
                    group.comm.Barrier()
                else:
                    apply(step, total)
    report(group)

elif mode == "function":

    def work(group):
        with md.Arena(group.comm, {"g": ((n,), "f8")}) as arena:
            for step in group.steps(0, STEPS):
                fate(step, "before")
                arena["g"][...] = part(group.rank, group.size, step)
                md.allreduce(group.comm, arena)
                apply(step, arena["g"])
                group.done(step)
        fate(STEPS, "after")
        return int(md.allreduce(group.comm, np.ones(1))[0])

    calls = []
    found = md.run_elastic(comm, lambda group: (calls.append(group), work(group))[1], state)
    report(calls[-1], f"returned {found}")

elif mode == "old":
    # What was made from the communicator of before says so.
    with md.elastic(comm, state) as group:
        old, x = group.comm, np.ones(n)
        planned, arena = md.plan(old, x), md.Arena(old, {"g": ((n,), "f8")})
        all_steps(group)
        for name, call in {
            "comm": lambda: md.allreduce(old, x),
            "plan": lambda: planned(),
            "arena": lambda: md.allreduce(old, arena),
            "free": lambda: md.Topology(old),
        }.items():
            try:
                call()
                found = "nothing raised"
            except md.MpidistError as error:
                found = f"{type(error).__name__}: {error}"
            if group.rank == 0:
                print(name, found, flush=True)
    report(group)

elif mode == "few":
    with md.elastic(comm, state, min_ranks=comm.size) as group:
        all_steps(group)

elif mode == "many":
    with md.elastic(comm, state, min_ranks=9) as group:
        all_steps(group)

elif mode == "raises":
    with md.elastic(comm, state) as group:
        for step in group.steps(0, STEPS):
            with step:
                one_step(group, step)
                if step == 8 and group.rank == group.size - 1:
                    raise ValueError("bad sample")

elif mode == "outside":
    with md.elastic(comm, state) as group:
        all_steps(group)
        if world == 1:
            die()
        md.allreduce(group.comm, np.ones(n))

elif mode == "code":
    with md.elastic(comm, state) as group:
        all_steps(group)
    raise SystemExit(3) if n == 1 else sys.exit(3)

elif mode == "forgotten":
    with md.elastic(comm, state) as group:
        for _ in group.steps(0, STEPS):
            md.allreduce(group.comm, np.ones(n))

elif mode == "early":
    # One rank leaves the loop, because it alone looks behind the step.
    with md.elastic(comm, state) as group:
        for step in group.steps(0, STEPS):
            with step:
                one_step(group, step)
            if world == 0 and step == 5:
                break

elif mode == "start":
    # One rank names a wrong first step, and catches its error.
    with md.elastic(comm, state) as group:
        md.allreduce(group.comm, np.zeros(3))
        try:
            for step in group.steps("0" if world == 1 else 0, STEPS):
                with step:
                    one_step(group, step)
        except TypeError:
            time.sleep(0.5)

elif mode == "later":
    # The others are in a call of MPI itself when a rank fails after the block.
    with md.elastic(comm, state) as group:
        all_steps(group)
    if world == 1:
        raise ValueError("bad sample")
    comm.Barrier()

elif mode == "exits":
    with md.elastic(comm, state) as group:
        all_steps(group)
        if world == 1:
            sys.exit(3)
        time.sleep(0.2)

elif mode == "spare":
    # The active ranks exit by themselves while a spare waits.
    def leaves(group):
        for step in group.steps(0, STEPS):
            with step:
                one_step(group, step)
            if int(step) == 8:
                sys.exit(n)

    md.run_elastic(comm, leaves, state, spares=1)

elif mode == "nested":
    with md.elastic(comm, state) as group:
        for step in group.steps(0, STEPS):
            with step:
                md.run_elastic(group.comm, lambda _: None, state)

elif mode == "lazy":
    # The rank that is ahead has a part of the state that the others have not made yet.
    with md.elastic(comm, state) as group:
        for step in group.steps(0, STEPS):
            with step:
                total = part(group.rank, group.size, step)
                md.allreduce(group.comm, total)
                if step == 0 and group.deaths == 0:
                    if world == 0:
                        state["a"] = total.copy()
                        group.done(step)
                    if world == 1:
                        time.sleep(0.2)
                        die()
                    group.comm.Barrier()

elif mode == "ring":
    # A communicator of another class, and MPI's own calls on it.
    with md.elastic(comm, state) as group:
        for step in group.steps(0, STEPS):
            with step:
                ring = group.comm.Create_cart([group.size], periods=[True])
                before, after = ring.Shift(0, 1)
                for k in range(200 if step == 3 and group.deaths == 0 else 1):
                    ring.sendrecv(world, after, source=before)
                    if (world, int(step), k) == (2, 3, 50):
                        die()
                apply(step, md.allreduce(group.comm, part(group.rank, group.size, step)))
                ring.Free()
    report(group)

elif mode == "duplicates":
    # The others are making a communicator when a rank dies, in each generation of communicators.
    with md.elastic(comm, state) as group:
        for step in group.steps(0, STEPS):
            with step:
                fate(step, "stuck")
                group.comm.Dup().Free()
                apply(step, md.allreduce(group.comm, part(group.rank, group.size, step)))
    report(group)

elif mode == "raw":
    # MPI's own blocking calls: what they return has been received from every rank.
    with md.elastic(comm, state) as group:
        for step in group.steps(0, STEPS):
            with step:
                fate(step, "stuck")
                if step % 2:
                    row, everyone = np.full(3, world), np.full(3 * group.size, -1)
                    group.comm.Allgatherv(row, [everyone, [3] * group.size])
                    found = everyone[::3].tolist()
                else:
                    found = group.comm.allgather(world)
                if found != sorted({0, 1, 2, 3, 4} - set(gone(step))):
                    raise ValueError(f"found {found}")
                apply(step, md.allreduce(group.comm, part(group.rank, group.size, step)))
    report(group)

elif mode == "flat":
    # What the ranks of the first to the last death have open, without Python's collector of cycles.
    gc.disable()
    with md.elastic(comm, state) as group:
        for step in group.steps(0, STEPS):
            with step:
                one_step(group, step)
                if world == 0:
                    lines = Path("/proc/self/maps").read_text().splitlines()
                    shared = sum("/dev/shm/#" in line for line in lines)  # without a name
                    files = len(list(Path("/proc/self/fd").iterdir()))
                    open_ = sum(child != MPI.COMM_NULL for child in group._members.children)
                    print(f"at {int(step)}: {shared} shared, {files} files, {open_} communicators")
    report(group)

elif mode == "opening":
    # A rank dies while the others make the group.
    if world == 1:
        elastic_group.NodeBoard = lambda _: die()
    with md.elastic(comm, state) as group:
        all_steps(group)
