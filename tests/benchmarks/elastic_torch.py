"""From a kill to the next step: an elastic `md.train`, torchrun's restart, and torchft.

The same MLP and batch on 4 ranks of one machine, gloo for both of torch, in turns. torch may be in
an environment of its own (``pip install torch==2.13.0 torchft numpy``; ``--torch-python``).
torchft runs twice: with the settings of its documentation, and with shorter ones.
"""

from __future__ import annotations

import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from python_path import python_path

from benchmarks import relaunch
from mpidist.errors import MpidistError
from mpidist.launch.launchers import launch_environment, launcher_command
from mpidist.launch.processes import Started

RANKS, KILL_AT = 4, 50
#: torchft's lighthouse: as documented (a replica is dead 5 s after its last heartbeat, of which it
#: sends one each 0.1 s), and as short as works with 4 processes on 2 cores.
LIGHTHOUSE = {
    "torchft": {"join_timeout_ms": 10_000},
    "torchft, short": {"join_timeout_ms": 1_000, "heartbeat_timeout_ms": 1_000},
}
_PATIENCE = 120.0


def add_arguments(parser) -> None:
    """Add the options of `measure`."""
    parser.add_argument("--torch-python", default=sys.executable, help="the Python that has torch")
    parser.add_argument("--torch-rounds", type=int, default=5, help="rounds of `torch` (5)")


def measure(args) -> dict:
    """Measure and print; return the row. Local."""
    python = args.torch_python
    reasons = {name: missing(python, name) for name in ("torch", "torchft")}
    who = ["elastic"]
    if not reasons["torch"]:
        who.append("torchrun")
        if not reasons["torchft"]:
            who += LIGHTHOUSE
    load = Path("/proc/loadavg").read_text().split()[0]
    print(f"# from a kill to the next step, {RANKS} ranks, {args.torch_rounds} rounds; load {load}")
    for name, reason in reasons.items():
        if reason:
            print(f"# {name} is left out: {reason}; pip install torch==2.13.0 torchft numpy")
    seconds: dict[str, list[float]] = {each: [] for each in who}
    for k in range(args.torch_rounds):
        for each in who if k % 2 else reversed(who):
            victim = 1 + k % (RANKS - 1)
            if each == "torchrun":
                found = relaunch.one("torch", RANKS, victim, python)
            else:
                found = survived(each, victim, python)
            seconds[each].append(round(found, 4))
    for each, times in seconds.items():
        pairs = zip(times, seconds["elastic"], strict=True)
        ratio = statistics.median(theirs / ours for theirs, ours in pairs)
        print(f"  {each:<15}{statistics.median(times):8.3f} s   ({min(times):.3f} to "
              f"{max(times):.3f}), {ratio:.1f} times ours")  # fmt: skip
    return {"what": "torch", "seconds": seconds, "load": load, "left_out": reasons}


def missing(python: str, module: str) -> str:
    """Say why there is no `module`, or "". Local."""
    done = subprocess.run([python, "-c", f"import {module}"], capture_output=True, text=True)
    return (done.stderr.strip().splitlines() or ["?"])[-1] if done.returncode else ""


def survived(who: str, victim: int, python: str) -> float:
    """Start a job that survives a death, kill a rank; return the seconds to the next step. Local.

    The next step is the first that ranks of a smaller group have done.
    """
    folder = Path(tempfile.mkdtemp(prefix="mpidist-survived-"))
    jobs = start(who, folder, python)
    try:
        wait(jobs, lambda: min(len(steps(folder, rank)) for rank in range(RANKS)) >= KILL_AT)
        killed = time.monotonic()
        os.kill(int((folder / f"pid-{victim}").read_text()), signal.SIGKILL)
        others = [rank for rank in range(RANKS) if rank != victim]

        def after() -> list[float]:
            found = [steps(folder, rank) for rank in others]
            return [
                when for one in found for when, _, size in one if size < RANKS and when > killed
            ]

        # With one job for each rank, that of the victim ends.
        wait([job for k, job in enumerate(jobs) if len(jobs) == 1 or k != victim + 1], after)
        return min(after()) - killed
    finally:
        for job in reversed(jobs):
            with suppress(ProcessLookupError):
                os.killpg(job.pid, signal.SIGKILL)
            job.finish(1)
        shutil.rmtree(folder, ignore_errors=True)


def start(who: str, folder: Path, python: str) -> list[Started]:
    """Start the ranks. Local."""
    env = {**launch_environment(), "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1",
           "PYTHONPATH": python_path()}  # fmt: skip
    if who == "elastic":
        launcher, *options = launcher_command(RANKS)
        words = [sys.executable, "-m", "benchmarks.relaunch_job", "elastic", str(folder)]
        return [Started([launcher, "--with-ft", "ulfm", *options, *words], env=env, cwd=folder)]
    made = "; import time; time.sleep(600)"
    settings = {"bind": "[::]:0", "min_replicas": 1, "quorum_tick_ms": 100, **LIGHTHOUSE[who]}
    code = f"from torchft.coordination import LighthouseServer as L; s = L(**{settings!r}); "
    code += f"open({str(folder / 'part')!r}, 'w').write(s.address())"
    jobs = [Started([python, "-c", code + made], env=env)]
    wait(jobs, lambda: (folder / "part").exists() and (folder / "part").read_text())
    env |= {"TORCHFT_LIGHTHOUSE": (folder / "part").read_text(), "NUM_REPLICA_GROUPS": str(RANKS)}
    words = [python, "-m", "benchmarks.relaunch_job", "torchft", str(folder)]
    return jobs + [Started(words, env=env | {"REPLICA_GROUP_ID": str(rank)}, cwd=folder)
                   for rank in range(RANKS)]  # fmt: skip


def steps(folder: Path, rank: int) -> list[tuple[float, int, int]]:
    """Return the notes of a rank: time, step, ranks that did it."""
    try:
        lines = (folder / f"steps-{rank}").read_text().split("\n")[:-1]
    except OSError:
        return []
    return [(float(a), int(b), int(c)) for a, b, c in map(str.split, lines)]


def wait(jobs: list[Started], done) -> None:
    """Wait until `done()`. Local."""
    deadline = time.monotonic() + _PATIENCE
    while not done():
        ended = [job for job in jobs if job.process.poll() is not None]
        if ended or time.monotonic() > deadline:
            said = [job.finish(0).stderr[-1500:] for job in (ended or jobs)]
            raise MpidistError(f"the run did not go on: {said}")
        time.sleep(0.01)
