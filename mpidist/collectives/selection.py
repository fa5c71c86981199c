"""``algorithm="auto"``: choose an algorithm once per communicator and size class, by measuring.

Vectors whose bytes round up to the same power of two are in the same size class. The time of an
algorithm is the time of the slowest rank, which all ranks learn, so all ranks make the same choice.
A checkpoint can store the choices, so that a resumed run adds in the same order.
"""

from __future__ import annotations

import json
import time
from functools import partial
from pathlib import Path

import mpi4py
import numpy as np
from mpi4py import MPI

from .. import events
from ..errors import ConfigError
from ..launch.environment import cache_folder, job_folder, mpi_settings
from ..runtime.agreement.mismatch import Signature
from ..runtime.context import Context, of
from . import selection_cache
from .engines.node_barrier import memory_of
from .engines.reductions import Reduction, native_op
from .schedules import algorithms

#: Seconds that the measurement of one size class may take; the smallest and the largest number of
#: rounds of this measurement.
BUDGET, LEAST_ROUNDS, ROUNDS = 0.1, 5, 41

#: Several calls are timed together, and should take this many seconds together, which is long
#: compared with the barrier before them.
TIMING, MOST_CALLS = 300e-6, 200

#: Two algorithms count as equally fast if their times differ by less than this factor. Among
#: equally fast ones, MPI's own is preferred, because it runs no Python, and a butterfly is
#: preferred to a ring, because it sends 2 log p messages and not 2(p-1).
_TIE, _BEFORE = 1.03, {"ring": ("native", "butterfly")}

#: Vectors of at most this many bytes are short; their first, rough timing is repeated.
_SHORT = 64 << 10

#: Vectors are measured up to this size; all longer vectors are in one class.
_LARGEST = 64 << 20


def size_class(nbytes: int) -> int:
    """Return the size class of a vector: log2 of its bytes, rounded up, at least 3, at most 26."""
    return min(max((nbytes - 1).bit_length(), 3) if nbytes else 3, _LARGEST.bit_length() - 1)


def table(comm: MPI.Comm) -> dict[str, dict]:
    """Return all choices and measurements of this communicator so far, as a dict for JSON.

    An example is ``{"1048576": {"algorithm": "ring", "ranks": 4, "from": "measured", "won": 1.0,
    "us": {"native": 812.0, "ring": 640.5}}}``. The key is the largest number of bytes in the size
    class (a range of lengths). ``won`` is the fraction of the measurements in which the algorithm
    was the fastest, and ``us`` has the microseconds per call. ``from`` is "measured", "cache",
    "checkpoint" or "more ranks" (chosen before the death of a rank).
    """
    return dict(_chosen(of(comm)))


def table_fingerprint(table: dict[str, dict]) -> str:
    """Return a digest of the chosen algorithms in `table`, as sixteen hexadecimal digits."""
    return selection_cache.fingerprint({key: e["algorithm"] for key, e in table.items()})


def restore(comm: MPI.Comm, saved: dict[str, dict], origin: str = "checkpoint") -> None:
    """Restore the chosen algorithms from a result of `table`. Every rank must pass the same table.

    Choices that were measured with another number of ranks are ignored. In the results of later
    calls of `table`, each restored choice has the text `origin` under the key ``from``.
    """
    context = of(comm)
    for key, entry in saved.items():
        names = (algorithms.NATIVE, *algorithms.ALLREDUCE, *algorithms.NODE)
        if entry.get("algorithm") not in names:
            raise ConfigError(f"selection table names unknown algorithm {entry.get('algorithm')!r}")
        if entry.get("ranks") == context.size:
            _chosen(context)[key] = {**entry, "from": origin}
    # Cached plans are dropped: a plan with an algorithm of the former table would add in another
    # order.
    for key, plan in list(context.plans.items()):
        if key[0] == "allreduce" and key[2] == algorithms.MEASURED and not plan.owners:
            context.drop(key)


