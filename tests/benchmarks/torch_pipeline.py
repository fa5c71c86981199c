"""Times steps of torch.distributed.pipelining (gloo); `benchmarks.pipeline_torch` starts it.

Needs torch only: it may run in an environment of its own. Prints the median of the slowest rank.
"""

import itertools
import json
import os
import statistics
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

SIZES, CUT, MICROBATCHES, SAMPLES, STEPS = json.loads(sys.argv[1])


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(1)
    layers = []
    for k, (a, b) in enumerate(itertools.pairwise(SIZES)):
        layers += [nn.Linear(a, b)] + ([nn.ReLU()] if k < len(SIZES) - 2 else [])
    mine = nn.Sequential(*(layers[:CUT] if rank == 0 else layers[CUT:]))
    stage = PipelineStage(mine, rank, 2, torch.device("cpu"))
    loss = nn.CrossEntropyLoss()
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=loss)
    x, y = torch.randn(SAMPLES, SIZES[0]), torch.randint(0, SIZES[-1], (SAMPLES,))
    times = []
    for _ in range(STEPS + 1):
        for parameter in mine.parameters():
            parameter.grad = None
        dist.barrier()
        began = time.perf_counter()
        if rank == 0:
            schedule.step(x)
        else:
            schedule.step(target=y, losses=[])
        times.append(time.perf_counter() - began)
    slowest = torch.tensor(statistics.median(times[1:]))
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    if rank == 0:
        print(f"seconds {float(slowest)}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    main()
