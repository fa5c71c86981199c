"""``algorithm="auto"``: measured once per communicator and size class, then frozen.

A size class is a power of two of bytes. The first call of a class times the candidates on this
communicator, interleaved, on a vector of its own length; every rank takes the slowest rank's
medians, so all choose alike. The table can be printed, stored in a checkpoint and put back, so
that a resumed run adds in the same order as the one that it continues.
"""

from __future__ import annotations

import time

import numpy as np
from mpi4py import MPI

from .. import events
from ..context import Context, of
from ..errors import ConfigError
from ..mismatch import Signature
from . import algorithms
from .reductions import Reduction, native_op
from .shared import memory_of

#: Rounds of a measurement: many where they are cheap.
SHORT_ROUNDS, LONG_ROUNDS = 21, 5
_SHORT = 256 << 10

#: Vectors are measured up to this size; longer ones are taken to behave alike.
_LARGEST = 64 << 20


def size_class(nbytes: int) -> int:
    """Class of a vector: log2 of its bytes, rounded up; 0 for eight bytes and fewer. Local."""
    return min(max((nbytes - 1).bit_length(), 3) if nbytes else 3, _LARGEST.bit_length() - 1)


def table(comm: MPI.Comm) -> dict[str, dict]:
    """Return what has been measured and chosen: class -> algorithm and microseconds. Local.

    JSON-ready: ``{"1048576": {"algorithm": "ring", "us": {"native": 812.0, "ring": 640.5}}}``;
    the key is the largest size of the class in bytes, with the number of ranks beside it.
    """
    return dict(_chosen(of(comm)))


def restore(comm: MPI.Comm, saved: dict[str, dict]) -> None:
    """Put a table back, as `table` returned it. Local; every rank must pass the same one.

    Entries measured with another number of ranks are ignored: they are measured anew.
    """
    context = of(comm)
    for key, entry in saved.items():
        names = (algorithms.NATIVE, *algorithms.ALLREDUCE, *algorithms.NODE)
        if entry.get("algorithm") not in names:
            raise ConfigError(f"selection table names unknown algorithm {entry.get('algorithm')!r}")
        if entry.get("ranks") == context.size:
            _chosen(context)[key] = dict(entry)
    # Plans that were chosen by the former table would go on adding in another order.
    for key, plan in list(context.plans.items()):
        if key[0] == "allreduce" and key[2] == algorithms.MEASURED and not plan.bound:
            context.drop(key)


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
        return ("native", "node")
    return ("native", "hierarchical", "ring", "butterfly")


def choose(context: Context, signature: Signature, reduction: Reduction, shape, make) -> str:
    """Return the algorithm for this problem, measuring its class first if needed. Collective."""
    if context.size == 1:
        return algorithms.NATIVE
    n = int(np.prod(shape, dtype=np.int64))
    nbytes = n * reduction.work.itemsize
    key = str(1 << size_class(nbytes))
    names = candidates(context)
    if not native_op(reduction).is_predefined:
        # MPI would call back into Python for every piece; our own do the same sum without that.
        return names[1] if names[1] in algorithms.NODE else "butterfly"
    chosen = _chosen(context)
    known = chosen[key]["algorithm"] if key in chosen else None
    # A table from another layout of nodes may name what cannot run here.
    if known is None or (known in algorithms.NODE and known not in names):
        length = min(n, _LARGEST // reduction.work.itemsize)
        times = _measure(context, signature, reduction, length, make, names)
        best = min(times, key=times.__getitem__)
        chosen[key] = {"algorithm": best, "ranks": context.size, "us": times}
        events.emit("selection", bytes=int(key), algorithm=best, us=times)
    return chosen[key]["algorithm"]


def _measure(context: Context, signature: Signature, reduction, n: int, make, names) -> dict:
    probe = signature._replace(kind="selection", shape=f"({n})")
    plans = [make(context, probe, reduction, (n,), name) for name in names]
    data = np.zeros(n, reduction.work)
    rounds = LONG_ROUNDS if data.nbytes > _SHORT else SHORT_ROUNDS
    seconds = np.empty((rounds + 1, len(plans)))
    for measured in range(rounds + 1):
        for k, plan in enumerate(plans):
            context.wait(context.control.Ibarrier().Test)
            start = time.perf_counter()
            plan(data)
            seconds[measured, k] = time.perf_counter() - start
    # A round lasts until its slowest rank is through; the first pays for connections and pages.
    context.wait(context.control.Iallreduce(MPI.IN_PLACE, seconds, MPI.MAX).Test)
    medians = np.median(seconds[1:], axis=0)
    for plan in plans:
        plan.close()
    return {name: round(float(t) * 1e6, 2) for name, t in zip(names, medians, strict=True)}
