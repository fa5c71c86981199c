"""What a context begins with, made step by step: an exception on the way loses nothing.

    barrier | duplicate for data | duplicate for control | a number that stands for the communicator

A rank that breaks this off (by Ctrl-C, or a time limit of its own) and calls again goes on where it
was. If it began anew, its barrier would meet the others' duplicate, and all would wait for ever.
"""

from __future__ import annotations

import secrets
import threading

import numpy as np
from mpi4py import MPI

from . import elsewhere
from .calls import refusal
from .waiting import wait_until


class Making:
    """The private communicators of `comm` on their way. Used by one thread."""

    def __init__(self, comm: MPI.Comm):
        self.comm, self._busy = comm, threading.Lock()
        self._made: tuple = ()
        self._pending: object = None
        self._request: MPI.Request | None = None

    def finish(self) -> tuple[MPI.Comm, MPI.Comm, int]:
        """Return (data, control, identity) when all ranks have made them. Collective, polled."""
        if not self._busy.acquire(blocking=False):
            raise refusal("the first call")
        try:
            # A barrier first: it can be left for good, but Open MPI makes no communicator at all
            # while another one is half made.
            for step in (self._meet, self._duplicate, self._duplicate, self._number)[
                len(self._made) :
            ]:
                if self._request is None:
                    self._pending, self._request = step()
                wait_until(self._request.Test, lambda _: elsewhere.look(self.comm))
                # Nothing is called in here, so no exception comes between.
                self._made, self._request = (*self._made, self._pending), None
        finally:
            self._busy.release()
        _, data, control, number = self._made
        return data, control, int(number[0])

    def _meet(self):
        return None, self.comm.Ibarrier()

    def _duplicate(self):
        return self.comm.Idup()

    def _number(self):
        number = np.array([secrets.randbits(62)], np.int64)
        return number, self._made[2].Ibcast(number, root=0)
