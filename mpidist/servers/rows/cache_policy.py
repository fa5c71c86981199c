"""How many rows a worker keeps in its cache (`row_cache`), and for how long. Without MPI."""

from __future__ import annotations

from dataclasses import dataclass

from ...errors import ConfigError, shown
from ...registry import checked_whole
from ..consistency import Consistency
from ..modes.stale_gradients import KeepStale


@dataclass(frozen=True)
class RowCache:
    """How many rows of each table a worker caches, and for how many steps: see `ServerGroup.add`.

    With a cache, a pull asks the servers only for rows that the worker does not have, or that are
    too old.

    Parameters
    ----------
    rows : int
        How many rows of each table the cache keeps. When it is full, the least recently used rows
        are dropped.
    max_age : int, optional
        The largest number of steps for which a worker uses a row after it was fetched. By default,
        a row is used as long as the consistency mode allows. The mode `ASP` (asynchronous) sets no
        limit, so it needs `max_age`.

    Raises
    ------
    ConfigError
        `rows` is not a whole number of at least 1, or `max_age` is not a whole number of at least
        0.
    """

    rows: int
    max_age: int | None = None

    def __post_init__(self):
        object.__setattr__(self, "rows", checked_whole("RowCache: rows", self.rows, 1))
        if self.max_age is not None:  # the dataclass is frozen
            age = checked_whole("RowCache: max_age", self.max_age, 0)
            object.__setattr__(self, "max_age", age)


def row_cache(model: str, given, consistency: Consistency, stale) -> RowCache | None:
    """Return the argument `cache_rows` of `ServerGroup.add` as a `RowCache`, or None for no cache.

    Raises ConfigError if it is neither a number of rows nor a `RowCache`, or if the mode or the
    policy for stale gradients does not allow a cache.
    """
    if given is None:
        return None
    cache = given if isinstance(given, RowCache) else None
    if cache is None:
        if isinstance(given, bool) or not hasattr(given, "__index__"):
            raise ConfigError(
                f"model {model!r}: cache_rows is {shown(given)}; give a number of rows, or "
                "md.RowCache"
            )
        cache = RowCache(checked_whole(f"model {model!r}: cache_rows", given, 1))
    if consistency.bound is None and not consistency.holds and cache.max_age is None:
        raise ConfigError(
            f"model {model!r}: {consistency} has no bound for the age of rows in a cache; give "
            f"cache_rows=md.RowCache({cache.rows}, max_age=...)"
        )
    if stale != KeepStale():
        raise ConfigError(
            f"model {model!r}: with cache_rows servers do not know the age of gradients, which "
            f"stale={stale} needs; give KeepStale or no cache"
        )
    return cache
