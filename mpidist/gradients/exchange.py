"""`Gradients` averages a model's gradients over all ranks, in buckets, during the backward pass.

The gradients are stored in memory that the ranks of a node share, in the order in which they became
ready in the first step. A checkpoint stores this order, because the order of the additions depends
on it. A bucket is a part of the gradients that is sent in one piece, as soon as its last gradient
is ready. If all ranks are on one node, all gradients are added in shared memory at the end of the
step. Reference: Li et al., "PyTorch Distributed" (PyTorch's DDP), VLDB 13(12), 2020.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import partial
from math import prod
from typing import NoReturn

import numpy as np
from mpi4py import MPI

from ..arrays import keep_freed_memory, medians, work_dtype
from ..collectives.engines import arena_sum
from ..collectives.engines.fused_pieces import bucket, can_overlap
from ..collectives.engines.node_barrier import faked_nodes
from ..collectives.plan import AllreducePlan, make_plan
from ..collectives.schedules.algorithms import MEASURED
from ..errors import MpidistError, ProtocolError
from ..partition import bounds_of
from ..runtime.agreement.mismatch import Signature
from ..runtime.agreement.run_on_all import same_on_all
from ..runtime.context import of, running
from ..runtime.node_memory.arena import Arena
from . import exchange_settings as arguments
from .exchange_settings import Settings, check_order, check_settings, order_facts, wrong_ready
from .flat_views import EXTRAS, allocate, with_extras
from .gradient_buckets import bucket_bytes, cut_buckets
from .progress_thread import Background


class Gradients:
    """The gradients of all parameters, averaged over the ranks in each step.

    Collective over `comm`, as are the methods `reduce` and `close`; `begin` is collective only in
    the second step. In each step, call `begin`, then `ready` for each gradient as soon as the
    gradient is final, and then `reduce`.

    Parameters
    ----------
    comm : mpi4py.MPI.Comm
    parameters : mapping of name -> array
        Host or device arrays; the same names, shapes and dtypes on every rank.
    algorithm : str
        The algorithm of `md.allreduce` that adds the gradients, such as "auto" (the fastest).
    bucket_bytes : int or "auto"
        The size in bytes of a bucket (a group of gradients that are sent together).
    overlap : bool
        Whether to exchange gradients between nodes while the backward pass still runs.
    progress : "hooks" or "thread"
        What calls MPI while gradients are being sent: every call of `ready`, or a thread. While the
        thread runs, the program must call no other function of mpidist that communicates.
    order : sequence of str, optional
        Names in the order of backward, if this order is known from an earlier run.
    ranks_per_node : int, optional
        For tests: treat every group of this many consecutive ranks as a node.
    uses : mapping of name -> int, optional
        For a tensor that the model uses several times (tied weights): how many times `ready` is
        called for it in a step. By default once.

    Attributes
    ----------
    views : dict of name -> array
        The arrays into which a model writes its gradients. The second call of `begin` may put other
        arrays into the dict.
    extras : array
        Two extra numbers that are summed over the ranks together with the gradients.
    overlapping : bool
        Whether buckets may be sent before `reduce` is called.

    Raises
    ------
    ConfigError
        On all ranks: a parameter is not an array of real or complex numbers, or a setting is
        invalid.
    MismatchError
        On all ranks: the ranks differ in settings, in the names, shapes, dtypes or order of the
        parameters, or in the order of their calls.
    ProtocolError
        `ready` or `reduce` was called before `begin`, or `ready` was called more often than `uses`
        allows, or `begin` was called although buckets of the step have been sent.
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
        keep_freed_memory()
        self.comm, self.context = comm, of(comm)
        asked = Settings(algorithm, bucket_bytes, overlap, progress, order, ranks_per_node, uses)

        def facts() -> dict:
            self._settings, self._shapes, self._xp, facts = check_settings(parameters, asked)
            return facts

        same_on_all(comm, "Gradients", facts)
        self._names = list(self._shapes)
        number = self.context.store["gradients"] = self.context.store.get("gradients", 0) + 1
        self._label = f"gradients {number}"  # the number is equal on all ranks
        self.views: dict = {}
        self.arena: Arena | None = None
        self.order: list[str] | None = None
        self.exposed_seconds, self.steps = 0.0, 0
        self.alone_seconds: float | None = None
        self._seen: list[str] = []
        self._learned = self._begun = self._closed = False
        self._awaited: dict[str, int] = {}  # name -> remaining calls of `ready` in this step
        self._active: list = []
        self._next = self._given = 0  # the next bucket to send; the count of extras
        self._plans: list[AllreducePlan] = []
        self._background: Background | None = None
        self._values: tuple[float, ...] = ()
        with self.context.call("Gradients"):
            self._place(self._names)
            if self._settings.order is not None:
                self._arrange(list(self._settings.order))

    # -- memory ------------------------------------------------------------------------

    def _place(self, names: list[str]) -> None:
        """Allocate all gradients in the order of `names`, and cut them into buckets. Collective."""
        settings, self.overlapping = self._settings, False
        spec = with_extras({name: self._shapes[name] for name in names})
        if self.arena is not None:
            self.arena.close()
        if self._xp is np:
            nodes = settings.ranks_per_node or faked_nodes(self.comm)
            self.arena = Arena(self.comm, spec, ranks_per_node=nodes)
            views, self.vectors = dict(self.arena), self.arena.vectors
            self.overlapping = settings.overlap and can_overlap(self.arena, settings.algorithm)
        else:
            views, self.vectors = allocate(spec, self._xp)
            for k, vector in enumerate(self.vectors):
                label = f"{self._label} vector {k}"
                plan = make_plan(self.context, vector, "sum", settings.algorithm, label)
                self._plans.append(plan.owned())
        #: Whether each vector has half precision. Values of half precision are scaled and added in
        #: single precision, and rounded once at the end.
        self._half = [vector.dtype != work_dtype(vector.dtype) for vector in self.vectors]
        self.extras = views.pop(EXTRAS)
        self.views.clear()
        self.views.update({name: views[name] for name in self._names})
        self._cut(spec, names)

    def _cut(self, spec: dict, names: list[str]) -> None:
        """Cut the gradients into buckets, numbered in the order in which backward finishes them."""
        total = sum(vector.nbytes for vector in self.vectors)
        limit = bucket_bytes(self._settings.bucket_bytes, total)
        self._starts, self._spans, self._bucket_of, self._least = [], [], {}, []
        if self.arena is None or not self.overlapping:
            return
        rank = {name: k for k, name in enumerate([*names, EXTRAS])}  # the extras come last
        found = []
        for k, vector in enumerate(self.vectors):
            mine = [name for name, (_, dtype) in spec.items() if dtype == vector.dtype]
            sizes = [prod(spec[name][0]) for name in mine]
            bounds = bounds_of(sizes)
            for first, last in cut_buckets([size * vector.itemsize for size in sizes], limit):
                newest = max(rank[name] for name in mine[first:last])
                found.append((newest, k, bounds[first], bounds[last], mine[first:last]))
        for number, (_, k, start, stop, mine) in enumerate(sorted(found)):
            self._starts.append(bucket(self.arena, k, start, stop, self._settings.algorithm))
            self._spans.append((k, start, stop))
            self._least.append(len(mine))
            self._bucket_of.update(dict.fromkeys(mine, number))

    def arrange(self, order: Sequence[str]) -> None:
        """Reorder the gradients in memory as `order` says. Collective; call it between steps."""

        def facts() -> dict:
            return order_facts(check_order(order, self._shapes))

        names = list(same_on_all(self.comm, "Gradients.arrange", facts).values())
        with self.context.call("Gradients.arrange"):
            self._arrange(names)

    def _arrange(self, order: list[str]) -> None:
        self.order = order
        if self.overlapping and order != self._names:
            self._place(order)
        if self.overlapping:
            self._measure()
            if self._settings.progress == "thread" and self._background is None:
                self._background = Background()

    # -- one step ----------------------------------------------------------------------

    def begin(self, share: float) -> None:
        """Begin a training step in which this rank has the fraction `share` of all samples.

        Collective only in the second step, in which the ranks agree on an order of the gradients. A
        program may call `begin` again in a step as long as no gradients of this step have been
        sent.
        """
        if self._begun and self._next:
            self.refuse("Gradients.begin", ProtocolError(
                "begin: buckets of the previous step are not summed yet; call reduce first"
            ))  # fmt: skip
        with self.context.call("Gradients.begin"):
            share = arguments.checked_share(share, self._closed)
            if self._learned:
                self._learn()
                self._learned = False
        self._seen, self._active, self._next = [], [], 0
        self._left, self._awaited = self._least.copy(), self._settings.uses.copy()
        self._share, self._begun = share, True

    def _learn(self) -> None:
        """Order the gradients as they became ready in the first step of rank 0. Collective."""
        context, place = self.context, {name: k for k, name in enumerate(self._names)}
        context.begin_agreed(Signature("Gradients.begin", "", "", extra=self._label), "order")
        seen = np.full(len(place), -1, np.int64)
        mine = dict.fromkeys(self._seen)
        seen[: len(mine)] = [place[name] for name in mine]
        context.wait(context.control.Ibcast(seen, 0).Test)
        if seen[0] >= 0:
            first = [self._names[k] for k in seen if k >= 0]
            self._arrange(list(dict.fromkeys([*first, *self._names])))

    def ready(self, name: str) -> None:
        """Declare that the gradient `name` is final in this step.

        For a tensor that the model uses several times (argument `uses`), call `ready` once per use.
        """
        awaited = self._awaited.get(name, 0) - 1 if isinstance(name, str) else -1
        if awaited < 0:
            self.refuse("Gradients.ready", wrong_ready(name, self._settings.uses, self._begun))
        self._awaited[name] = awaited
        if awaited or not self.overlapping:
            return
        began = time.perf_counter()
        if self.order is None:
            self._seen.append(name)
        else:
            self._left[self._bucket_of[name]] -= 1
            self._send(self._background)
            for handle in self._active:
                handle.test()
            self.exposed_seconds += time.perf_counter() - began

    def refuse(self, what: str, error: MpidistError) -> NoReturn:
        """Raise `error`, with which the call `what` fails, and send it to all ranks."""
        if self._next:
            self.context.break_off(error)
            raise error
        with self.context.call(what):
            raise error

    def _send(self, background: Background | None = None) -> None:
        """Begin to send the complete buckets, in an order that is the same on all ranks."""
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
        """Finish the exchange; the arrays in `views` then have the averaged gradients. Collective.

        Each rank's gradients are multiplied by its `share` (see `begin`), and then added over all
        ranks. `extras` are up to two numbers; every rank passes equally many. They are not
        multiplied by `share`, and their sums over the ranks are then in `Gradients.extras`.
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
                for vector, half in zip(self.vectors, self._half, strict=True):
                    if not half:
                        vector *= vector.dtype.type(self._share)
                self._set_extras()
                plans = self._plans
                if self.arena is not None:
                    algorithm = self._settings.algorithm
                    plans = arena_sum.plans_of(self.context, self.arena, "sum", algorithm)
                for plan, vector, half in zip(plans, self.vectors, self._half, strict=True):
                    plan(vector, self._share if half else None)
            self._begun, self._next, self._awaited = False, 0, {}

    def _set_extras(self) -> None:
        """Write the extra numbers that `reduce` sums. Collective if the count of extras changed."""
        if len(self._values) != self._given:  # raises if the counts differ between ranks
            self._given = len(self._values)
            signature = Signature("Gradients.reduce", "", "", extra=self._label)
            self.context.begin_agreed(signature, f"{self._given} extra numbers")
        self.extras[0], self.extras[1] = (*self._values, 0.0, 0.0)[:2]

    # -- what it cost ------------------------------------------------------------------

    def _measure(self, rounds: int = 3) -> None:
        """Measure how long an exchange of all buckets takes outside a backward pass. Collective."""
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
        slowest = np.array([medians(seconds[1:])])
        self.context.wait(self.context.control.Iallreduce(MPI.IN_PLACE, slowest, MPI.MAX).Test)
        self.alone_seconds = float(slowest[0])
        self._next, self._active = 0, []

    def hidden(self) -> float | None:
        """Return the fraction of the exchange time that overlapped with the backward pass, or None.

        The result is None on one node, and before the first complete step.
        """
        if not self.alone_seconds or not self.steps:
            return None
        exposed = self.exposed_seconds / self.steps / self.alone_seconds
        return round(min(1.0, max(0.0, 1 - exposed)), 4)

    def abandon(self) -> None:
        """End the thread that makes progress for messages, but keep the gradients' memory."""
        if self._background is not None:
            self._background.close()
            self._background = None

    def close(self) -> None:
        """Free the memory; a second call does nothing.

        All ranks must call `close` between the same two collective operations.
        """
        if self._background is not None:
            for handle in self._background.take():  # of a step without `reduce`
                running.append(handle)
        self.abandon()
        for plan in self._plans:
            plan.release()
        self._plans = []
        self._begun, self._awaited, self._closed = False, {}, True
        if self.arena is not None:
            self.arena.close()
            self.arena = None
