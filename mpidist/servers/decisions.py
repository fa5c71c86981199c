"""Send the first server's decisions about which pushes count to the other servers.

    first server    gate.decisions: close round 4 with workers 0, 2 | worker 0 enters round 5
    other servers   gate.follow(decision), in the same order

Under `modes.backup_workers` a step (a round) does not wait for the slowest workers, but all servers
must use the pushes of the same workers. So the server with number 0 decides which workers these
are. Its gate, the state machine of the mode, makes the decisions, and the gates of the other
servers carry out the same decisions in the same order. The first server sends each decision to each
other server as one message of a few numbers. MPI keeps the order of these messages.
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
    """Sends the decisions of the first server to the other servers, and receives them there.

    Under `BackupWorkers` the server with number 0 decides for all servers which pushes count. A
    decision is a `modes.backup_workers.Decision` about one model.

    Parameters
    ----------
    link : Link
    servers : sequence of int
        Ranks of all servers. The attribute `ranks` has the same ranks.
    """

    def __init__(self, link: Link, servers: Sequence[int]):
        self._link, self.ranks = link, list(servers)
        self._first, self._others = self.ranks[0], self.ranks[1:]

    def tell(self, model: int, gate: Any) -> None:
        """On the first server: send its new decisions about a model to the other servers.

        `model` is the number of the model, and `gate` is the `BackupGate` that has decided.
        """
        decisions, gate.decisions = gate.decisions, []
        for kind, clock, workers in decisions:
            for rank in self._others:
                words = self._link.pool.take(8 * (3 + len(workers)))
                words.view(np.int64)[:] = model, kind, clock, *workers
                self._link.send(words, words.size, rank, DECISION)

    def heard(self) -> list[tuple[int, Decision]]:
        """On the other servers: return the arrived decisions, as (number of a model, decision)."""
        status, comm, tag = MPI.Status(), self._link.comm, self._link.tag + DECISION
        found = []
        while comm.Iprobe(self._first, tag, status):
            words = np.empty(status.Get_count(MPI.INT64_T), np.int64)
            comm.Recv([words, MPI.INT64_T], self._first, tag)
            model, kind, clock, *workers = words.tolist()
            found.append((model, Decision(kind, clock, tuple(workers))))
        return found
