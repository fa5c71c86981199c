"""Servers and workers out of one communicator: which rank does what, their models, start and end.

ranks        0  1  2  3  4  5            servers=2, dedicated: the last ranks serve only
workers      0  1  2  3                  group.workers: a communicator of these
servers                  0  1

ranks        0  1  2  3                  servers=2, colocated: all ranks work,
workers      0  1  2  3                  the last ones serve as well, from inside
servers            0  1                  the calls of their clients
"""

from __future__ import annotations

import atexit
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mpi4py import MPI

from ..errors import ClosedError, ConfigError, ProtocolError, nearest, shown
from ..events import OPEN, trails
from ..runtime.agreement.run_on_all import same_on_all
from ..runtime.context import free, of
from .add_model import host_model
from .client import Client
from .consistency import BSP, Consistency
from .layout.placement import ServerLayout, choose_ranks, ranks_asked
from .link import GroupCall, Link, nothing
from .model_facts import Request
from .protocol import BYE, HEADER_BYTES, PAUSE, TO_SERVER, TO_WORKER
from .server import Hosted, Server, with_histograms

#: Under which name a context counts its groups, for their tags.
_GROUPS = "server groups"


class ServerGroup:
    """Parameter servers and their workers. Collective over `comm`, as are `add` and leaving.

    Parameters
    ----------
    comm : MPI.Comm
    servers : int or sequence of int
        How many (the last ranks of `comm`), or which ranks.
    placement : str
        "dedicated": a server rank does nothing else. "colocated": every rank works, and server
        ranks serve from inside the calls of their clients, so that a long computation between
        two calls delays the others.

    Attributes
    ----------
    workers : MPI.Comm or None
        Communicator of the workers in rank order, None on a dedicated server; freed at the end.
    server_ranks, worker_ranks : list of int
        Ranks on `comm`.
    is_server, is_worker : bool
        The roles of this rank.
    """

    def __init__(
        self, comm: MPI.Comm, *, servers: int | Sequence[int] = 1, placement: str = "dedicated"
    ):
        context = of(comm)

        def describe() -> dict:
            asked = ranks_asked(servers)
            choose_ranks(comm.size, asked, placement)
            return {"servers": asked, "placement": placement}

        # Ranks may have been given different numbers: what one refuses, all refuse.
        agreed = same_on_all(comm, "ServerGroup", describe)
        number = context.store.get(_GROUPS, 0)
        context.store[_GROUPS] = number + 1
        self.comm = comm
        self.link = Link(context, number)
        self._server: Server | None = None
        self._layouts: dict[str, ServerLayout] = {}
        self._clients: list[Client] = []
        self._everyone: list[dict] | None = None
        self._served = self.closed = False
        self.placement = placement
        self.server_ranks, self.worker_ranks = choose_ranks(comm.size, agreed["servers"], placement)
        self.is_server = comm.rank in self.server_ranks
        self.is_worker = comm.rank in self.worker_ranks
        # It blocks, but all ranks are here: they have just agreed.
        split = comm.Split(0 if self.is_worker else MPI.UNDEFINED)
        self.workers = None if split == MPI.COMM_NULL else split
        atexit.register(self._left_open)
        if self.is_server:
            index = self.server_ranks.index(comm.rank)
            self._server = Server(self.link, index, self.worker_ranks)
            self._server.pauses_here = not self.is_worker
            if self.is_worker:
                self.link.background = self._server.poll

    # -- models ----------------------------------------------------------------------------

    def add(
        self,
        name: str,
        model: Mapping,
        *,
        optimizer,
        consistency: Consistency | None = None,
        seed: int = 0,
        global_batch: int | None = None,
    ) -> Client | None:
        """Put a model on the servers; returns its client, None on a dedicated server.

        Collective over the group's `comm`, before the first client is used.

        Parameters
        ----------
        name : str
        model : mapping
            Name to array (the lowest worker rank's values are used), or name to
            ``(shape, dtype)`` or ``(shape, dtype, init)``: then the servers allocate and fill it,
            and nobody needs the whole. init is "zeros", "normal", "uniform", a number, or
            ``(kind, scale)``. Ranks may mix the two forms.
        optimizer : object with init and update
            Applied by the servers, elementwise: see ``mpidist.optim``.
        consistency : BSP, ASP or SSP
            BSP by default.
        seed : int
            Of initial values; they depend on seed, name and position only.
        global_batch : int, optional
            With ASP and SSP a push is an update of weight samples / global_batch. Without it its
            weight is 1 / (number of workers), whatever its samples; 0 samples weigh 0.

        Raises
        ------
        ConfigError
            On all ranks: a spec that cannot work, ranks that disagree, a model that does not fit
            the memory of the servers, an optimizer that is not elementwise.
        """
        self._open()

        # Nobody else needs to hear of it: the servers know that this worker has begun.
        if any(client.started for client in self._clients):
            raise ProtocolError(f"add {name!r}: add all models before the first pull or push")

        def check() -> None:
            if isinstance(name, str) and name in self._layouts:
                raise ConfigError(f"add {name!r}: this group has a model of that name")

        # A colocated server must not answer for a model whose values are still on their way.
        with GroupCall(self.link, "add"), self.link.quiet():
            mode = BSP() if consistency is None else consistency
            asked = Request(name, model, optimizer, mode, seed, global_batch)
            servers, workers = self.server_ranks, self.worker_ranks
            layout = host_model(self.link, self._server, servers, workers, check, asked)
        self._layouts[name] = layout
        if not self.is_worker:
            return None
        client = Client(self, name, layout, len(self._layouts) - 1, global_batch)
        self._clients.append(client)
        return client

    # -- serving, pausing ------------------------------------------------------------------

    def serve(self, on_pause: Callable[[Any], None] | None = None) -> None:
        """Serve until all workers have left. On dedicated server ranks only.

        Leaving the group does this by itself; call it to pass `on_pause`.

        Parameters
        ----------
        on_pause : callable, optional
            Called with the tag when the workers call `pause`: the place for what all ranks do
            together in mid-training, such as a checkpoint. Serving resumes when it returns.
        """
        self._open()
        if self.is_worker or self._server is None:
            raise ProtocolError(f"serve: rank {self.comm.rank} works; it serves within its calls")
        check_function(on_pause)
        link, server, server.on_pause = self.link, self._server, on_pause
        with GroupCall(link, "serve"):
            link.background = server.poll
            link.wait(lambda: server.done, server.present, "worker")
            link.background = nothing
        link.waits["worker"] -= server.busy_seconds
        self._served = True

    def progress(self) -> None:
        """Serve what is waiting, where this worker is a server as well. Returns at once.

        For a colocated worker that waits for something else than its client.
        """
        with GroupCall(self.link, "progress"):
            self.link.background()

    def pause(self, tag: str | int) -> None:
        """Bring the servers out of their loop, between two clocks. Collective over the workers.

        Returns when every server has all that was pushed before and is about to call its
        ``on_pause(tag)``; a worker then does its side of the same thing. A colocated server
        calls nothing: its worker half acts for both.
        """
        self._workers("pause")
        if isinstance(tag, bool) or not isinstance(tag, str | int):
            raise ConfigError(f"pause: tag={shown(tag)}; expected a string or a whole number")
        link, replies = self.link, {}
        with GroupCall(link, "pause"):
            operation = link.trail.begin("pause")
            for rank in self.server_ranks:
                replies[rank] = link.receive(rank, TO_WORKER, HEADER_BYTES)
                link.tell(PAUSE, rank, TO_SERVER, json.dumps(tag).encode())
            link.wait(
                lambda: all([reply.test() for reply in replies.values()]),
                lambda: [rank for rank, reply in replies.items() if not reply.test()],
                "worker",
            )
            operation[OPEN] = False
            for reply in replies.values():
                link.pool.give(reply.buffer)

    def barrier(self) -> None:
        """Wait for all workers, serving meanwhile. Collective over the workers.

        With colocated servers a barrier of MPI's own would not serve those that are not there yet.
        """
        workers = self._workers("barrier")
        with GroupCall(self.link, "barrier"):
            operation = self.link.trail.begin("barrier")
            self.link.touched = True
            self.link.wait(workers.Ibarrier().Test, peers="worker")
            operation[OPEN] = False

    # -- shards ------------------------------------------------------------------------

    def shards(self, name: str) -> dict:
        """What this server holds of a model. On server ranks, not while they serve.

        Returns
        -------
        dict
            ``parameters``: list of (tensor name, flat start, 1-D array); ``optimizer``: the same
            per kind of state; ``scalars``: its 0-d arrays; ``version`` and ``clock``: updates
            applied, clocks finished by the slowest worker. The arrays are the live ones: what is
            written into them is what the server has.
        """
        hosted = self._hosted(name)
        return {**hosted.shard.export(), "clock": min(hosted.gate.clocks, default=0)}

    def load_shards(self, name: str, saved: Mapping) -> None:
        """Set parameters, optimizer state and version from what `shards` gave.

        The pieces may have been cut for any number of servers, as long as they cover this
        server's ranges; clocks begin anew. On server ranks, before serving or in a pause.
        """
        self._hosted(name).shard.load(saved)

    def _hosted(self, name: str) -> Hosted:
        self._open()
        if self._server is None:
            raise ProtocolError(
                f"rank {self.comm.rank} holds no shards; servers are ranks {self.server_ranks}"
            )
        if name not in self._layouts:
            raise ConfigError(f"no model {name!r} here{nearest(name, self._layouts)}")
        return next(model for model in self._server.models if model.name == name)

    # -- facts ------------------------------------------------------------------------

    def report(self) -> dict:
        """Counts of all ranks once the group is closed, of this rank before.

        ``models`` has bytes per server and the imbalance factor (fullest over mean); ``ranks``
        one entry per rank, with ``server`` (queue lengths, and per model staleness of pushes,
        gaps, updates), ``clients`` (see `Client.stats`) and ``waits``, the seconds waited for
        servers, for workers, and for all together.
        """
        ranks = [self._facts()] if self._everyone is None else self._everyone
        return {
            "servers": self.server_ranks,
            "placement": self.placement,
            "models": {
                name: {
                    "bytes": [layout.bytes_of(s) for s in range(len(self.server_ranks))],
                    "imbalance": layout.imbalance,
                }
                for name, layout in self._layouts.items()
            },
            "ranks": ranks,
        }

    def _facts(self) -> dict:
        return {
            "rank": self.comm.rank,
            "server": None if self._server is None else self._server.facts(),
            "clients": {client.name: client.stats for client in self._clients},
            "waits": dict(self.link.waits),
        }

    # -- the end -----------------------------------------------------------------------

    def close(self) -> None:
        """End the group: clients leave, servers serve until all have. Collective; twice is fine."""
        if self.closed:
            return
        if not self.is_worker and not self._served:
            self.serve()
        link, server = self.link, self._server
        with GroupCall(link, "close"):
            for client in self._clients:
                client.leave()
            if self.is_worker:
                for rank in self.server_ranks:
                    link.tell(BYE, rank, TO_SERVER)
            if self.is_worker and server is not None:
                operation = link.trail.begin("serve until all have left")
                link.wait(lambda: server.done, server.present, "worker")
                operation[OPEN] = False
            link.wait(link.reap)
            self._everyone = [with_histograms(facts) for facts in link.exchange(self._facts())]
            self._end()
        if self.workers is not None:
            free(self.workers)
            self.workers.Free()

    def _end(self) -> None:
        self.closed = True
        atexit.unregister(self._left_open)
        trails.discard(self.link.trail)

    def _left_open(self) -> None:
        """At exit: the program ends and has not closed the group, which others may wait for."""
        if not self.closed and MPI.Is_initialized() and not MPI.Is_finalized():
            self._abandon(ProtocolError("the program ended and left the server group open"))

    def __enter__(self) -> ServerGroup:
        return self

    def __exit__(self, kind, error, trace) -> None:
        if error is None:
            try:
                self.close()
            except BaseException as failure:
                self._abandon(failure)
                raise
        elif not self.closed:
            self._abandon(error)

    def _abandon(self, failure: BaseException) -> None:
        """Give up without waiting for anyone; the communicator stays, messages may be under way."""
        self._end()
        for client in self._clients:
            client.closed = True
        self.link.abandon(failure)

    def _workers(self, call: str) -> MPI.Comm:
        self._open()
        if self.workers is None:
            raise ProtocolError(f"{call}: rank {self.comm.rank} is no worker; the workers call it")
        return self.workers

    def _open(self) -> None:
        if self.closed:
            raise ClosedError("this server group is closed; it was used after its end")


def check_function(on_pause) -> None:
    """Refuse an `on_pause` that cannot be called."""
    if on_pause is not None and not callable(on_pause):
        raise ConfigError(f"serve: on_pause={shown(on_pause)}; expected a function of the tag")
