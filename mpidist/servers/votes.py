"""In an elastic run, all servers apply the pushes of a clock (a step), or none: the servers vote.

    server 0   has all pushes of clock 7 | vote -> | ............ apply clock 7 -> answers
    server 1   ............................ has all pushes of clock 7 | vote -> | apply clock 7

Under BSP and SSP(0) a step is done when all servers have applied its pushes. A worker that dies may
have sent its push to only some of the servers. If only these servers applied the step, the
parameters would be a mixture of two steps. Therefore each server sends a vote to all other servers
when it has all pushes of a clock, and applies the pushes when it has the votes of all other
servers. If a server has applied the pushes of a clock before a death, all servers have these
pushes, and the other servers apply them, too (`settle`). If no server has applied them, the living
workers repeat the step. A vote is a message of 16 bytes from each server to each other server.

A run may also keep a copy of each server's shard (its part of a model) on the next server, see
`replicas`. In this case a server votes only after it has also received the gradients of the clock
for its copy. So if a server dies, and the other servers apply the pushes of a clock, the same
update can be made in the copy of the dead server's shard.
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
    """Lets one server apply the pushes of a clock (step) only when all servers have these pushes.

    A vote is a message to all other servers which says that this server has all pushes of a clock.
    Servers vote only about models with BSP or SSP(0), in which pushes are held until all workers
    have finished the clock. The docstring of the module explains why servers vote in elastic runs.

    Parameters
    ----------
    link : Link
    others : sequence of int
        Ranks of the other servers.
    copies : ShardCopies, optional
        This server's copies of another server's parameters. If there are copies, this server votes
        only when it has also received the gradients of the clock for its copy.
    """

    def __init__(self, link: Link, others: Sequence[int], copies: ShardCopies | None = None):
        self._link, self._others, self._copies = link, list(others), copies
        self._open: list[tuple[int, int]] = []  # (model, clock) for which this server has to vote
        self._due: dict[int, deque[Action]] = defaultdict(deque)
        self._heard: Counter[tuple[int, int]] = Counter()

    @property
    def pending(self) -> bool:
        """Whether updates wait for the votes of other servers."""
        return any(self._due.values())

    def released(self, model: int, actions: Sequence[Action]) -> Actions:
        """Send votes for the updates in `actions`; return the actions that wait for no votes.

        `actions` are the updates and answers that the mode of model number `model` allows. A vote
        tells the other servers that this server has all pushes of an update. An update waits until
        all other servers have voted for its clock (step), and later actions wait for the update.
        `listen` returns the waiting actions later.
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
        """Receive votes of other servers.

        Returns pairs (number of a model, its updates and answers that have waited and go on now).
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
        """Return the waiting updates of the first `clocks` steps; forget all that waits after them.

        Called after a death, with the number of steps that at least one server has applied. A
        server applies a step only with the votes of all servers, so all servers have the pushes of
        these steps.
        """
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
    """Let a server tell the other servers by votes that it has all pushes of a step.

    The server applies the step only when it has the votes of all other servers.

    `server` is None on a rank that is no server. `ranks` has the ranks of all servers. With
    `copies`, let the server also keep a copy of the previous server's part of each model.
    """
    if server is None or len(ranks) < 2:
        return
    link = server.link
    if copies:
        before, after = ranks[server.index - 1], ranks[(server.index + 1) % len(ranks)]
        server.copies = ShardCopies(link, before, after, server.models)
    others = [rank for rank in ranks if rank != link.comm.rank]
    server.votes = Votes(link, others, server.copies)
