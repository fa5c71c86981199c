"""An elastic loop: elastic_steps.py FOLDER STEPS SECONDS [RANK:STEP ...].

Each rank notes in FOLDER/RANK the time, the step and the number of ranks of each step that it has
done; its host stands in FOLDER/RANK.host. A rank named by RANK:STEP kills itself there. Steps take
SECONDS each. At the end each rank prints a hash of its state.
"""

import hashlib
import os
import signal
import socket
import sys
import time
from pathlib import Path

import numpy as np
from mpi4py import MPI

import mpidist as md

SAMPLES, N = 24, 20_000
comm, world = MPI.COMM_WORLD, MPI.COMM_WORLD.rank
folder, steps, pause = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
deaths = {int(rank): int(step) for rank, step in (word.split(":") for word in sys.argv[4:])}
state = {"w": np.zeros(N)}
(folder / f"{world}.host").write_text(socket.gethostname())
log = (folder / str(world)).open("a", buffering=1)
with md.elastic(comm, state) as group:
    for step in group.steps(0, steps):
        with step:
            time.sleep(pause)
            total = np.zeros(N)
            for k in range(group.rank, SAMPLES, group.size):  # whole numbers: the same bits
                total += (np.arange(N) * (k + 1) + step) % 89
            if deaths.get(world) == step:
                (folder / "killed").write_text(f"{time.time()}")
                os.kill(os.getpid(), signal.SIGKILL)
            md.allreduce(group.comm, total)
            state["w"] += total
            log.write(f"{time.time()} {int(step)} {group.size}\n")
found = hashlib.sha256(state["w"].tobytes()).hexdigest()
print(f"rank {world} of {group.size} has {found}\n", end="", flush=True)