def remember_in(comm: MPI.Comm, folder: Path | None) -> None:
    """Store new choices of algorithms in `folder`, unless it is None. All ranks must call this.

    Without a call of `remember_in`, the folder is ``$XDG_CACHE_HOME/mpidist`` (by default
    ``~/.cache/mpidist``), and nothing is stored if ``MPIDIST_SELECTION_CACHE=0`` is set.
    """
    context = of(comm)
    context.store["selection folder"] = folder
    context.store.pop("remembered", None)


def _chosen(context: Context) -> dict[str, dict]:
    return context.store.setdefault("selection", {})


def candidates(context: Context) -> tuple[str, ...]:
    """Return the algorithms worth measuring on these nodes.

    All ranks must make the first call for a communicator together.
    """
    memory = memory_of(context)
    nodes = memory.topology.nodes
    if memory.reason is not None or nodes == context.size:
        return ("native", "ring", "butterfly")
    if nodes == 1:
        return ("native", "node", *([algorithms.SINGLE_COPY] if memory.cross else []))
    return ("native", "hierarchical", "ring", "butterfly")


def choose(context: Context, signature: Signature, reduction: Reduction, shape, make) -> str:
    """Return the algorithm for a vector; measure first if its size class is new. Collective.

    Vectors whose bytes round up to the same power of two are in one size class. `make` is a
    function that prepares the operation with a given algorithm, so that it can be measured.
    """
    if context.size == 1:
        return algorithms.NATIVE
    n = int(np.prod(shape, dtype=np.int64))
    nbytes = n * reduction.work.itemsize
    key = str(1 << size_class(nbytes))
    names = candidates(context)
    if nbytes <= _SHORT:  # shorter than one system call
        names = tuple(name for name in names if name != algorithms.SINGLE_COPY)
    if not native_op(reduction).is_predefined:
        # For an operation that is a ufunc, MPI's own algorithm would call Python for every piece.
        # mpidist's own algorithms call the ufunc directly.
        return names[1] if names[1] in algorithms.NODE else "butterfly"
    chosen = _chosen(context)

    def known() -> bool:
        # A table from another layout of nodes may name an algorithm that cannot run here.
        name = chosen[key]["algorithm"] if key in chosen else None
        return name is not None and (name in names or name not in algorithms.NODE)

    # If a restore, or the death of a rank, has left a table, this table is used, and the file of
    # stored choices is not read.
    if known():
        return chosen[key]["algorithm"]
    cache = remembered(context.comm)
    if not known():
        length = min(n, _LARGEST // reduction.work.itemsize)
        entry = _measure(context, signature, reduction, length, make, names)
        entry["ranks"] = context.size
        chosen[key] = {**entry, "from": "measured"}
        events.emit("selection", bytes=int(key), **entry)
        local = memory_of(context).topology.local_size
        if context.rank == 0 and not selection_cache.busy(local):
            cache.keep(key, entry, time.time())
        context.store["attempts"].keep(key, entry, time.time())
    return chosen[key]["algorithm"]


def remembered(comm: MPI.Comm) -> selection_cache.Remembered:
    """Return the `Remembered` of `comm`, which stores in a file which algorithm was the fastest.

    The first call for a communicator is collective.
    """
    context = of(comm)
    if "remembered" not in context.store:
        cache = attempts = selection_cache.Remembered({}, None)
        mine: dict[str, dict] = {}
        if context.rank == 0:
            folder = context.store.get("selection folder", cache_folder())
            node_of = memory_of(context).topology.node_of
            mpi = {
                "library": MPI.Get_library_version().strip("\0 \n"),
                "thread_level": MPI.Query_thread(),
                "mpi4py": mpi4py.__version__,
                "settings": mpi_settings(),
            }
            facts = selection_cache.facts_of(node_of, mpi)
            cache = selection_cache.Remembered(facts, folder)
            # A job that is started again must make the same choices, so it measures no algorithm
            # again.
            job = job_folder() if folder else None
            attempts = selection_cache.Remembered(facts, job, all_choices=True)
            mine = cache.read(time.time()) | attempts.read(time.time())
        context.store["remembered"], context.store["attempts"] = cache, attempts
        # All ranks use the entries that rank 0 has read, because other ranks may have other home
        # folders.
        for key, entry in json.loads(_from_rank_0(context, json.dumps(mine).encode())).items():
            if entry["algorithm"] in candidates(context) and entry.get("ranks") == context.size:
                _chosen(context).setdefault(key, {**entry, "from": "cache"})
    return context.store["remembered"]


def _from_rank_0(context: Context, data: bytes) -> bytes:
    """Broadcast `data` of rank 0. Collective."""
    length = np.array([len(data)], np.int64)
    context.wait(context.control.Ibcast(length, root=0).Test)
    buffer = np.frombuffer(bytearray(data if context.rank == 0 else length[0]), np.uint8)
    context.wait(context.control.Ibcast(buffer, root=0).Test)
    return buffer.tobytes()


def _measure(context: Context, signature: Signature, reduction, n: int, make, names) -> dict:
    """Measure the algorithms `names`; return the fastest and all times, as `table` does.

    Collective.
    """
    probe = signature._replace(kind="selection", shape=f"({n})")
    plans = [make(context, probe, reduction, (n,), name) for name in names]
    data = np.zeros(n, reduction.work)
    # An engine for short vectors has a method `bind`, which returns a faster function for one
    # vector; that function is timed, because `md.plan` uses it.
    runs = [partial(p, data) if p.short is None else p.short.bind(data) for p in plans]
    for run in runs:
        run()  # the first run opens connections and allocates pages
    once, repeat = (8, 3) if data.nbytes <= _SHORT else (1, 1)
    # Each rank has the times of the slowest rank, so all ranks compute the same numbers.
    rough = _rounds(context, runs, [once] * len(runs), repeat).min(axis=0)
    calls = np.clip(TIMING / rough, 1, MOST_CALLS).astype(int).tolist()
    rounds = int(np.clip(BUDGET / (rough * calls).sum(), LEAST_ROUNDS, ROUNDS))
    seconds = _rounds(context, runs, calls, rounds)
    for plan in plans:
        plan.close()
    # The lower quartile is used instead of the mean, because other programs on the machine can only
    # make a round longer. (`np.quantile` would import `np.ma`, which takes 7 ms.)
    typical = np.sort(seconds, axis=0)[(rounds - 1) // 4]
    best = _fastest(names, typical)
    return {
        "algorithm": names[best],
        "won": round(float((seconds.argmin(axis=1) == best).mean()), 2),
        "us": {name: round(float(t) * 1e6, 2) for name, t in zip(names, typical, strict=True)},
    }


def _fastest(names, typical: np.ndarray) -> int:
    """Return the index of the fastest algorithm, or of a preferred one that is nearly as fast."""
    best = int(typical.argmin())
    for other in _BEFORE.get(names[best], ("native",)):
        if other in names and typical[names.index(other)] <= _TIE * typical[best]:
            return names.index(other)
    return best


def _rounds(context: Context, runs: list, calls: list[int], rounds: int) -> np.ndarray:
    """Run each algorithm `rounds` times; return the slowest rank's seconds per call. Collective."""
    seconds = np.empty((rounds, len(runs)))
    for k in range(rounds):
        for j in range(len(runs)):
            which = (k + j) % len(runs)
            run = runs[which]
            context.wait(context.control.Ibarrier().Test)
            start = time.perf_counter()
            for _ in range(calls[which]):
                run()
            seconds[k, which] = (time.perf_counter() - start) / calls[which]
    context.wait(context.control.Iallreduce(MPI.IN_PLACE, seconds, MPI.MAX).Test)
    return seconds
