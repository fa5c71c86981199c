"""In an elastic run, all servers apply the pushes of a clock (a step), or none: the servers vote.

    server 0   has all pushes of clock 7 | vote -> | ............ apply clock 7 -> answers
    server 1   ............................ has all pushes of clock 7 | vote -> | apply clock 7

A worker that dies may have sent its gradients to only some of the servers. If only these servers
applied the step, the parameters would be a mixture of two steps. So each server sends a vote (16
bytes) to all other servers when it has the gradients of all workers, and applies them when it has
the votes of all other servers. After a death, a step that one server has applied is applied by all
servers; otherwise the living workers repeat it.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Sequence

import numpy as np
from mpi4py import MPI

from .consistency import Action, Apply
from .link import Link
from .protocol import VOTE
from .replicas.shard_copies import ShardCopies

Actions = list[Action]


class Votes:
    """Lets one server apply the gradients of a step only when all servers have these gradients.

    When a server has the gradients of all workers, it sends a message, a vote, to all other
    servers. If the server keeps a copy of another server's parameters (`copies`), it votes only
    when it has also received the gradients for its copy.
    """

    # With copies: if a server dies after others have applied a clock, the same update can still be
    # made in the copy of its parameters.
    def __init__(self, link: Link, others: Sequence[int], copies: ShardCopies | None = None):
        self._link, self._others, self._copies = link, list(others), copies
        self._open: list[tuple[int, int]] = []  # (model, clock) for which this server has to vote
        self._due: dict[int, deque[Action]] = defaultdict(deque)
        self._heard: Counter[tuple[int, int]] = Counter()

    @property
    def pending(self) -> bool:
        """Whether updates wait until other servers have the gradients, too."""
        return any(self._due.values())

    def released(self, model: int, actions: Sequence[Action]) -> Actions:
        """Vote for the updates in `actions`; return the actions that this server may do now.

        An update waits for the votes of all other servers, and later actions wait for the update.
        """
        # Stored before the first vote is sent. If a death interrupts this call, another server may
        # already have the vote, and then `settle` must find these updates.
        self._due[model] += actions
        clocks = dict.fromkeys(each.clock for each in actions if isinstance(each, Apply))
        self._open += [(model, clock) for clock in clocks]
        self._vote()
        return self._allowed(model)

    def _vote(self) -> set[int]:
        """Send votes for the clocks of which this server has all pushes; return their models."""
        ready = [one for one in self._open if self._copies is None or self._copies.has(*one)]
        for one in ready:
            for rank in self._others:
                vote = self._link.pool.take(16)
                vote.view(np.int64)[:] = one
                self._link.send(vote, 16, rank, VOTE)
            self._open.remove(one)
        return {model for model, _ in ready}

    def listen(self) -> list[tuple[int, Actions]]:
        """Receive votes of servers that have all gradients; return the actions now allowed.

        The result is a list of pairs (number of a model, its updates and answers to workers).
        """
        status, comm, tag = MPI.Status(), self._link.comm, self._link.tag + VOTE
        heard = self._vote() if self._open else set()
        while comm.Iprobe(MPI.ANY_SOURCE, tag, status):
            vote = np.empty(2, np.int64)
            comm.Recv([vote, MPI.INT64_T], status.source, tag)
            model, clock = vote.tolist()
            self._heard[model, clock] += 1
            heard.add(model)
        return [(model, self._allowed(model)) for model in sorted(heard)]

    def settle(self, model: int, clocks: int) -> Actions:
        """After a death, return waiting updates of the first `clocks` steps; drop the others."""
        # A step is applied only with the votes of all servers, so all servers have its pushes.
        due = [each for each in self._due.pop(model, ()) if isinstance(each, Apply)]
        return [each for each in due if each.clock < clocks]

    def _allowed(self, model: int) -> Actions:
        due, allowed = self._due[model], []
        while due:
            first = due[0]
            if isinstance(first, Apply):
                key = model, first.clock
                if self._heard[key] < len(self._others) or key in self._open:
                    break
            allowed.append(due.popleft())
        for each in allowed:
            if isinstance(each, Apply):
                self._heard.pop((model, each.clock), None)
        return allowed


def start_votes(server, ranks: Sequence[int], copies: bool) -> None:
    """Let a server apply a step only when all servers have voted that they have its gradients.

    With `copies`, the server also keeps a copy of the previous server's part of each model.
    `server` is None on a rank that is no server.
    """
    if server is None or len(ranks) < 2:
        return
    link = server.link
    if copies:
        before, after = ranks[server.index - 1], ranks[(server.index + 1) % len(ranks)]
        server.copies = ShardCopies(link, before, after, server.models)
    others = [rank for rank in ranks if rank != link.comm.rank]
    server.votes = Votes(link, others, server.copies)
