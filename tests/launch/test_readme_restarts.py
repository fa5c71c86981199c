"""The first loop in README.md, killed or stopped at some step, continues there on other ranks."""

import contextlib
import os
import re
import shutil
import signal
import sys
from pathlib import Path

import numpy as np
import pytest
from tiers import exhaustive
from until import wait_until

import mpidist as md
from mpidist.launch.launchers import launch, launch_environment, start
from mpidist.launch.processes import Started, marked, run, signal_all

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
(LOOP,) = re.findall(r"^```python\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)

#: Runs loop.py as it stands, slower, and tells which batches it takes.
TOLD = """
import runpy, sys, time
import mpidist as md
batch = md.data.Sampler.batch
def told(self, position):
    time.sleep(float(sys.argv[1]))
    print(f"<batch {position.epoch} {position.offset}>", flush=True)
    return batch(self, position)
md.data.Sampler.batch = told
runpy.run_path("loop.py", run_name="__main__")
"""
STEPS, EVERY = 200, 50


def reference():
    """The weights after 0, 1, ... steps, from the same loop without anything of ours around it."""
    rng = np.random.default_rng(0)
    inputs = rng.standard_normal((600, 20)).astype("f4")
    targets = inputs @ rng.standard_normal(20).astype("f4")
    weights = [np.zeros(20, "f4")]
    for step in range(STEPS):
        order = np.random.default_rng((1, step // 10)).permutation(600)
        batch = order[step % 10 * 60 :][:60]
        error = inputs[batch] @ weights[-1] - targets[batch]
        weights.append(weights[-1] - 0.1 * (inputs[batch].T @ error / 60).astype("f4"))
    return weights


WEIGHTS = reference()


def batches(output):
    """The steps of the batches that were taken, in their order; each rank tells them."""
    return [10 * int(e) + int(o) // 60 for e, o in re.findall(r"<batch (\d+) (\d+)>", output)]


def saved(folder):
    return sorted(int(path.name[5:]) for path in (folder / "runs/loop").glob("step-*"))


def check_saved(folder):
    """Every step that is there has the weights of so many steps."""
    for step in saved(folder):
        weights = md.load(folder / "runs/loop", step)["weights"]
        np.testing.assert_allclose(weights, WEIGHTS[step], rtol=1e-5, atol=1e-6)


def broken_off(folder, ranks, number, after):
    """Run on `ranks` until step `after`, and send a signal to all of them."""
    (folder / "loop.py").write_text(LOOP)
    (folder / "told.py").write_text(TOLD)
    command = [sys.executable, "told.py", "0.02"]
    if ranks == 1:
        job = Started(command, cwd=folder, env=launch_environment())
    else:
        job = start(ranks, command, cwd=folder)
    try:
        wait_until(
            lambda: max(batches(job.output()), default=0) >= after,
            200, otherwise=job.output, job=job.process,
        )  # fmt: skip
        pids = [pid for pid in marked(job.mark) if is_rank(pid)]
        assert len(pids) == ranks
        if number == signal.SIGKILL:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):  # the launcher was quicker
                    os.kill(pid, number)
        else:
            signal_all(pids, number)
    finally:
        result = job.finish(100)
    return result


def is_rank(pid):
    with contextlib.suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        return words[:2] == [sys.executable.encode(), b"told.py"]
    return False


#: Ranks, the signal, and the step at which it comes: after the first save, and before any.
BROKEN_OFF = {
    "killed": (4, signal.SIGKILL, EVERY + 10),
    "TERM": (4, signal.SIGTERM, 20),
    "Ctrl-C": (1, signal.SIGINT, 20),
}


@pytest.fixture(scope="module")
def scenes():
    def play(ranks, number, after):
        return lambda folder: broken_off(folder, ranks, number, after)

    return {name: play(*each) for name, each in BROKEN_OFF.items()}


def check_left(result, folder, name):
    """How it ended, and what it has left. Returns the step to go on with."""
    (step,) = saved(folder)
    if name == "killed":
        assert result.returncode not in (0, 75)
        assert step == EVERY
    else:
        assert result.returncode == 75, result.stderr
        assert step == max(batches(result.stdout)) + 1 >= 20
        assert "Traceback" not in result.stderr
    check_saved(folder)
    return step


#: On how many ranks each goes on; on the others in `make test-all`.
FIRST = {"killed": 3, "TERM": 1, "Ctrl-C": 4}


@pytest.mark.parametrize(
    ("scene", "name", "ranks"),
    [(name, name, ranks) if FIRST[name] == ranks else exhaustive(name, name, ranks)
     for name in BROKEN_OFF for ranks in (1, 3, 4)],
    indirect=["scene"],
)  # fmt: skip
def test_the_loop_goes_on(scene, name, ranks, tmp_path):
    """R117, R47: from the newest step on, each batch once, to the weights of an undisturbed run."""
    result, folder = scene
    step = check_left(result, folder, name)
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    command = [sys.executable, "told.py", "0"]
    if ranks == 1:
        further = run(command, cwd=copy, env=launch_environment(), timeout=200).check()
    else:
        further = launch(ranks, command, cwd=copy, timeout=200).check()
    assert sorted(batches(further.stdout)) == sorted(list(range(step, STEPS)) * ranks)
    assert saved(copy)[-1] == STEPS
    check_saved(copy)
    again = run([sys.executable, "loop.py"], cwd=copy, env=launch_environment(), timeout=200)
    assert "distance to the truth: " in again.check().stdout  # it is over, and says the result
