"""`mpidist bench allreduce`: compare algorithms with the MPI library's own allreduce, in one run.

MPI's own allreduce is timed both in place and not in place, and the shorter time is used. On one
node, no allreduce of N bytes per rank should be faster than the *memory limit*: the time in which
all ranks copy N bytes at once. The key ``limit`` of a row is the memory limit divided by the time
of the allreduce.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from math import ceil

import numpy as np
from mpi4py import MPI

from ..collectives.allreduce import allreduce, iallreduce, plan
from ..collectives.schedules.algorithms import MEASURED, NATIVE, NODE
from ..errors import ConfigError
from ..partition import BlockPartition
from ..runtime.node_memory.arena import Arena
from ..runtime.topology import topology_of
from .interleave import Candidate, interleave, last_level_cache, wire_meter
from .ratios import Measured, against_best, ratio

#: The ways to call an algorithm: `md.allreduce`, `md.plan` on private arrays, `md.plan` on an
#: arena, `md.iallreduce`.
FORMS = ("call", "plan", "arena", "nonblocking")
#: Names of MPI's own allreduce, and of the reference for the nonblocking form.
NATIVE_FORMS, NATIVE_NONBLOCKING = ("native", "native in place"), "native nonblocking"
COPY, TORCH = "memory copy", "torch gloo"
#: The largest number of vectors that the timed calls use in turn. With the form "arena" each vector
#: is in an arena of its own, which has communicators of its own.
MAX_POOL = 512
#: The largest number of seconds for the calls that are timed together.
TURN = 0.01
#: Shorter vectors get no memory limit, because latency dominates their time.
LEAST_LIMITED = 128 << 10
#: Bytes of the Ethernet, IP and TCP headers of a packet, including TCP's time stamps.
HEADERS = 66


def size_range(low: int, high: int, step: int = 2) -> list[int]:
    """Return the sizes `low`, `low` times `step`, and so on, up to `high` bytes."""
    result = []
    size = low
    while size <= high:
        result.append(size)
        size *= step
    return result


def calls_per_round(comm, nbytes: int, call: Callable[[], object]) -> int:
    """Return how many calls of `call` are timed together. Collective over `comm`.

    They take about `TURN` (0.01) seconds or less together, unless one call alone takes longer.
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
    """Return how many vectors of `nbytes` bytes the timed allreduces use, one after the other.

    If `cold` is true, the vectors together are larger than the last-level cache; otherwise there is
    one vector.
    """
    return max(2, ceil(2 * last_level_cache() / nbytes)) if cold else 1


def check_forms(forms: Sequence[str], low: int, cold: bool) -> None:
    """Raise ConfigError for an unknown name in `forms`, or if ``--cold`` needs too many vectors."""
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
    """Return a row per algorithm and form of call (see `forms`), for vectors of `nbytes` bytes.

    Collective over `comm`.

    Parameters
    ----------
    algorithms : sequence of str
        The names of the algorithms to time.
    rounds : int
        How many times every algorithm and form is timed; a row has the medians of these times.
    forms : sequence of str
        The ways to call an algorithm: "call" (a function), "plan" (an operation that is prepared
        once), "arena" (a plan for memory that all ranks of a node share), or "nonblocking". Only
        algorithms that use the shared memory of a node are timed with an arena.
    cold : bool
        Whether each call uses a vector that is not in the cache.
    consistency : bool
        Whether to time also two pairs of MPI calls with the same result: reduce and then broadcast,
        and reduce-scatter and then allgather.
    torch : callable, optional
        ``torch(vector)`` returns a function that sums the vector over all ranks; see
        `torch_yardstick`.
    device : str, optional
        Network device, such as eth0, whose sent bytes are counted.

    Returns
    -------
    list of dict
        A row has the keys bytes, algorithm and ranks. The keys median_us and native_us are the
        median microseconds of this call and of MPI's own call, and extra_us is the median of their
        difference. The key ratio is the time of MPI's call divided by the time of this call, as the
        median over the rounds; low and high are the ends of its 95 % interval. Two bandwidths in
        GB/s are defined as by nccl-tests: algbw is bytes / time, and busbw is algbw times 2(p-1)/p
        on p ranks. On one node, rows of 128 KiB and more also have the key limit: the time of a
        memory copy divided by the time of the call. With `device`, rows have the keys wire_bytes,
        the bytes that a host sends per call including packet headers, and wire_payload, the bytes
        without packet headers. With `torch`, the row of PyTorch has the key over_arena: the time of
        PyTorch's call divided by the time of mpidist's algorithm "auto" on an arena. Rows of "auto"
        have the keys best, the name of the fastest of `algorithms`, and against_best, the time of
        this algorithm divided by the time of "auto". With `consistency`, rows of "auto" also have
        the key consistent. It is the time of the fastest of `algorithms`, MPI's own allreduce and
        the two pairs, divided by the time of "auto".
    """
    pool = _Pool(comm, nbytes, np.dtype(dtype), pool_size(nbytes, cold))
    candidates = _native(comm, pool, forms, consistency)
    repeat = calls_per_round(comm, nbytes, candidates["native"].calls[0])
    for name in algorithms:
        for form in forms:
            if form != "arena" or name in (MEASURED, *NODE):
                candidates[label(name, form)] = _own(comm, pool, name, form)
    if pool.nbytes >= LEAST_LIMITED and topology_of(comm).nodes == 1:
        calls = [partial(np.copyto, out, x) for x, out in zip(pool.x, pool.out, strict=True)]
        candidates[COPY] = Candidate(calls, pool.x, pool.out, summed=False)
    if torch is not None:
        candidates[TORCH] = Candidate([torch(x) for x in pool.x], pool.x, pool.x)
    repeat = min(repeat, pool.count) if cold else repeat
    meter = wire_meter(device) if device else None
    times = interleave(comm, candidates, rounds=rounds, repeat=repeat, meter=meter)
    pool.close()
    # The two forms of "native" (in place and not in place) become one row.
    names = ["native", *(name for name in times if name not in NATIVE_FORMS)]
    return [_row(comm, name, pool.nbytes, times, algorithms) for name in names]


