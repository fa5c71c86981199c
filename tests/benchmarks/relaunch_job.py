"""The jobs of `relaunch.py` and `elastic_torch.py`: ``relaunch_job ours|memory|torch|... FOLDER``.

The same MLP is trained with the same batch, steps and checkpoints in three ways: by `md.train`, by
`md.train` with copies in memory in place of checkpoints, and by torch's DDP over gloo as torch's
documentation shows it. In the third way, rank 0 writes the checkpoint and all ranks load it. For
`elastic_torch.py`, the same MLP is also trained without checkpoints, by an elastic `md.train` and
by torchft.
"""

from __future__ import annotations

import itertools
import os
import sys
import time
from pathlib import Path

import numpy as np

SIZES, SAMPLES, BATCH, STEPS, EVERY = (784, 512, 256, 10), 4096, 64, 100_000, 20
RATE, MOMENTUM = 0.01, 0.9


def _data():
    rng = np.random.default_rng(0)
    inputs = rng.standard_normal((SAMPLES, SIZES[0])).astype(np.float32)
    return inputs, rng.integers(0, SIZES[-1], SAMPLES)


def _note(folder: Path, rank: int, size: int):
    """Leave this rank's process number; return what writes the time of each step on rank 0."""
    (folder / f"pid-{rank}").write_text(str(os.getpid()))
    file = (folder / "steps").open("a", buffering=1)
    return lambda step: file.write(f"{time.time():.4f} {step} {size}\n") if rank == 0 else None


def ours(folder: Path, copies: bool = False) -> None:
    """Train by `md.train`. Collective over all ranks."""
    from mpi4py import MPI

    import mpidist as md
    from mpidist.checkpoint.memory_copies import open_with_copies
    from mpidist.launch.environment import memory_folder

    comm, checkpoint = MPI.COMM_WORLD, folder / "checkpoints"
    note = _note(folder, comm.rank, comm.size)
    if copies:
        checkpoint = open_with_copies(comm, checkpoint, memory_folder())
        checkpoint.save_async = checkpoint.hold
    md.train(
        comm, md.models.mlp(SIZES), _data(), optimizer=md.optim.momentum(RATE, MOMENTUM),
        global_batch=BATCH, steps=STEPS, checkpoint=checkpoint, checkpoint_every=EVERY,
        callbacks=[lambda step: note(step.step)],
    )  # fmt: skip


def torch(folder: Path) -> None:
    """Train by DDP, as torchrun's documentation shows it. Collective over all ranks."""
    import torch
    import torch.distributed as distributed
    from torch import nn

    torch.set_num_threads(1)
    rank, size = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE"))
    # Keys of an earlier attempt are still in the agent's store, and gloo of torch 2.13 connects to
    # the addresses that it finds there.
    agent = distributed.TCPStore(
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), size, False
    )
    store = distributed.PrefixStore(os.environ["TORCHELASTIC_RESTART_COUNT"], agent)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=size)
    note, path = _note(folder, rank, size), folder / "checkpoint.pt"
    layers: list = []
    for n, m in itertools.pairwise(SIZES):
        layers += [nn.Linear(n, m), nn.ReLU()]
    model = nn.Sequential(*layers[:-1])
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM)
    step = 0
    if path.exists():
        saved = torch.load(path)
        step = saved["step"]
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    replica = nn.parallel.DistributedDataParallel(model)
    inputs, labels = map(torch.from_numpy, _data())
    while step < STEPS:
        order = torch.from_numpy(np.random.default_rng(step).permutation(SAMPLES)[:BATCH])
        mine = order[rank::size]
        optimizer.zero_grad()
        nn.functional.cross_entropy(replica(inputs[mine]), labels[mine]).backward()
        optimizer.step()
        step += 1
        note(step)
        if step % EVERY == 0 and rank == 0:
            state = {"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state, path.with_suffix(".part"))
            path.with_suffix(".part").replace(path)


def elastic(folder: Path) -> None:
    """Train by an elastic `md.train`. Collective over all ranks."""
    from mpi4py import MPI

    import mpidist as md
    from mpidist.runtime import ulfm

    comm = MPI.COMM_WORLD
    note = _note_size(folder, comm.rank)
    md.train(
        comm, md.models.mlp(SIZES), _data(), optimizer=md.optim.momentum(RATE, MOMENTUM),
        global_batch=BATCH, steps=STEPS, elastic=True,
        callbacks=[lambda step: note(step.step, ulfm.current.base.size)],
    )  # fmt: skip


def torchft(folder: Path) -> None:
    """Train by torchft; each process is a replica group.

    After an error of gloo, the `DistributedDataParallel` of torchft 0.2.0 ends its process by an
    assertion (``assert fut._fut``), so the gradients are averaged by `Manager.allreduce`.
    """
    from datetime import timedelta

    import torch
    import torchft as ft
    from torch import nn
    from torch.distributed import TCPStore

    torch.set_num_threads(1)
    rank, groups = int(os.environ["REPLICA_GROUP_ID"]), int(os.environ["NUM_REPLICA_GROUPS"])
    note = _note_size(folder, rank)
    layers: list = []
    torch.manual_seed(0)
    for n, m in itertools.pairwise(SIZES):
        layers += [nn.Linear(n, m), nn.ReLU()]
    model = nn.Sequential(*layers[:-1])
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM)

    def load(state) -> None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    manager = ft.Manager(
        pg=ft.ProcessGroupGloo(timeout=timedelta(seconds=5)), min_replica_size=1,
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
        replica_id=f"replica_{rank}", rank=0, world_size=1, store_addr="localhost",
        store_port=store.port, hostname="localhost",
    )  # fmt: skip
    guarded, parameters = ft.Optimizer(manager, optimizer), [*model.parameters()]
    inputs, labels = map(torch.from_numpy, _data())
    while manager.current_step() < STEPS:
        before = manager.current_step()
        order = torch.from_numpy(np.random.default_rng(before).permutation(SAMPLES)[:BATCH])
        mine = order[rank::groups]
        guarded.zero_grad()
        nn.functional.cross_entropy(model(inputs[mine]), labels[mine]).backward()
        flat = torch.cat([p.grad.reshape(-1) for p in parameters])
        manager.allreduce(flat).wait()
        parts = flat.split([p.numel() for p in parameters])
        for parameter, part in zip(parameters, parts, strict=True):
            parameter.grad.copy_(part.view_as(parameter))
        guarded.step()
        if manager.current_step() > before:
            note(manager.current_step(), manager.num_participants())


def _note_size(folder: Path, rank: int):
    """Like `_note`, on all ranks, with the number of ranks that have done the step."""
    (folder / f"pid-{rank}").write_text(str(os.getpid()))
    file = (folder / f"steps-{rank}").open("a", buffering=1)
    return lambda step, size: file.write(f"{time.monotonic():.5f} {step} {size}\n")


def memory(folder: Path) -> None:
    """Train by `md.train` with copies in memory. Collective over all ranks."""
    ours(folder, copies=True)


if __name__ == "__main__":
    programs = {
        "ours": ours, "memory": memory, "torch": torch, "elastic": elastic, "torchft": torchft,
    }  # fmt: skip
    programs[sys.argv[1]](Path(sys.argv[2]))
