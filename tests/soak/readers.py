"""Load checkpoints while a job saves without a pause and keeps one step: `readers.py LOADS`.

Each load must return a whole step, no older than the step of the load before, and print nothing. A
step that the job removes during a load does not count as damaged, and the folder always has a step.
If a load fails these conditions, the exit code is 1.
"""

import contextlib
import io
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

import mpidist as md

sys.path.append(str(Path(__file__).parents[1] / "unit"))


def state(step):
    return {"w": np.arange(200.0) + step, "step": step}


def job(folder):
    """Save until it is killed."""
    from checkpoint_solo import Solo

    with md.CheckpointStore(Solo(), folder, keep=1, direct=False) as store:
        for step in range(1, 10**9):
            store.save(step, state(step))


def one_load(folder, newest):
    """Return what was loaded, and what is wrong with it."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            found = md.load(folder)
    except md.CheckpointError as error:
        return newest, str(error)
    step = found["step"]
    if said.getvalue() or step < newest or found["w"].tobytes() != state(step)["w"].tobytes():
        return step, f"step {step} after {newest}; {said.getvalue()}"
    return step, ""


def main(loads):
    newest, wrong, removed = 0, [], 0
    began = time.monotonic()
    # In memory, if possible: the job's saves take a few milliseconds, and so do the loads.
    where = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(prefix="mpidist-readers-", dir=where) as folder:
        saver = subprocess.Popen([sys.executable, __file__, "job", folder])
        try:
            first = newest = md.wait_for_step(folder, timeout=60)
            for number in range(loads):
                if saver.poll() is not None:
                    raise SystemExit("the saver has ended")
                newest, text = one_load(folder, newest)
                if text:
                    wrong.append(f"load {number}: {text}")
                    print(wrong[-1], file=sys.stderr, flush=True)
            removed = newest - first
        finally:
            saver.send_signal(signal.SIGKILL)
            saver.wait()
    seconds = time.monotonic() - began
    print(f"{loads} loads, {removed} saves meanwhile, {len(wrong)} false reports; {seconds:.0f} s")
    return bool(wrong)


if __name__ == "__main__":
    if sys.argv[1] == "job":
        job(sys.argv[2])
    else:
        sys.exit(main(int(sys.argv[1])))
