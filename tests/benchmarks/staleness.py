"""Simulate bounds of staleness: DSSP beside every fixed SSP in its range, without MPI.

    PYTHONPATH=tests python -m benchmarks.staleness

Each trace has the times of 400 steps of 8 workers. A run ends when all workers have done all steps.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import numpy as np

from mpidist.servers.consistency import SSP, simulate
from mpidist.servers.modes.dynamic_bound import DSSP, RULES

WORKERS, STEPS = 8, 400
LOW, HIGH = 3, 15


def _noise(rng, width: float = 0.1) -> np.ndarray:
    return rng.lognormal(0, width, (WORKERS, STEPS))


def _slow_rank(rng) -> np.ndarray:
    times = _noise(rng)
    times[0] *= 3
    return times


def _uneven(rng) -> np.ndarray:
    times = _noise(rng)
    times[rng.random(times.shape) < 0.25] *= 5
    return times


def _pauses(rng) -> np.ndarray:
    times = _noise(rng)
    for worker in range(WORKERS):
        times[worker, worker * 50 // WORKERS :: 50] *= 20
    return times


def _bursts(rng) -> np.ndarray:
    """Other work slows a worker down for 8 steps at a time."""
    times = _noise(rng)
    for worker in range(WORKERS):
        for begin in range(worker * 9, STEPS, 73):
            times[worker, begin : begin + 8] *= 2.5
    return times


def _clusters(rng) -> np.ndarray:
    """The same at random times, so that one burst may follow another."""
    times = _noise(rng)
    for worker in range(WORKERS):
        for begin in rng.integers(0, STEPS - 8, 6):
            times[worker, begin : begin + 8] *= 2.5
    return times


def _in_turn(rng) -> np.ndarray:
    times = _noise(rng)
    for worker in range(WORKERS):
        part = STEPS // WORKERS
        times[worker, worker * part : (worker + 1) * part] *= 3
    return times


#: Name -> the times of a trace.
TRACES: dict[str, Callable] = {
    "equal": lambda rng: np.ones((WORKERS, STEPS)),
    "noise of 30 %": lambda rng: _noise(rng, 0.3),
    "one rank 3 x slow": _slow_rank,
    "5 x with probability 1/4": _uneven,
    "20 x every 50 steps": _pauses,
    "speeds from 1 to 1.5": lambda rng: _noise(rng) * np.linspace(1, 1.5, WORKERS)[:, None],
    "2.5 x for 8 steps": _bursts,
}
#: Here a worker is slow for most of the last 31 steps, and then fast again: the median is wrong.
HARD = {"2.5 x for 8 steps, random": _clusters, "each 3 x slow in turn": _in_turn}


def times(trace: Callable, seed: int) -> list[list[float]]:
    """The seconds of all steps of all workers."""
    return trace(np.random.default_rng(seed)).tolist()


def compare(delays: list[list[float]]) -> dict[str, float]:
    """Of each rule: the time of the best fixed SSP over that of DSSP, and the mean gaps."""
    best = min(simulate(delays, SSP(bound)).seconds for bound in range(LOW, HIGH + 1))
    found = {"ssp gap": simulate(delays, SSP(HIGH)).gap}
    for rule in RULES:
        run = simulate(delays, DSSP(LOW, HIGH, rule))
        found |= {rule: best / run.seconds, f"{rule} gap": run.gap}
    return found


def main() -> None:
    """Print a table: medians over the seeds."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5)
    seeds = range(parser.parse_args().seeds)
    print(f"{'trace':26}" + "".join(f"{name:>12}" for name in compare([[1.0], [1.0]])))
    for name, trace in (TRACES | HARD).items():
        every = [compare(times(trace, seed)) for seed in seeds]
        medians = [float(np.median([one[key] for one in every])) for key in every[0]]
        print(f"{name:26}" + "".join(f"{value:12.3f}" for value in medians), flush=True)


if __name__ == "__main__":
    main()
