"""A loop over the network, whose link is away for a while: network_away.py KIND FOLDER STEPS.

KIND is ``allreduce``, ``deadline`` (the same, and late ranks are evicted), ``apart`` (the same as
``allreduce``, and each rank writes its errors to FOLDER/RANK.stderr on its own host) or ``save``,
which are loops of `md.elastic`, or ``push`` (parameter servers). Each rank notes the time of each
step in FOLDER/RANK. It waits after ten steps for FOLDER/go, makes slow steps until the link is away
(FOLDER/down), and, but for ``apart``, does not make its last step before the link is back
(FOLDER/back). At the end it prints a hash of its result.
"""

import hashlib
import os
import sys
import time
from pathlib import Path

import numpy as np
from mpi4py import MPI

import mpidist as md
from mpidist.runtime import polling

N = 250_000  # 2 MB: 24 ms for a host's part of an allreduce at 1 Gbit/s
kind, folder, steps = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
comm, world = MPI.COMM_WORLD, MPI.COMM_WORLD.rank
state = {"w": np.zeros(N)}
log = (folder / str(world)).open("a", buffering=1)


if kind == "apart":  # for the launcher loses what a host says that it has given up
    with (folder / f"{world}.stderr").open("wb") as errors:
        os.dup2(errors.fileno(), 2)


def note(step: int) -> None:
    log.write(f"{time.time()} {step}\n")
    awaited = {9: "go", steps - 2: "" if kind == "apart" else "back"}.get(step)
    while awaited and not (folder / awaited).exists():
        time.sleep(0.01)
    if step > 9 and not (folder / "down").exists():
        time.sleep(0.1)  # on a busy machine it takes a second until the link is away


def allreduce(deadline="stopped") -> None:
    with md.elastic(comm, state, deadline=deadline) as group:
        for step in group.steps(0, steps):
            with step:
                state["w"] += md.allreduce(group.comm, np.full(N, world + step + 1.0))
                note(int(step))


def save() -> None:
    def work(group):
        with md.CheckpointStore(group.comm, folder / "store", keep=2) as store:
            if store.all_steps():
                store.restore()
            for step in group.steps(0, steps):
                total = md.allreduce(group.comm, np.full(N, world + step + 1.0))
                state["w"] += total
                group.done(step)
                store.save(int(step) + 1, state)
                note(int(step))
            _, found = store.restore()
        return found

    state["w"] = md.run_elastic(comm, work, state)["w"]


def push() -> None:
    params = {"w": np.zeros(N)}
    with md.parameter_server(
        comm, params, servers=1, consistency=md.BSP(), optimizer=md.optim.sgd(1.0)
    ) as client:
        for step in range(steps if client is not None else 0):
            client.push({"w": np.full(N, -1.0 - step)}, samples=1)
            client.clock()
            client.pull(out=params)
            note(step)
    state["w"] = params["w"] if client is not None else np.full(N, steps * (steps + 1) / 2)


loops = {"allreduce": allreduce, "apart": allreduce, "deadline": lambda: allreduce(4.0)}
(loops | {"save": save, "push": push})[kind]()
print(f"rank {world} has {hashlib.sha256(state['w'].tobytes()).hexdigest()}\n", end="", flush=True)
# The looks at the network tell that it is back: four in a second, as long as it is not.
end = time.monotonic() + (0 if kind == "apart" else 20)
while polling.unreachable and time.monotonic() < end:
    time.sleep(0.05)
time.sleep(0.5)
