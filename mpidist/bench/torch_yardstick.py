"""Run PyTorch on the same ranks for comparison: `all_reduce` over gloo, and checkpoints.

PyTorch is not a dependency of mpidist: install both into one environment.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import ConfigError


def reducer(comm) -> tuple[str, Callable[[np.ndarray], Callable[[], object]]]:
    """Return the version of PyTorch and the function ``make(vector)``. Collective over `comm`.

    ``make(vector)`` returns a function that sums `vector` over all ranks in place, by gloo. Raises
    ConfigError on all ranks if one of them has no PyTorch.
    """
    torch = enter(comm)

    def make(vector: np.ndarray) -> Callable[[], object]:
        return partial(torch.distributed.all_reduce, torch.from_numpy(vector))

    return torch.__version__, make


def enter(comm) -> Any:
    """Make gloo's process group of all ranks; return the module torch. Collective over `comm`.

    Raises ConfigError on all ranks if one of them has no PyTorch.
    """
    torch: Any = None
    with suppress(ImportError):
        distributed = import_module("torch.distributed")
        torch = import_module("torch")
    if not all(comm.allgather(torch is not None)):
        raise ConfigError(
            "--torch: no PyTorch here; pip install torch beside mpidist in an environment of its "
            "own, and run this command there"
        )
    torch.set_num_threads(1)
    hosts = comm.allgather(socket.gethostname())
    host = hosts[0]
    if len(set(hosts)) == 1:
        # Without GLOO_SOCKET_IFNAME, gloo looks up the address of its own host, which fails on many
        # machines.
        host = "127.0.0.1"
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = None
    if comm.rank == 0:
        store = distributed.TCPStore(host, 0, comm.size, True, wait_for_workers=False)
    port = comm.bcast(store.port if store is not None else None, root=0)
    if store is None:
        store = distributed.TCPStore(host, port, comm.size, False)
    distributed.init_process_group("gloo", store=store, rank=comm.rank, world_size=comm.size)
    return torch


def checkpointer(comm, whole: np.ndarray, block: np.ndarray, folder: Path):
    """Return functions (save, load) that use torch.distributed.checkpoint. Collective over `comm`.

    `whole` is equal on all ranks, and `block` is this rank's part of a distributed vector.
    ``save()`` writes both arrays to a folder in `folder`, and ``load()`` reads both back.
    """
    torch = enter(comm)
    from torch.distributed import checkpoint
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard

    mesh = init_device_mesh("cpu", (comm.size,))
    count = comm.allreduce(block.size)
    state = {
        "w": DTensor.from_local(torch.from_numpy(whole), mesh, [Replicate()], run_check=False),
        "momentum": DTensor.from_local(
            torch.from_numpy(block), mesh, [Shard(0)], run_check=False,
            shape=torch.Size([count]), stride=(1,),
        ),
    }  # fmt: skip
    path = str(folder / "torch")

    def save() -> None:
        writer = checkpoint.FileSystemWriter(path, sync_files=True, overwrite=True)
        checkpoint.save(state, storage_writer=writer)

    def load() -> None:
        checkpoint.load(state, storage_reader=checkpoint.FileSystemReader(path))

    return save, load


def leave() -> None:
    """Destroy PyTorch's process group. All ranks of the group must make this call."""
    import torch.distributed as distributed

    distributed.destroy_process_group()
