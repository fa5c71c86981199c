"""What a context begins with, made step by step: an exception on the way loses nothing.

    barrier | duplicate for data | duplicate for control | a number that stands for the communicator
            | once in a job: a duplicate for the exit barrier

A rank that breaks this off (by Ctrl-C, or a time limit of its own) and calls again goes on where it
was. If it began anew, its barrier would meet the others' duplicate, and all would wait for ever.
"""

from __future__ import annotations

import secrets
import threading

import numpy as np
from mpi4py import MPI

from .agreement import crossed_waits
from .agreement.calls import refusal
from .failure import claim_exit_barrier, first_of_job, set_exit_barrier
from .polling import wait_until


class Making:
    """The private communicators of `comm` on their way. Used by one thread, inside of its ``with``.

    A second thread is refused there.
    """

    def __init__(self, comm: MPI.Comm):
        self.comm, self._busy = comm, threading.Lock()
        self._made: tuple = ()
        self._pending: object = None
        self._request: MPI.Request | None = None

    def __enter__(self) -> Making:
        if not self._busy.acquire(blocking=False):
            raise refusal("the first call")
        return self

    def __exit__(self, *exc) -> None:
        self._busy.release()

    def finish(self) -> tuple[MPI.Comm, MPI.Comm, int]:
        """Return (data, control, identity) when all ranks have made them. Collective, polled."""
        # A barrier first: it can be left for good, but Open MPI makes no communicator at all
        # while another one is half made.
        steps = (self._meet, self._duplicate, self._duplicate, self._number, self._exit_barrier)
        for step in steps[len(self._made) :]:
            if self._request is None:
                self._pending, self._request = step()
            wait_until(self._request.Test, lambda _: crossed_waits.look(self.comm))
            # Nothing is called in here, so no exception comes between.
            self._made, self._request = (*self._made, self._pending), None
        _, data, control, number, exit_barrier = self._made
        if exit_barrier is not None:
            set_exit_barrier(exit_barrier)
        return data, control, int(number[0])

    def _meet(self):
        return None, self.comm.Ibarrier()

    def _duplicate(self):
        return self.comm.Idup()

    def _number(self):
        number = np.zeros(2, np.int64)
        root = first_of_job(self.comm)
        if self.comm.rank == root:
            number[:] = secrets.randbits(62), claim_exit_barrier(self.comm)
        return number, self._made[2].Ibcast(number, root)

    def _exit_barrier(self):
        return self._duplicate() if self._made[3][1] else (None, MPI.Request())
