"""`mpidist bench overlap`: measure how much of the gradient exchange runs during backward.

The backward pass is simulated: the rank sleeps once for each layer, and all sleeps together take as
long as the exchange of gradients.
"""

from __future__ import annotations

import time

import numpy as np
from mpi4py import MPI

from ..errors import MpidistError
from ..gradients.exchange import Gradients


def measure(comm, *, nbytes: int, layers: int = 32, rounds: int = 9, **settings) -> dict:
    """Measure which fraction of the gradient exchange runs during a backward pass; return a row.

    Collective over `comm`.

    The key ``hidden`` of the row is the median, over the rounds, of 1 - (step - backward) /
    exchange. The three words stand for the times of a step, of its backward pass, and of the
    exchange alone. ``hidden`` is None if no message is sent before the backward pass ends.
    """
    each = max(1, nbytes // layers // 4)
    shapes = {f"layer{k}": np.empty(each, np.float32) for k in range(layers)}
    gradients = Gradients(comm, shapes, **settings)
    order = list(reversed(shapes))

    def step(seconds: float) -> float:
        """Simulate a backward pass of `seconds`, exchange gradients; return the time of both."""
        comm.Barrier()
        gradients.begin(1 / comm.size)
        began = time.perf_counter()
        for k, name in enumerate(order):
            gradients.views[name][...] = comm.rank
            until = began + seconds * (k + 1) / layers
            while (left := until - time.perf_counter()) > 0:
                time.sleep(left)
            gradients.ready(name)
        gradients.reduce(0.0, 0.0)
        taken = time.perf_counter() - began
        if not np.allclose(gradients.views[order[0]], (comm.size - 1) / 2):
            raise MpidistError("bench overlap: the mean of the gradients is wrong")
        return comm.allreduce(taken, MPI.MAX)

    step(0.0)
    step(0.0)
    alone = float(np.median([step(0.0) for _ in range(rounds)]))
    shares, steps = [], []
    for _ in range(rounds):
        exchange = step(0.0)
        steps.append(step(alone))
        shares.append(1 - (steps[-1] - alone) / exchange)
    buckets, overlapping = len(gradients._starts), gradients.overlapping
    gradients.close()
    return {
        "bytes": each * layers * 4,
        "layers": layers,
        "buckets": buckets,
        "ranks": comm.size,
        "overlap": overlapping,
        "exchange_ms": round(alone * 1e3, 2),
        "backward_ms": round(alone * 1e3, 2),
        "step_ms": round(float(np.median(steps)) * 1e3, 2),
        "hidden": round(float(np.median(shares)), 3) if overlapping else None,
    }
