"""Elastic jobs on the nodes of a one-box Slurm cluster: started there, disturbed, and judged."""

import hashlib
import os
import re

import numpy as np
from interpreters import job_environment
from nodes import processes_of, rows
from until import wait_until

SHAPE = ["--nodes=4", "--ntasks-per-node=2"]
#: Steps of `elastic_steps.py`, each of `PAUSE` seconds: the 21st is not long before a loss.
SOME, PAUSE = 80, 0.03
SCRIPT = """#!/bin/bash
mpirun --with-ft ulfm -n 8 python {program} {folder} {steps} {pause} {deaths}
echo "mpirun ended with $?"
"""


def mpirun_ulfm(cluster, python, programs, folder, steps, pause, deaths=""):
    """Submit `elastic_steps.py` under `mpirun --with-ft ulfm`."""
    script = folder / "elastic.sbatch"
    program = programs / "elastic_steps.py"
    script.write_text(SCRIPT.format(program=program, folder=folder, steps=steps, pause=pause,
                                    deaths=deaths))  # fmt: skip
    env = {**job_environment(python), "PYTHONPATH": os.environ.get("PYTHONPATH", "")}
    return cluster.submit(script, options=[*SHAPE, "--no-kill"], env=env, cwd=folder)


def launch_elastic(cluster, python, folder, words, *, shape=(*SHAPE, "--no-kill")):
    """Submit `mpidist launch --elastic`."""
    script = folder / "launch.sbatch"
    script.write_text(f"#!/bin/bash\nexec mpidist launch --elastic {words}\n")
    env = {**job_environment(python), "PYTHONPATH": os.environ.get("PYTHONPATH", "")}
    return cluster.submit(script, options=shape, env=env, cwd=folder)


def ended(cluster, number):
    """Wait for the end of the batch script; Slurm itself waits for the lost node, and longer."""
    wait_until(lambda: cluster.job(number).state != "RUNNING", 180, every=0.2,
               otherwise=lambda: cluster.job(number).output)  # fmt: skip
    job = cluster.job(number)
    assert (job.state, job.exit_code) in {("COMPLETED", 0), ("COMPLETING", 0)}, job.output
    return job.output


def send(cluster, node, number):
    """Send a signal to all that runs on a node, also to its slurmd; return the processes."""
    pids = processes_of(cluster, node)
    for pid in pids:
        os.kill(pid, number)
    return pids


def program(programs, folder, count=SOME):
    """The words that run `elastic_steps.py`."""
    return f"python {programs / 'elastic_steps.py'} {folder} {count} {PAUSE}"


def result(count):
    """The hash that the ranks of `elastic_steps.py` print after `count` steps, however many."""
    numbers, weights = np.arange(20_000), np.zeros(20_000)
    for step in range(count):
        for k in range(24):
            weights += (numbers * (k + 1) + step) % 89
    return hashlib.sha256(weights.tobytes()).hexdigest()


def next_step(folder, ranks, killed):
    """The seconds from a kill to the first step that `ranks` ranks have done."""
    found = [row for rank in range(ranks) for row in rows(folder, rank)]
    return min(when for when, _, size in found if when > killed and size == ranks) - killed


def told_rightly(found):
    """A host that has its network names the one that is away, and says so when that is back."""
    away = re.findall(
        r"rank \d of \d on h([124]) has had no answer from 10\.77\.0\.3 for \d+ s, in "
        r"md\.[\w.]+ \(network_away\.py:\d+\); is a host or the network down\?",
        found.done.stderr,
    )
    back = re.findall(
        r"on h([124]) gets answers from 10\.77\.0\.3 again after \d+ s, and goes on",
        found.done.stderr,
    )
    once = len(set(away)) == len(away)  # one line from each host at most
    return away and once and set(back) == set(away)
