"""Fair timing of several candidates: in each of many rounds, every candidate is timed once.

The order of the candidates changes from round to round. The time of a candidate in a round is the
seconds per call of the slowest rank, from a barrier to the end of the calls. New inputs are written
before, and one result is checked afterwards; neither is timed.

Hunold, Carpen-Amarie, "MPI Benchmarking Revisited: Experimental Design and Reproducibility",
arXiv:1505.07734, 2015.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path

import numpy as np
from mpi4py import MPI

from ..errors import MpidistError
from .ratios import Measured

#: Bytes of the last-level cache where the system does not report its size.
_USUAL_CACHE = 32 << 20


@dataclass
class Candidate:
    """A candidate to be timed, whose ``calls[k]()`` computes ``results[k]`` from ``inputs[k]``.

    If `summed` is true, a result is checked in each round: it must be the sum of the inputs of all
    ranks. `around` makes a context manager that is entered before the timed calls and left after
    them.
    """

    calls: Sequence[Callable[[], object]]
    inputs: Sequence[np.ndarray]
    results: Sequence[np.ndarray]
    summed: bool = True
    around: Callable[[], AbstractContextManager] = nullcontext
    turn: int = 0

    def next_inputs(self) -> list[np.ndarray]:
        """Return all inputs in the order in which the next calls use them."""
        start = self.turn % len(self.calls)
        return [*self.inputs[start:], *self.inputs[:start]]

    def next_calls(self, repeat: int) -> list[Callable[[], object]]:
        """Return the next `repeat` calls; after the last of `calls`, the first comes again."""
        start = self.turn % len(self.calls)
        self.turn += repeat
        return list(islice(cycle(self.calls), start, start + repeat))


def interleave(
    comm: MPI.Comm,
    candidates: Mapping[str, Candidate],
    *,
    rounds: int,
    repeat: int = 1,
    meter: Callable[[], np.ndarray] | None = None,
) -> dict[str, Measured]:
    """Measure `repeat` calls of every candidate in each of `rounds` rounds. Collective over `comm`.

    Returns for each name a `Measured`: the seconds per call in each round, and the counts per call
    (see `meter`).

    Parameters
    ----------
    meter : callable, optional
        Returns counters of this rank, such as sent bytes, as a float64 array. The result has the
        increase of each counter per call, as the maximum over all ranks.

    Raises
    ------
    MpidistError
        When a candidate computes a wrong sum.
    """
    names = list(candidates)
    size = meter().size if meter else 0
    seconds = np.empty((len(names), rounds))
    metered = np.zeros((len(names), rounds, size))
    rng = np.random.default_rng(0)
    pattern = _Pattern(comm)
    for k in range(-1, rounds):  # round -1 warms up
        for index in rng.permutation(len(names)):
            candidate = candidates[names[index]]
            # If a turn sums a vector twice, the vector must contain zeros, because otherwise the
            # sums would grow.
            once = repeat <= len(candidate.calls)
            for vector in candidate.next_inputs():
                pattern.write(vector) if once else vector.fill(0)
            with candidate.around():
                elapsed, counts = _turn(comm, candidate.next_calls(repeat), meter)
            if k >= 0:
                seconds[index, k] = elapsed
                metered[index, k] = counts
            if not once:
                pattern.write(candidate.next_inputs()[0])
                candidate.next_calls(1)[0]()
            last = (candidate.turn - 1) % len(candidate.calls)
            if candidate.summed:
                pattern.check(names[index], candidate.results[last])
    comm.Allreduce(MPI.IN_PLACE, seconds, MPI.MAX)
    comm.Allreduce(MPI.IN_PLACE, metered, MPI.MAX)
    return {name: Measured(seconds[i], metered[i]) for i, name in enumerate(names)}


def _turn(comm, calls: list[Callable[[], object]], meter) -> tuple[float, np.ndarray | float]:
    before = meter() if meter else 0.0
    comm.Barrier()
    start = time.perf_counter()
    for call in calls:
        call()
    elapsed = time.perf_counter() - start
    if meter is None:
        return elapsed / len(calls), 0.0
    comm.Barrier()  # this rank has now sent all messages that it forwards for other ranks
    return elapsed / len(calls), (meter() - before) / len(calls)


class _Pattern:
    """Test values for vectors: small whole numbers whose sums over the ranks are exact."""

    def __init__(self, comm: MPI.Comm) -> None:
        self.rank, self.size = comm.rank, comm.size
        self._known: dict[tuple, tuple[np.ndarray, np.ndarray]] = {}

    def _of(self, vector) -> tuple[np.ndarray, np.ndarray]:
        key = (vector.size, vector.dtype)
        if key not in self._known:
            base = (np.arange(vector.size) % 97).astype(vector.dtype)
            total = base * self.size + self.size * (self.size - 1) // 2
            self._known[key] = base, total.astype(vector.dtype)
        return self._known[key]

    def write(self, vector) -> None:
        np.add(self._of(vector)[0], vector.dtype.type(self.rank), out=vector)

    def check(self, name: str, result) -> None:
        expected = self._of(result)[1]
        wrong = np.flatnonzero(result != expected)
        if wrong.size:
            k = wrong[0]
            raise MpidistError(
                f"bench: {name} gave {result[k]} at {k} of {result.size}, expected {expected[k]}"
            )


def last_level_cache() -> int:
    """Return the size in bytes of the largest cache of processor 0."""
    sizes = []
    for file in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = file.read_text().strip()
        unit = {"K": 1 << 10, "M": 1 << 20}.get(text[-1:], 1)
        sizes.append(int(text.rstrip("KM")) * unit)
    return max(sizes, default=_USUAL_CACHE)


def wire_meter(device: str) -> Callable[[], np.ndarray]:
    """Return a function that returns how many (bytes, packets) the network `device` has sent."""
    folder = Path("/sys/class/net") / device / "statistics"
    files = [folder / "tx_bytes", folder / "tx_packets"]
    return lambda: np.array([float(file.read_text()) for file in files])
