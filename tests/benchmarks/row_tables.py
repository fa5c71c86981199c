"""Measure what rows of a large table cost, beside a table of 1,000 rows or all rows.

PYTHONPATH=tests python -m benchmarks.row_tables optimizers
"""

from __future__ import annotations

import argparse
import time

import numpy as np

from mpidist import optim

ROWS, FEW, WIDTH, SOME = 1 << 20, 1000, 16, 256


def optimizers(times: int = 25) -> None:
    """Print the median milliseconds of one update of `SOME` rows, and of one of all rows."""
    rng = np.random.default_rng(0)
    print(f"{'ms per update':14}{'some rows':>12}{'all rows':>12}")
    for name, make in optim.OPTIMIZERS.items():
        optimizer = make(0.01)
        table = {"w": np.zeros((ROWS, WIDTH), np.float32)}
        state, medians = optimizer.init(table), []
        for whole in (False, True):
            seconds = []
            for _ in range(times):
                rows = np.unique(rng.integers(0, ROWS, SOME))
                gradient = np.ones((ROWS if whole else len(rows), WIDTH), np.float32)
                start = time.perf_counter()
                optimizer.update({"w": gradient if whole else (rows, gradient)}, state, table)
                seconds.append(time.perf_counter() - start)
            medians.append(1e3 * float(np.median(seconds)))
        print(f"{name:14}{medians[0]:12.3f}{medians[1]:12.1f}", flush=True)


def main() -> None:
    """Run the measurement that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["optimizers"])
    globals()[parser.parse_args().what]()


if __name__ == "__main__":
    main()
