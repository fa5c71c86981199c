"""Deal the rows of a table to the servers one by one, so that no server has all frequent rows.

    rows of a table          0 1 2 3 4 5 6 7      tables often have their frequent rows first
    in dealt order           0 3 6 | 1 4 7 | 2 5  server s of n holds rows s, s + n, s + 2n, ...
    shares 1 : 1 : 2         2 6 | 3 7 | 0 1 4 5  the turns 2, 2, 0, 1 are repeated

The dealt order lists all rows of the first server, then all rows of the second server, and so on.
Messages, and the arrays of the servers, use only the dealt order. Clients translate between the
user's row numbers and the dealt order.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

#: The longest period of turns, and how much a server's fraction of the turns may differ from its
#: share.
_PERIOD, _ERROR = 256, 0.03

#: One period of turns: the server of each row.
Turns = tuple[int, ...]


def turns_of(shares: Sequence[float]) -> Turns:
    """Return the order in which servers get the rows of a table, as a tuple of server numbers.

    The order is repeated until all rows are dealt. So the server of row i is ``turns[i %
    len(turns)]``, where `turns` is the result. `shares` has the share of each server. The fractions
    of the turns differ from the shares by at most 3 %, or by as little as about 256 turns allow.
    """
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
    """Return the numbers of the rows that `server` holds, in ascending order.

    The table has `count` rows. Row i is on the server ``turns[i % len(turns)]``.
    """
    mine = np.flatnonzero(np.array(turns) == server)
    rows = (np.arange(0, count, len(turns))[:, np.newaxis] + mine).reshape(-1)
    return rows[rows < count]


def first_rows(count: int, turns: Turns) -> list[int]:
    """Return where each server's rows begin in dealt order, as a list that ends with `count`.

    In dealt order, all rows of server 0 come first, then those of server 1, and so on. `count` is
    the number of rows of the table. Row i is on the server ``turns[i % len(turns)]``.
    """
    periods, more = divmod(count, len(turns))
    number = max(turns) + 1
    each, last = (
        np.bincount(np.array(part, np.int64), minlength=number) for part in (turns, turns[:more])
    )
    return [0, *np.cumsum(periods * each + last).tolist()]


def dealt_places(rows: np.ndarray, count: int, turns: Turns) -> np.ndarray:
    """Return the position of each of `rows` in dealt order.

    In dealt order, all rows of server 0 come first, then those of server 1, and so on. `count` is
    the number of rows of the table. Row i is on the server ``turns[i % len(turns)]``.
    """
    first, each = _turn_places(count, turns)
    periods, place = np.divmod(rows, len(turns))
    return first[place] + periods * each[place]


@lru_cache(maxsize=64)
def _turn_places(count: int, turns: Turns) -> tuple[np.ndarray, np.ndarray]:
    """Return the position in dealt order of each turn's first row, and the turns of its server.

    The second array has, for each turn, the number of turns of the same server.
    """
    servers = np.array(turns)
    each = np.bincount(servers)
    order = np.argsort(servers, kind="stable")
    earlier = np.empty(len(turns), np.int64)  # turns of the same server before each turn
    earlier[order] = np.arange(len(turns)) - np.repeat(np.cumsum(each) - each, each)
    return np.array(first_rows(count, turns))[servers] + earlier, each[servers]


def dealt_order(count: int, turns: Turns) -> np.ndarray:
    """Return all row numbers of a table in dealt order: first all rows of server 0, and so on."""
    return np.argsort(np.resize(np.array(turns), count), kind="stable")
