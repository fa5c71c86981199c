"""Where the ranks of a test wait for each other asleep, and hear whether one of them has failed."""

import contextlib
import select
import socket
import tempfile
import time
from pathlib import Path

import numpy as np


def sleep_until(test, look=lambda: None, sleep=time.sleep):
    """Look for something without taking a core: a rank outside a test waits as long as it runs."""
    pause = 0.0002
    while not test():
        look()
        sleep(pause)
        pause = min(1.1 * pause, 0.008)


class Meeting:
    """Meetings of the ranks of a communicator, in memory that all of them map.

    A barrier of MPI takes messages in several rounds, and a rank that sleeps answers each of them
    late. Here a rank writes one word and reads those of the others; the last one wakes the others.
    """

    def __init__(self, comm):
        self.rank, self.count = comm.rank, 0
        if comm.rank == 0:
            made = Path(tempfile.mkdtemp(prefix="mpidist-meeting-"), "words")
            made.write_bytes(bytes(2 * 8 * comm.size))
        path = comm.bcast(made if comm.rank == 0 else None)
        # A rank can come to the next but one meeting only when all have left this one: so two rows
        # are enough, and none is written over before all have read it.
        self.rows = np.memmap(path, np.int64, "r+", shape=(2, comm.size))
        # Names of Linux that are no files.
        self.bells = [f"\0{path}-{rank}" for rank in range(comm.size)]
        self.bell = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.bell.bind(self.bells[comm.rank])
        self.bell.setblocking(False)
        comm.Barrier()
        if comm.rank == 0:
            path.unlink()
            path.parent.rmdir()

    def meet(self, told, look):
        """Wait until all ranks are here; return whether one of them has something to tell."""
        self.count += 1
        row = self.rows[self.count % 2]
        row[self.rank] = 2 * self.count + bool(told)
        if row.min() >= 2 * self.count:
            for rank, bell in enumerate(self.bells):
                if rank != self.rank:
                    with contextlib.suppress(OSError):  # it looks by itself, a little later
                        self.bell.sendto(b"!", bell)
        else:
            sleep_until(lambda: row.min() >= 2 * self.count, look, self._sleep)
        return bool((row & 1).any())

    def _sleep(self, seconds):
        if select.select([self.bell], [], [], seconds)[0]:
            with contextlib.suppress(OSError):
                while True:
                    self.bell.recv(1)
