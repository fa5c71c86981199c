"""A worker's cache of rows: if a cached row is new enough, the worker asks no server for the row.

    SSP(2), a worker at clock 7        row 3: has all updates before clock 6    used
                                       row 9: has all updates before clock 4    asked for again

A clock is a step. Each answer of a server says how far the slowest worker is; if it is at clock c,
the values in the answer have all updates from the clocks before c. Let `bound` be the number of
steps that a worker may be ahead of the slowest worker. At clock t the worker may use the values as
long as ``c >= t - bound``. A new request would guarantee no more: its answer, too, may lack updates
from the clock ``t - bound`` on.

Ho et al., "More effective distributed ML via a stale synchronous parallel parameter server", NIPS
2013; Wei et al., "Managed communication and consistency for fast data-parallel iterative
analytics", SoCC 2015.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import numpy as np

from ...arrays import copy_into
from ...registry import has_argument
from ..layout.dealt_rows import dealt_places
from ..layout.placement import ServerLayout, Tensor
from ..protocol import CLOCK, PUSH, Header
from .cache_policy import RowCache, row_cache
from .key_slots import KeyRows


class CachedTable:
    """The rows of one table that a worker has fetched and keeps for later pulls."""

    def __init__(self, tensor: Tensor, most: int):
        self.tensor, self.most = tensor, most
        row = (tensor.width,), tensor.dtype
        # "has": the row has all updates of all workers before this clock. "came": the worker's
        # clock when it fetched the row. "used": the number of the newest call in which a pull has
        # named the row.
        self.rows = KeyRows(
            values=row, has=((), np.int64), came=((), np.int64), used=((), np.int64)
        )

    def look_up(
        self, keys: np.ndarray, clock: int, oldest: int, earliest: int, now: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Find which wanted rows the cache has, and which of them are new enough for a pull.

        `clock` is the worker's present step. A row that it has fetched in this step is new enough.
        An older row must have all updates before the step `oldest`, and the worker must have
        fetched it in the step `earliest` or later. `now` is the number of this call. Returns the
        place of each row in the cache (-1 if it is not there), and a boolean array that says which
        rows are new enough.
        """
        places = self.rows.find(keys)
        columns = self.rows.columns
        good = places >= 0
        here = places[good]
        columns["used"][here] = now
        came = columns["came"][here]
        good[good] = (came == clock) | ((columns["has"][here] >= oldest) & (came >= earliest))
        return places, good

    def keep(self, keys: np.ndarray, values: np.ndarray, has: int, came: int, now: int) -> None:
        """Store rows that were fetched; if there are too many, drop those used longest ago."""
        if len(keys) > self.most:
            keys, values = keys[: self.most], values[: self.most]
        places = self.rows.find(keys)
        absent = places < 0
        if (more := len(self.rows) + int(absent.sum()) - self.most) > 0:
            self._forget(max(more, self.most // 8), places[~absent])
        places[absent] = self.rows.add(keys[absent])
        columns = self.rows.columns
        columns["values"][places] = values
        for name, value in (("has", has), ("came", came), ("used", now)):
            columns[name][places] = value

    def _forget(self, count: int, but: np.ndarray) -> None:
        candidates = self.rows.live.copy()
        candidates[but] = False
        places = np.flatnonzero(candidates)
        if count < len(places):
            used = self.rows.columns["used"][places]
            places = places[np.argpartition(used, count)[:count]]
        self.rows.remove(places)

    def wrote(
        self, keys: np.ndarray, gradient: np.ndarray, update: OwnUpdate | None, weight: float
    ):
        """Apply this worker's own gradients to the cached rows of `keys`.

        If the worker cannot compute the update itself, these rows are dropped.
        """
        places = self.rows.find(keys)
        here = places >= 0
        places = places[here]
        if not places.size:
            return
        # The worker cannot compute the update itself.
        if update is None or (self.tensor.open is not None and self.tensor.open.min_count > 1):
            self.rows.remove(places)
        elif weight:
            values = self.rows.columns["values"][places]
            update(values, gradient.reshape(len(keys), -1)[here], weight)
            self.rows.columns["values"][places] = values


class OwnUpdate:
    """Applies a worker's own gradients to its cached rows, as the servers apply them."""

    # Only for optimizers that add a constant multiple of the gradient to the parameters.
    def __init__(self, optimizer):
        self._optimizer = optimizer

    def __call__(self, values: np.ndarray, gradient: np.ndarray, weight: float) -> None:
        """Update `values`, which are rows of a table, in place by their `gradient`."""
        parameters = {"x": values}
        state = self._optimizer.init(parameters)
        self._optimizer.update({"x": gradient}, state, parameters, weight=weight)
        values[...] = parameters["x"]


def own_update(optimizer) -> OwnUpdate | None:
    """Return the function that applies a worker's own gradients to its cached rows.

    Returns None if the worker cannot compute the update from the gradients alone: the optimizer
    must have a constant learning rate, no state for each element, and no decay.
    """
    settings = getattr(optimizer, "settings", {})
    rate = settings.get("lr") if isinstance(settings, Mapping) else None
    if getattr(optimizer, "rows", "") != "exact" or not isinstance(rate, float | int):
        return None
    state = optimizer.init({"x": np.zeros(1)})
    plain = not any(isinstance(value, Mapping) for value in state.values())
    return OwnUpdate(optimizer) if plain and has_argument(optimizer.update, "weight") else None


class CachedRows:
    """The cached rows of all tables of a model on one worker."""

    def __init__(
        self, policy: RowCache, layout: ServerLayout, workers: int, asked: Any, modes: Any
    ):
        self._policy, self._layout, self._workers = policy, layout, workers
        self._batch, self._modes, self._mode = asked.global_batch, modes, asked.consistency
        self._update: OwnUpdate | None = own_update(asked.optimizer)
        self._next: tuple[int, OwnUpdate | None] = (sys.maxsize, None)
        # Distinct rows from the cache and from servers, and pulls that asked no server.
        self.hits = self.misses = self.quiet = self._now = 0
        self.clear()

    def use_layout(self, layout: ServerLayout) -> None:
        """Use another division of the tables between the servers; drop all cached rows."""
        # Rows of a table that are dealt to the servers may have other numbers in the new layout.
        self._layout = layout
        self.clear()

    def change_optimizer(self, optimizer, clock: int) -> None:
        """Record that the optimizer changes in the step `clock`."""
        # Servers use the new optimizer when all workers have requested it. Until an answer shows
        # that all have finished `clock`, this worker drops cached rows that it pushes.
        self._update, self._next = None, (clock, own_update(optimizer))

    def clear(self) -> None:
        """Drop all cached rows, for example when a loaded checkpoint changes the servers' rows."""
        self._tables = {
            tensor.name: CachedTable(tensor, self._policy.rows)
            for tensor in self._layout.tensors
            if tensor.shape and tensor.by_rows
        }

    def stats(self) -> dict[str, int]:
        """Return the counts "hits", "misses", "quiet" and "rows" that `Client.stats` explains."""
        rows = sum(len(table.rows) for table in self._tables.values())
        return {"hits": self.hits, "misses": self.misses, "quiet": self.quiet, "rows": rows}

    def wrote(self, pushes: Mapping, samples: int | None, clock: int) -> None:
        """Apply this worker's gradients of the step `clock` to its cached rows.

        If the worker cannot compute the update itself, it removes the pushed rows from its cache.
        """
        # In modes that hold pushes until the end of the step, a row is used only in the step in
        # which it was fetched, before its push is applied.
        if self._modes.at(clock).holds:
            return
        weight = 0.0 if samples == 0 else 1.0 / self._workers
        if self._batch is not None:
            weight = (samples or 0) / self._batch
        for name, (rows, gradient) in pushes.items():
            if (table := self._tables.get(name)) is not None:
                if rows is None:
                    table.rows.clear()
                else:
                    table.wrote(rows, gradient, self._update, weight)

    def ask(
        self, requests: Any, flags: int, wanted: dict, results: dict, pushes, samples, known
    ) -> tuple[list[Header], float]:
        """Send gradients, and get parameters into `results`; ask only for what is not cached.

        The arguments are those of `ClientRequests.ask`. Returns the headers of the answers, and the
        seconds waited; there are no headers if no server was asked.
        """
        if flags & PUSH:
            self.wrote(pushes, samples, requests.clock)
        clock, self._now = requests.clock + bool(flags & CLOCK), self._now + 1
        if (mode := self._modes.at(clock)) != self._mode:
            self._mode = mode
            # In a mode that held pushes, this worker's own pushes were not added to cached rows.
            self.clear()
        missing, arrays, looked = {}, {}, []
        for name, rows in wanted.items():
            if rows is None or name not in self._tables:
                missing[name], arrays[name] = rows, results[name]
                continue
            looked.append(one := self._look_up(self._tables[name], rows, clock))
            if one.absent.size:
                missing[name], arrays[name] = one.absent, one.fetched
        headers, waited = [], 0.0
        if missing or not looked or not requests.may_be_quiet(flags):
            headers, waited = requests.ask(flags, missing, arrays, pushes, samples, known)
            # The slowest worker has reached at least this clock, according to all answers.
            has = min(header.clock - header.gap for header in headers) if headers else 0
            for one in looked:
                one.take(has, clock, self._now)
            if has > self._next[0]:
                self._update, self._next = self._next[1], (sys.maxsize, None)
        else:
            requests.tick_quietly(flags, pushes, samples)
            self.quiet += 1
        for one in looked:
            copy_into(results[one.table.tensor.name], one.result())
        return headers, waited

    def _look_up(self, table: CachedTable, rows: np.ndarray, clock: int) -> LookUp:
        # Under DSSP a worker may be more than `low` steps ahead, but cached rows keep this bound.
        bound, age = getattr(self._mode, "low", self._mode.bound), self._policy.max_age
        if self._mode.holds:  # this worker's own pushes are not added to cached rows
            bound = 0
        oldest = -1 if bound is None else clock - bound
        earliest = -1 if age is None else clock - age
        found = LookUp(table, rows, clock, oldest, earliest, self._now)
        self.misses += found.absent.size
        self.hits += len(found.good) - found.absent.size
        return found


class LookUp:
    """The rows of one table that a worker asks for: which are cached, and which are not."""

    def __init__(self, table: CachedTable, rows: np.ndarray, *clocks: int):
        self.table, tensor = table, table.tensor
        distinct, self._where = np.unique(rows, return_inverse=True)
        self._keys = distinct
        if tensor.dealt:  # pushes have positions in dealt order, so the cache uses them as keys
            self._keys = dealt_places(distinct, tensor.shape[0], tensor.dealt)
        places, self.good = table.look_up(self._keys, *clocks)
        self.absent = distinct[~self.good]
        self.fetched = np.empty((len(self.absent), *tensor.shape[1:]), tensor.dtype)
        self._values = np.empty((len(distinct), tensor.width), tensor.dtype)
        self._values[self.good] = table.rows.columns["values"][places[self.good]]

    def take(self, has: int, came: int, now: int) -> None:
        """Store the fetched rows in the cache."""
        values = self.fetched.reshape(len(self.absent), self.table.tensor.width)
        self._values[~self.good] = values
        self.table.keep(self._keys[~self.good], values, has, came, now)

    def result(self) -> np.ndarray:
        """Return all rows of the pull, cached and fetched ones, in the order of the pull."""
        return self._values[self._where].reshape(len(self._where), *self.table.tensor.shape[1:])


def cached_rows(asked: Any, layout: ServerLayout, workers: int, modes: Any) -> CachedRows | None:
    """Return the cache of a worker for a model; None if the model has no cache."""
    policy = row_cache(asked.name, asked.cache_rows, asked.consistency, asked.stale)
    return None if policy is None else CachedRows(policy, layout, workers, asked, modes)
