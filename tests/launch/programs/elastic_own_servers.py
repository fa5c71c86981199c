"""`md.run_elastic` with parameter servers that the function makes itself; ranks die by DEATHS."""

import os
import signal
import sys

import numpy as np
from mpi4py import MPI

import mpidist as md

placement, steps = sys.argv[1], 20
comm, me = MPI.COMM_WORLD, MPI.COMM_WORLD.rank
deaths = os.environ["DEATHS"].split(",")
state, sizes = {"w": np.zeros(60)}, []


def work(group):
    if not sizes:
        group.on_resize(lambda old, new: sizes.append((old, new)))
        sizes.append(group.size)
    with md.parameter_server(
        group.comm, state, servers=2, optimizer=md.optim.sgd(1.0), placement=placement
    ) as client:
        if client is None:
            return
        workers = client.group.workers
        for step in group.steps(0, steps, together=False):
            gradients = np.zeros(60)
            gradients[workers.rank :: workers.size] = -workers.size  # the mean has 1 everywhere
            new = client.push_pull({"w": gradients})
            state["w"][...] = new["w"]
            group.done(step)
            if f"{me}:{step}" in deaths:
                os.kill(os.getpid(), signal.SIGKILL)


md.run_elastic(comm, work, state)
print(f"rank {me}: {sizes}, w {sorted({*state['w'].tolist()})}")
