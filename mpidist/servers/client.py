"""A worker's access to one model on the servers: pull, push, clock and push_pull.

    worker sends                    each server
    pull    -> names, rows          -> waits for slower workers -> answers with values, version
    push    -> gradients, samples   -> applies the gradients as the model's consistency says
    clock   -> tick                 -> advances the worker's clock, answers the pulls that waited
                                       for it

A clock is one training step of a worker, and a tick is the message that ends the step. A push_pull
does all three with one message to each server.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping

from ..errors import ClosedError, MpidistError, ProtocolError
from .consistency import Consistency
from .layout.placement import ServerLayout
from .layout.push_checks import checked_samples, not_finite
from .layout.row_selection import Selection
from .link import GroupCall
from .model_facts import Request
from .modes.client_modes import ClientModes
from .modes.global_norm import clipped_push
from .protocol import CHANGE, CLOCK, LEAVE, PULL, PUSH, Header, largest
from .rows.row_cache import cached_rows
from .rows.unused_rows import ask_to_drop
from .wire.bound_push_pull import BoundPushPull, bind
from .wire.client_requests import ClientRequests
from .wire.node_mail import exchanges
from .wire.node_share import NodeShare
from .wire.wire_pieces import WirePiece, cut_shard

# A client remembers the arrays of a push_pull, because a further push_pull of the same arrays takes
# less time. After this many calls in a row with other arrays, it stops remembering arrays.
_BINDS = 8


class Client:
    """One worker's access to one model on the servers. `ServerGroup.add` makes it.

    A clock is one training step of a worker, which ends with a call of `clock` or `push_pull`.

    Attributes
    ----------
    versions : list of int
        For each server, the number of updates that it had made when it answered this worker's
        newest pull.
    dropped : int
        How many pushes of this worker the servers had not used (dropped) when they answered its
        newest pull.
    gaps : Counter
        ``gaps[n]`` is the number of steps that this worker began n steps ahead of the slowest
        worker.
    group : ServerGroup
        The group that the model belongs to.
    """

    def __init__(
        self, group, asked: Request, layout: ServerLayout, model: int, piece_bytes: int, share=None
    ):
        self.name, self.layout, self.group = (name := asked.name), layout, group
        self._link, self._servers = group.link, group.server_ranks
        kinds = ("pull", "push", "clock of", "push_pull", "drop rows of")
        self._pulling, self._pushing, self._ticking, self._fused, self._dropping = (
            GroupCall(group.link, f"{kind} {name!r}") for kind in kinds
        )
        self.gaps: Counter[int] = Counter()
        self.closed = self.removed = False
        self._batch, self._drops = asked.global_batch, asked.nonfinite == "drop"
        self._nonfinite = self.dropped = self.skipped = 0
        self._bound: BoundPushPull | None = None
        # The client keeps neither the arrays alive nor what a server has kept after a death.
        self.asked = asked._replace(model={}, kept=None)
        self.modes = ClientModes(self.asked, group.votes)
        self._cache = cached_rows(asked, layout, len(group.worker_ranks), self.modes)
        self.requests = self._requests(model, piece_bytes, share)
        self.versions = self.requests.versions
        self._staleness: Counter[int] = Counter()
        self._waits = {"server": 0.0, "worker": 0.0}

    # -- the four calls of the step loop ---------------------------------------------------

    def pull(self, what=None, *, out: Mapping | None = None) -> dict:
        """Fetch parameters that are at least as new as the consistency mode (such as BSP) requires.

        If the mode requires it, the call waits for slower workers. A server never answers a pull
        while it is in the middle of an update.

        Parameters
        ----------
        what : None, str, iterable of str, or mapping of str to rows, optional
            The names of the wanted tensors, or a mapping of each name to the wanted rows (indices
            of the first axis; None for all). By default `pull` fetches the names in `out`, or all
            names if there is no `out`.
        out : mapping of str to array, optional
            Arrays that receive the values in place. New arrays are made for names that are not in
            `out`.

        Returns
        -------
        dict
            Name to array. An array has the shape of its tensor, or the shape ``(len(rows),
            *shape[1:])`` if only some rows are wanted.
        """
        self._open()
        with self._pulling:
            wanted, results = self._names.wanted(what, out)
            self._ask(PULL, wanted, results)
        return results

    def push(self, gradients: Mapping, *, samples: int | None = None) -> None:
        """Send the mean gradient over `samples` samples to the servers, at most once per step.

        When the call returns, the caller may overwrite the gradients. For a large gradient, the
        call takes about as long as the transfer.

        Parameters
        ----------
        gradients : mapping
            Name to array, or to ``(rows, values)`` for some rows of a tensor (a row given twice is
            added twice). Tensors that are not named have gradient zero.
        samples : int, optional
            The number of samples, which is the weight of this push; 0 is allowed. By default all
            workers have the same weight. `samples` is required if the model has a `global_batch`.
        """
        self._open()
        with self._pushing:
            pushes, samples = self._checked(gradients, samples)
            self._enter()
            if self._cache is not None:
                self._cache.wrote(pushes, samples, self.finished)
            self.requests.push(pushes, samples)
            self._link.background()

    def clock(self) -> None:
        """Finish this worker's step, without waiting.

        The next pull may wait for slower workers, depending on the consistency mode.
        """
        self._open()
        with self._ticking:
            self._enter()
            for server in range(len(self._servers)):
                self.requests.post(server, CLOCK)
            self.requests.clock += 1
            self._link.background()

    def push_pull(
        self,
        gradients: Mapping,
        *,
        what=None,
        out: Mapping | None = None,
        samples: int | None = None,
    ) -> dict:
        """Do ``push``, ``clock`` and ``pull`` with one request to each server and one answer.

        `what` has the names of the tensors to pull, or maps each name to the wanted rows, for
        example those of the next minibatch. Returns the parameters for the next step as a dict of
        name to array.
        """
        self._open()
        with self._fused:
            if what is None and (bound := self._bound) is not None and bound.fits(gradients, out):
                count = self._check_push(samples)
                # If a gradient is not finite, the code below raises the error, or drops the push.
                if bound.pack():
                    return self._push_pull_again(bound, count)
            wanted, results = self._names.wanted(what, out)
            pushes, samples = self._checked(gradients, samples)
            self._enter()
            self._ask(PUSH | CLOCK | PULL, wanted, results, pushes, samples)
            plain = self.asked.clip_norm is None and not self.requests.streams(self.finished)
            if self._binds and plain:
                self._binds -= 1
                whole, link = self.requests.whole, self._link
                make = exchanges(link, self._servers, whole, self.requests.share)
                self._bound = bind(link, whole, make, gradients, out)
        return results

    def _push_pull_again(self, bound: BoundPushPull, samples: int | None) -> dict:
        """Do a push_pull of the arrays of an earlier call, after `bound.pack`."""
        self._enter()
        requests, self._binds = self.requests, _BINDS
        requests.pushed, requests.started = (clock := requests.clock), True
        entered, note = int(requests.has_entered), requests.take_note()
        waited, headers = bound.exchange(self.name, requests.model, clock, samples, entered, note)
        requests.silent.clear()
        for server, header in enumerate(headers):
            self.versions[server] = header.version
            requests.queue[header.queue] += 1
        self._end_call(headers, waited, True, True)
        return bound.results()

    def begin_at(self, clock: int) -> None:
        """Let this worker begin with the step number `clock`, if training goes on after a death."""
        self.requests.clock = clock

    def repeat_push_pull(
        self, gradients: Mapping, *, out: Mapping, samples: int | None, known: Collection[int]
    ) -> None:
        """Do `push_pull` again after a death, but send no gradients to the servers in `known`."""
        self._open()
        with self._fused:
            wanted, results = self._names.wanted(None, out)
            pushes, samples = self._checked(gradients, samples)
            self._enter()
            self._ask(PUSH | CLOCK | PULL, wanted, results, pushes, samples, known)

    def drop(self, *, unused_for: int) -> int:
        """Free the rows that were not used lately; return how many rows were freed.

        Only rows of open tables (see `OpenRows`) are freed. A row is freed if no push has named it
        in the last `unused_for` steps that all workers have finished. A later pull of the row's key
        gets the initial values again. One worker calls `drop`, while the other workers go on.

        Raises
        ------
        ConfigError
            The model has no open table, or `unused_for` is not a whole number of at least 1.
        """
        self._open()
        with self._dropping:
            self.forget_rows()
            return ask_to_drop(self, unused_for)

    def forget_rows(self) -> None:
        """Forget the rows that this worker has cached (`cache_rows`); later pulls ask servers."""
        if self._cache is not None:
            self._cache.clear()

    def close(self) -> None:
        """Leave the model, so that the model's other workers no longer wait for this worker.

        A second call does nothing.
        """
        if not self.closed:
            with GroupCall(self._link, f"close of {self.name!r}"):
                self.leave()
                self._link.background()

    def leave(self) -> None:
        """Leave the model; called by `close`, and by `ServerGroup.close`."""
        if not self.closed:
            for server in range(len(self._servers)):
                self.requests.post(server, LEAVE)
            self.closed = True

    @property
    def finished(self) -> int:
        """How many clocks (steps) this worker has finished, or skipped because it was late."""
        return self.requests.clock

    @property
    def stats(self) -> dict:
        """The counts of messages, steps and waits of this worker so far, as a dict.

        - ``waits``: the seconds spent waiting for servers to answer ("server") and for slower
          workers ("worker").
        - ``gaps``: a histogram of how many steps this worker was ahead of the slowest worker.
        - ``staleness``: a histogram of how many updates came between a pull and the next push.
        - ``queue``: a histogram of how many workers waited for a server at the same time.
        - ``nonfinite``: the number of pushes left out because of a NaN or an infinity.
        - ``dropped``, ``skipped``: the numbers of pushes that servers left out, and of steps that
          this worker skipped, as of its newest pull.
        - ``cache``: None without `cache_rows`; otherwise the number of pulled rows that came from
          the cache (``hits``) and from servers (``misses``), the number of pulls that asked no
          server (``quiet``), and the number of rows in the cache now (``rows``).

        The counts of messages and bytes are sums over all clients of this rank.
        """
        return {
            "clocks": self.finished,
            "versions": list(self.versions),
            "gaps": dict(self.gaps),
            "staleness": dict(self._staleness),
            "queue": dict(self.requests.queue),
            "waits": dict(self._waits),
            "imbalance": self.layout.imbalance,
            "nonfinite": self._nonfinite,
            "dropped": self.dropped,
            "skipped": self.skipped,
            "cache": None if self._cache is None else self._cache.stats(),
            **self._link.counters.snapshot(),
        }

    # -- changes during training -------------------------------------------------------------

    @property
    def consistency(self) -> Consistency:
        """When workers wait for each other: a `BSP`, `SSP`, `DSSP` or `ASP`, which can be set.

        All workers of the model must set the same mode between the same two steps; otherwise all
        ranks get a ProtocolError. The new mode begins with the next step, for all workers and
        servers, and no push is lost. If the old mode is BSP or SSP(0), all workers begin the new
        mode with the same parameters. Setting the present mode does nothing. The mode cannot change
        in elastic runs.

        Raises
        ------
        ConfigError
            Training cannot change to this mode, or the mode does not allow the model's policy for
            stale gradients (`stale`).
        """
        return self.modes.newest

    @consistency.setter
    def consistency(self, mode: Consistency) -> None:
        self._open()
        with GroupCall(self._link, f"consistency of {self.name!r}"):
            if text := self.modes.checked(mode, self.finished):
                self.requests.tell_all(CHANGE, text)
                self.modes.set(mode, self.finished)
                self._link.background()

    def set_optimizer(self, optimizer) -> None:
        """Use another optimizer, or another learning rate, from now on. All workers must call this.

        The workers call it in the same step, with equal optimizers; otherwise all ranks get a
        ProtocolError. Under BSP the update of this step is the first one with the new optimizer. In
        other modes a server uses the new optimizer as soon as the last worker has called. An
        optimizer of the same kind goes on with the state of the old one (such as velocities and the
        progress of a schedule). An optimizer of another kind begins with a new state. `pickle` must
        be able to copy an optimizer of your own. In elastic runs the optimizer cannot change.

        Raises
        ------
        ConfigError
            The optimizer needs whole tensors, as the optimizers made by `optim.clipped` do, or it
            cannot be sent to the servers.
        """
        self._open()
        with GroupCall(self._link, f"set_optimizer of {self.name!r}"):
            message = self.modes.checked_optimizer(optimizer, self.finished, self.layout)
            self.requests.tell_all(CHANGE, message)
            self.modes.set_optimizer(optimizer, self.finished)
            if self._cache is not None:
                self._cache.change_optimizer(optimizer, self.finished)
            self._link.background()

    # -- messages ------------------------------------------------------------------------

    def _requests(self, model: int, piece_bytes: int, share: NodeShare | None) -> ClientRequests:
        """Return the object that sends this client's requests to the servers."""
        layout, numbers = self.layout, range(len(self._servers))
        self._names, self._binds = Selection(self.name, layout), 0 if self._cache else _BINDS
        self._names.assigns = getattr(self.asked.optimizer, "assigns", False)
        cuts = (cut_shard(layout, k, piece_bytes) for k in numbers)
        pieces: list[list[WirePiece]] = [each if len(each) > 1 else [] for each in cuts]
        first = self.group.worker_ranks.index(self.group.comm.rank) % len(self._servers)
        return ClientRequests(
            self._link, self._servers, model, self._names, pieces, self.modes, share, first
        )

    def forget(self) -> None:
        """Close the client of a removed model, and drop its references to shared memory."""
        self.closed = self.removed = True
        self.requests.share = self._bound = None

    def use_layout(
        self, layout: ServerLayout, servers: list[int], piece_bytes: int, share: NodeShare | None
    ) -> None:
        """Use another division of the model between servers, given by `layout`, from this step on.

        `piece_bytes` is the largest size of a piece of a message, and `share` is the memory that
        the ranks of this host share for the model.
        """
        self.layout, self._servers, before = layout, servers, self.requests
        self._bound = None
        if self._cache is not None:
            self._cache.use_layout(layout)
        self.requests = self._requests(before.model, piece_bytes, share)
        self.requests.go_on_from(before)
        self.versions = self.requests.versions

    def _open(self) -> None:
        if self.removed:
            raise ClosedError(f"client {self.name!r}: the model was removed from its group")
        if self.closed:
            raise ClosedError(f"client {self.name!r} is closed; it was used after close()")

    def _enter(self) -> None:
        """Begin this step by an empty pull, unless this worker has already pulled in this step."""
        if self.requests.entered < self.finished and self.finished > 0:
            self._end_call(*self.requests.ask(PULL, {}, {}), False, True)

    def _checked(self, gradients: Mapping, samples) -> tuple[dict, int | None]:
        """Check a push before anything is sent; return its gradients and its number of samples."""
        samples = self._check_push(samples)
        pushes = self._names.split(gradients)
        if (wrong := not_finite(self.name, pushes)) is None:
            return clipped_push(pushes, self.modes.clip_norm(self.finished)), samples
        if not self._drops:
            raise MpidistError(wrong)
        self._nonfinite += 1
        return {}, 0

    def _check_push(self, samples) -> int | None:
        if (clock := self.finished) == self.requests.pushed:
            text = f"client {self.name!r}: second push in clock {clock}; call clock() first"
            raise ProtocolError(text)
        return checked_samples(self.name, samples, self._batch)

    def _ask(
        self, flags: int, wanted: dict, results: dict, pushes=None, samples=None, known=()
    ) -> None:
        """Send requests by `ClientRequests.ask`, and update this client's counts."""
        entering = bool(flags & CLOCK) or self.requests.entered < self.finished
        if self._cache is None:
            headers, waited = self.requests.ask(flags, wanted, results, pushes, samples, known)
        else:
            given = (wanted, results, pushes, samples, known)
            headers, waited = self._cache.ask(self.requests, flags, *given)
        self._end_call(headers, waited, bool(flags & CLOCK), entering)

    def _end_call(self, headers: list[Header], waited: float, ticks: bool, entering: bool) -> None:
        """Update the counts from the headers of the answers of one call."""
        held, gap, dropped, oldest = largest(headers)
        blocked = min(waited, held / 1e9)
        waits, requests = self._waits, self.requests
        waits["worker"] += blocked
        waits["server"] += waited - blocked
        # The call is complete on all servers, so an error from here on does not end the group.
        self._link.touched = False
        clock = requests.clock = requests.clock + ticks
        if not headers:  # all rows were in the cache
            requests.entered = requests.clock
            self._link.background()
        elif entering:
            self.gaps[gap] += 1
            before, self.dropped = self.dropped, dropped
            if oldest >= 0 and requests.pushed == clock - 1 and dropped == before:
                self._staleness[oldest] += 1
            # With backup workers, a late worker continues at the clock of the other workers.
            self.skipped += headers[0].clock - clock
            requests.clock = requests.entered = headers[0].clock
