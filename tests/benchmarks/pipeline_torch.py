"""A step of `md.Stage` beside one of torch.distributed.pipelining (gloo), both with 1f1b, in turns.

    PYTHONPATH=tests python -m benchmarks.pipeline_torch --torch-python .venv-torch/bin/python

A perceptron of 784-1024x6-10, with the same cut, microbatches and samples on 2 ranks. torch
computes with its own layers, and with those of mpidist (`torch_numpy_stage`), so that only the
pipelines differ; then loss and gradients must agree. torch may be in an environment of its own
(``pip install torch==2.13.0 numpy``). Each process computes with one thread. All programs are
started once, and compute in turns; every second round has the reverse order.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from python_path import python_path

from mpidist.launch.launchers import launch_environment, launcher_command

from .turns import Program, Turn

SIZES = [784, *[1024] * 6, 10]
#: The cut is behind three dense layers, each with its ReLU.
CUT, MICROBATCHES, SAMPLES = 6, 16, 1024
#: The steps of a turn; the first one, after a pause, is not counted.
STEPS = 4
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


def ours(folder: str) -> None:
    """Take turns: rank 0 prints the median step, the loss and the gradients, see `_turn`."""
    from mpi4py import MPI

    import mpidist as md

    from .pipeline import _data, step_seconds

    comm = MPI.COMM_WORLD
    turn = Turn(folder, comm.rank)
    model = md.models.mlp(SIZES, seed=1)
    first = len(model.layers) - (2 * len(SIZES) - 3)  # layers that only shape the input
    grid = md.pipeline.plan_stages(
        len(model.layers), cuts=[first + CUT], ranks=2, microbatches=MICROBATCHES
    )
    stage, data = md.Stage(comm, model, grid), _data(SIZES[0], SAMPLES)
    while turn.wait():
        seconds = step_seconds(comm, stage, data, STEPS - 1)
        loss = stage.step(data)
        mine = sum(float(abs(one).sum()) for one in stage.gradients.values())
        total = comm.allreduce(mine)
        if comm.rank == 0:
            print(json.dumps([seconds, loss, total]), flush=True)


def _start(command, **environ) -> subprocess.Popen:
    env = {**launch_environment(), "PYTHONPATH": python_path(), **ONE_THREAD, **environ}
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)


def _torch(folder: str, python: str, same_layers: bool) -> list[subprocess.Popen]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    program = str(Path(__file__).with_name("torch_pipeline.py"))
    settings = [folder, same_layers, SIZES, CUT, MICROBATCHES, SAMPLES, STEPS]
    words = [python, program, json.dumps(settings)]
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2"}
    return [_start(words, **where, RANK=str(rank)) for rank in range(2)]


def _mpidist(folder: str) -> list[subprocess.Popen]:
    command = [sys.executable, "-m", "benchmarks.pipeline_torch", "--ours", folder]
    return [_start([*launcher_command(2), *command])]


def _turn(program: Program) -> tuple[float, float, float]:
    """Return the seconds of a step, its loss, and the sum of its gradients' absolute values."""
    seconds, loss, gradients = json.loads(program.turn())
    return seconds, loss, gradients


def _check(first, second) -> None:
    """Raise SystemExit unless two steps had the same loss and gradients, but for rounding."""
    if any(abs(a - b) > 1e-4 * abs(a) for a, b in zip(first, second, strict=True)):
        raise SystemExit(f"loss and gradients: mpidist {first}, torch with its layers {second}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--torch-python", default=sys.executable, help="the Python that has torch")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--ours", metavar="FOLDER", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.ours:
        ours(given.ours)
        return
    python = given.torch_python
    starts = {
        "mpidist": _mpidist,
        "torch, mpidist's layers": lambda folder: _torch(folder, python, True),
        "torch, its own layers": lambda folder: _torch(folder, python, False),
    }
    mine, same, _ = starts
    rows: dict[str, list[float]] = {name: [] for name in starts}
    with tempfile.TemporaryDirectory() as folder:
        programs = {
            name: Program(Path(folder) / str(k), 2, start)
            for k, (name, start) in enumerate(starts.items())
        }
        try:
            for k in range(given.rounds):
                found = {
                    name: _turn(programs[name]) for name in list(starts)[:: -1 if k % 2 else 1]
                }
                _check(found[mine][1:], found[same][1:])
                for name, one in found.items():
                    rows[name].append(one[0])
        finally:
            for program in programs.values():
                program.close()
    print(f"load {os.getloadavg()[0]:.1f}, {given.rounds} rounds, a step:")
    for name, times in rows.items():
        ratio = statistics.median(b / a for a, b in zip(rows[mine], times, strict=True))
        median, least = statistics.median(times) * 1e3, min(times) * 1e3
        print(
            f"{name:24} median {median:7.1f} ms, {ratio:.2f} times as long; "
            f"fastest {least:7.1f} ms, {min(times) / min(rows[mine]):.2f}"
        )


if __name__ == "__main__":
    main()
