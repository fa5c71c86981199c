"""The script requeue.sbatch decides rightly for each end of a training run; no Slurm, no MPI.

Small scripts replace `srun` and `scontrol` here; test_jobs.py uses the real programs.
"""

import os
import signal
import subprocess
import time

import pytest
from interpreters import ROOT
from until import wait_until

SRUN = """#!/bin/bash
echo "$@" > "$STAND_IN/srun.args"
echo "$SLURM_PMIX_FENCE" > "$STAND_IN/srun.fence"
{body}
"""
SCONTROL = """#!/bin/bash
echo "$@" > "$STAND_IN/scontrol.args"
"""
#: Exits with 75 when it gets the signal, as training does; two signals must not confuse the script.
SAVES = "trap 'sleep 0.3; exit 75' USR1; touch $STAND_IN/ready; while :; do sleep 0.05; done"
#: The signal comes as early as there is something to hand it on to.
AT_ONCE = "trap 'exit 75' USR1; kill -USR1 $PPID; while :; do sleep 0.05; done"
#: Has no handler yet.
DIES = "touch $STAND_IN/ready; exec sleep 60"


def run_script(folder, body, signals=0, script="requeue", **more):
    """Run a batch script; return its exit code and whether it asked for a requeue."""
    for name, text in (("srun", SRUN.format(body=body)), ("scontrol", SCONTROL)):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    variables = {
        "PATH": f"{folder}:{os.environ['PATH']}",
        "STAND_IN": str(folder),
        "SLURM_MPI_TYPE": "",
        "SLURM_JOB_ID": "17",
        "SLURM_JOB_NAME": "requeue",
        **more,
    }
    script = subprocess.Popen(
        ["bash", ROOT / "jobs" / f"{script}.sbatch", "JOB.toml", "--set", "a.b=c d"],
        env={**os.environ, **variables}, cwd=folder,
    )  # fmt: skip
    wait_until(lambda: not signals or (folder / "ready").exists())
    for _ in range(signals):
        script.send_signal(signal.SIGUSR1)
        time.sleep(0.1)
    code = script.wait(60)
    asked = folder / "scontrol.args"
    assert not asked.exists() or asked.read_text() == "requeue 17\n"
    return code, asked.exists()


@pytest.mark.parametrize(
    ("body", "signals", "expected"),
    [
        ("exit 0", 0, (0, False)),
        ("exit 2", 0, (2, False)),
        ("exit 75", 0, (75, True)),
        ("kill -KILL $$", 0, (137, False)),
        (SAVES, 1, (75, True)),
        (SAVES, 3, (75, True)),
        (AT_ONCE, 0, (75, True)),
        (DIES, 1, (138, True)),
    ],
    ids=["done", "error", "saved", "killed", "asked", "asked-thrice", "asked-at-once", "too-early"],
)
def test_only_a_pause_goes_back_into_the_queue(tmp_path, body, signals, expected):
    """R47, R106: requeue what was paused, and nothing else."""
    assert run_script(tmp_path, body, signals) == expected


def test_arguments_reach_the_command(tmp_path):
    run_script(tmp_path, "exit 0")
    words = (tmp_path / "srun.args").read_text()
    assert words == (
        "--mpi=pmix --kill-on-bad-exit=0 mpidist train JOB.toml "
        "--set out=runs/requeue-17 --set a.b=c d\n"
    )


@pytest.mark.parametrize("path", sorted(ROOT.glob("jobs/*.sbatch")), ids=lambda path: path.stem)
def test_all_scripts_start_with_whole_barriers(tmp_path, path, monkeypatch):
    """R97: else Open MPI dies in some starts on several hosts; what the user has set stays."""
    monkeypatch.delenv("SLURM_PMIX_FENCE", raising=False)
    hetero = {f"SLURM_JOB_NUM_NODES_HET_GROUP_{group}": "1" for group in (0, 1)}
    fence = tmp_path / "srun.fence"
    assert run_script(tmp_path, "exit 0", script=path.stem, **hetero) == (0, False)
    assert fence.read_text() == "ring\n"
    run_script(tmp_path, "exit 0", script=path.stem, SLURM_PMIX_FENCE="mixed", **hetero)
    assert fence.read_text() == "mixed\n"


@pytest.mark.parametrize("name", ["allreduce", "servers", "requeue", "gpu"])
def test_scripts_are_short_and_parse(name):
    script = ROOT / "jobs" / f"{name}.sbatch"
    assert len(script.read_text().splitlines()) <= 30
    subprocess.run(["bash", "-n", script], check=True)
