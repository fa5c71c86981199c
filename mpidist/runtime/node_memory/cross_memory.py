"""Cross-memory attach: the kernel copies between the private memory of the ranks of a node.

With the system calls process_vm_readv(2) and process_vm_writev(2), Linux copies data once between
two processes of one user, without shared memory and without a message. Containers and hardened
kernels may forbid these calls, or a process number may mean another process, so all ranks test them
with random numbers before they use them. In an elastic group (ranks that go on after a rank has
died), a rank first asks the kernel whether a process has ended, and writes to another process only
if none has.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import os
import secrets
import select
import weakref

import numpy as np
from mpi4py import MPI

from ...errors import ConfigError, MpidistError
from .. import ulfm
from .arena import Wait, first_problem

_PR_SET_PTRACER, _ANY = 0x59616D61, ctypes.c_ulong(-1)
_TOKEN = 16  # bytes: enough random bytes that two tokens are never equal by chance
_MOST = 1 << 30  # bytes of one call; the kernel copies at most 2 GiB less a page
#: The data that each rank sends to the other ranks of its node: its process number, random bytes,
#: the address of the random bytes, and the address to which the other ranks write them.
_RECORD = np.dtype([("pid", "i8"), ("token", "u1", _TOKEN), ("token_at", "u8"), ("inbox", "u8")])


class _Run(ctypes.Structure):
    """The C type ``struct iovec``: an address and a number of bytes."""

    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


class _End:
    """A file descriptor (pidfd) that the kernel makes readable when a process ends."""

    def __init__(self, pid: int):
        self.file = os.pidfd_open(pid)
        weakref.finalize(self, os.close, self.file)


class CrossMemory:
    """Copies to and from the address spaces of all ranks of `comm`.

    Collective over `comm`, whose ranks must be on one node. Raises ConfigError on all ranks if the
    kernel forbids the copies. Each rank permits all processes of its user to copy its memory, as
    MPI libraries do.
    """

    def __init__(self, comm: MPI.Comm, wait: Wait):
        self._rank = comm.rank
        self._ends: list[_End] = []
        self._here, self._there = _Run(), _Run()
        self._arguments = ctypes.byref(self._here), 1, ctypes.byref(self._there), 1, 0
        problem = ""
        try:
            libc = ctypes.CDLL(None, use_errno=True)
            self._read, self._write = libc.process_vm_readv, libc.process_vm_writev
            self._read.restype = self._write.restype = ctypes.c_ssize_t
            libc.prctl(_PR_SET_PTRACER, _ANY, 0, 0, 0)
        except (OSError, AttributeError) as error:
            problem = str(error)
        self._prove(comm, wait, problem)

    def holds(self, address: int, nbytes: int) -> bool:
        """Return whether the kernel can copy `nbytes` bytes at `address` in this rank's memory."""
        byte = np.empty(1, np.uint8)
        with contextlib.suppress(MpidistError):
            for end in (address, address + nbytes - 1):
                self.read(self._rank, end, byte.ctypes.data, 1)
            return True
        return False

    def read(self, rank: int, address: int, target: int, nbytes: int) -> None:
        """Copy `nbytes` from `address` of local rank `rank` to `target` of this rank.

        Raises MpidistError if the kernel copies fewer bytes.
        """
        self._copy(self._read, rank, address, target, nbytes)

    def write(self, rank: int, address: int, source: int, nbytes: int) -> None:
        """Copy `nbytes` from `source` of this rank to `address` of local rank `rank`.

        Raises MpidistError if the kernel copies fewer bytes.
        """
        if self._ends and self._poll.poll(0):
            raise MpidistError("cross memory: a process of this node has ended")
        self._copy(self._write, rank, address, source, nbytes)

    def _copy(self, call, rank: int, address: int, mine: int, nbytes: int) -> None:
        for at in range(0, nbytes, _MOST):
            count = min(_MOST, nbytes - at)
            self._here.base, self._here.length = mine + at, count
            self._there.base, self._there.length = address + at, count
            done = call(self.pids[rank], *self._arguments)
            if done != count:
                why = os.strerror(ctypes.get_errno()) if done < 0 else f"{done} bytes were copied"
                raise MpidistError(
                    f"cross memory: {count} bytes at {address + at:#x} of process "
                    f"{self.pids[rank]} (local rank {rank}): {why}"
                )

    def without(self, living: list[int]) -> CrossMemory:
        """Return an object for the local ranks `living` only, after other ranks have died.

        Afterwards, only the returned object may be used.
        """
        new = copy.copy(self)
        new.pids, new._rank = [self.pids[k] for k in living], living.index(self._rank)
        new._watch([self._ends[k] for k in living])
        return new

    def _watch(self, ends: list[_End]) -> None:
        self._ends, self._poll = ends, select.poll()
        for end in ends:
            self._poll.register(end.file, select.POLLIN)

    def _watch_ends(self) -> str:
        """If the job goes on after deaths, watch all local processes; return an error text."""
        try:
            self._watch([_End(pid) for pid in self.pids] if ulfm.current is not None else [])
        except OSError as error:  # a kernel before Linux 5.3, or a process has ended
            return f"pidfd_open: {error.strerror}"
        return ""

    def _prove(self, comm, wait: Wait, problem: str) -> None:
        """Check that this rank can read and write the memory of every other rank.

        Collective over `comm`. Raises ConfigError on all ranks if the check fails on one rank, or
        if a rank passes an error text as `problem`.
        """
        size, rank = comm.size, comm.rank
        answers = np.zeros((size, _TOKEN), np.uint8)
        found = np.empty(_TOKEN, np.uint8)
        mine, everyone = np.zeros(1, _RECORD), np.zeros(size, _RECORD)
        token = mine["token"][0]
        token[:] = np.frombuffer(secrets.token_bytes(_TOKEN), np.uint8)
        mine["pid"], mine["token_at"], mine["inbox"] = (
            os.getpid(),
            token.ctypes.data,
            answers.ctypes.data,
        )
        target = [everyone.view(np.uint8), MPI.BYTE]
        wait(comm.Iallgather([mine.view(np.uint8), MPI.BYTE], target).Test)
        self.pids = everyone["pid"].tolist()
        problem = problem or self._watch_ends()
        tokens, addresses = everyone["token"], everyone["token_at"].tolist()
        for other, inbox in enumerate(everyone["inbox"].tolist()):
            if other == rank or problem:
                continue
            try:
                self.read(other, addresses[other], found.ctypes.data, _TOKEN)
                if (found != tokens[other]).any():
                    problem = f"process number {self.pids[other]} is another process here"
                    continue  # this rank must not write to a foreign process
                self.write(other, inbox + rank * _TOKEN, token.ctypes.data, _TOKEN)
            except MpidistError as error:
                problem = str(error)
        wait(comm.Ibarrier().Test)  # after the barrier, all ranks have written their answers
        for other in range(size):
            if other != rank and (answers[other] != tokens[other]).any():
                problem = problem or f"data that process {self.pids[other]} wrote did not arrive"
        problem = first_problem(comm, problem, wait)
        if problem:
            raise ConfigError(f"ranks of this node cannot reach each other: {problem}")
