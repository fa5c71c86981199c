"""Count steps in a file; exit with code 75 after SIGUSR1, and with code 0 after the last step.

The program replaces a training run in tests of the batch script: ``until_signal.py FILE STEPS``.
"""

import signal
import sys
import time
from pathlib import Path

from mpi4py import MPI

comm = MPI.COMM_WORLD
path, steps = Path(sys.argv[1]), int(sys.argv[2])
asked = []
signal.signal(signal.SIGUSR1, lambda *_: asked.append(1))
begin = int(path.read_text()) if path.exists() else 0
begin = comm.bcast(begin)
for step in range(begin, steps):
    time.sleep(0.1)
    if comm.allreduce(len(asked), MPI.MAX):
        if comm.rank == 0:
            path.write_text(str(step + 1))
            print(f"stopped at {step + 1}", flush=True)
        comm.Barrier()
        sys.exit(75)
if comm.rank == 0:
    print(f"done from {begin} to {steps}", flush=True)
