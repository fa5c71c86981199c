"""`mpidist bench allreduce`: every algorithm against the MPI library's own, in one run.

`interleave.py` says how it is measured. Native is taken in its better form (in place or not). The
*memory limit* is the time in which all ranks copy N bytes at once, in the same rounds. A copy
moves 2N bytes, one read and one written: C libraries copy long vectors with stores that do not
read first. What lies in an arena moves 2N as well, and so do private vectors at the least (2-3N:
the staging stays in the cache, the rest is reading before writing). So the limit's time for both
is that of the copy, and ``limit`` is copy over ours.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from math import ceil

import numpy as np
from mpi4py import MPI

from ..collectives.allreduce import allreduce, iallreduce, plan
from ..collectives.schedules.algorithms import MEASURED, NATIVE, NODE
from ..errors import ConfigError
from ..partition import BlockPartition
from ..runtime.arena import Arena
from .interleave import Candidate, interleave, last_level_cache, wire_meter
from .ratios import Measured, against_best, ratio

#: How the vectors reach an algorithm: by `md.allreduce`, by `md.plan` on private arrays, by
#: `md.plan` on an arena, by `md.iallreduce`.
FORMS = ("call", "plan", "arena", "nonblocking")
#: What native is, with the yardstick of the nonblocking form.
NATIVE_FORMS, NATIVE_NONBLOCKING = ("native", "native in place"), "native nonblocking"
COPY, TORCH = "memory copy", "torch gloo"
#: Most vectors in a pool. Each is an arena too, and an arena has communicators of its own.
MAX_POOL = 512
#: Seconds that the calls which are timed together take at most.
TURN = 0.01
#: Below, a call is latency and not memory traffic: no limit is told.
LEAST_LIMITED = 128 << 10
#: Bytes of an Ethernet, IP and TCP header with time stamps: what a packet carries besides data.
HEADERS = 66


def size_range(low: int, high: int, step: int = 2) -> list[int]:
    """Sizes from `low` to `high` bytes, each `step` times the last."""
    result = []
    size = low
    while size <= high:
        result.append(size)
        size *= step
    return result


def calls_per_round(comm, nbytes: int, call: Callable[[], object]) -> int:
    """How many calls are timed together: many quick ones, one slow one. Collective.

    The more the shorter the vector, but no more than `call` makes in `TURN` seconds: where each
    message takes long, a few are enough.
    """
    most = 200 if nbytes <= 4096 else 20 if nbytes <= 128 << 10 else 3 if nbytes <= 2 << 20 else 1
    if most == 1:
        return 1
    call()
    comm.Barrier()
    start = time.perf_counter()
    for _ in range(3):
        call()
    seconds = comm.allreduce(time.perf_counter() - start, MPI.MAX) / 3
    return max(1, min(most, int(TURN / seconds)))


def pool_size(nbytes: int, cold: bool) -> int:
    """How many vectors take turns: one, or `cold` twice the last-level cache full."""
    return max(2, ceil(2 * last_level_cache() / nbytes)) if cold else 1


def check_forms(forms: Sequence[str], low: int, cold: bool) -> None:
    """Raise ConfigError for forms that there are not, or vectors too small to be cold."""
    for form in forms:
        if form not in FORMS:
            raise ConfigError(f"--forms {form}: expected some of {', '.join(FORMS)}")
    if (count := pool_size(low, cold)) > MAX_POOL:
        raise ConfigError(
            f"--min {low}: --cold would need {count} vectors, expected {MAX_POOL} at most; "
            "give a larger --min"
        )


def measure(
    comm,
    nbytes: int,
    algorithms: Sequence[str],
    rounds: int,
    dtype="f4",
    *,
    forms: Sequence[str] = ("call", "plan", "arena"),
    cold: bool = False,
    consistency: bool = False,
    torch: Callable | None = None,
    device: str | None = None,
) -> list[dict]:
    """Return a row per algorithm and form for vectors of `nbytes`. Collective over `comm`.

    Parameters
    ----------
    forms : sequence of str
        Some of `FORMS`. Only what uses the node's memory has an arena row.
    cold : bool
        Each call finds a vector that the cache does not hold.
    consistency : bool
        Also MPI's reduce + broadcast and reduce-scatter + allgather, which no allreduce should
        lose to.
    torch : callable, optional
        ``torch(vector)`` returns a call that reduces it; see `torch_yardstick`.
    device : str, optional
        Network device whose sent bytes are counted.

    Returns
    -------
    list of dict
        bytes, algorithm, ranks, median_us, native_us, extra_us, ratio (native over ours, median of
        the rounds) with its 95 % interval (low, high), algbw and busbw (GB/s, as nccl-tests define
        them: bytes / time, and that times 2(p-1)/p), on one node and from 128 KiB limit; and where
        asked for
        wire_bytes and wire_payload (sent by a host per call), over_arena (of torch), best and
        against_best (of auto, among the algorithms given), consistent (likewise, among all).
    """
    pool = _Pool(comm, nbytes, np.dtype(dtype), pool_size(nbytes, cold))
    candidates = _native(comm, pool, forms, consistency)
    repeat = calls_per_round(comm, nbytes, candidates["native"].calls[0])
    for name in algorithms:
        for form in forms:
            if form != "arena" or name in (MEASURED, *NODE):
                candidates[label(name, form)] = _own(comm, pool, name, form)
    if pool.nbytes >= LEAST_LIMITED and _on_one_node(comm):
        calls = [partial(np.copyto, out, x) for x, out in zip(pool.x, pool.out, strict=True)]
        candidates[COPY] = Candidate(calls, pool.x, pool.out, summed=False)
    if torch is not None:
        candidates[TORCH] = Candidate([torch(x) for x in pool.x], pool.x, pool.x)
    times = interleave(
        comm,
        candidates,
        rounds=rounds,
        repeat=min(repeat, pool.count) if cold else repeat,
        meter=wire_meter(device) if device else None,
    )
    pool.close()
    return [_row(comm, name, pool.nbytes, times, algorithms) for name in _shown(times)]


def label(name: str, form: str) -> str:
    """Name of a row: the algorithm, and how it was called unless by `md.allreduce`."""
    return name if form == "call" else f"{name} {form}"


class _Pool:
    """The vectors that take turns: private ones, others for results, and arenas as needed."""

    def __init__(self, comm, nbytes: int, dtype: np.dtype, count: int):
        self.comm, self.dtype, self.count = comm, dtype, count
        self.n = max(1, nbytes // dtype.itemsize)
        self.nbytes = self.n * dtype.itemsize
        self.x = [np.zeros(self.n, dtype) for _ in range(count)]
        self.out = [np.zeros(self.n, dtype) for _ in range(count)]
        self._arenas: list[Arena] = []

    @property
    def arenas(self) -> list[Arena]:
        """As many arenas of one vector each. Collective on first use."""
        if not self._arenas:
            spec = {"x": ((self.n,), self.dtype)}
            self._arenas = [Arena(self.comm, spec) for _ in range(self.count)]
        return self._arenas

    def close(self) -> None:
        for arena in self._arenas:
            arena.close()


def _own(comm, pool: _Pool, name: str, form: str) -> Candidate:
    if form == "arena":
        vectors = [arena.flat for arena in pool.arenas]
        return Candidate(
            [plan(comm, arena, algorithm=name) for arena in pool.arenas], vectors, vectors
        )
    calls: list[Callable[[], object]]
    if form == "plan":
        calls = [plan(comm, x, algorithm=name) for x in pool.x]
    else:
        function = allreduce if form == "call" else _begin_and_wait
        calls = [partial(function, comm, x, algorithm=name) for x in pool.x]
    return Candidate(calls, pool.x, pool.x)


def _begin_and_wait(comm, x, algorithm: str) -> None:
    iallreduce(comm, x, algorithm=algorithm).wait()


def _native_begin_and_wait(comm, x) -> None:
    comm.Iallreduce(MPI.IN_PLACE, x).Wait()


def _native(comm, pool: _Pool, forms, consistency: bool) -> dict[str, Candidate]:
    pairs = list(zip(pool.x, pool.out, strict=True))
    made = {
        "native": Candidate(
            [partial(comm.Allreduce, x, out) for x, out in pairs], pool.x, pool.out
        ),
        "native in place": Candidate(
            [partial(comm.Allreduce, MPI.IN_PLACE, x) for x in pool.x], pool.x, pool.x
        ),
    }
    if "nonblocking" in forms:
        made[NATIVE_NONBLOCKING] = Candidate(
            [partial(_native_begin_and_wait, comm, x) for x in pool.x], pool.x, pool.x
        )
    if consistency:
        made["native reduce+broadcast"] = Candidate(
            [partial(_reduce_broadcast, comm, x, out) for x, out in pairs], pool.x, pool.out
        )
        made["native reduce_scatter+allgather"] = Candidate(
            [partial(_scatter_gather, comm, x, out) for x, out in pairs], pool.x, pool.out
        )
    return made


def _reduce_broadcast(comm, x, out) -> None:
    comm.Reduce(x, out, root=0)
    comm.Bcast(out, root=0)


def _scatter_gather(comm, x, out) -> None:
    parts = BlockPartition(x.size, comm.size)
    start, stop = parts.range(comm.rank)
    comm.Reduce_scatter(x, out[start:stop], parts.counts())
    comm.Allgatherv(MPI.IN_PLACE, [out, parts.counts()])


def _on_one_node(comm) -> bool:
    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    same = node.size == comm.size
    node.Free()
    return same


def _shown(times: dict[str, Measured]) -> list[str]:
    """Rows in order; the two forms of native become one."""
    return ["native", *[name for name in times if name not in NATIVE_FORMS]]


def _row(comm, name: str, nbytes: int, times: dict[str, Measured], algorithms) -> dict:
    better = times[min(NATIVE_FORMS, key=lambda form: times[form].median)]
    native = times[NATIVE_NONBLOCKING] if name.endswith("nonblocking") else better
    mine = better if name == "native" else times[name]
    middle, low, high = ratio(native, mine)
    algbw = nbytes / mine.median / 1e9
    row = {
        "bytes": nbytes,
        "algorithm": name,
        "ranks": comm.size,
        "median_us": _digits(mine.median * 1e6),
        "native_us": _digits(native.median * 1e6),
        "extra_us": _digits(float(np.median(mine.seconds - native.seconds)) * 1e6),
        "ratio": _digits(middle),
        "low": _digits(low),
        "high": _digits(high),
        "algbw": _digits(algbw),
        "busbw": _digits(algbw * 2 * (comm.size - 1) / comm.size),
    }
    if COPY in times:
        row["limit"] = _digits(ratio(times[COPY], mine)[0])
    if mine.metered.shape[1]:
        sent, packets = np.median(mine.metered, axis=0)
        row["wire_bytes"] = round(float(sent))
        row["wire_payload"] = round(float(sent - HEADERS * packets))
    arena = label(MEASURED, "arena")
    if name == TORCH and arena in times:
        row["over_arena"] = _digits(ratio(mine, times[arena])[0])
    for form in ("call", "plan"):
        if name == label(MEASURED, form):
            chosen = [label(a, form) for a in algorithms if a != MEASURED]
            _compare(row, mine, times, chosen)
    return row


def _digits(value: float) -> float:
    return float(f"{value:.5g}")


def _compare(row: dict, mine: Measured, times: dict[str, Measured], chosen: list[str]) -> None:
    """Hold auto against what could have been chosen by hand, and against everything that adds."""
    if chosen:
        row["best"], value = against_best(mine, {name: times[name] for name in chosen})
        row["against_best"] = _digits(value)
    compositions = [name for name in times if name.startswith(NATIVE) and "+" in name]
    if compositions:
        every = [*NATIVE_FORMS, *compositions, *chosen]
        row["consistent"] = _digits(against_best(mine, {n: times[n] for n in every})[1])
