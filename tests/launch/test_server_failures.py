"""With parameter servers, only the rank with the cause of a failure prints its traceback, once."""

import sys

import pytest
from tiers import tiers

PROGRAM = """
import sys, time
import numpy as np
from mpi4py import MPI
import mpidist as md

what = sys.argv[1]
comm = MPI.COMM_WORLD
SGD, ONES = md.optim.sgd(1.0), {"x": np.ones(6)}

class Broken:
    elementwise = True
    def init(self, parameters):
        return {}
    def update(self, gradients, state, parameters):
        raise FloatingPointError("deep trouble")

def steps(client, fail):
    for step in range(10**6):
        if step == 3 and fail:
            raise ValueError("deep trouble")
        client.push_pull(ONES)

if what == "worker":  # the last of the workers
    with md.parameter_server(comm, ONES, optimizer=SGD) as client:
        steps(client, comm.rank == comm.size - 2)
elif what == "server":
    with md.parameter_server(comm, ONES, optimizer=Broken()) as client:
        steps(client, False)
elif what == "bare":  # no with block, and the caller of the server catches what it is told
    group = md.ServerGroup(comm)
    client = group.add("m", ONES, optimizer=SGD)
    if client is None:
        group.serve()
    steps(client, comm.rank == 1)
elif what == "groups":  # rank 1 is in both
    left = comm.Split(0 if comm.rank < 2 else MPI.UNDEFINED)
    right = comm.Split(0 if comm.rank else MPI.UNDEFINED)
    if comm.rank == 0:
        with md.parameter_server(left, ONES, optimizer=SGD, placement="colocated") as client:
            steps(client, False)
    elif comm.rank > 1:
        with md.parameter_server(right, ONES, servers=1, optimizer=SGD) as client:
            steps(client, comm.rank == 2)
    with (
        md.parameter_server(left, ONES, optimizer=SGD, placement="colocated") as near,
        md.parameter_server(right, ONES, servers=1, optimizer=SGD) as far,
    ):
        while True:
            near.push_pull(ONES)
            far.push_pull(ONES)
elif what == "argument":
    with md.parameter_server(comm, ONES, optimizer=SGD) as client:
        if client is not None:
            client.push(ONES, samples="all" if comm.rank == 1 else 1)
            client.clock()
            steps(client, False)
elif what == "left":  # the program of one rank ends, and the group is open
    group = md.ServerGroup(comm)
    client = group.add("m", ONES, optimizer=SGD)
    if comm.rank == 1:
        sys.exit()
    if client is None:
        group.serve()
    steps(client, False)
"""

FUNNELED = """
import threading
import mpi4py
mpi4py.rc.thread_level = "funneled"
import numpy as np
from mpi4py import MPI
import mpidist as md

comm = MPI.COMM_WORLD
with md.parameter_server(comm, {"x": np.ones(6)}, optimizer=md.optim.sgd(1.0)) as client:
    if client is not None:
        client.pull()
        def pull():
            try:
                client.pull()
            except md.ProtocolError as error:
                print("refused:", error, flush=True)
        thread = threading.Thread(target=pull)
        thread.start()
        thread.join()
        client.pull()
"""

#: case -> ranks, the rank that speaks, what it says
CASES = {
    "worker": (4, 2, "ValueError: deep trouble"),
    "server": (3, 2, "FloatingPointError: deep trouble"),
    "bare": (3, 1, "ValueError: deep trouble"),
    "groups": (4, 2, "ValueError: deep trouble"),
}


@pytest.fixture(scope="module")
def ends(launches, tmp_path_factory, chosen):
    folder = tmp_path_factory.mktemp("servers")
    program, funneled = folder / "servers.py", folder / "funneled.py"
    program.write_text(PROGRAM, encoding="utf-8")
    funneled.write_text(FUNNELED, encoding="utf-8")
    whats = chosen("test_the_rank_with_the_cause_speaks_once", "what")
    wanted = {what: (CASES[what][0], [sys.executable, program, what]) for what in whats}
    wanted |= {what: (3, [sys.executable, program, what]) for what in ("argument", "left")}
    return launches({**wanted, "funneled": (2, [sys.executable, funneled])}, timeout=60)


@pytest.mark.parametrize("what", tiers(CASES, "worker"))
def test_the_rank_with_the_cause_speaks_once(ends, what):
    """Its traceback is the only one, with the line of the program that failed."""
    ranks, rank, text = CASES[what]
    result = ends[what]
    assert result.returncode == 1, result.stderr
    assert result.stderr.count("Traceback (most recent call last)") == 1, result.stderr
    assert f"rank {rank} of {ranks} on " in result.stderr
    assert text in result.stderr
    assert "gave up with" not in result.stderr
    assert "raise " in result.stderr


def test_a_bad_argument_is_one_line(ends):
    """Of the rank that gave it; the others keep silent."""
    result = ends["argument"]
    assert result.returncode == 2, result.stderr
    assert result.stderr.count("mpidist: error: push to 'model': samples is 'all'") == 1
    assert "Traceback" not in result.stderr
    assert "gave up" not in result.stderr


def test_a_program_that_ends_with_an_open_group(ends):
    """The others hear of it, and do not wait for ever."""
    result = ends["left"]
    assert result.returncode == 1, result.stderr
    assert "rank 1 gave up with ProtocolError: the program ended and left" in result.stderr


def test_another_thread_below_thread_multiple(ends):
    result = ends["funneled"]
    assert result.returncode == 0, result.stderr
    assert "below MPI_THREAD_MULTIPLE" in result.stdout
