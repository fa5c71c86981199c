"""The first server decides which pushes are used, and tells the other servers its decisions.

    first server    gate.decisions: close round 4 with workers 0, 2 | worker 0 enters round 5
    other servers   gate.follow(decision), in the same order

With backup workers (`modes.backup_workers`), a step (a round) does not wait for the slowest
workers. All servers must use the pushes of the same workers, so the server with number 0 decides
which workers these are, and the other servers follow its decisions in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

from .link import Link
from .modes.backup_workers import Decision
from .protocol import DECISION


class Decisions:
    """Tells all other servers the first server's decisions on which gradients are used."""

    def __init__(self, link: Link, servers: Sequence[int]):
        # The ranks of all servers.
        self._link, self.ranks = link, list(servers)
        self._first, self._others = self.ranks[0], self.ranks[1:]

    def tell(self, model: int, gate: Any) -> None:
        """On the first server: send its new decisions about a model to the other servers."""
        decisions, gate.decisions = gate.decisions, []
        for kind, clock, workers in decisions:
            for rank in self._others:
                words = self._link.pool.take(8 * (3 + len(workers)))
                words.view(np.int64)[:] = model, kind, clock, *workers
                self._link.send(words, words.size, rank, DECISION)

    def heard(self) -> list[tuple[int, Decision]]:
        """Return the first server's decisions that have arrived, as (number of a model, decision).

        All servers except the first one call this method.
        """
        status, comm, tag = MPI.Status(), self._link.comm, self._link.tag + DECISION
        found = []
        while comm.Iprobe(self._first, tag, status):
            words = np.empty(status.Get_count(MPI.INT64_T), np.int64)
            comm.Recv([words, MPI.INT64_T], self._first, tag)
            model, kind, clock, *workers = words.tolist()
            found.append((model, Decision(kind, clock, tuple(workers))))
        return found
