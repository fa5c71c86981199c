"""Count the frames of mpidist's own code on the stack when MPI is called (HOUSE.md, rule 3).

alone = Recorded(comm.Dup())        # what is duplicated or split from it records too
md.allreduce(alone, x)              # the first call makes the plan
with recorded() as notes:
    md.allreduce(alone, x)
assert deepest(notes, "Isend", "Irecv") <= 7
"""

import sys
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from mpi4py import MPI

import mpidist

_OWN = str(Path(mpidist.__file__).parent)


class Note(NamedTuple):
    """A call of MPI, and the functions of our own that led to it, the outermost first."""

    call: str
    way: tuple[str, ...]


_notes: list[Note] | None = None


def note(call: str) -> None:
    """Note that `call` is entered now, if somebody records."""
    if _notes is None:
        return
    way, frame = [], sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename.startswith(_OWN):
            way.append(f"{Path(frame.f_code.co_filename).stem}.{frame.f_code.co_name}")
        frame = frame.f_back
    _notes.append(Note(call, tuple(reversed(way))))


@contextmanager
def recorded():
    """Note every call of MPI on a `Recorded` communicator; the value is the list of notes."""
    global _notes
    _notes = []
    try:
        yield _notes
    finally:
        _notes = None


def deepest(notes: list[Note], *calls: str) -> int:
    """The most frames of our own under one of `calls`, of any call where none is named."""
    return max((len(n.way) for n in notes if not calls or n.call in calls), default=0)


def _noting(name: str):
    def call(self, *args, **kwargs):
        note(name)
        return getattr(MPI.Intracomm, name)(self, *args, **kwargs)

    return call


class _Persistent:
    """A persistent request whose starts are noted."""

    def __init__(self, request):
        self.request, self.Test, self.Free = request, request.Test, request.Free

    def Start(self):
        note("Start")
        self.request.Start()


class Recorded(MPI.Intracomm):
    """A communicator that notes what is begun on it, as do its duplicates: they keep the class."""

    def Split(self, *args, **kwargs):
        return Recorded(super().Split(*args, **kwargs))

    def Split_type(self, *args, **kwargs):
        return Recorded(super().Split_type(*args, **kwargs))

    def Create_group(self, *args, **kwargs):
        return Recorded(super().Create_group(*args, **kwargs))

    def Allreduce_init(self, *args, **kwargs):
        return _Persistent(super().Allreduce_init(*args, **kwargs))


for _name in (
    "Isend", "Issend", "Irecv", "Send", "Recv", "Ibcast", "Bcast", "Iallreduce", "Allreduce",
    "Reduce", "Ireduce", "Iallgather", "Allgather", "Allgatherv", "Gatherv", "Scatterv",
    "Reduce_scatter", "Ibarrier", "Barrier", "bcast", "gather", "allgather", "allreduce", "isend",
    "send", "recv",
):  # fmt: skip
    setattr(Recorded, _name, _noting(_name))
