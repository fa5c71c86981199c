"""`Gradients`: averaged over all ranks, in buckets, while backward still runs.

They lie in an `Arena` in the order in which backward finishes them: learned in the first step, then
frozen (and stored with a checkpoint, for the order of additions depends on it). Where nodes send,
a bucket leaves when its last gradient is ready, and every further `ready` pushes on what is under
way. Inside one node nothing travels, so everything is added at the end, where it lies.

What must be equal on all ranks is compared when a `Gradients` is made (`settings.py`).

PyTorch's DDP: Li et al., "PyTorch Distributed", VLDB 13(12), 2020.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import partial
from math import prod
from typing import NoReturn

import numpy as np
from mpi4py import MPI

from ..arrays import work_dtype
from ..collectives.engines import arena_sum
from ..collectives.engines.fused_pieces import bucket, can_overlap
from ..collectives.engines.node_barrier import faked_nodes
from ..collectives.plan import AllreducePlan, make
from ..collectives.schedules.algorithms import MEASURED
from ..errors import MpidistError, ProtocolError
from ..runtime.agreement.mismatch import Signature
from ..runtime.agreement.run_on_all import same_on_all
from ..runtime.arena import Arena
from ..runtime.context import of, running
from . import exchange_settings as arguments
from .exchange_settings import Settings, check_order, check_settings, order_facts, wrong_ready
from .flat_views import EXTRAS, allocate, with_extras
from .gradient_buckets import bucket_bytes, cut_buckets
from .progress_thread import Background


class Gradients:
    """One gradient per parameter, in memory that is exchanged with the other ranks.

    Collective over `comm`, as are `reduce` and `close`; `begin` and `ready` are local.
    A step is `begin`, `ready` for what is final, `reduce`; a step that has not exchanged anything
    may begin again.

    Parameters
    ----------
    comm : mpi4py.MPI.Comm
    parameters : mapping of name -> array
        Host or device arrays; the same names, shapes and dtypes on every rank.
    algorithm : str
        As for `md.allreduce`.
    bucket_bytes : int or "auto"
        Gradients that travel together.
    overlap : bool
        Exchange while backward still runs, where nodes send.
    progress : "hooks" or "thread"
        Who pushes on what is under way: every `ready`, or a thread beside the program (see
        ``progress_thread.py`` for what it forbids).
    order : sequence of str, optional
        Names in the order of backward, where it is known from an earlier run.
    ranks_per_node : int, optional
        Fake nodes, as in `Topology`.
    uses : mapping of name -> int, optional
        How many `ready` a step makes for a tensor that is used several times (tied weights): it is
        final with the last of them. 1 for all others.

    Attributes
    ----------
    views : dict of name -> array
        What a model writes its gradients into. The first `reduce` may move them: do not keep the
        arrays, keep the dict.
    extras : array
        Two further numbers of the first vector, summed with it in the same message.
    overlapping : bool
        Whether buckets leave before `reduce`.

    Raises
    ------
    ConfigError
        On all ranks, for a parameter that is no array of real or complex numbers, or a setting
        that is none, on some rank.
    MismatchError
        On all ranks, where they differ in a setting or in names, shapes, dtypes or order of the
        parameters, or where a rank makes another call.
    ProtocolError
        `ready` or `reduce` before `begin`, one `ready` more than `uses` says, `begin` when a part
        of the step has left.
    """

    def __init__(
        self,
        comm: MPI.Comm,
        parameters: Mapping,
        *,
        algorithm: str = MEASURED,
        bucket_bytes: int | str = "auto",
        overlap: bool = True,
        progress: str = "hooks",
        order: Sequence[str] | None = None,
        ranks_per_node: int | None = None,
        uses: Mapping[str, int] | None = None,
    ):
        self.comm, self.context = comm, of(comm)
        given = {
            "algorithm": algorithm, "bucket_bytes": bucket_bytes, "overlap": overlap,
            "progress": progress, "order": order, "ranks_per_node": ranks_per_node, "uses": uses,
        }  # fmt: skip
        taken: list[Settings] = []

        def facts() -> dict:
            taken[:] = [check_settings(parameters, given)]
            return taken[0].facts

        same_on_all(comm, "Gradients", facts)
        with self.context.call("Gradients"):
            self._take(taken[0], given)
            self._place(None)
            if taken[0].order is not None:
                self._arrange(taken[0].order)

    def _take(self, settings: Settings, given: dict) -> None:
        self.algorithm, self.bucket_bytes = given["algorithm"], given["bucket_bytes"]
        self._overlap, self._progress = given["overlap"], given["progress"]
        self._ranks_per_node = settings.ranks_per_node or faked_nodes(self.comm)
        self._shapes, self._xp, self._uses = settings.shapes, settings.xp, settings.uses
        self._names = list(self._shapes)
        number = self.context.store["gradients"] = self.context.store.get("gradients", 0) + 1
        self._label = f"gradients {number}"  # what else is theirs was compared
        self.views: dict = {}
        self.arena: Arena | None = None
        self.order: list[str] | None = None
        self.exposed_seconds, self.steps = 0.0, 0
        self.alone_seconds: float | None = None
        self._seen: list[str] = []
        self._learned = self._begun = self._closed = False
        self._awaited: dict[str, int] = {}  # name -> how many `ready` are to come in this step
        self._active: list = []
        self._next = self._given = 0  # the bucket that leaves next; extras of the newest step
        self._plans: list[AllreducePlan] = []
        self._background: Background | None = None
        self._values: tuple[float, ...] = ()

    # -- memory ------------------------------------------------------------------------

    def _place(self, order: Sequence[str] | None) -> None:
        """Allocate all tensors in `order`, and cut the buckets. Collective."""
        names = self._names if order is None else list(order)
        spec = with_extras({name: self._shapes[name] for name in names})
        if self.arena is not None:
            self.arena.close()
        if self._xp is np:
            self.arena = Arena(self.comm, spec, ranks_per_node=self._ranks_per_node)
            views, self.vectors = dict(self.arena), self.arena.vectors
        else:
            views, self.vectors = allocate(spec, self._xp)
            for k, vector in enumerate(self.vectors):
                label = f"{self._label} vector {k}"
                plan = make(self.context, vector, "sum", self.algorithm, label)
                self._plans.append(plan.owned())
        #: Half precision is scaled in single, as it is added, and rounded once.
        self._half = [vector.dtype != work_dtype(vector.dtype) for vector in self.vectors]
        self.extras = views.pop(EXTRAS)
        self.views.clear()
        self.views.update({name: views[name] for name in self._shapes})
        self.overlapping = (
            self._overlap and self.arena is not None and can_overlap(self.arena, self.algorithm)
        )
        self._cut(spec, names)

    def _cut(self, spec: dict, names: list[str]) -> None:
        """Make a bucket of every few neighbours, in the order in which they become ready."""
        limit = bucket_bytes(self.bucket_bytes, sum(vector.nbytes for vector in self.vectors))
        self._starts, self._bucket_of, self._least = [], {}, []
        self._spans: list = []
        if not self.overlapping:
            return
        assert self.arena is not None
        rank = {name: k for k, name in enumerate([*names, EXTRAS])}  # the extras come last
        found = []
        for k, vector in enumerate(self.vectors):
            mine = [name for name, (_, dtype) in spec.items() if dtype == vector.dtype]
            ends = np.cumsum([prod(spec[name][0]) for name in mine])
            for first, last in cut_buckets(
                [prod(spec[n][0]) * vector.itemsize for n in mine], limit
            ):
                start, stop = int(ends[first - 1]) if first else 0, int(ends[last - 1])
                members = mine[first:last]
                found.append((max(rank[n] for n in members), k, start, stop, members))
        for number, (_, k, start, stop, mine) in enumerate(sorted(found)):
            self._starts.append(bucket(self.arena, k, start, stop, self.algorithm))
            self._spans.append((k, start, stop))
            self._least.append(len(mine))
            self._bucket_of.update(dict.fromkeys(mine, number))

    def arrange(self, order: Sequence[str]) -> None:
        """Lay the gradients out in `order`, the one of backward. Collective; between two steps."""
        names: list[str] = []

        def facts() -> dict:
            names[:] = check_order(order, self._shapes)
            return order_facts(names)

        same_on_all(self.comm, "Gradients.arrange", facts)
        with self.context.call("Gradients.arrange"):
            self._arrange(names)

    def _arrange(self, order: list[str]) -> None:
        self.order = order
        if self.overlapping and order != self._names:
            self._place(order)
        if self.overlapping:
            self._measure()
            if self._progress == "thread" and self._background is None:
                self._background = Background()

    # -- one step ----------------------------------------------------------------------

    def begin(self, share: float) -> None:
        """Begin a step of which this rank has `share` of the samples. Collective the second time.

        Then the ranks agree on the order that was seen in the first step.
        """
        if self._begun and self._next:
            self.refuse("Gradients.begin", ProtocolError(
                "begin: a part of the step before is on its way; call reduce, which finishes it"
            ))  # fmt: skip
        with self.context.call("Gradients.begin"):
            share = arguments.checked_share(share, self._closed)
        if self._learned:
            with self.context.call("Gradients.begin"):
                self._learn()
            self._learned = False
        self._seen, self._active = [], []
        self._share, self._next = share, 0
        self._left = list(self._least)
        self._awaited = self._uses.copy()
        self._begun = True

    def _learn(self) -> None:
        """Take the order that rank 0 has seen: it may depend on threads. Collective."""
        context, place = self.context, {name: k for k, name in enumerate(self._names)}
        context.begin_agreed(Signature("Gradients.begin", "", "", extra=self._label), "order")
        seen = np.full(len(place), -1, np.int64)
        mine = dict.fromkeys(self._seen)
        seen[: len(mine)] = [place[name] for name in mine]
        context.wait(context.control.Ibcast(seen, 0).Test)
        if seen[0] >= 0:
            told = [self._names[k] for k in seen if k >= 0]
            self._arrange([*told, *(name for name in self._names if name not in set(told))])

    def ready(self, name: str) -> None:
        """Say that the gradient `name` is final in this step.

        A tensor with several `uses` is final when it was said so often.
        """
        awaited = self._awaited.get(name, 0) - 1 if isinstance(name, str) else -1
        if awaited < 0:
            self.refuse("Gradients.ready", wrong_ready(name, self._uses, self._begun))
        self._awaited[name] = awaited
        if awaited or not self.overlapping:
            return
        began = time.perf_counter()
        if self.order is None:
            self._seen.append(name)
        else:
            number = self._bucket_of[name]
            self._left[number] -= 1
            self._send(self._background)
            for handle in self._active:
                handle.test()
            self.exposed_seconds += time.perf_counter() - began

    def refuse(self, what: str, error: MpidistError) -> NoReturn:
        """Raise `error`, which all ranks hear; what has begun of the step never ends."""
        if self._next:
            self.context.break_off(error)
            raise error
        with self.context.call(what):
            raise error

    def _send(self, background: Background | None = None) -> None:
        """Begin all buckets that are complete, in order: the same one on all ranks."""
        try:
            while self._next < len(self._starts) and self._left[self._next] <= 0:
                k, start, stop = self._spans[self._next]
                begin = self._starts[self._next]
                if self._half[k]:
                    begin = partial(begin, self._share)
                else:
                    self.vectors[k][start:stop] *= self.vectors[k].dtype.type(self._share)
                if self._next == len(self._starts) - 1:
                    self._set_extras()
                if background is None:
                    self._active.append(begin())
                else:
                    background.push(begin)
                self._next += 1
        except BaseException as error:
            self.context.break_off(error)
            raise

    def reduce(self, *extras: float) -> None:
        """Finish the exchange: views and extras hold the sums over ranks of share times value.

        Collective; in place. `extras`: up to two numbers, as many on each rank, not scaled.
        """
        with self.context.call("Gradients.reduce"):
            if not self._begun:
                raise ProtocolError("reduce outside a step; call begin first")
            self._values = arguments.checked_extras(extras)
            began = time.perf_counter()
            if self.overlapping:
                self._left = [0] * len(self._starts)
                if self._background is not None:
                    self._active += self._background.take()
                self._send()
                for handle in self._active:
                    handle.wait()
                self._active = []
                self.exposed_seconds += time.perf_counter() - began
                self.steps += 1
                self._learned = self.order is None
            else:
                self._scale()
                plans = self._plans
                if self.arena is not None:
                    plans = arena_sum.plans_of(self.context, self.arena, "sum", self.algorithm)
                for plan, vector, half in zip(plans, self.vectors, self._half, strict=True):
                    plan(vector, self._share if half else None)
            self._begun, self._next, self._awaited = False, 0, {}

    def _scale(self) -> None:
        """Scale what is added in its own dtype, and put the extras in. See `_set_extras`."""
        for vector, half in zip(self.vectors, self._half, strict=True):
            if not half:
                vector *= vector.dtype.type(self._share)
        self._set_extras()

    def _set_extras(self) -> None:
        """Put the extras in, unscaled. Collective where they are more or fewer than before."""
        if len(self._values) != self._given:  # who is alone with that is found here
            self._given = len(self._values)
            signature = Signature("Gradients.reduce", "", "", extra=self._label)
            self.context.begin_agreed(signature, f"{self._given} extra numbers")
        self.extras[0], self.extras[1] = (*self._values, 0.0, 0.0)[:2]

    # -- what it cost ------------------------------------------------------------------

    def _measure(self, rounds: int = 3) -> None:
        """Time the exchange with nothing beside it: what there is to hide. Collective."""
        seconds = []
        for _ in range(rounds + 1):
            self._left, self._next, self._active = [0] * len(self._starts), 0, []
            self._share = 0.0
            self.context.wait(self.context.control.Ibarrier().Test)
            began = time.perf_counter()
            self._send()
            for handle in self._active:
                handle.wait()
            seconds.append(time.perf_counter() - began)
        slowest = np.array([np.median(seconds[1:])])
        self.context.wait(self.context.control.Iallreduce(MPI.IN_PLACE, slowest, MPI.MAX).Test)
        self.alone_seconds = float(slowest[0])
        self._next, self._active = 0, []

    def hidden(self) -> float | None:
        """Share of the exchange that ran behind backward, 0 to 1; None where nothing is."""
        if not self.alone_seconds or not self.steps:
            return None
        exposed = self.exposed_seconds / self.steps / self.alone_seconds
        return round(min(1.0, max(0.0, 1 - exposed)), 4)

    def abandon(self) -> None:
        """End the thread that makes progress.

        The memory stays: the other ranks may be anywhere, and messages to it under way.
        """
        if self._background is not None:
            self._background.close()
            self._background = None

    def close(self) -> None:
        """Give the memory back. Idempotent.

        Sends nothing; all ranks must call it between the same two operations.
        """
        if self._background is not None:
            for handle in self._background.take():  # of a step that nobody finished
                running.append(handle)
            self._background.close()
            self._background = None
        for plan in self._plans:
            plan.release()
        self._plans = []
        self._begun, self._awaited, self._closed = False, {}, True
        if self.arena is not None:
            self.arena.close()
            self.arena = None
