"""The ranks of a new group agree which ranks are servers and workers, and who holds how much."""

from __future__ import annotations

import socket
from typing import NamedTuple

from mpi4py import MPI

from ...runtime.agreement.run_on_all import run_on_all, same_on_all
from ..model_facts import check_checksums
from .roles import choose_ranks, ranks_and_shares, ranks_asked


class Roles(NamedTuple):
    """The ranks of servers and workers, the servers' parts of the models, and who only serves."""

    servers: list[int]
    workers: list[int]
    shares: list[float]
    placement: str | list[int]


def agree_on_roles(comm: MPI.Comm, servers, placement, checksums: bool = False) -> Roles:
    """Check the arguments of `ServerGroup`, and return the roles of the ranks. Collective.

    Raises an error on all ranks if the arguments are wrong or differ between ranks.
    """

    def describe() -> dict:
        asked = ranks_asked(servers)
        choose_ranks(comm.size, asked, placement)
        only_serve = placement if isinstance(placement, str) else sorted(map(int, placement))
        check_checksums(checksums)
        return {"servers": asked, "placement": only_serve, "checksums": checksums}

    # Ranks may have passed different arguments, so an error on one rank is raised on all ranks.
    agreed = same_on_all(comm, "ServerGroup", describe)
    asked, placed = agreed["servers"], agreed["placement"]

    def hosts() -> list[str]:
        return run_on_all(comm, "ServerGroup: hosts", socket.gethostname, list)

    serving, working, parts = ranks_and_shares(comm.size, asked, placed, hosts)
    return Roles(serving, working, [part / sum(parts) for part in parts], placed)
