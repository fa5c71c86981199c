"""Check, when a job starts, which cores the ranks may use.

Three mistakes in a launch raise no error, but make the job slow: several ranks are bound to the
same core; all ranks are bound to one core although the host has many; or BLAS starts a thread for
each core of the host in every rank.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from .. import events

#: Variables with the number of BLAS threads. OpenBLAS, MKL and BLIS each read their own variable,
#: or OpenMP's variable if their own is not set.
_THREADS = ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS", "OMP_NUM_THREADS")

_CURE = "bind each to cores of its own: mpirun --bind-to core, srun --cpu-bind=cores"


class RankPlace(NamedTuple):
    """The host of a rank, the cores it may use, all cores of the host, and its BLAS threads."""

    host: str
    machine: str
    cores: tuple[int, ...]
    host_cores: int
    threads: int


def rank_place(environ: Mapping[str, str]) -> RankPlace:
    """Return the host, the cores and the BLAS threads of this process."""
    cores = tuple(sorted(os.sched_getaffinity(0)))
    threads = blas_threads(environ, len(cores))
    return RankPlace(socket.gethostname(), _machine(), cores, os.cpu_count() or len(cores), threads)


def _machine() -> str:
    # Containers on one machine have different host names, and two machines may have the same host
    # name. Therefore the kernel's boot id identifies the machine.
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return socket.gethostname()


def blas_threads(environ: Mapping[str, str], cores: int) -> int:
    """Return how many threads NumPy's BLAS starts in this process, which may use `cores` cores."""
    for name in _THREADS:
        first = environ.get(name, "").split(",")[0].strip()  # OMP_NUM_THREADS may be a list
        if first.isdigit() and int(first):
            return int(first)
    return cores


def warning(places: Sequence[RankPlace]) -> str | None:
    """Return a line about the worst problem with the ranks' cores, or None without a problem."""
    machines: dict[str, list[int]] = {}
    for rank, mine in enumerate(places):
        machines.setdefault(mine.machine, []).append(rank)
    for look in (_same_core, _too_many_threads):
        found = [text for ranks in machines.values() if (text := look(places, ranks))]
        if found:
            return found[0] + (f"; {len(found) - 1} more likewise" if len(found) > 1 else "")
    return None


def _same_core(places: Sequence[RankPlace], ranks: Sequence[int]) -> str | None:
    bound: dict[int, list[int]] = {}
    for rank in ranks:
        if len(places[rank].cores) == 1:
            bound.setdefault(places[rank].cores[0], []).append(rank)
    crowded = {core: there for core, there in bound.items() if len(there) > 1}
    if not crowded:
        return None
    host, host_cores = places[ranks[0]].host, places[ranks[0]].host_cores
    if host_cores == 1:
        return None  # the host has no other core that a rank could be bound to
    core, there = next(iter(crowded.items()))
    if len(there) == len(ranks):
        return f"all {len(ranks)} ranks of {host} are bound to core {core} of {host_cores}; {_CURE}"
    named = ", ".join(map(str, there[:4])) + (", ..." if len(there) > 4 else "")
    return f"ranks {named} are bound to the same core {core} of {host}; {_CURE}"


def _too_many_threads(places: Sequence[RankPlace], ranks: Sequence[int]) -> str | None:
    host = places[ranks[0]].host
    cores = len({core for rank in ranks for core in places[rank].cores})
    threads = sum(places[rank].threads for rank in ranks)
    if threads <= cores:
        return None
    room = "1 core" if cores == 1 else f"{cores} cores"
    if threads == len(ranks):
        return f"{len(ranks)} ranks of {host} take turns on {room}; for speed start at most {cores}"
    each = max(1, cores // len(ranks))
    return (
        f"{len(ranks)} ranks of {host} would run {threads} BLAS threads on {room}; "
        f"set OMP_NUM_THREADS={each}"
    )


def check_binding(comm, environ: Mapping[str, str]) -> bool:
    """Print a warning on rank 0 if ranks slow each other down. Collective over `comm`.

    ``MPIDIST_VERBOSE=0`` suppresses the warning. Returns whether some host has more ranks than
    cores.
    """
    mine = rank_place(environ)
    told = comm.allgather((tuple(mine), whole_cores(mine.cores)))
    everyone = [RankPlace(*fields) for fields, _ in told]
    text = warning(everyone)
    if text:
        events.emit("binding", warning=text)
        if comm.rank == 0 and events.VERBOSITY:
            print(f"mpidist: note: {text}", file=sys.stderr, flush=True)
    hosts: dict[str, list[set[int]]] = {}
    for there, (_, cores) in zip(everyone, told, strict=True):
        hosts.setdefault(there.machine, []).append(cores)
    return any(len(ranks) > len(set.union(*ranks)) for ranks in hosts.values())


def whole_cores(cores: Sequence[int]) -> set[int]:
    """Return, for each physical core in `cores`, the number (ID) of one of its hardware threads."""
    found = set()
    for core in cores:
        there = Path(f"/sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list")
        try:
            found.add(int(re.split("[,-]", there.read_text())[0]))
        except (OSError, ValueError):
            found.add(core)
    return found
