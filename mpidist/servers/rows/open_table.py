"""One server's rows of a table that gets rows when keys are pushed, and can drop unused rows.

    a push of keys -> counts of keys without a row -> rows, once a key has `min_count` pushes
    a pull of keys -> the values of their rows, or the initial values of the keys

Each key with a row has a place, the index of its row in the table's parameter array and in the
arrays of the optimizer's state. The arrays have room for more rows than exist, and grow if needed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ...errors import ConfigError
from ...launch.free_memory import available_memory
from ..layout.placement import Tensor
from .key_slots import KeyRows, lengthened
from .key_values import initial_rows, owners

_FEW = 1 << 20  # if a table grows by fewer bytes, the free memory is not checked


class OpenTable:
    """One server's rows of an open table: a table that gets rows when new keys are pushed."""

    def __init__(self, shard: Any, kind: Tensor, init: tuple[str, float], seed: int):
        self._shard, self.kind, self._init, self._seed = shard, kind, init, seed
        self.name, self.width = kind.name, kind.width
        # The keys that have a row, with the clock of their newest push.
        self.rows = KeyRows(touched=((), np.int64))
        # With `min_count` above 1: the pushed keys without a row, and how often they were pushed.
        self.waiting = KeyRows(touched=((), np.int64), count=((), np.int32))
        assert kind.open is not None  # the caller makes only open tables
        self._policy, self._least = kind.open, kind.open.min_count
        self.most: int | None = None
        if kind.open.max_rows is not None:
            self.most = most_rows(kind.open.max_rows, shard.layout.shares[shard.server])

    # -- pulls and pushes --------------------------------------------------------------------

    def _table(self, array: np.ndarray) -> np.ndarray:
        return array.reshape(-1, self.width)

    def _initial(self, keys: np.ndarray) -> np.ndarray:
        dtype = self.kind.dtype
        return initial_rows(keys, self.width, dtype, self.name, self._init, self._seed)

    def read(self, keys: np.ndarray, out: np.ndarray) -> None:
        """Write the values of `keys` to `out`; keys without a row have their initial values."""
        places = self.rows.find(keys)
        known = places >= 0
        values = self._table(self._shard.parameters[self.name])
        if known.all():
            np.take(values, places, axis=0, out=out)
            return
        out[known] = values[places[known]]
        out[~known] = self._initial(keys[~known])

    def pushed(
        self, keys: np.ndarray, gradient: np.ndarray, all_keys: Sequence[np.ndarray], clock: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Make rows for pushed keys that have none; return (places of rows, gradient of each row).

        Keys that were pushed fewer than `min_count` times get no row, and are left out.
        """
        places = self.rows.find(keys)
        absent = places < 0
        if absent.any():
            new = keys[absent]
            if self._least > 1:
                new = new[self._counted(new, all_keys, clock)]
            self._make(new, clock)
            places[absent] = self.rows.find(keys[absent])
            known = places >= 0
            places, gradient = places[known], gradient[known]
        self.rows.columns["touched"][places] = clock
        return places, gradient

    def _counted(self, keys: np.ndarray, all_keys: Sequence[np.ndarray], clock: int) -> np.ndarray:
        """Count the pushes of keys without a row; return which of these keys get a row now."""
        pushed = np.sort(np.concatenate(all_keys))
        times = np.searchsorted(pushed, keys, "right") - np.searchsorted(pushed, keys, "left")
        waiting = self.waiting
        places = waiting.find(keys)
        absent = places < 0
        places[absent] = waiting.add(keys[absent])
        waiting.columns["count"][places[absent]] = 0
        waiting.columns["count"][places] += times.astype(np.int32)
        waiting.columns["touched"][places] = clock
        enough = waiting.columns["count"][places] >= self._least
        waiting.remove(places[enough])
        if self.most is not None and len(waiting) > self.most:
            self._forget_oldest()
        return enough

    def _forget_oldest(self) -> None:
        """Of the keys without a row, forget the half that was pushed longest ago."""
        places = np.flatnonzero(self.waiting.live)
        touched = self.waiting.columns["touched"][places]
        self.waiting.remove(places[np.argsort(touched, kind="stable")[: len(places) // 2]])

    def _make(self, keys: np.ndarray, clock: int) -> None:
        """Make rows for distinct keys, with their initial values and the optimizer's first state.

        Raises ConfigError if there are more than `max_rows` rows, or more than fit into the memory.
        """
        if not keys.size:
            return
        if self.most is not None and len(self.rows) + keys.size > self.most:
            raise ConfigError(
                f"{self._where()} has {len(self.rows)} rows and may have {self.most} (its share of "
                f"max_rows={self._policy.max_rows}), and a push has {keys.size} new keys; give a "
                "larger max_rows or min_count, or call client.drop(unused_for=...) now and then"
            )
        if capacity := self.rows.short_of(keys.size):
            self._resize(capacity if self.most is None else min(capacity, self.most))
        places = self.rows.add(keys)
        self.rows.columns["touched"][places] = clock
        values = self._initial(keys)
        self._table(self._shard.parameters[self.name])[places] = values
        first = dict(self._slots(self._shard.optimizer.init({self.name: values.reshape(-1)})))
        for slot, node in self._slots_of_state():
            self._table(node[self.name])[places] = self._table(first[slot][self.name])

    def _resize(self, capacity: int) -> None:
        parameter = self._shard.parameters[self.name]
        arrays = [parameter, *(node[self.name] for _, node in self._slots_of_state())]
        each = sum(array.itemsize for array in arrays) * self.width
        need = capacity * each
        free = available_memory() if need > _FEW else None
        if free is not None and need > free:
            raise ConfigError(
                f"{self._where()} has {len(self.rows)} rows, room for {capacity} takes {need} "
                f"bytes and {free} are available; give max_rows, min_count or more servers, or "
                "call client.drop(unused_for=...) now and then"
            )
        self.rows.resize(capacity)
        self._shard.parameters[self.name] = lengthened(parameter, capacity * self.width)
        for _, node in self._slots_of_state():
            node[self.name] = lengthened(node[self.name], capacity * self.width)

    def _where(self) -> str:
        return f"table {self.name!r}: server {self._shard.server}"

    def _slots_of_state(self) -> Iterator[tuple[tuple[str, ...], dict]]:
        return self._slots(self._shard.state)

    def _slots(self, state: Mapping, path: tuple[str, ...] = ()) -> Iterator[tuple]:
        """Yield the path and the dict of each array in an optimizer's state for this table."""
        if self.name in state and np.ndim(state[self.name]) == 1:
            yield path, state
        for key, value in state.items():
            if isinstance(value, Mapping):
                yield from self._slots(value, (*path, key))

    # -- unused rows, and the report -----------------------------------------------------------

    def drop(self, before: int) -> int:
        """Free the rows whose newest push was before the step `before`; return how many."""
        for table in (self.waiting, self.rows):
            # Of keys without a row, the counts of pushes are forgotten.
            old = np.flatnonzero(table.live & (table.columns["touched"] < before))
            table.remove(old)
        if 4 * len(self.rows) < self.rows.capacity:
            self._compact()
        return old.size

    def _compact(self) -> None:
        """Free the memory of unused rows."""
        places = self.rows.compacted()
        nodes = [self._shard.parameters, *(node for _, node in self._slots_of_state())]
        for node in nodes:
            kept = self._table(node[self.name])[places]
            node[self.name] = lengthened(kept, self.rows.capacity).reshape(-1)
        self.waiting.compacted()

    def facts(self) -> dict[str, int]:
        """Return the numbers of rows, of counted keys without a row, and of bytes in memory.

        Counted keys have no row because they were pushed fewer than `min_count` times.
        """
        nodes = [self._shard.parameters, *(node for _, node in self._slots_of_state())]
        nbytes = sum(node[self.name].nbytes for node in nodes)
        return {
            "rows": len(self.rows),
            "waiting": len(self.waiting),
            "bytes": nbytes + self.rows.nbytes + self.waiting.nbytes,
        }

    # -- saving ------------------------------------------------------------------------------

    def saved(self, array: np.ndarray) -> tuple[str, np.ndarray, np.ndarray]:
        """Return what a checkpoint saves: the table's name, its keys, and their rows in `array`."""
        places, keys = self._sorted(self.rows)
        return self.name, keys, self._table(array)[places]

    def saved_counts(self, clock: int) -> tuple[str, np.ndarray, np.ndarray]:
        """Return what a checkpoint saves of pushes: the table's name, its keys, and their counts.

        `counts` has two numbers for each key: the steps since its newest push, and the number of
        its pushes. For a key with a row the second number is -1, because its pushes are not
        counted.
        """
        parts = []
        for table, count in ((self.rows, None), (self.waiting, "count")):
            places, keys = self._sorted(table)
            ages = np.maximum(0, clock - table.columns["touched"][places])
            counts = table.columns[count][places] if count else np.full(len(keys), -1)
            parts.append((keys, np.column_stack([ages, counts]).astype(np.int64)))
        (keys, columns), (more, others) = parts
        return self.name, np.concatenate([keys, more]), np.concatenate([columns, others])

    @staticmethod
    def _sorted(table: KeyRows) -> tuple[np.ndarray, np.ndarray]:
        places = np.flatnonzero(table.live)
        places = places[np.argsort(table.keys[places])]
        return places, table.keys[places]

    def load(self, saved: Mapping, clock: int) -> None:
        """Replace all rows by those of the keys in `saved` that belong to this server.

        `saved` has the form of a result of `ServerGroup.shards`. Raises ConfigError if it lacks the
        table or the optimizer's state of a row, or has too many rows.
        """
        pieces = list(self._mine(saved["parameters"]))
        if not pieces:
            raise ConfigError(f"load_shards: parameters of {self.name!r} are not in what was given")
        self.rows.clear()
        self.waiting.clear()
        self._shard.parameters[self.name] = np.empty(0, self.kind.dtype)
        for _, node in self._slots_of_state():
            node[self.name] = np.empty(0, node[self.name].dtype)
        for keys, values in pieces:
            keys, first = np.unique(keys, return_index=True)
            absent = self.rows.find(keys) < 0
            self._make(keys[absent], clock)
            table = self._table(self._shard.parameters[self.name])
            table[self.rows.find(keys)] = values[first]
        for path, node in self._slots_of_state():
            missing = len(self.rows)
            for keys, values in self._mine(saved["optimizer"].get("/".join(path), ())):
                places = self.rows.find(keys)
                self._table(node[self.name])[places[places >= 0]] = values[places >= 0]
                missing -= int((places >= 0).sum())
            if missing > 0:
                raise ConfigError(
                    f"load_shards: optimizer state {'/'.join(path)!r} of {self.name!r}: {missing} "
                    f"of {len(self.rows)} rows are in none of the pieces given"
                )
        for keys, columns in self._mine(saved.get("counts", ())):
            self._load_counts(keys, clock - columns[:, 0], columns[:, 1])

    def _load_counts(self, keys: np.ndarray, touched: np.ndarray, counts: np.ndarray) -> None:
        places = self.rows.find(keys)
        self.rows.columns["touched"][places[places >= 0]] = touched[places >= 0]
        waits = (places < 0) & (counts > 0)
        if self._least > 1 and waits.any():
            places = self.waiting.add(keys[waits])
            self.waiting.columns["touched"][places] = touched[waits]
            self.waiting.columns["count"][places] = counts[waits]

    def _mine(self, pieces: Iterable) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield the keys and the rows of this server in each piece of this table."""
        for name, keys, array in pieces:
            if name == self.name:
                keys = np.asarray(keys).astype(np.int64, copy=False)
                here = owners(keys, self._shard.layout.shares) == self._shard.server
                yield keys[here], np.asarray(array)[here]


def most_rows(max_rows: int, share: float) -> int:
    """Return how many of a table's `max_rows` rows a server with this `share` may hold at most."""
    return max(1, round(max_rows * share))
