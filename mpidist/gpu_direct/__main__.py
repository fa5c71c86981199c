"""Test whether MPI can send device memory: ``mpiexec -n 2 python -m mpidist.gpu_direct``.

An MPI library that cannot send device memory raises no error: it ends the process or delivers wrong
bytes. Therefore this test runs in a job of its own. It writes its result to a file, which is valid
for this host and for the installed versions of MPI, cupy and the driver. `arrays.mpi_direct` reads
the file.
"""

from __future__ import annotations

import json
import os
import sys

import numpy as np

from .. import arrays
from ..errors import ConfigError

#: Sizes below and above the limits at which MPI libraries change protocol (eager, pipelined, IPC).
_COUNTS = (1, 1000, 20_000, 3_000_000)


def probe(comm) -> list[str]:
    """Run operations on device arrays; return which had wrong results. Collective over `comm`."""
    from mpi4py import MPI

    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    gpu = node.rank  # as `mpidist train` does, each rank of a node takes another GPU
    node.Free()
    wrong: list[str] = []
    for count in _COUNTS:
        mine = np.arange(count, dtype=np.float32) % 1000 + comm.rank
        expected = comm.size * (mine - comm.rank) + comm.size * (comm.size - 1) // 2
        x, y = arrays.to_device(mine, gpu), arrays.to_device(np.zeros_like(mine), gpu)
        arrays.synchronize(x)
        comm.Allreduce(x, y, MPI.SUM)
        _check(wrong, f"Allreduce of {count}", y, expected)

        right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        MPI.Request.Waitall([comm.Irecv(y, left), comm.Isend(x, right)])
        _check(wrong, f"Isend and Irecv of {count}", y, mine - comm.rank + left)

        comm.Bcast(x, root=0)
        _check(wrong, f"Bcast of {count}", x, mine - comm.rank)
    return wrong


def _check(wrong: list[str], what: str, x, expected) -> None:
    found = np.empty(expected.shape, expected.dtype)
    arrays.copy_into(found, x)
    if not np.array_equal(found, expected):
        wrong.append(what)


def main() -> int:
    """Run the test, write the result file on each host, and return the exit code."""
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    try:
        if comm.size < 2:
            raise ConfigError(
                "mpidist.gpu_direct: the test needs two ranks; start it with mpiexec -n 2"
            )
        arrays.load_cupy()
    except ConfigError as error:
        if comm.rank == 0:
            print(f"mpidist: error: {error}", file=sys.stderr)
        return error.exit_code
    path = arrays.proof_path()
    path.unlink(missing_ok=True)
    comm.Barrier()  # otherwise a slow rank could remove the new file of a fast rank
    wrong = sorted({what for each in comm.allgather(probe(comm)) for what in each})
    path.parent.mkdir(parents=True, exist_ok=True)
    # All ranks of a host write the same text, each to a temporary file. The file is then renamed,
    # so readers always see a complete file.
    draft = path.with_suffix(f".{os.getpid()}")
    draft.write_text(json.dumps({"direct": not wrong, "wrong": wrong}), encoding="utf-8")
    draft.replace(path)
    if comm.rank == 0:
        said = f"wrong values after {', '.join(wrong)}" if wrong else "device memory works"
        print(f"mpidist.gpu_direct: {said}; written to {path}", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
