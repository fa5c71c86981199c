"""Rows that are dealt to the servers in turn, so that no server has all the rows that many need.

    rows of a table          0 1 2 3 4 5 6 7      tables often have their frequent rows first
    in dealt order           0 3 6 | 1 4 7 | 2 5  server s of n holds rows s, s + n, s + 2n, ...
    shares 1 : 1 : 2         2 6 | 3 7 | 0 1 4 5  the turns 2, 2, 0, 1 are repeated

Servers with equal shares take turns. With other shares, the turns of a period of up to 256 rows go
to the servers in proportion to the shares, spread evenly. A server with share 0 has no turn.

Messages and shards know the dealt order only, in which each server has one range of rows, as of any
other tensor. Clients translate; saved pieces name rows as the user does. This module uses no MPI.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

#: The longest period of turns, and how far from its share a server's part of the turns may be.
_PERIOD, _ERROR = 256, 0.03

#: The server of each row of a period.
Turns = tuple[int, ...]


def turns_of(shares: Sequence[float]) -> Turns:
    """Return the shortest turns that are close to these shares, or the closest ones."""
    total = sum(shares)
    parts = [share / total for share in shares]
    living = [part for part in parts if part]
    best: tuple[float, list[int]] | None = None
    for period in range(len(living), max(_PERIOD, len(living)) + 1):
        counts = [max(1, round(part * period)) if part else 0 for part in parts]
        period = sum(counts)
        given = zip(counts, parts, strict=True)
        error = max(abs(count / (period * part) - 1) for count, part in given if part)
        if best is None or error < best[0]:
            best = error, counts
        if error <= _ERROR:
            break
    assert best is not None  # some share is above 0
    turns = [((k + 0.5) / n, server) for server, n in enumerate(best[1]) for k in range(n)]
    return tuple(server for _, server in sorted(turns))


def dealt_to(server: int, count: int, turns: Turns) -> np.ndarray:
    """Return the rows of a table of `count` rows that a server holds, in ascending order."""
    mine = np.flatnonzero(np.array(turns) == server)
    rows = (np.arange(0, count, len(turns))[:, np.newaxis] + mine).reshape(-1)
    return rows[rows < count]


def first_rows(count: int, turns: Turns) -> list[int]:
    """Return where, in dealt order, the rows of each server begin, and the end."""
    periods, more = divmod(count, len(turns))
    number = max(turns) + 1
    each, last = (
        np.bincount(np.array(part, np.int64), minlength=number) for part in (turns, turns[:more])
    )
    return [0, *np.cumsum(periods * each + last).tolist()]


def dealt_places(rows: np.ndarray, count: int, turns: Turns) -> np.ndarray:
    """Return the places of `rows` in the dealt order of a table of `count` rows."""
    first, each = _turn_places(count, turns)
    periods, place = np.divmod(rows, len(turns))
    return first[place] + periods * each[place]


@lru_cache(maxsize=64)
def _turn_places(count: int, turns: Turns) -> tuple[np.ndarray, np.ndarray]:
    """Return for each turn the place of its first row, and how many turns its server has."""
    servers = np.array(turns)
    each = np.bincount(servers)
    order = np.argsort(servers, kind="stable")
    earlier = np.empty(len(turns), np.int64)  # turns of the same server before each turn
    earlier[order] = np.arange(len(turns)) - np.repeat(np.cumsum(each) - each, each)
    return np.array(first_rows(count, turns))[servers] + earlier, each[servers]


def dealt_order(count: int, turns: Turns) -> np.ndarray:
    """Return the rows of a table in dealt order."""
    return np.argsort(np.resize(np.array(turns), count), kind="stable")
