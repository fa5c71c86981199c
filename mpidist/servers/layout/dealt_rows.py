"""Rows that are dealt to the servers in turn, so that no server has all the rows that many need.

    rows of a table          0 1 2 3 4 5 6 7      tables often have their frequent rows first
    in dealt order           0 3 6 | 1 4 7 | 2 5  server s of n holds rows s, s + n, s + 2n, ...

Messages and shards know the dealt order only, in which each server has one range of rows, as of any
other tensor. Clients translate; saved pieces name rows as the user does. This module uses no MPI.
"""

from __future__ import annotations

import numpy as np


def first_rows(count: int, servers: int) -> list[int]:
    """Return where, in dealt order, the rows of each server begin, and the end."""
    each, more = divmod(count, servers)
    return [server * each + min(server, more) for server in range(servers + 1)]


def dealt_places(rows: np.ndarray, count: int, servers: int) -> np.ndarray:
    """Return the places of `rows` in the dealt order of a table of `count` rows."""
    return np.array(first_rows(count, servers))[rows % servers] + rows // servers


def dealt_order(count: int, servers: int) -> np.ndarray:
    """Return the rows of a table in dealt order."""
    return np.concatenate([np.arange(server, count, servers) for server in range(servers)])
