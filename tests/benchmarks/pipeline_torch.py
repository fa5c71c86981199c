"""A step of `md.Stage` beside one of torch.distributed.pipelining (gloo), both with 1f1b, in turns.

    PYTHONPATH=tests python -m benchmarks.pipeline_torch --torch-python .venv-torch/bin/python

The same layers (a perceptron of 784-1024x6-10), cut, microbatches and samples on 2 ranks. torch may
be in an environment of its own (``pip install torch==2.13.0 numpy``). Each process computes with
one thread. In each round both run one after the other; in every second round torch runs first.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import socket
import statistics
import subprocess
import sys
from pathlib import Path

from python_path import python_path

from mpidist.launch.launchers import launch_environment, launcher_command

SIZES = [784, *[1024] * 6, 10]
#: The cut is behind three dense layers, each with its ReLU.
CUT, MICROBATCHES, SAMPLES, STEPS = 6, 16, 1024, 5
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


def ours() -> None:
    """Print the median step of `md.Stage` on the slowest rank. Collective over the launch."""
    from mpi4py import MPI

    import mpidist as md

    from .pipeline import _data, step_seconds

    comm = MPI.COMM_WORLD
    model = md.models.mlp(SIZES, seed=1)
    first = len(model.layers) - (2 * len(SIZES) - 3)  # layers that only shape the input
    grid = md.pipeline.plan_stages(
        len(model.layers), cuts=[first + CUT], ranks=2, microbatches=MICROBATCHES
    )
    stage = md.Stage(comm, model, grid)
    seconds = step_seconds(comm, stage, _data(SIZES[0], SAMPLES), STEPS)
    if comm.rank == 0:
        print(f"seconds {seconds}", flush=True)
    stage.close()


def _ran(starts: list[subprocess.Popen]) -> float:
    said = [one.communicate(timeout=300)[0] for one in starts]
    if any(one.returncode for one in starts):
        raise SystemExit("\n".join(said))
    return float(re.search(r"seconds (\S+)", "".join(said))[1])


def _start(command, **environ) -> subprocess.Popen:
    env = {**launch_environment(), "PYTHONPATH": python_path(), **ONE_THREAD, **environ}
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)


def _torch(python: str) -> float:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    program = str(Path(__file__).with_name("torch_pipeline.py"))
    words = [python, program, json.dumps([SIZES, CUT, MICROBATCHES, SAMPLES, STEPS])]
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2"}
    return _ran([_start(words, **where, RANK=str(rank)) for rank in range(2)])


def _mpidist() -> float:
    command = [sys.executable, "-m", "benchmarks.pipeline_torch", "--ours"]
    return _ran([_start([*launcher_command(2), *command])])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--torch-python", default=sys.executable, help="the Python that has torch")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--ours", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.ours:
        ours()
        return
    rows = []
    for k in range(given.rounds):
        kinds = {"mpidist": _mpidist, "torch": lambda: _torch(given.torch_python)}
        order = list(kinds)[:: -1 if k % 2 else 1]
        found = {name: kinds[name]() for name in order}
        rows.append((found["mpidist"], found["torch"]))
        print(f"round {k}: " + ", ".join(f"{name} {found[name] * 1e3:.1f} ms" for name in order))
    a, b = (statistics.median(row[k] for row in rows) for k in range(2))
    ratio = statistics.median(row[1] / row[0] for row in rows)
    load = os.getloadavg()[0]
    print(f"mpidist {a * 1e3:.1f} ms, torch {b * 1e3:.1f} ms a step: torch takes {ratio:.2f} times "
          f"as long (load {load:.1f})")  # fmt: skip


if __name__ == "__main__":
    main()
