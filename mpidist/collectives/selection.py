"""``algorithm="auto"``: measured once per communicator and size class, then frozen.

A size class is a power of two of bytes. The first call of a class times the candidates on this
communicator, interleaved, on a vector of its own length; every rank takes the slowest rank's
figures, so all choose alike. The table can be printed, stored in a checkpoint and put back, so
that a resumed run adds in the same order as the one that it continues. What was clear is
remembered for the next run on the like of this cluster (`selection_cache`).
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
from .selection_cache import Remembered

#: Seconds that the rounds of one size class may take, and how many there are at least and at most.
BUDGET, LEAST_ROUNDS, ROUNDS = 0.1, 5, 41

#: Calls are timed together until they last so long: less is mostly how ranks leave a barrier.
TIMING, MOST_CALLS = 300e-6, 200

#: Of two that are equal but for noise, MPI's own is taken, for it needs no Python, and a butterfly
#: before a ring, for it needs fewer messages: 2 log p for 2(p-1).
_TIE, _BEFORE = 1.03, {"ring": ("native", "butterfly")}

#: Vectors up to so many bytes are short: the rough timing that comes first may be repeated.
_SHORT = 64 << 10

#: Vectors are measured up to this size; longer ones are taken to behave alike.
_LARGEST = 64 << 20


def size_class(nbytes: int) -> int:
    """Class of a vector: log2 of its bytes, rounded up; 3 for eight bytes and fewer."""
    return min(max((nbytes - 1).bit_length(), 3) if nbytes else 3, _LARGEST.bit_length() - 1)


def table(comm: MPI.Comm) -> dict[str, dict]:
    """Return what has been measured and chosen: class -> algorithm and microseconds.

    JSON-ready: ``{"1048576": {"algorithm": "ring", "ranks": 4, "from": "measured",
    "won": 1.0, "us": {"native": 812.0, "ring": 640.5}}}``; the key is the largest size of the
    class in bytes, ``won`` the share of the rounds that it won, ``from`` is "measured", "cache" or
    "checkpoint".
    """
    return dict(_chosen(of(comm)))


def fingerprint(table: dict[str, dict]) -> str:
    """Return sixteen hexadecimal digits that stand for the choices of a table."""
    return selection_cache.fingerprint({key: e["algorithm"] for key, e in table.items()})


def restore(comm: MPI.Comm, saved: dict[str, dict]) -> None:
    """Put a table back, as `table` returned it. Every rank must pass the same one.

    Entries measured with another number of ranks are ignored: they are measured anew.
    """
    context = of(comm)
    for key, entry in saved.items():
        names = (algorithms.NATIVE, *algorithms.ALLREDUCE, *algorithms.NODE)
        if entry.get("algorithm") not in names:
            raise ConfigError(f"selection table names unknown algorithm {entry.get('algorithm')!r}")
        if entry.get("ranks") == context.size:
            _chosen(context)[key] = {**entry, "from": "checkpoint"}
    # Plans that were chosen by the former table would go on adding in another order.
    for key, plan in list(context.plans.items()):
        if key[0] == "allreduce" and key[2] == algorithms.MEASURED and not plan.owners:
            context.drop(key)


def remember_in(comm: MPI.Comm, folder: Path | None) -> None:
    """Remember choices in `folder`, or nowhere (None), from now on. All ranks do the same.

    What is chosen already stays. The default is the folder of ``MPIDIST_SELECTION_CACHE``.
    """
    context = of(comm)
    context.store["selection folder"] = folder
    context.store.pop("remembered", None)


def remembered(comm: MPI.Comm) -> Remembered:
    """Return fingerprint and file of this communicator, on rank 0. Collective on first use."""
    return _remembered(of(comm))


def _chosen(context: Context) -> dict[str, dict]:
    return context.store.setdefault("selection", {})


def candidates(context: Context) -> tuple[str, ...]:
    """Return what is worth measuring where these ranks are. Collective on first use.

    Where all ranks are on one node, messages are a detour around its memory; where each is on a
    node of its own, there is nothing to share.
    """
    memory = memory_of(context)
    nodes = memory.topology.nodes
    if memory.reason is not None or nodes == context.size:
        return ("native", "ring", "butterfly")
    if nodes == 1:
        return ("native", "node", *([algorithms.SINGLE_COPY] if memory.cross else []))
    return ("native", "hierarchical", "ring", "butterfly")


def choose(context: Context, signature: Signature, reduction: Reduction, shape, make) -> str:
    """Return the algorithm for this problem, measuring its class first if needed. Collective."""
    if context.size == 1:
        return algorithms.NATIVE
    n = int(np.prod(shape, dtype=np.int64))
    nbytes = n * reduction.work.itemsize
    key = str(1 << size_class(nbytes))
    names = candidates(context)
    if nbytes <= _SHORT:  # a system call takes longer
        names = tuple(name for name in names if name != algorithms.SINGLE_COPY)
    if not native_op(reduction).is_predefined:
        # MPI would call back into Python for every piece; our own do the same sum without that.
        return names[1] if names[1] in algorithms.NODE else "butterfly"
    cache, chosen = _remembered(context), _chosen(context)
    known = chosen[key]["algorithm"] if key in chosen else None
    # A table from another layout of nodes may name what cannot run here.
    if known is None or (known in algorithms.NODE and known not in names):
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


def _remembered(context: Context) -> Remembered:
    """Return the cache, of rank 0 alone, its entries taken over. Collective on first use."""
    if "remembered" not in context.store:
        cache = attempts = Remembered({}, None)
        mine: dict[str, dict] = {}
        if context.rank == 0:
            folder = context.store.get("selection folder", cache_folder())
            node_of = memory_of(context).topology.node_of
            facts = selection_cache.facts_of(node_of, _mpi())
            cache = Remembered(facts, folder)
            # Another attempt at the same job goes on as it began, and measures nothing again.
            attempts = Remembered(facts, job_folder() if folder else None, all_choices=True)
            mine = cache.read(time.time()) | attempts.read(time.time())
        context.store["remembered"], context.store["attempts"] = cache, attempts
        # All ranks take what rank 0 finds, also nothing: their homes may differ, choices may not.
        for key, entry in json.loads(_from_rank_0(context, json.dumps(mine).encode())).items():
            if entry["algorithm"] in candidates(context) and entry.get("ranks") == context.size:
                _chosen(context).setdefault(key, {**entry, "from": "cache"})
    return context.store["remembered"]


def _mpi() -> dict[str, object]:
    return {
        "library": MPI.Get_library_version().strip("\0 \n"),
        "thread_level": MPI.Query_thread(),
        "mpi4py": mpi4py.__version__,
        "settings": mpi_settings(),
    }


def _from_rank_0(context: Context, data: bytes) -> bytes:
    length = np.array([len(data)], np.int64)
    context.wait(context.control.Ibcast(length, root=0).Test)
    buffer = np.empty(length[0], np.uint8)
    if context.rank == 0:
        buffer[:] = np.frombuffer(data, np.uint8)
    context.wait(context.control.Ibcast(buffer, root=0).Test)
    return buffer.tobytes()


def _measure(context: Context, signature: Signature, reduction, n: int, make, names) -> dict:
    """Return the fastest, the share of rounds it won, and microseconds of a call of each."""
    probe = signature._replace(kind="selection", shape=f"({n})")
    plans = [make(context, probe, reduction, (n,), name) for name in names]
    data = np.zeros(n, reduction.work)
    # Short ones bound to the vector, as by `md.plan`: who counts microseconds calls them so.
    runs = [partial(p, data) if p.short is None else p.short.bind(data) for p in plans]
    for run in runs:
        run()  # pays for connections and pages
    once, repeat = (8, 3) if data.nbytes <= _SHORT else (1, 1)
    # All ranks know the slowest one's seconds, so they go on with the same numbers.
    rough = _rounds(context, runs, [once] * len(runs), repeat).min(axis=0)
    calls = np.clip(TIMING / rough, 1, MOST_CALLS).astype(int).tolist()
    rounds = int(np.clip(BUDGET / (rough * calls).sum(), LEAST_ROUNDS, ROUNDS))
    seconds = _rounds(context, runs, calls, rounds)
    for plan in plans:
        plan.close()
    # The lower quartile: whatever else happens on the machine can only make a round longer.
    typical = np.quantile(seconds, 0.25, axis=0)
    best = _fastest(names, typical)
    return {
        "algorithm": names[best],
        "won": round(float((seconds.argmin(axis=1) == best).mean()), 2),
        "us": {name: round(float(t) * 1e6, 2) for name, t in zip(names, typical, strict=True)},
    }


def _fastest(names, typical: np.ndarray) -> int:
    """Return which of `names` is the fastest, by its seconds; see `_TIE`."""
    best = int(typical.argmin())
    for other in _BEFORE.get(names[best], ("native",)):
        if other in names and typical[names.index(other)] <= _TIE * typical[best]:
            return names.index(other)
    return best


def _rounds(context: Context, runs: list, calls: list[int], rounds: int) -> np.ndarray:
    """Return seconds per call, of the slowest rank: a row per round, a column per candidate.

    Collective. Who is first changes from round to round.
    """
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
