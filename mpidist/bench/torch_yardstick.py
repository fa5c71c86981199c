"""PyTorch's `all_reduce` over gloo, and its checkpoints, on the same ranks, in the same rounds.

PyTorch is no dependency: install it into an environment of your own. Its processes find each other
by a TCP store that rank 0 opens and whose address MPI hands on.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import ConfigError


def reducer(comm) -> tuple[str, Callable[[np.ndarray], Callable[[], object]]]:
    """Return the version and ``make(vector)``, which returns a call. Collective over `comm`.

    The call sums `vector` over all ranks in place, by gloo. Raises ConfigError, on all ranks, where
    one of them has no PyTorch.
    """
    torch = enter(comm)
    import torch.distributed as distributed

    def make(vector: np.ndarray) -> Callable[[], object]:
        tensor = torch.from_numpy(vector)
        return lambda: distributed.all_reduce(tensor)

    return torch.__version__, make


def enter(comm) -> Any:
    """Make gloo's process group of these ranks; return the module torch. Collective over `comm`.

    Raises ConfigError, on all ranks, where one of them has no PyTorch.
    """
    try:
        import torch
        import torch.distributed as distributed
    except ImportError:
        torch = None
    if not all(comm.allgather(torch is not None)):
        raise ConfigError(
            "--torch: no PyTorch here; pip install torch beside mpidist in an environment of its "
            "own, and run this command there"
        )
    torch.set_num_threads(1)
    hosts = comm.allgather(socket.gethostname())
    host = hosts[0] if len(set(hosts)) > 1 else "127.0.0.1"
    if len(set(hosts)) == 1:
        # Gloo looks its own host name up, which many machines cannot.
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
    """Return (version, save, load) of torch.distributed.checkpoint. Collective over `comm`.

    `whole` is replicated, `block` this rank's part of a vector; both are shared with PyTorch, not
    copied. ``save()`` puts them on the disk below `folder`, ``load()`` fills them.
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

    return torch.__version__, save, load


def leave() -> None:
    """Take the process group down. Collective."""
    import torch.distributed as distributed

    distributed.destroy_process_group()
