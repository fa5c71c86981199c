"""A job is killed during a save, and a job on another number of ranks continues from it."""

import sys

import numpy as np
import pytest

from mpidist.checkpoint.load import load_step
from mpidist.launch.launchers import launch

PROGRAM = """
import os, signal, sys
import numpy as np
from mpi4py import MPI
import mpidist as md
from mpidist.checkpoint.storage import files
from mpidist.partition import BlockPartition
from mpidist.launch.processes import mpi_segments

comm = MPI.COMM_WORLD
path, steps, victim, call, number = sys.argv[1], *map(eval, sys.argv[2:])
files.BLOCK = 1024

def state(step):
    w = np.arange(3000.0).reshape(100, 30) * step
    low, high = BlockPartition(100, comm.size).range(comm.rank)
    return {"parameters": {"w": w}, "momentum": {"w": md.Shard(w[low:high] + 1, w.shape, (low, 0))},
            "step": step}

def blank():
    zero = state(0)
    for leaf in (zero["parameters"]["w"], zero["momentum"]["w"].array):
        leaf[...] = -1
    return zero

def kill_at(call, number):
    count, original = 0, getattr(files, call)
    def counting(*args):
        nonlocal count
        count += 1
        if count == number:
            # The MPI library's shared memory outlives a killed rank: unlink it while it is mapped.
            for segment in mpi_segments([os.getpid()]):
                segment.unlink(missing_ok=True)
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args)
    setattr(files, call, counting)

with md.CheckpointStore(comm, path, keep=2) as store:
    start = 0
    try:
        start, got = store.restore(blank())
        want = state(start)
        assert got["step"] == start
        assert got["parameters"]["w"].tobytes() == want["parameters"]["w"].tobytes()
        assert got["momentum"]["w"].array.tobytes() == want["momentum"]["w"].array.tobytes()
    except md.NoCheckpoint:
        pass
    if comm.rank == 0:
        with open(path + ".from", "w") as file:  # what a killed job prints may be lost
            file.write(str(start))
    comm.Barrier()
    if comm.rank == victim:
        kill_at(call, number)
    for step in range(start + 1, start + 1 + steps):
        store.save_async(step, state(step))
    store.wait()
    newest = store.latest_step()
    if comm.rank == 0:
        print(f"to {newest}", flush=True)
"""

#: ranks, the rank that is killed, in which call and at which of them
KILLS = [
    (4, 3, "write_at", 3),
    (3, 0, "sync", 6),
    (6, 1, "create", 2),
    (1, 0, "rename", 2),
    (2, 0, "remove_file", 3),
]


@pytest.mark.exhaustive
def test_killed_in_a_save_then_resumed_on_another_size(tmp_path):
    """R52: save at p, kill -9 one rank inside a save, restore at q: five times in one store."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    folder, begun = tmp_path / "store", tmp_path / "store.from"

    def job(ranks, steps, victim=-1, call="sync", number=0):
        words = [str(folder), str(steps), str(victim), repr(call), str(number)]
        return launch(ranks, [sys.executable, str(program), *words], timeout=150)

    job(1, 1).check()
    assert begun.read_text() == "0"
    newest = 1
    for ranks, victim, call, number in KILLS:
        # It goes on from what the one before has left, on another number of ranks, and is killed.
        killed = job(ranks, 4, victim, call, number)
        assert killed.returncode != 0
        assert not killed.timed_out
        assert begun.read_text() == str(newest)
        step, state = load_step(folder)
        assert newest <= step <= newest + 4
        assert (state["parameters"]["w"].reshape(-1) == np.arange(3000.0) * step).all()
        newest = step
    assert f"to {newest + 2}\n" in job(4, 2).check().stdout
    assert begun.read_text() == str(newest)
    # The two newest, and the one that the last job went on from.
    kept = [f"step-{step:012d}" for step in (newest, newest + 1, newest + 2)]
    assert sorted(path.name for path in folder.iterdir()) == kept


@pytest.mark.parametrize("ranks", [1, 3])
def test_an_empty_store_is_one_line_for_the_whole_job(tmp_path, ranks):
    """Resume from an empty folder: NoCheckpoint on every rank, exit code 2 where nobody catches."""
    code = (
        "import sys; from mpi4py import MPI; import mpidist as md\n"
        "with md.CheckpointStore(MPI.COMM_WORLD, sys.argv[1]) as store:\n"
        "    try:\n"
        "        store.restore()\n"
        "    except md.NoCheckpoint as error:\n"
        "        if MPI.COMM_WORLD.rank == 0:\n"
        "            print(error)\n"
        "        code = error.exit_code\n"
        "sys.exit(code)\n"
    )
    done = launch(ranks, [sys.executable, "-c", code, str(tmp_path)], timeout=120)
    assert done.returncode == 2
    assert "holds no step-* folder" in done.stdout
