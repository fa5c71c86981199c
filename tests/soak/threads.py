"""Mixed calls from several threads, each with its own communicator (`make soak-threads`).

mpirun -n 2 python tests/soak/threads.py [calls of each thread] [threads]
"""

import sys
import threading
import time
import traceback

import numpy as np
from mpi4py import MPI

import mpidist as md

COMM = MPI.COMM_WORLD
CALLS, THREADS = (int(word) for word in [*sys.argv[1:], "10000", "3"][:2])
WRONG: list[str] = []


def one(comm, rng, k):
    """One call, or a few that are under way together; whether the result is right."""
    n = int(2 ** rng.uniform(0, 13))
    x = np.full(n, comm.rank + k % 1000, np.float32)
    total = sum(rank + k % 1000 for rank in range(comm.size))
    kind = int(rng.integers(8))
    if kind == 0:
        handles = [md.iallreduce(comm, x), md.iallreduce(comm, np.ones(3))]
        for handle in handles[:: -1 if comm.rank % 2 else 1]:
            handle.wait()
    elif kind == 1:
        found = md.reduce(comm, x, root=k % comm.size)
        return found is None or bool((found == total).all())
    elif kind == 2:
        x[:] = k if comm.rank == k % comm.size else -1
        return (md.broadcast(comm, x, root=k % comm.size) == np.float32(k)).all()
    elif kind == 3:
        whole = md.allgather(comm, x)
        return len(whole) == comm.size * n and whole[-1] == comm.size - 1 + k % 1000
    elif kind == 4:
        md.allreduce(comm, x, algorithm="ring")
    elif kind == 5:
        md.allreduce(comm, x, algorithm="native")
    else:
        md.allreduce(comm, x)
    return (x == total).all()


def work(comm, seed):
    """All calls of one thread; the same on the thread's peers."""
    rng = np.random.default_rng(seed)
    try:
        for k in range(CALLS):
            if not one(comm, rng, k):
                WRONG.append(f"rank {comm.rank} thread {seed} call {k}: wrong result")
    except BaseException:
        traceback.print_exc()
        COMM.Abort(1)  # the peers of this thread would wait for it


if MPI.Query_thread() != MPI.THREAD_MULTIPLE:
    sys.exit("this MPI gives no MPI_THREAD_MULTIPLE")
comms = [COMM.Dup() for _ in range(THREADS)]
start = time.monotonic()
threads = [
    threading.Thread(target=work, args=each) for each in zip(comms, range(THREADS), strict=True)
]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
found = COMM.gather(WRONG)
if COMM.rank == 0:
    wrong = [text for texts in found for text in texts]
    print(
        f"{THREADS} threads x {CALLS} calls, {COMM.size} ranks, {time.monotonic() - start:.0f} s: "
        f"{len(wrong)} errors",
        *wrong[:10],
        sep="\n",
    )
sys.exit(bool(WRONG))
