"""Record how long the steps of real runs take, for the simulator of bounds of staleness.

    mpirun -n 5 python tests/benchmarks/record_traces.py tests/unit/traces

Four workers train LeNet on the digits under ASP, in three runs: worker 0 computes each batch three
times; now and then a worker reads a file that is not in the page cache; now and then a worker frees
many objects that refer to each other in circles. Each run makes a text file with a line for each
worker: the microseconds from the parameters of a step to its gradients.
"""

from __future__ import annotations

import gc
import os
import sys
import tempfile
from pathlib import Path

import numpy as np
from mpi4py import MPI

import mpidist as md
from mpidist import data, models, optim

STEPS, STALL_BYTES, OBJECTS = 200, 6 << 20, 20_000


class Disturbed:
    """A model whose workers are disturbed in some steps."""

    def __init__(self, kind: str, worker: int, folder: str):
        self.model = models.lenet([1, 8, 8], channels=[16, 32], seed=0)
        self.parameters, self.predict = self.model.parameters, self.model.predict
        self._kind, self._worker, self._steps = kind, worker, 0
        self._rng = np.random.default_rng(worker)
        self._file = Path(folder) / f"stall-{worker}"

    def loss_and_gradients(self, batch, gradients, ready=None) -> float:
        """Compute as the model does, and more in some steps."""
        self._steps += 1
        if self._kind == "slow" and self._worker == 0:
            for _ in range(2):
                self.model.loss_and_gradients(batch, gradients)
        if self._kind == "stalls" and self._rng.random() < 0.03:
            self._read()
        if self._kind == "pauses" and self._steps % 45 == 11 * self._worker % 45:
            circles = [[] for _ in range(OBJECTS)]
            for one in circles:
                one.append(one)
            del circles, one
            gc.collect()
        return self.model.loss_and_gradients(batch, gradients)

    def _read(self) -> None:
        if not self._file.exists():
            self._file.write_bytes(bytes(STALL_BYTES))
        file = os.open(self._file, os.O_RDONLY)
        os.fsync(file)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        while os.read(file, 1 << 20):
            pass
        os.close(file)


def main(comm, out: str) -> None:
    """Record the three runs. Collective over `comm`."""
    training, _ = data.digits()
    for kind in ("slow", "stalls", "pauses"):
        times: list[int] = []
        with tempfile.TemporaryDirectory() as folder:
            md.train(
                comm, Disturbed(kind, comm.rank, folder), training, optimizer=optim.sgd(0.05),
                global_batch=32 * (comm.size - 1), steps=STEPS,
                strategy=md.ParameterServer(1, md.ASP()),
                callbacks=[lambda report, times=times: times.append(
                    round(1e6 * report.compute_seconds))],
            )  # fmt: skip
        everyone = comm.gather(times)
        if comm.rank == 0:
            lines = [" ".join(map(str, each)) for each in everyone if each]
            Path(out, f"{kind}.txt").write_text("\n".join(lines) + "\n", encoding="ascii")


if __name__ == "__main__":
    main(MPI.COMM_WORLD, sys.argv[1])
