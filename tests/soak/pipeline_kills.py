"""Kill a stage at every action of a step, under `mpidist launch`: pipeline_kills.py [FIRST [STOP]].

A job of two stages with 4 microbatches has 16 actions in a step on each rank: forward and backward
passes, sends and receives. For each rank and each action, a run gets SIGKILL there, in the middle
of the training. It must end in time, with one restart and the bits of an undisturbed run on one
rank. FIRST and STOP choose some of the 32 kills.
"""

import sys
import tempfile
import time
from pathlib import Path

LAUNCH = Path(__file__).parents[1] / "launch"
sys.path[:0] = [str(LAUNCH), str(LAUNCH.parent)]

from digits_job import write_job  # noqa: E402
from supervised_jobs import TRAIN, run, summary  # noqa: E402

from mpidist.launch.launchers import launch  # noqa: E402

#: Actions of a step on a rank: each of 4 microbatches is computed, and received or sent, both ways.
ACTIONS = 16
SETTINGS = {"steps": 24, "checkpoint_every": 10, "microbatches": 4}
PIPELINE = '[strategy]\nname = "pipeline"\ncuts = [2]\n'
#: The kill is in this step, which no checkpoint has.
STEP = 15


def main(first: int = 0, stop: int = 2 * ACTIONS) -> int:
    """Make the kills; return the exit code."""
    wrong, slowest = 0, 0.0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name, "alone")
        folder.mkdir()
        launch(1, TRAIN, cwd=write_job(folder, **SETTINGS), timeout=120).check()
        expected = summary(folder)["parameters_sha256"]
        for number in range(first, stop):
            rank, action = number % 2, number // 2
            folder = Path(name, str(number))
            folder.mkdir()
            write_job(folder, PIPELINE, **SETTINGS)
            began = time.monotonic()
            run(folder, "-n", "2", fault=f"kill@action:{STEP * ACTIONS + action + 1},rank={rank}")
            slowest = max(slowest, time.monotonic() - began)
            found = summary(folder)
            right = found["parameters_sha256"] == expected and found["restarts"] == 1
            wrong += not right
            print(f"rank {rank}, action {action}: {'right' if right else found}", flush=True)
    print(f"{stop - first} kills, {wrong} wrong, no hang; the slowest run took {slowest:.1f} s")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
