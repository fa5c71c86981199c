"""`ServerGroup`: the ranks of one communicator, divided into parameter servers and workers.

ranks        0  1  2  3  4  5            servers=2, dedicated: the last ranks serve only
workers      0  1  2  3                  group.workers: the communicator of the workers
servers                  0  1

ranks        0  1  2  3                  servers=2, colocated: all ranks work,
workers      0  1  2  3                  and the last two ranks serve as well, from
servers            0  1                  inside the calls of their clients
"""

from __future__ import annotations

import atexit
import json
import time
from ast import literal_eval
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mpi4py import MPI

from ..errors import ClosedError, ConfigError, ProtocolError, nearest, shown
from ..events import trails
from ..runtime.context import free, of
from .add_model import agree_to_remove, host_model
from .balance.online_shares import OnlineShares
from .balance.rebalance import BusySince
from .client import Client
from .consistency import BSP, Consistency
from .layout.agree_on_roles import agree_on_roles
from .layout.load_report import group_facts, group_text
from .layout.placement import ServerLayout
from .link import GroupCall, Link
from .model_facts import Request, check_function
from .modes.model_changes import ModelChanges
from .modes.stale_gradients import KeepStale, Stale
from .pieces.checksums import Checksums
from .protocol import BARRIER, BYE, HEADER_BYTES, PAUSE, TO_SERVER, TO_WORKER
from .rows.cache_policy import RowCache
from .rows.open_rows import OpenRows
from .rows.table_updates import chosen_update
from .server import Hosted, Server
from .wire.node_share import Transport


