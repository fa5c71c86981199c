"""A second start of `mpidist train` in the same folder, also after Ctrl-C."""

import contextlib
import json
import os
import re
import shlex
import signal
import sys
import time
from pathlib import Path

import pytest
from digits_job import write_job
from tiers import exhaustive
from until import wait_until

from mpidist.launch.launchers import find_launcher, launch, launch_environment, launcher_kind, start
from mpidist.launch.processes import Started, marked, mpi_segments, run, signal_all

MPIDIST = [sys.executable, "-m", "mpidist"]
TRAIN = [*MPIDIST, "train", "job.toml"]
RANKS = 3
#: Nothing is saved but at the end, or when the run is stopped.
SETTINGS = {"steps": 4000, "checkpoint_every": 10_000, "log_every": 1}


def alone(folder, *words, **settings):
    """Run without a launcher to the end."""
    command = [*TRAIN, *words]
    result = run(command, cwd=folder, env={**launch_environment(), **settings}, timeout=300)
    return result.check()


def saved(folder):
    """The steps that are there."""
    return sorted(int(path.name[5:]) for path in (folder / "run/checkpoints").glob("step-*"))


def ours(result):
    """The lines of ours on stderr, without what other work on the machine may cause."""
    lines = [line for line in result.stderr.splitlines() if line.startswith("mpidist: ")]
    return [line for line in lines if "mpidist: note: " not in line and ": fault: " not in line]


# --------------------------------------------------------------------------------------- Ctrl-C


def under_way(job, folder):
    """Wait until steps are logged."""
    metrics = folder / "run/metrics.jsonl"
    wait_until(
        lambda: metrics.exists() and metrics.read_text().count("\n") >= 4,
        200, otherwise=job.output, job=job.process,
    )  # fmt: skip


def interrupted(folder, ranks, presses=1, fault="sleep@step,ms=20"):
    """Press Ctrl-C as a terminal does: to the whole process group. Returns what came of it."""
    write_job(folder, **SETTINGS)
    env = {"MPIDIST_TESTING": "1", "MPIDIST_FAULT": fault}
    if ranks == 1:
        job = Started(TRAIN, cwd=folder, env={**launch_environment(), **env})
    else:
        job = start(ranks, TRAIN, cwd=folder, env=env)
    try:
        under_way(job, folder)
        segments = mpi_segments(marked(job.mark))
        began = time.monotonic()
        for _ in range(presses):
            if job.process.poll() is None:
                os.killpg(job.pid, signal.SIGINT)
            time.sleep(0.3)
        job.process.wait(60)
        wait_until(lambda: not marked(job.mark), every=0.05)
        if ranks == 1:  # else the launcher's to remove
            assert [path for path in segments if path.exists()] == []
        return job.finish(60), time.monotonic() - began
    finally:
        job.finish(1)


OPEN_MPI = launcher_kind(find_launcher())[0] == "openmpi"


def check_said(result, folder):
    (step,) = saved(folder)
    said = ours(result)
    assert re.search(rf"stopped at step {step}: SIG\w+ on rank \d; the state was saved", said[-2])
    assert said[-1].startswith("mpidist: go on with: ")


@pytest.mark.parametrize("ranks", [1, RANKS])
def test_ctrl_c_saves_and_says_so(tmp_path, ranks):
    """R47: as SIGTERM; all that is lost is the rest of a step."""
    result, _ = interrupted(tmp_path, ranks)
    assert "Traceback" not in result.stderr
    if ranks > 1 and OPEN_MPI:
        # Its mpirun kills the ranks a quarter of a second later, whether they have saved or not.
        assert len(saved(tmp_path)) <= 1
        return
    assert result.returncode == 75
    assert ours(result)[0].startswith("mpidist: interrupted: the run stops after this step")
    check_said(result, tmp_path)


def test_what_is_said_to_a_launcher_that_does_not_read(tmp_path):
    """Open MPI's mpirun reads nothing after Ctrl-C. Here it stands still, and kills nobody."""
    write_job(tmp_path, **SETTINGS)
    slow = {"MPIDIST_TESTING": "1", "MPIDIST_FAULT": "sleep@step,ms=20"}
    job = start(RANKS, TRAIN, cwd=tmp_path, env=slow)
    try:
        under_way(job, tmp_path)
        ranks = [pid for pid in marked(job.mark) if is_rank(pid)]
        assert len(ranks) == RANKS
        os.kill(job.pid, signal.SIGSTOP)
        signal_all(ranks, signal.SIGTERM)
        wait_until(lambda: not OPEN_MPI or "go on with" in job._read(1), 100)
        past = job._read(1)
        os.kill(job.pid, signal.SIGCONT)
        job.process.wait(100)
    finally:
        result = job.finish(1)
    assert result.returncode == 75
    (step,) = saved(tmp_path)
    text = f"stopped at step {step}: SIGTERM on rank"
    assert (text in past) == OPEN_MPI  # to where its launcher writes itself
    assert text in result.stderr


def is_rank(pid):
    with contextlib.suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        return words[:3] == [word.encode() for word in MPIDIST]
    return False


@pytest.mark.parametrize("ranks", [1, RANKS])
def test_ctrl_c_twice_ends_at_once(tmp_path, ranks):
    """Whatever the ranks do: here each sleeps for a minute. What was saved stays as it was."""
    result, seconds = interrupted(tmp_path, ranks, presses=2, fault="sleep@step:5,ms=60000")
    assert seconds < 20
    if ranks == 1:  # else it is the launcher's, and MPICH's says 0
        assert result.returncode == -signal.SIGINT
    assert saved(tmp_path) == []


