"""The collective steps that make mpidist's state for a communicator, called its context.

    barrier | duplicate for data | duplicate for control | a number that stands for the communicator
            | once in a job: a duplicate for the exit barrier

If an exception, such as Ctrl-C, interrupts a rank and the rank repeats its call, the rank continues
with the interrupted step.
"""

from __future__ import annotations

import secrets
import threading

import numpy as np
from mpi4py import MPI

from ..launch.environment import has_ulfm
from .agreement import crossed_waits
from .agreement.calls import refusal
from .failure import claim_exit_barrier, first_of_job, set_exit_barrier, this_rank
from .network.network_watch import watch_network
from .polling import wait_until
from .ulfm import is_death, keep_alive, rank_failure


class Making:
    """The private communicators of `comm` while they are being made, in a ``with`` block.

    A second thread that enters the ``with`` block at the same time gets ProtocolError.
    """

    def __init__(self, comm: MPI.Comm):
        self.comm, self._busy = comm, threading.Lock()
        self._made: tuple = ()
        self._pending: object = None
        self._request: MPI.Request | None = None
        if comm.size > 1:
            watch_network(this_rank())

    def __enter__(self) -> Making:
        if not self._busy.acquire(blocking=False):
            raise refusal("the first call")
        return self

    def __exit__(self, *exc) -> None:
        self._busy.release()

    def finish(self) -> tuple[MPI.Comm, MPI.Comm, int]:
        """Return (communicator for data, communicator for control messages, number of `comm`).

        The number stands for `comm` in messages between ranks. Collective.
        """
        if prepared := getattr(self.comm, "prepared", None):
            self.comm.prepared = None  # type: ignore[attr-defined]
            return prepared
        # The barrier comes first, because an interrupted rank can abandon a barrier. If a rank
        # abandons a communicator that is only partly made, Open MPI cannot make any other
        # communicator.
        steps = (self._meet, self._duplicate, self._duplicate, self._number, self._exit_barrier)
        for step in steps[len(self._made) :]:
            if self._request is None:
                self._pending, self._request = step()
            try:
                wait_until(self._request.Test, lambda _: crossed_waits.look(self.comm))
            except Exception as error:
                # If a rank dies while a communicator is made, MPI may report the error
                # MPI_ERR_INTERN.
                if is_death(error) or (isinstance(error, MPI.Exception) and _has_dead(self.comm)):
                    keep_alive(self._request, self._pending)
                    raise rank_failure(error) from error
                raise
            # This line calls no function, so no exception can interrupt it.
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


def _has_dead(comm: MPI.Comm) -> bool:
    """Return whether a rank of `comm` is known to have died; False if MPI has no ULFM."""
    if not has_ulfm():
        return False
    failed = comm.Get_failed()
    count = failed.size
    failed.Free()
    return count > 0
