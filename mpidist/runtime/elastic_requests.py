"""Test MPI requests, and wait for them, where the death of a rank may interrupt them.

An elastic program goes on after a rank has died. In other programs, these functions do the same as
the functions of MPI.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from mpi4py import MPI

from . import ulfm
from .polling import wait_until


def wait_for(requests: Sequence[MPI.Request], *memory: np.ndarray) -> None:
    """Wait for requests that use the arrays `memory`. Raises RankFailure if a rank has died."""
    try:
        for request in requests:
            wait_until(tester(request))
    except Exception:
        ulfm.keep_alive(memory, requests)
        raise


def test_some(requests: list[MPI.Request]) -> list[int] | None:
    """Return the indices of the requests that have ended, or None if none of them is active.

    Raises RankFailure if the death of a rank has interrupted a request, which then is not freed.
    """
    if ulfm.current is None:
        return MPI.Request.Testsome(requests)
    status = MPI.Status()
    ended = [k for k, request in enumerate(requests) if _has_ended(request, status)]
    for k in ended:
        requests[k].Test()
    return ended


def test_one(request: MPI.Request, status: MPI.Status) -> bool:
    """Return whether a request has ended, and fill `status`; raise RankFailure after a death."""
    if ulfm.current is None:
        return request.Test(status)
    return _has_ended(request, status) and request.Test()


def test_all(requests: list[MPI.Request]) -> bool:
    """Return whether all requests have ended; raise RankFailure if a death interrupted one."""
    if ulfm.current is None:
        return MPI.Request.Testall(requests)
    return len(test_some(requests) or ()) == len(requests)


def tester(request: MPI.Request) -> Callable[[], bool]:
    """Return a function that says if a request has ended, and raises RankFailure after a death."""
    return request.Test if ulfm.current is None else lambda: test_one(request, MPI.Status())


def _has_ended(request: MPI.Request, status: MPI.Status) -> bool:
    ended = request.Get_status(status)
    if ended and status.Get_error() != MPI.SUCCESS and ulfm.current is not None:
        raise ulfm.current.failure()
    return ended
