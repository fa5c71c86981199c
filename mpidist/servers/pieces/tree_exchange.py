"""Gather a value of each rank up a binomial tree to rank 0, and send all values down again.

::

    up     7 -> 6 -> 4 -> 0         each rank sends its values and those of its children
           5 -> 4    2 -> 0
           3 -> 2    1 -> 0         down: the same edges, with the values of all ranks
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from mpi4py import MPI

from ...runtime.elastic_requests import test_all, tester
from ..protocol import DOWN, UP


def tree_exchange(link: Any, fact) -> list:
    """Return a list of the JSON values `fact` of all ranks, in rank order. Collective.

    All p ranks together send 2 (p - 1) messages.
    """
    rank, size = link.comm.rank, link.comm.size
    lowest = rank & -rank if rank else size
    steps = [1 << k for k in range(size.bit_length()) if 1 << k < lowest]
    children = [rank + step for step in steps if rank + step < size]
    known = [[rank, fact]]
    for child in children:
        known += json.loads(_take(link, child, UP))
    if rank:
        _give(link, [rank & (rank - 1)], UP, json.dumps(known).encode())
        everything = _take(link, rank & (rank - 1), DOWN)
    else:
        everything = json.dumps([fact for _, fact in sorted(known)]).encode()
    _give(link, children, DOWN, everything)
    return json.loads(everything)


def _give(link: Any, ranks: Sequence[int], tag: int, data: bytes) -> None:
    sending: list[MPI.Request] = []
    with link.pinned(sending, data):
        for rank in ranks:
            sending.append(link.comm.Isend([data, MPI.BYTE], rank, link.tag + tag))
        link.wait(lambda: test_all(sending), peers="all")


def _take(link: Any, source: int, tag: int) -> bytes:
    data = bytearray(link.wait_for_size(source, tag, "all"))
    request = link.comm.Irecv([data, MPI.BYTE], source, link.tag + tag)
    with link.pinned(request, data):
        link.wait(tester(request), peers="all")
    return bytes(data)