def label(name: str, form: str) -> str:
    """Return the name of a row: "NAME FORM", or only the `name` if the `form` is "call"."""
    return name if form == "call" else f"{name} {form}"


class _Pool:
    """The vectors that the calls use in turn: inputs, results, and vectors in shared memory."""

    def __init__(self, comm, nbytes: int, dtype: np.dtype, count: int):
        self.comm, self.dtype, self.count = comm, dtype, count
        self.n = max(1, nbytes // dtype.itemsize)
        self.nbytes = self.n * dtype.itemsize
        self.x = [np.zeros(self.n, dtype) for _ in range(count)]
        self.out = [np.zeros(self.n, dtype) for _ in range(count)]

    @cached_property
    def arenas(self) -> list[Arena]:
        """The vectors in memory that the ranks of a node share."""
        spec = {"x": ((self.n,), self.dtype)}
        return [Arena(self.comm, spec) for _ in range(self.count)]

    def close(self) -> None:
        for arena in self.__dict__.get("arenas", ()):  # if the property has made arenas
            arena.close()


def _own(comm, pool: _Pool, name: str, form: str) -> Candidate:
    vectors = [arena.flat for arena in pool.arenas] if form == "arena" else pool.x
    calls: list[Callable[[], object]]
    if form in ("plan", "arena"):
        targets: list = pool.arenas if form == "arena" else pool.x
        calls = [plan(comm, target, algorithm=name) for target in targets]
    else:
        function = allreduce if form == "call" else _begin_and_wait
        calls = [partial(function, comm, x, algorithm=name) for x in pool.x]
    return Candidate(calls, vectors, vectors)


def _begin_and_wait(comm, x, algorithm: str) -> None:
    iallreduce(comm, x, algorithm=algorithm).wait()


def _native_begin_and_wait(comm, x) -> None:
    comm.Iallreduce(MPI.IN_PLACE, x).Wait()


def _native(comm, pool: _Pool, forms, consistency: bool) -> dict[str, Candidate]:
    def in_place(call: Callable) -> Candidate:
        return Candidate([partial(call, x) for x in pool.x], pool.x, pool.x)

    def out_of_place(call: Callable) -> Candidate:
        calls = [partial(call, x, out) for x, out in zip(pool.x, pool.out, strict=True)]
        return Candidate(calls, pool.x, pool.out)

    made = {
        "native": out_of_place(comm.Allreduce),
        "native in place": in_place(partial(comm.Allreduce, MPI.IN_PLACE)),
    }
    if "nonblocking" in forms:
        made[NATIVE_NONBLOCKING] = in_place(partial(_native_begin_and_wait, comm))
    if consistency:
        made["native reduce+broadcast"] = out_of_place(partial(_reduce_broadcast, comm))
        made["native reduce_scatter+allgather"] = out_of_place(partial(_scatter_gather, comm))
    return made


def _reduce_broadcast(comm, x, out) -> None:
    comm.Reduce(x, out, root=0)
    comm.Bcast(out, root=0)


def _scatter_gather(comm, x, out) -> None:
    parts = BlockPartition(x.size, comm.size)
    start, stop = parts.range(comm.rank)
    comm.Reduce_scatter(x, out[start:stop], parts.counts())
    comm.Allgatherv(MPI.IN_PLACE, [out, parts.counts()])


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
    """Add the keys best, against_best and consistent of `measure` to the row of "auto".

    The candidates for best and against_best are the algorithms `chosen`.
    """
    if chosen:
        row["best"], value = against_best(mine, {name: times[name] for name in chosen})
        row["against_best"] = _digits(value)
    compositions = [name for name in times if name.startswith(NATIVE) and "+" in name]
    if compositions:
        every = [*NATIVE_FORMS, *compositions, *chosen]
        row["consistent"] = _digits(against_best(mine, {n: times[n] for n in every})[1])
