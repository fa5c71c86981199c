"""`Gradients`: averaged over all ranks, in buckets, while backward still runs.

They lie in an `Arena` in the order in which backward finishes them: learned in the first step, then
frozen (and stored with a checkpoint, for the order of additions depends on it). Where nodes send,
a bucket leaves when its last gradient is ready, and every further `ready` pushes on what is under
way. Inside one node nothing travels, so everything is added at the end, where it lies.

PyTorch's DDP: Li et al., "PyTorch Distributed", VLDB 13(12), 2020.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from math import prod

import numpy as np
from mpi4py import MPI

from ..arena import Arena
from ..arrays import array_module
from ..collectives.algorithms import MEASURED
from ..collectives.allreduce import allreduce
from ..collectives.buckets import bucket, can_overlap
from ..collectives.shared import faked_nodes
from ..errors import ConfigError
from .background import Background
from .buckets import bucket_bytes, cut
from .vectors import EXTRAS, allocate, with_extras


class Gradients:
    """One gradient per parameter, in memory that is exchanged with the other ranks.

    Collective over `comm`, as are `reduce` and `close`; `begin` and `ready` are local.

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
        ``background.py`` for what it forbids).
    order : sequence of str, optional
        Names in the order of backward, where it is known from an earlier run.
    ranks_per_node : int, optional
        Fake nodes, as in `Topology`.

    Attributes
    ----------
    views : dict of name -> array
        What a model writes its gradients into. The first `reduce` may move them: do not keep the
        arrays, keep the dict.
    extras : array
        Two further numbers of the first vector, summed with it in the same message.
    overlapping : bool
        Whether buckets leave before `reduce`.
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
    ):
        self.comm, self.algorithm, self.bucket_bytes = comm, algorithm, bucket_bytes
        self._overlap = overlap
        self._ranks_per_node = ranks_per_node or faked_nodes(comm)
        self._shapes = {name: (array.shape, array.dtype) for name, array in parameters.items()}
        self._xp = array_module(next(iter(parameters.values())))
        self.views: dict = {}
        self.arena: Arena | None = None
        self.order: list[str] | None = None
        self.exposed_seconds, self.steps = 0.0, 0
        self.alone_seconds: float | None = None
        self._seen: list[str] = []
        self._learned = False
        self._active: list = []
        if progress not in ("hooks", "thread"):
            raise ConfigError(f"progress={progress!r}: expected 'hooks' or 'thread'")
        self._progress = progress
        self._background: Background | None = None
        self._values: tuple[float, ...] = ()
        self._place(None)
        if order is not None:
            self.arrange(order)

    # -- memory ------------------------------------------------------------------------

    def _place(self, order: Sequence[str] | None) -> None:
        """Allocate all tensors in `order`, and cut the buckets. Collective."""
        names = list(self._shapes) if order is None else list(order)
        spec = with_extras({name: self._shapes[name] for name in names})
        if self.arena is not None:
            self.arena.close()
        if self._xp is np:
            self.arena = Arena(self.comm, spec, ranks_per_node=self._ranks_per_node)
            views, self.vectors = dict(self.arena), self.arena.vectors
        else:
            views, self.vectors = allocate(spec, self._xp)
        self.extras = views.pop(EXTRAS)
        self.views.clear()
        self.views.update({name: views[name] for name in self._shapes})
        self.overlapping = (
            self._overlap and self.arena is not None and can_overlap(self.arena, self.algorithm)
        )
        self._cut(spec, names)

    def _cut(self, spec: dict, names: list[str]) -> None:
        """Make a bucket of every few neighbours, in the order in which they become ready."""
        total = sum(vector.nbytes for vector in self.vectors)
        limit = bucket_bytes(self.bucket_bytes, total)
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
            for first, last in cut([prod(spec[n][0]) * vector.itemsize for n in mine], limit):
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
        if sorted(order) != sorted(self._shapes):
            raise ConfigError(f"the order of gradients names {len(order)} tensors, not the model's")
        self.order = list(order)
        if self.overlapping and self.order != list(self._shapes):
            self._place(self.order)
        if self.overlapping:
            self._measure()
            if self._progress == "thread" and self._background is None:
                self._background = Background()

    # -- one step ----------------------------------------------------------------------

    def begin(self, share: float) -> None:
        """Begin a step of which this rank has `share` of the samples. Collective the second time.

        Then the ranks agree on the order that was seen in the first step.
        """
        if self._learned:
            self._learned = False
            # Rank 0's for all: an order may depend on threads.
            seen = self.comm.bcast(list(dict.fromkeys(self._seen)), root=0)
            if seen:
                self.arrange([*seen, *(name for name in self._shapes if name not in set(seen))])
        self._seen, self._active = [], []
        self._share, self._next = share, 0
        self._left = list(self._least)

    def ready(self, name: str) -> None:
        """Say that the gradient `name` is final in this step. Local."""
        if not self.overlapping:
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

    def _send(self, background: Background | None = None) -> None:
        """Begin all buckets that are complete, in order: the same one on all ranks."""
        while self._next < len(self._starts) and self._left[self._next] <= 0:
            k, start, stop = self._spans[self._next]
            self.vectors[k][start:stop] *= self.vectors[k].dtype.type(self._share)
            if self._next == len(self._starts) - 1:
                self._set_extras()
            begin = self._starts[self._next]
            if background is None:
                self._active.append(begin())
            else:
                background.push(begin)
            self._next += 1

    def reduce(self, *extras: float) -> None:
        """Finish the exchange: views and extras hold the sums over ranks of share times value.

        `extras`, up to two numbers, are added as they are. Collective; in place.
        """
        began = time.perf_counter()
        self._values = extras
        if not self.overlapping:
            for vector in self.vectors:
                vector *= vector.dtype.type(self._share)
            self._set_extras()
            self._whole()
            return
        self._left = [0] * len(self._starts)
        if self._background is not None:
            self._active += self._background.take()
        self._send()
        for handle in self._active:
            handle.wait()
        self.exposed_seconds += time.perf_counter() - began
        self.steps += 1
        self._learned = self.order is None

    def _set_extras(self) -> None:
        """Put the extras in after their vector was scaled: they are added as they are."""
        self.extras[...] = 0
        for k, value in enumerate(self._values):
            self.extras[k] = value

    def _whole(self) -> None:
        if self.arena is not None:
            allreduce(self.comm, self.arena, algorithm=self.algorithm)
            return
        for vector in self.vectors:
            allreduce(self.comm, vector, algorithm=self.algorithm)

    # -- what it cost ------------------------------------------------------------------

    def _measure(self, rounds: int = 3) -> None:
        """Time the exchange with nothing beside it: what there is to hide. Collective."""
        seconds = []
        for _ in range(rounds + 1):
            self._left, self._next, self._active = [0] * len(self._starts), 0, []
            self._share = 0.0
            self.comm.Barrier()
            began = time.perf_counter()
            self._send()
            for handle in self._active:
                handle.wait()
            seconds.append(time.perf_counter() - began)
        self.alone_seconds = self.comm.allreduce(float(np.median(seconds[1:])), MPI.MAX)

    def hidden(self) -> float | None:
        """Share of the exchange that ran behind backward, 0 to 1; None where nothing is. Local."""
        if not self.alone_seconds or not self.steps:
            return None
        exposed = self.exposed_seconds / self.steps / self.alone_seconds
        return round(min(1.0, max(0.0, 1 - exposed)), 4)

    def close(self) -> None:
        """Give the memory back. Collective; idempotent."""
        if self._background is not None:
            self._background.close()
            self._background = None
        if self.arena is not None:
            self.arena.close()
            self.arena = None
