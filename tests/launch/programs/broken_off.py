"""Raise an exception at every message and every sum of every scheduled operation, one at a time.

A case is an operation, the first or the last rank, and a step. Each case has its own communicator:
in a first call that rank raises at that step, and two further calls follow. The program prints a
line for each wrong result, and at the end the number of cases. The argument 1 means every step, and
2 means every second step.
"""

import functools
import sys

import numpy as np
from mpi4py import MPI

import mpidist as md
from mpidist.collectives.engines import executor
from mpidist.collectives.schedules import algorithms
from mpidist.runtime import context as contexts
from mpidist.runtime import polling

WORLD = MPI.COMM_WORLD
KINDS = (RuntimeError, KeyboardInterrupt, MemoryError, SystemExit)

# The others hear at once, not after a second: there are many cases.
executor.GRACE = 0.1
contexts.wait_until = functools.partial(polling.wait_until, patience=0.003)


class Flaky:
    """The communicator of the data; raises at the k-th message or sum that this rank begins."""

    def __init__(self, comm):
        self.comm, self.steps, self.fails_at = comm, 0, None
        self.error, self.raised = None, False

    def step(self):
        self.steps += 1
        if self.steps == self.fails_at:
            self.raised = True
            raise self.error

    def Isend(self, *args):
        self.step()
        return self.comm.Isend(*args)

    def Irecv(self, *args):
        self.step()
        return self.comm.Irecv(*args)

    def __getattr__(self, name):
        return getattr(self.comm, name)


def compute(run, step, original=executor.Run._compute):
    run.comm.step()
    original(run, step)


executor.Run._compute = compute


def vector(comm, n):
    return np.arange(n) + comm.rank


def total(comm, n):
    return comm.size * np.arange(n) + comm.size * (comm.size - 1) // 2


def allreduce(name, n):
    def call(comm):
        x = vector(comm, n)
        md.allreduce(comm, x, algorithm=name)
        return (x == total(comm, n)).all()

    return call


def iallreduce(name, n):
    def call(comm):
        x, y = vector(comm, n), vector(comm, n)
        handles = [md.iallreduce(comm, v, algorithm=name) for v in (x, y)]
        for handle in handles:
            handle.wait()
        return (x == total(comm, n)).all() and (y == total(comm, n)).all()

    return call


def reduce_scatter(name):
    def call(comm):
        n = 3 * comm.size + 1
        block = md.reduce_scatter(comm, vector(comm, n), algorithm=name)
        return (block == np.array_split(total(comm, n), comm.size)[comm.rank]).all()

    return call


def allgather(name, known):
    def call(comm):
        counts = [r + 1 for r in range(comm.size)]
        mine = np.full(comm.rank + 1, comm.rank)
        whole = md.allgather(comm, mine, counts=counts if known else None, algorithm=name)
        return (whole == np.repeat(range(comm.size), counts)).all()

    return call


def broadcast(name, n):
    def call(comm):
        x = np.full(n, comm.rank)
        md.broadcast(comm, x, root=comm.size - 1, algorithm=name)
        return (x == comm.size - 1).all()

    return call


def reduce(name):
    def call(comm):
        result = md.reduce(comm, vector(comm, 5), root=1, algorithm=name)
        return result is None if comm.rank != 1 else (result == total(comm, 5)).all()

    return call


def gather(comm):
    whole = md.gather(comm, np.full(2, comm.rank), counts=[2] * comm.size)
    return whole is None if comm.rank else (whole == np.repeat(range(comm.size), 2)).all()


def scatter(comm):
    x = np.arange(2 * comm.size) if comm.rank == 0 else None
    return (md.scatter(comm, x) == [2 * comm.rank, 2 * comm.rank + 1]).all()


CALLS = {
    **{name: allreduce(name, 11) for name in algorithms.ALLREDUCE},
    "long ring": allreduce("ring", 2000),
    "nonblocking": iallreduce("two_hop", 11),
    **{f"reduce_scatter {name}": reduce_scatter(name) for name in algorithms.REDUCE_SCATTER},
    **{f"allgather {name}": allgather(name, True) for name in algorithms.ALLGATHER},
    "allgather of what is not known": allgather("direct", False),
    **{f"broadcast {name}": broadcast(name, 3) for name in algorithms.BROADCAST},
    "long broadcast": broadcast("tree", 500),
    **{f"reduce {name}": reduce(name) for name in algorithms.REDUCE},
    "gather": gather,
    "scatter": scatter,
}


def outcome(call, comm):
    """What came of a call: its result is right or not, or what it raised."""
    try:
        return "right" if call(comm) else "wrong", ""
    except BaseException as error:
        return type(error).__name__, str(error)


def one(parent, call, victim, at, kind):
    """Play a case; returns what is wrong, and whether the rank came to that step at all."""
    comm = parent.Dup()
    flaky = contexts.of(comm).data = Flaky(contexts.of(comm).data)
    if comm.rank == victim:
        flaky.fails_at, flaky.error = at, kind("stopped here")
    results = []
    for _ in range(3):
        results.append(outcome(call, comm))
        flaky.fails_at = None
        parent.Barrier()
    everyone = parent.allgather((results, flaky.error is None or flaky.raised))
    reached = everyone[victim][1]
    wrong = []
    for rank, (results, _) in enumerate(everyone):
        what, text = results[0]
        told = what == "MismatchError" and f"rank {victim}" in text and "stopped here" in text
        if rank == victim:
            told = (what, text) == (kind.__name__, "stopped here")
        # A rank that needs nothing more of the one that raised may have its result.
        if not (reached and told) and (what != "right" or (reached and rank == victim)):
            wrong.append(f"rank {rank} got {what}: {text}")
    for k in (1, 2):
        words = {results[k][0] for results, _ in everyone}
        if words != {"MismatchError" if reached else "right"}:
            wrong.append(f"afterwards {[results[k] for results, _ in everyone]}")
    if not reached:
        md.free(comm)
        comm.Free()
    return wrong, reached


thin = int(sys.argv[1])
parent = WORLD.Dup()
ranks = parent.size
cases = 0
for number, (name, call) in enumerate(CALLS.items()):
    for victim in (0, ranks - 1):
        at = 1 + (number + victim) % thin
        reached = True
        while reached:
            wrong, reached = one(parent, call, victim, at, KINDS[cases % len(KINDS)])
            if parent.rank == 0 and wrong:
                print(f"{name}, step {at} of rank {victim}: {wrong}", flush=True)
            cases += reached
            at += thin
if parent.rank == 0:
    print(f"{cases} cases", flush=True)
