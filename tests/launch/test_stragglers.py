"""A slow rank is reported, with servers and in a user's own loop; a fast rank never is."""

import json
import socket
import sys

import pytest
from again import best_of_three
from tiers import tiers

from mpidist.launch.launchers import launch

PROGRAM = """
import json, os, sys, time
import numpy as np
from mpi4py import MPI
import mpidist as md
from mpidist import events
from mpidist.launch.fault_points import fault_point

what, own_cores, steps = sys.argv[1], int(sys.argv[2]), 40
comm = MPI.COMM_WORLD
events.recent.clear()
if own_cores:  # as where there are enough
    os.sched_getaffinity = lambda pid: {comm.rank}
else:
    os.sched_getaffinity = lambda pid: {0, 1}
x = np.ones(100)

def work():
    a = np.ones((120, 120))
    for _ in range(10):
        a @ a

def loop(run, exchange):
    for step in range(steps):
        work()
        fault_point("mine", step)
        exchange(run)
        if run.should_stop(step):
            run.leave(step)

def plain(run):  # MPI's own calls: nobody but the loop knows where its work ends
    run.computed()
    comm.Allreduce(MPI.IN_PLACE, x, MPI.MAX)

if what == "ours":
    with md.guard(comm) as run:
        loop(run, lambda run: md.allreduce(comm, x, "max"))
elif what == "plain":
    with md.guard(comm) as run:
        loop(run, plain)
elif what == "unmarked":
    with md.guard(comm) as run:
        loop(run, lambda run: comm.Allreduce(MPI.IN_PLACE, x, MPI.MAX))
elif what == "client":  # the last rank serves, and is outside the loop
    workers = comm.Split(0 if comm.rank < comm.size - 1 else MPI.UNDEFINED)
    with md.guard(comm, deciders=workers) as run, md.parameter_server(
        comm, {"x": x}, optimizer=md.optim.sgd(0.1)
    ) as client:
        if client is not None:
            loop(run, lambda run: client.push_pull({"x": x}))
else:
    placement = "colocated" if what == "colocated" else "dedicated"
    mode = md.ASP() if what == "asp" else md.BSP()
    strategy = md.ParameterServer(1, mode, placement)
    data = np.ones((400, 50), "f4"), np.zeros(400, np.int64)
    md.train(
        comm, md.models.mlp([50, 100, 4]), data, optimizer=md.optim.sgd(0.1), global_batch=40,
        steps=steps, strategy=None if what == "allreduce" else strategy,
    )
found = [details for _, kind, details in events.recent if kind == "straggler"]
found = comm.gather(found)
if comm.rank == 0:
    print(json.dumps(found), flush=True)
"""

#: By what runs: the phase that is told, and the ranks whose event log has it.
SERVED = {"bsp": "gradients", "asp": "gradients", "colocated": "gradients"}
LOOPS = {"ours": "work", "plain": "work", "client": "work"}
SLOW = 1


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    path = tmp_path_factory.mktemp("stragglers") / "program.py"
    path.write_text(PROGRAM)
    return str(path)


#: A run of `md.train` reaches the first, a loop of the program the second.
POINTS = [f"sleep@{point},rank={SLOW},ms=40" for point in ("step", "mine")]
FAULT = {"MPIDIST_TESTING": "1", "MPIDIST_FAULT": "; ".join(POINTS)}


def read(done):
    """By rank, what its event log has of stragglers; and what was said."""
    return json.loads(done.check().stdout.splitlines()[-1]), done.stderr


def run(program, what, slow):
    """Play one again, alone."""
    words = [sys.executable, program, what, "1"]
    return read(launch(4, words, env=FAULT if slow else {}, timeout=120))


@pytest.fixture(scope="module")
def slowed(program, many, chosen):
    """What runs with a slow rank, on cores of its own (1) or not (0)."""
    own = [(what, 1) for what in chosen("test_a_slow_rank_is_named", "what")]
    shared = chosen("test_nobody_is_named_where_ranks_share_cores", "what")
    return many(
        4, {each: [program, *each] for each in [*own, *((what, 0) for what in shared)]}, env=FAULT
    )


@pytest.fixture(scope="module")
def even(program, many, chosen):
    whats = chosen("test_nobody_is_named_where_nobody_is_slow", "what")
    return many(4, {(what, 1): [program, what, 1] for what in whats})


@pytest.mark.parametrize("what", tiers([*SERVED, *LOOPS], "bsp", "colocated", "ours", "client"))
def test_a_slow_rank_is_named(slowed, program, what):
    """R45, issue 4 point 7: rank, phase and lag, once."""

    def check(made):
        found, said = made
        known = [one for log in found for one in log]
        assert {(one["straggler"], one["phase"]) for one in known} == {
            (SLOW, {**SERVED, **LOOPS}[what])
        }
        assert all(30 < one["lag_ms"] < 400 for one in known)
        # The first server knows it under servers; in a loop rank 0 and the one that is slow.
        assert [bool(log) for log in found] == (
            [False, False, False, True] if what in SERVED else [True, True, False, False]
        )
        lines = [line for line in said.splitlines() if line.startswith("mpidist: note: ")]
        assert len(lines) == 1, said
        assert f"rank {SLOW} on {socket.gethostname()}" in lines[0]

    best_of_three(check, lambda: run(program, what, slow=True), read(slowed[what, 1]))


@pytest.mark.parametrize(
    "what",
    tiers([*SERVED, "allreduce", *LOOPS], "asp", "colocated", "allreduce", "plain", "client"),
)
def test_nobody_is_named_where_ranks_share_cores(slowed, what):
    """Four ranks on two cores take turns, so being late is nobody's own."""
    found, said = read(slowed[what, 0])
    assert found == [[], [], [], []]
    assert "a step" not in said


@pytest.mark.parametrize("what", tiers(["bsp", "asp", "ours", "unmarked"], "bsp", "ours"))
def test_nobody_is_named_where_nobody_is_slow(even, program, what):
    """Four ranks on fewer cores take turns: that is no straggler."""

    def check(made):
        found, said = made
        assert found == [[], [], [], []]
        assert "a step" not in said

    best_of_three(check, lambda: run(program, what, slow=False), read(even[what, 1]))
