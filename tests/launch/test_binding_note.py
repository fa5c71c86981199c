"""`mpidist bench` and `mpidist train` print a note at their start if ranks share cores."""

import os
import sys

from mpidist.launch.launchers import launch

#: Sets the cores of this process and becomes the command.
PINNED = "import os, sys; os.sched_setaffinity(0, CORES); os.execv(sys.executable, ARGS)"


def started(cores, threads) -> str:
    """What rank 0 says on stderr when each of two ranks has these cores and BLAS threads."""
    words = [sys.executable, "-m", "mpidist", "bench", "allreduce", "--max", "8", "--rounds", "1"]
    words += ["--algorithms", "native", "--forms", "call"]
    program = PINNED.replace("CORES", str(sorted(cores))).replace("ARGS", repr(words))
    env = {"OPENBLAS_NUM_THREADS": str(threads), "OMP_NUM_THREADS": str(threads)}
    return launch(2, [sys.executable, "-c", program], env=env).check().stderr


def test_ranks_on_one_core_are_told():
    """Once, on rank 0, with what to do."""
    cores = os.sched_getaffinity(0)
    said = [line for line in started({min(cores)}, 1).splitlines() if "mpidist: note" in line]
    assert len(said) == 1
    assert "2 ranks of " in said[0]  # "all 2 ranks are bound", or "take turns" where there is one
    assert len(cores) == 1 or "--bind-to core" in said[0]


def test_a_thread_per_core_in_every_rank_is_told():
    cores = os.sched_getaffinity(0)
    threads = 2 * len(cores)
    assert f"would run {2 * threads} BLAS threads on {len(cores)} core" in started(cores, threads)


def test_nothing_is_said_where_nothing_is_wrong():
    cores = os.sched_getaffinity(0)
    assert len(cores) < 2 or "note" not in started(cores, 1)
