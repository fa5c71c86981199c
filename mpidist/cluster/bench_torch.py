"""PyTorch's `all_reduce` over gloo as a yardstick, on the same ranks and in the same rounds.

PyTorch is no dependency: install it into an environment of your own. Its processes find each other
by a TCP store that rank 0 opens and whose address MPI hands on.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable

import numpy as np

from ..errors import ConfigError


def reducer(comm) -> tuple[str, Callable[[np.ndarray], Callable[[], object]]]:
    """Return the version and ``make(vector)``, which returns a call. Collective over `comm`.

    The call sums `vector` over all ranks in place, by gloo. Raises ConfigError, on all ranks, where
    one of them has no PyTorch.
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

    def make(vector: np.ndarray) -> Callable[[], object]:
        tensor = torch.from_numpy(vector)
        return lambda: distributed.all_reduce(tensor)

    return torch.__version__, make


def leave() -> None:
    """Take the process group down. Collective."""
    import torch.distributed as distributed

    distributed.destroy_process_group()
