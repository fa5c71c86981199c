"""Count the resources of a process during its work; a line through the second half must be flat."""

import ctypes
import gc
from pathlib import Path

import numpy as np
from mpi4py import MPI

from mpidist.runtime import context

_libc = ctypes.CDLL(None)
#: What the second half may add. Numbers are noisy, since what was freed last may be used first;
#: memory is less than 21 bytes for each of 50,000 operations, and no Python object is that small.
ALLOWED = {"communicators": 8, "requests": 8, "objects": 200, "memory": 1 << 20}


def look(comm) -> dict[str, float]:
    """Count what this process holds. Collective over `comm`.

    MPI has no call that counts its objects, but both libraries number them and use numbers again,
    so that of a new communicator or request rises where old ones are not freed.
    """
    gc.collect()
    _libc.malloc_trim(0)
    new = comm.Dup()
    request = new.Recv_init(np.empty(1), source=MPI.ANY_SOURCE)
    held = {"communicators": new.py2f() & 0x3FFFFFF, "requests": request.py2f() & 0x3FFFFFF}
    request.Free()
    new.Free()
    shared = [line.split(maxsplit=5) for line in Path("/proc/self/maps").read_text().splitlines()]
    statm = Path("/proc/self/statm").read_text().split()
    return held | {
        "contexts": len(context.open_contexts),
        "running": len(context.running),
        "files": len(list(Path("/proc/self/fd").iterdir())),
        "threads": len(list(Path("/proc/self/task").iterdir())),
        "segments": len({words[-1] for words in shared if words[1][3] == "s"}),
        "objects": len(gc.get_objects()),
        "memory": int(statm[1]) * 4096,
    }


def growth(looks: list[dict[str, float]]) -> dict[str, float]:
    """Return what each count grew by in the second half of `looks`, on the line through them."""
    half = looks[len(looks) // 2 :]
    times = np.arange(len(half))
    return {
        name: float(np.polyfit(times, [one[name] for one in half], 1)[0]) * (len(half) - 1)
        for name in half[0]
    }


def grown(comm, looks: list[dict[str, float]]) -> dict[str, tuple]:
    """Return (last count, growth, the growth that is allowed) by name, where it grew most.

    Collective over `comm`.
    """
    mine = {name: (grew, looks[-1][name]) for name, grew in growth(looks).items()}
    everyone = comm.allgather(mine)
    worst = {name: max(one[name] for one in everyone) for name in mine}
    return {name: (last, grew, ALLOWED.get(name, 1)) for name, (grew, last) in worst.items()}
