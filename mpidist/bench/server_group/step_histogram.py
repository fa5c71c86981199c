"""A histogram of the durations of each rank's steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

#: Ends of the bins, as shares of the median over all ranks. The last bin has no end.
BINS = (0.5, 0.9, 1.1, 1.5, 2.0, 3.0, 5.0)


def step_histogram(seconds: np.ndarray | Sequence[Sequence[float]]) -> dict:
    """Count how many steps of each rank have a duration in each bin of a histogram.

    Returns a dict: ``edges_us`` are the upper ends of the bins in microseconds (the last bin has no
    end), and ``counts`` has a list for each rank, with the number of its steps in each bin.
    """
    edges = np.array(BINS) * float(np.median(np.concatenate([np.asarray(s) for s in seconds])))
    counts = [
        np.bincount(np.searchsorted(edges, each, side="right"), minlength=len(BINS) + 1).tolist()
        for each in seconds
    ]
    return {"edges_us": [round(edge * 1e6, 1) for edge in edges], "counts": counts}


def histogram_lines(histogram: dict) -> Iterator[str]:
    """Yield the lines of a table with the result of `step_histogram`."""
    ends = [f"<{edge / 1e3:.3g}" for edge in histogram["edges_us"]]
    yield "steps(ms)" + "".join(f"{end:>9}" for end in [*ends, "longer"])
    for rank, counts in enumerate(histogram["counts"]):
        yield f"worker {rank:<2}" + "".join(f"{count or '.':>9}" for count in counts)