def test_ctrl_c_that_is_ignored_stays_so(tmp_path):
    """A shell lets what it starts beside itself ignore SIGINT: it is meant for something else."""
    write_job(tmp_path, **{**SETTINGS, "steps": 40})
    ignoring = ["sh", "-c", "trap '' INT; exec \"$@\"", "sh", *TRAIN]
    slow = {"MPIDIST_TESTING": "1", "MPIDIST_FAULT": "sleep@step,ms=20"}
    job = Started(ignoring, cwd=tmp_path, env={**launch_environment(), **slow})
    try:
        under_way(job, tmp_path)
        os.killpg(job.pid, signal.SIGINT)
    finally:
        result = job.finish(60)
    assert result.returncode == 0, result.stderr
    assert saved(tmp_path) == [40]


# --------------------------------------------------------------------------------- going on


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """A folder with a run of 30 steps on three ranks."""
    folder = write_job(tmp_path_factory.mktemp("begun"), steps=30)
    launch(RANKS, TRAIN, cwd=folder, timeout=300).check()
    return folder


def test_a_resume_says_from_where_and_what_is_new(begun):
    """R109: nothing goes on in another way without a word."""
    result = alone(begun, "--set", "steps=40", "--set", "optimizer.lr=0.5", "--set", "shuffle=none")
    assert ours(result) == [
        f"mpidist: resumed from step 30 (saved by {RANKS} ranks), 10 to go",
        "mpidist: steps: 30 when saved, 40 now",
        "mpidist: optimizer.lr: 0.02 when saved, 0.5 now",
        "mpidist: shuffle: permutation when saved, which stays; none now",
    ]
    again = alone(begun, "--set", "steps=50", "--set", "optimizer.lr=0.5")
    assert ours(again) == [
        "mpidist: resumed from step 40 (saved by 1 rank), 10 to go",
        "mpidist: steps: 40 when saved, 50 now",
    ]
    assert alone(begun, "--set", "steps=60", MPIDIST_VERBOSE="0").stderr == ""


@pytest.mark.parametrize("strategy", [exhaustive("allreduce"), "parameter_server"])
def test_a_finished_run_is_left_alone(tmp_path, strategy):
    """It says so in one line, exits 0 and leaves the summary as it was; a lost one is made."""
    write_job(tmp_path, f'[strategy]\nname = "{strategy}"\n', steps=30)
    launch(RANKS, TRAIN, cwd=tmp_path, timeout=300).check()
    summary = tmp_path / "run/summary.json"
    before, files = summary.read_bytes(), saved(tmp_path)
    result = launch(RANKS, TRAIN, cwd=tmp_path, timeout=300).check()
    assert ours(result) == [
        f"mpidist: nothing to do: the run is at step 30 (saved by {RANKS} ranks) and ends at 30; "
        "give more steps or epochs"
    ]
    assert "nan" not in result.stdout
    assert (summary.read_bytes(), saved(tmp_path)) == (before, files)
    summary.unlink()
    result = launch(RANKS, TRAIN, cwd=tmp_path, timeout=300).check()
    assert "nan" not in result.stdout
    old, new = json.loads(before), json.loads(summary.read_text())
    for name in ("parameters_sha256", "test_accuracy", "steps", "finished"):
        assert new[name] == old[name], name


def test_the_folder_keeps_each_start(begun):
    """R104: job file, command, versions, hosts, Slurm id; of all starts, in their order."""
    number = len(list((begun / "run/starts").glob("*.json")))
    alone(begun, "--set", "steps=30", SLURM_JOB_ID="812")
    first = json.loads((begun / "run/starts/0001.json").read_text())
    last = json.loads((begun / f"run/starts/{number + 1:04}.json").read_text())
    assert shlex.split(first["command"])[1:] == ["train", "job.toml"]
    assert shlex.split(last["command"])[1:] == ["train", "job.toml", "--set", "steps=30"]
    assert set(first["versions"]) >= {"mpidist", "Python", "numpy", "mpi4py", "MPI"}
    assert sum(first["hosts"].values()) == RANKS
    assert (first["slurm_job_id"], last["slurm_job_id"]) == (None, "812")
    assert first["time"] < last["time"]
    assert first["working_directory"] == str(begun)
    for start_ in ("0001", f"{number + 1:04}"):
        kept = begun / f"run/starts/{start_}.toml"
        assert kept.read_bytes() == (begun / "job.toml").read_bytes()


# ------------------------------------------------------------------------------- "again:"


@pytest.mark.parametrize("on_path", [True, exhaustive(False)])
def test_the_line_for_again_works_as_printed(tmp_path, on_path):
    """Pasted into a shell, on more ranks than this machine has cores."""
    ranks = 1 + len(os.sched_getaffinity(0))
    write_job(tmp_path, steps=10)
    words = ["--set", "out=run", "--set", 'optimizer.lr={schedule="cosine", lr=0.02}']
    here = f"{Path(sys.executable).parent}{os.pathsep}"
    path = os.environ["PATH"].replace(here, "")
    env = {"PATH": here + path if on_path else path}
    first = launch(ranks, [*TRAIN, *words], cwd=tmp_path, env=env, timeout=300).check()
    (line,) = re.findall(
        r"^results in run; to repeat or resume the run: (.*)$", first.stdout, re.MULTILINE
    )
    assert f"-n {ranks} " in line
    assert line.startswith("mpirun ") == on_path
    env = {**launch_environment(), **env}
    further = run(["bash", "-c", f"{line} --set steps=20"], cwd=tmp_path, env=env, timeout=300)
    further.check()
    assert f"resumed from step 10 (saved by {ranks} ranks), 10 to go" in further.stderr
