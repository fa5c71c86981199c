"""`mpidist bench overlap`: how much of the gradient exchange hides behind backward.

Backward is a wait of the length of the exchange itself, cut in layers: it stands for a processor of
its own per rank, for several ranks that share a core would measure the scheduler. The step without
exchange, the exchange alone and both together take turns in one run.
"""

from __future__ import annotations

import time

import numpy as np
from mpi4py import MPI

from ..errors import MpidistError
from ..gradients.exchange import Gradients


def measure(comm, *, nbytes: int, layers: int = 32, rounds: int = 9, **settings) -> dict:
    """Return a row: milliseconds of exchange, backward and step, and the share that was hidden.

    Collective over `comm`. `settings` go to `Gradients`. hidden = 1 - (step - backward) / exchange,
    the median over rounds; None where nothing travels.
    """
    each = max(1, nbytes // layers // 4)
    shapes = {f"layer{k}": np.empty(each, np.float32) for k in range(layers)}
    gradients = Gradients(comm, shapes, **settings)
    order = list(reversed(shapes))

    def step(seconds: float) -> float:
        """One backward of that length with its exchange; returns how long it took."""
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