class ServerGroup(OnlineShares):
    """A group of parameter servers and workers, used as a ``with`` block. Collective over `comm`.

    The method `add` and the end of the ``with`` block are also collective over `comm`.

    Parameters
    ----------
    comm : MPI.Comm
    servers : int, sequence of int, mapping of int to float, or "auto"
        The number of servers (the last ranks of `comm`), or the ranks of the servers, or the share
        of the model that each server rank holds: ``{0: 1, 1: 1, 2: 4}`` gives rank 2 two thirds. A
        rank with share 0 is no server. With "auto" all ranks serve, and the shares balance the
        traffic of the hosts.
    placement : str or sequence of int
        "dedicated": a server rank only serves. "colocated": every rank works, and server ranks
        serve from inside the calls of their clients, so that a long computation between two calls
        delays the other workers. A list contains the server ranks that only serve; all other
        servers also work.
    checksums : bool
        Whether receivers check a CRC-32 of each message.

    Attributes
    ----------
    workers : MPI.Comm or None
        Communicator of the workers in rank order; None on a rank that only serves. `close` frees
        this communicator.
    server_ranks, worker_ranks : list of int
        Ranks of the servers and of the workers on `comm`.
    shares : list of float
        The fraction of each model that each server holds, up to rounding.
    is_server, is_worker : bool
        The roles of this rank.
    """

    def __init__(
        self,
        comm: MPI.Comm,
        *,
        servers: int | Sequence[int] | Mapping[int, float] | str = 1,
        placement: str | Sequence[int] = "dedicated",
        checksums: bool = False,
    ):
        context = of(comm)
        roles = agree_on_roles(comm, servers, placement, checksums)
        # The number of this group among the groups of the communicator gives the group its tags.
        number = context.store["server groups"] = context.store.get("server groups", -1) + 1
        self.comm, self.link = comm, Link(context, number)
        self._server: Server | None = None
        self._layouts: dict[str, ServerLayout] = {}
        self._clients: list[Client] = []
        self._everyone: list[dict] | None = None
        self._served = self.closed = self.replicated = self.votes = False
        self.server_ranks, self.worker_ranks, self.shares, self.placement = roles
        self.link.checksums = Checksums(self.link, *roles[:2]) if checksums else None
        self.is_server, self.is_worker = (comm.rank in ranks for ranks in roles[:2])
        # `Split` blocks, but no rank waits long, because all ranks have just agreed on this call.
        split = comm.Split(0 if self.is_worker else MPI.UNDEFINED)
        self.workers = None if split == MPI.COMM_NULL else split
        self.transports: dict[str, Transport] = {}
        atexit.register(self._left_open)
        if self.is_server:
            self._server = Server(
                self.link, self.server_ranks.index(comm.rank), self.worker_ranks, self.server_ranks
            )
            if self.is_worker:
                self.link.background = self._server.poll
                self._server.on_pause = lambda tag: None  # the rank's worker does the server's part
            else:
                self._server.on_call = self._take_part
        self._measured = BusySince(seconds=time.monotonic())
        self._changes = ModelChanges(self.link, self._server)

    # -- models ----------------------------------------------------------------------------

    def add(
        self,
        name: str,
        model: Mapping,
        *,
        optimizer=None,
        update: str | None = None,
        consistency: Consistency | None = None,
        seed: int = 0,
        global_batch: int | None = None,
        nonfinite: str = "raise",
        stale: Stale | None = None,
        rows: str | OpenRows | Mapping[str, str | OpenRows] = "dense",
        spread: str | Mapping[str, str] = "ranges",
        server_device: str = "cpu",
        cache_rows: int | RowCache | None = None,
        clip_norm: float | None = None,
    ) -> Client | None:
        """Add a model to the servers; return its client, or None on a rank that only serves.

        Collective over the group's `comm`. Call it before the first client is used. To add a model
        later, workers call `pause` and then `add`, and servers call `add` in `on_pause` of `serve`.

        Parameters
        ----------
        name : str
            The name of the model in this group.
        model : mapping
            Name to array (the lowest worker rank's values are used), or name to ``(shape, dtype)``
            or ``(shape, dtype, init)``. With shapes, the servers fill the tensors, and no rank
            needs memory for the whole model. init is "zeros", "normal", "uniform", a number, or
            ``(kind, scale)``. Some ranks may pass arrays and other ranks shapes.
        optimizer : object with init and update
            Each server applies it to its own parts of the tensors: see ``mpidist.optim``.
        update : "add" or "assign"
            Used without `optimizer`, `global_batch` and `clip_norm`. "add": servers add pushed
            values to the present values. "assign": pushed values replace the present values. If a
            row gets several values in a step under BSP, the highest worker rank's value wins, and
            within one push the last value. A push with ``samples=0`` changes nothing; other numbers
            do not matter.
        consistency : BSP, SSP, DSSP, ASP or BackupWorkers
            The consistency mode, which says when workers wait for each other. BSP by default.
        seed : int
            Seed of the initial values, which depend only on seed, name and position.
        global_batch : int, optional
            With ASP, SSP and DSSP a push is an update with the weight ``samples / global_batch``.
            Without a `global_batch`, a push with 0 samples has weight 0, and any other push has
            weight 1 / (number of workers).
        nonfinite : "raise" or "drop"
            What a worker does if a push has a NaN or an infinity. "raise": it raises an error and
            sends nothing. "drop": it sends a push of 0 samples, which ``client.stats`` counts.
        stale : KeepStale, DropStale, ScaleStale, DelayCompensated or MomentumCorrected
            What servers do with gradients computed from old parameters under ASP, SSP and DSSP.
        rows : "dense", "lazy", "open" or OpenRows, or mapping of tensor name to one of these
            "dense": an update changes all rows of a tensor, with gradient zero in rows that no push
            names. "lazy": only the named rows change, which gives the same result if the
            optimizer's attribute ``rows`` is "exact". "open": see `OpenRows`.
        spread : "ranges" or "rows", or mapping of tensor name to one of these
            "ranges": a server holds consecutive rows. "rows": servers get the rows in turn.
        server_device : "cpu" or "gpu"
            Where servers keep the optimizer's state and update the parameters. With "gpu", each
            server needs CuPy and a GPU.
        cache_rows : int or RowCache, optional
            How many rows of each table a worker caches. A pull takes a row from the cache if the
            cached row is as new as the mode requires in this step. Under ASP, set the largest age:
            ``md.RowCache(rows, max_age=steps)``. A worker always sees its own pushes.
        clip_norm : float, optional
            The largest global norm (over all tensors) of a step's mean gradient under BSP and with
            backup workers, and of each push in other modes; a larger gradient is scaled down. An
            optimizer ``optim.clipped(optimizer, norm)`` has the same effect.

        Raises
        ------
        ConfigError
            On all ranks: an argument is wrong, the model does not fit the memory of the servers, or
            the optimizer needs whole tensors.
        MismatchError
            On all ranks: the arguments differ between ranks.
        """
        mode = BSP() if consistency is None else consistency
        # A plain str, because `close` sends its ``repr``, and a subclass may have another one.
        name = str.__str__(name) if isinstance(name, str) else name
        policy = KeepStale() if stale is None else stale
        optimizer, clip_norm = chosen_update(optimizer, update, clip_norm)
        given = (seed, global_batch, None, nonfinite, policy, rows, spread)
        more = (server_device, cache_rows, clip_norm)
        return self._host(Request(name, model, optimizer, mode, *given, *more))

    def _host(self, asked: Request) -> Client | None:
        self._open()
        name = asked.name
        # A colocated server must not answer for a model whose values have not arrived yet.
        with self._changes.changing(f"add {shown(name)}", self._clients):
            layout, piece, share = host_model(self, self._server, self._layouts, asked)
            self._layouts[name] = layout
            number = self._changes.number()
        if not self.is_worker:
            return None
        client = Client(self, asked, layout, number, piece, share)
        self._clients.append(client)
        return client

    def remove(self, name: str) -> None:
        """Remove a model, and free its arrays on the servers. Collective over the group's `comm`.

        It is allowed at the same times as `add`. Later calls of the model's client fail.
        """
        self._open()
        with self._changes.changing(f"remove {shown(name)}", self._clients):
            agree_to_remove(self, self._server, name, self._layouts)
            del self._layouts[name]
            if self._server is not None:
                self._server.forget(name)
        for client in self._clients:
            if client.name == name:
                client.forget()

    def hosted(self, name: str) -> tuple[Server, Hosted] | None:
        """Return (this rank's `Server`, its part of a model), or None if the rank is no server."""
        return None if self._server is None else (self._server, self._part(self._server, name))

    # -- serving, pausing ------------------------------------------------------------------

    def serve(self, on_pause: Callable[[Any], None] | None = None) -> None:
        """Serve until all workers have left. Only ranks that are no workers call `serve`.

        A program needs to call `serve` only to pass `on_pause`; otherwise the end of the group's
        ``with`` block serves.

        Parameters
        ----------
        on_pause : callable, optional
            A function that is called with the argument `tag` of `pause` when the workers call
            `pause`. In `on_pause` the servers take part in an operation of all ranks, such as a
            checkpoint. When `on_pause` returns, the server serves again.
        """
        self._open()
        if self.is_worker or self._server is None:
            raise ProtocolError(f"serve: rank {self.comm.rank} is a worker; only servers call it")
        check_function(on_pause)
        link, server, server.on_pause = self.link, self._server, on_pause
        with GroupCall(link, "serve"), link.serving(server.poll):
            link.wait(lambda: server.done, server.present, "worker")
        link.waits["worker"] -= server.load.busy_seconds
        self._served = True

    def progress(self) -> None:
        """Serve the requests that have arrived, if this worker is also a server; do not wait.

        Call it now and then in a long computation or wait; the calls of a client also serve.
        """
        with GroupCall(self.link, "progress"):
            self.link.background()

    def pause(self, tag: str | int) -> None:
        """Interrupt the servers between two training steps. Collective over the workers.

        Returns when every server has applied all earlier pushes and is about to call
        ``on_pause(tag)``. The workers then do their part of the operation (such as a checkpoint)
        that `on_pause` does on the servers. A rank that works and serves has no `on_pause`: its
        worker does the server's part as well.
        """
        self._workers("pause")
        if isinstance(tag, bool) or not isinstance(tag, str | int):
            raise ConfigError(f"pause: tag={shown(tag)}; expected a string or a whole number")
        with GroupCall(self.link, "pause"), self.link.doing("pause"):
            self._pause(tag)

    def _pause(self, tag: Any) -> None:
        link, replies = self.link, []
        for rank in self.server_ranks:
            replies.append(link.receive(rank, TO_WORKER, HEADER_BYTES))
            link.tell(PAUSE, rank, TO_SERVER, json.dumps(tag).encode())
        with self._changes.pausing():
            link.wait_for(replies, "worker")
        for reply in replies:
            link.pool.give(reply.buffer)
        for client in self._clients:  # because `on_pause` may change the servers' values
            client.forget_rows()

    def barrier(self) -> None:
        """Wait for all workers, and serve requests while waiting. Collective over the workers.

        In MPI's own barrier, a rank that works and serves would answer no requests.
        """
        workers = self._workers("barrier")
        with GroupCall(self.link, "barrier"), self.link.doing("barrier"):
            # So that the first server finds workers that wait for each other, some in a barrier.
            self.link.tell(BARRIER, self.server_ranks[0], TO_SERVER)
            self.link.wait(workers.Ibarrier().Test, peers="worker")

    # -- shards ------------------------------------------------------------------------

    def shards(self, name: str) -> dict:
        """Return the part of a model that this server holds. Call `shards` only on server ranks.

        Returns
        -------
        dict
            ``parameters``: list of (tensor name, first index in the flattened tensor, 1-D array),
            or (tensor name, rows, 2-D array) of a tensor whose rows are dealt to the servers;
            ``optimizer``: such a list for each kind of optimizer state; ``scalars``: the
            optimizer's 0-d arrays; ``version``: the number of updates applied; ``clock``: the steps
            that the slowest worker has finished. The arrays are not copies: writing into them
            changes the server's values. Open tables (see `OpenRows`) are in the list as copies,
            (name, keys, 2-D array). Only they have ``counts``: for each key the steps since its
            newest push, and its number of pushes if these are too few for a row, otherwise -1.
        """
        hosted = self._hosted(name)
        return {**hosted.shard.export(), "clock": min(hosted.gate.clocks, default=0)}

    def load_shards(self, name: str, saved: Mapping) -> None:
        """Set parameters, optimizer state and number of updates from results of `shards`.

        The arrays in `saved` may come from any number of servers, as long as they cover all
        elements that this server holds. Workers keep their step numbers, and their next pushes do
        not count as stale. Call `load_shards` on server ranks, before serving or in a pause.
        """
        self._hosted(name).load(saved)

    def _hosted(self, name: str) -> Hosted:
        self._open()
        if self._server is None:
            raise ProtocolError(
                f"rank {self.comm.rank} holds no shards; servers are ranks {self.server_ranks}"
            )
        return self._part(self._server, name)

    def _part(self, server: Server, name: str) -> Hosted:
        if name not in self._layouts:
            raise ConfigError(f"no model {name!r} here{nearest(name, self._layouts)}")
        return next(model for model in server.models if model.name == name)

    # -- facts ------------------------------------------------------------------------

    def report(self) -> dict:
        """Return a report with the counts of this rank, or of all ranks after the end of the group.

        ``shares`` has the fraction of each model that each server should hold. ``models`` has, for
        each model, the bytes on each server and ``imbalance``: the largest ratio of a server's
        bytes to its share of all bytes. ``ranks`` has one dict per rank, with the keys ``rank``,
        ``server``, ``clients`` (see `Client.stats`) and ``waits`` (the seconds that the rank has
        waited for servers, for workers, and for all ranks). ``server`` has, per model, the number
        of updates, how old pushes were, and how far workers were ahead of the slowest. It also has
        ``queue``, a histogram of how many workers waited for the server at the same time.
        """
        roles = self.server_ranks, self.placement, self.shares
        return {**group_facts(*roles, self._layouts), "ranks": self._everyone or [self._facts()]}

    def __repr__(self) -> str:
        return group_text(self.server_ranks, self.worker_ranks, self.shares, self._layouts)

    def _facts(self) -> dict:
        return {
            "rank": self.comm.rank,
            "server": None if self._server is None else self._server.facts(),
            "clients": {client.name: client.stats for client in self._clients},
            "waits": dict(self.link.waits),
            "transport": {name: each.text for name, each in self.transports.items()},
        }

    # -- the end -----------------------------------------------------------------------

    def close(self) -> None:
        """End the group: clients close, and servers serve until all clients have closed.

        Collective over the group's `comm`. A second call does nothing.
        """
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
                with link.doing("serve until all have left"):
                    link.wait(lambda: server.done, server.present, "worker")
            link.wait(link.reap)
            # As Python literals, because JSON would turn keys that are whole numbers into texts.
            self._everyone = list(map(literal_eval, link.exchange(repr(self._facts()))))
            self._end()
        if self.workers is not None:
            free(self.workers)
            self.workers.Free()

    def _end(self) -> None:
        self.closed = True
        atexit.unregister(self._left_open)
        trails.discard(self.link.trail)

    def _left_open(self) -> None:
        """At exit, notify all other ranks that this rank has not closed the group."""
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
        """Notify all other ranks of a failure, and end the group."""
        self._end()
        for client in self._clients:
            client.closed = True
        self.link.abandon(failure)
        self._changes.end()

    def _workers(self, call: str) -> MPI.Comm:
        self._open()
        if self.workers is None:
            raise ProtocolError(f"{call}: rank {self.comm.rank} is no worker; the workers call it")
        return self.workers

    def _open(self) -> None:
        if self.closed:
            raise ClosedError("this server group is closed; it was used after its end")
