"""Compare the time of calls in two source trees, in turns: `hot_path.py OTHER_TREE [TURNS]`.

Each turn starts two jobs of two ranks for each tree (by `PYTHONPATH`). One job times calls of 8
bytes and of an arena of 1 MiB, and the other job trains on the digits. The program prints the least
time of all turns, and the median of the turns' ratios. It does not need root.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parents[2]


def least(call, calls, batches=30):
    """Seconds of one call in the best of some batches."""
    best = float("inf")
    for _ in range(batches):
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        best = min(best, (time.perf_counter() - begin) / calls)
    return best


def measure():
    """One job: print rank 0's seconds per call."""
    import numpy as np
    from mpi4py import MPI

    import mpidist as md

    comm = MPI.COMM_WORLD
    x, out = np.zeros(1), np.empty(1)
    small = md.plan(comm, x)
    arena = md.Arena(comm, {"w": ((1 << 18,), np.float32)})
    arena["w"][...] = 1e-20
    takes = {
        "md.allreduce, 8 bytes": least(lambda: md.allreduce(comm, x), 1000),
        "the same with out=": least(lambda: md.allreduce(comm, x, out=out), 1000),
        "md.plan, 8 bytes": least(small, 1000),
        "arena, 1 MiB": least(md.plan(comm, arena, "mean"), 100),
    }
    if comm.rank == 0:
        print(json.dumps(takes), flush=True)


def step_seconds(tree):
    """Seconds of a training step of the digits, as the run's summary tells."""
    with tempfile.TemporaryDirectory() as folder:
        job = ["train", str(HERE / "jobs" / "digits.toml"), "--set", f"out={folder}/run"]
        launch(tree, ["-m", "mpidist", *job, "--set", "steps=1200", "--set", "global_batch=64"])
        facts = json.loads((Path(folder) / "run" / "summary.json").read_text())
    return 64 / facts["samples_per_second"]


def launch(tree, words):
    """The output of a job of two ranks that imports `mpidist` from a tree."""
    launcher = Path(sys.executable).with_name("mpirun")
    bind = ["--bind-to", "core"] if launcher.exists() else ["-bind-to", "core"]
    launcher = launcher if launcher.exists() else launcher.with_name("mpiexec")
    done = subprocess.run(
        [launcher, "-n", "2", *bind, sys.executable, *words],
        env={**os.environ, "PYTHONPATH": str(tree)}, stdout=subprocess.PIPE, text=True, check=True,
    )  # fmt: skip
    return done.stdout


def main(other, turns=20):
    trees = {"here": HERE, "other": Path(other).resolve()}
    seen = {name: [] for name in trees}
    for turn in range(turns):
        order = list(trees) if turn % 2 else list(trees)[::-1]
        for name in order:
            out = launch(trees[name], [__file__, "--measure"])
            took = json.loads(out.splitlines()[-1])
            seen[name].append({**took, "digits, a step": step_seconds(trees[name])})
    for what in seen["here"][0]:
        here, there = ([run[what] for run in seen[name]] for name in ("here", "other"))
        ratio = statistics.median(a / b for a, b in zip(here, there, strict=True))
        print(
            f"{what:24} {min(here) * 1e6:8.3f} us here {min(there) * 1e6:8.3f} us there "
            f"{(min(here) - min(there)) * 1e9:+7.0f} ns  median ratio {ratio:.3f}"
        )


if __name__ == "__main__":
    if sys.argv[1:] == ["--measure"]:
        measure()
    else:
        main(sys.argv[1], *(int(word) for word in sys.argv[2:3]))
