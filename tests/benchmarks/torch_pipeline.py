"""Times steps of torch.distributed.pipelining (gloo); `benchmarks.pipeline_torch` starts it.

Needs torch, and for the layers of mpidist NumPy: it may run in an environment of its own, without
MPI. Takes turns; in each, rank 0 prints the median step of the slowest rank, the loss, and the sum
of all gradients' absolute values.
"""

import itertools
import json
import os
import statistics
import sys
import time

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from benchmarks.turns import Turn

FOLDER, SAME, SIZES, CUT, MICROBATCHES, SAMPLES, STEPS = json.loads(sys.argv[1])


def torch_layers(rank: int):
    """Return torch's own layers of a stage, the loss, and what begins a step."""
    torch.manual_seed(1)
    layers = []
    for k, (a, b) in enumerate(itertools.pairwise(SIZES)):
        layers += [nn.Linear(a, b)] + ([nn.ReLU()] if k < len(SIZES) - 2 else [])
    mine = nn.Sequential(*(layers[:CUT] if rank == 0 else layers[CUT:]))

    def begin() -> None:
        for parameter in mine.parameters():
            parameter.grad = None

    return mine, nn.CrossEntropyLoss(), begin


def numpy_layers(rank: int):
    """Return mpidist's layers of a stage, the loss, and what begins a step."""
    from benchmarks.torch_numpy_stage import NumpyStage
    from mpidist.models import mlp

    model = mlp(SIZES, seed=1)
    # The first layer reshapes the samples, which have their shape already.
    start, stop = (1, 1 + CUT) if rank == 0 else (1 + CUT, len(model.layers))
    arrays = model.initial_parameters(start, stop)
    mine = NumpyStage(model.layers[start:stop], arrays, first=rank == 0)
    return mine, mine.loss, mine.begin


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    mine, loss_of, begin = (numpy_layers if SAME else torch_layers)(rank)
    # With the shapes given, torch need not find them out, for which it would call the layers.
    ends = [SIZES[0], SIZES[CUT // 2], SIZES[-1]]
    inputs, outputs = (torch.empty(SAMPLES // MICROBATCHES, ends[rank + k]) for k in (0, 1))
    if rank:
        inputs.requires_grad_(True)
    outputs.requires_grad_(True)
    stage = PipelineStage(mine, rank, 2, torch.device("cpu"), inputs, outputs)
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=loss_of)
    rng = np.random.default_rng(0)
    x = torch.from_numpy(rng.standard_normal((SAMPLES, SIZES[0])).astype("f4"))
    y = torch.from_numpy(rng.integers(0, SIZES[-1], SAMPLES))
    turn = Turn(FOLDER, rank)
    while turn.wait():
        times = []
        for _ in range(STEPS):
            losses: list = []
            begin()
            dist.barrier()
            began = time.perf_counter()
            if rank == 0:
                schedule.step(x)
            else:
                schedule.step(target=y, losses=losses)
            times.append(time.perf_counter() - began)
        slowest = torch.tensor(statistics.median(times[1:]), dtype=torch.float64)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        loss = float(np.mean([one.item() for one in losses])) if rank else 0.0
        total = sum(one.grad.abs().sum().item() for one in mine.parameters())
        told = torch.tensor([loss, total], dtype=torch.float64)
        dist.all_reduce(told)
        if rank == 0:
            print(json.dumps([slowest.item(), *told.tolist()]), flush=True)


if __name__ == "__main__":
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    main()
