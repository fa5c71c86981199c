"""Checks of the argument `comm`, and the translation of ranks between communicators.

The checks run when the context of a communicator is made, never in a hot path.
"""

from __future__ import annotations

import sys
import types

from mpi4py import MPI

from ..errors import ClosedError, ConfigError
from ..events import is_ours


def check_comm(comm) -> None:
    """Raise ConfigError unless `comm` is a valid intracommunicator that includes this rank.

    Raises ClosedError for a communicator of an elastic group that has ended because a rank has
    died. The error text names the public function that was called.
    """
    if ended := getattr(comm, "ended", ""):
        raise ClosedError(f"{_entry()}: {ended}")
    if problem := _problem(comm):
        raise ConfigError(f"{_entry()}: comm is {problem}")


def handle_of(comm) -> int:
    """Return MPI's handle of `comm`, even of a freed one; raise ConfigError for other objects."""
    if not isinstance(comm, MPI.Comm):
        check_comm(comm)
    return comm.handle


def translated_rank(rank: int, comm: MPI.Comm, other: MPI.Comm) -> int:
    """Return the rank in `other` of the process that is `rank` in `comm`, or MPI.UNDEFINED."""
    groups = comm.Get_group(), other.Get_group()
    (found,) = groups[0].Translate_ranks([rank], groups[1])
    for group in groups:
        group.Free()
    return found


def _problem(comm) -> str:
    wanted = "expected an mpi4py communicator, such as MPI.COMM_WORLD, as the first argument"
    if not isinstance(comm, MPI.Comm):
        return f"{_described(comm)}; {wanted}"
    try:
        if comm == MPI.COMM_NULL:
            return (
                "COMM_NULL: this rank is not in it, or it has been freed; "
                "call only on its ranks, and before comm.Free()"
            )
        if not comm.Is_inter():
            return ""
        there = MPI.Intercomm(comm).Get_remote_size()
        return (
            f"an intercommunicator ({comm.Get_size()} ranks here, {there} there); "
            "expected an intracommunicator: pass comm.Merge()"
        )
    except MPI.Exception as error:  # `comm` is a second object of a freed communicator
        return f"not valid to MPI ({error}); {wanted}, and not one that was freed"


def _described(given) -> str:
    if given is None:
        return "None"
    if isinstance(given, type):
        return f"the class {given.__name__}"
    kind = type(given).__name__
    shape, dtype = getattr(given, "shape", None), getattr(given, "dtype", None)
    if isinstance(shape, tuple) and dtype is not None:
        return f"an array ({kind}) of shape {shape} and dtype {dtype}"
    return f"a value of type {kind}"


def _entry() -> str:
    """Return the name, such as ``md.allreduce``, of the mpidist function that the user called."""
    frame: types.FrameType | None = sys._getframe(2)
    name = "mpidist"
    while frame is not None and is_ours(frame.f_code.co_filename):
        # The decorator `tells` wraps public functions; the user does not know the wrapper's name.
        inner = frame.f_code.co_qualname
        name = name if inner.startswith("tells.") else inner
        frame = frame.f_back
    for method in (".__init__", ".__enter__", ".__call__"):
        name = name.removesuffix(method)
    public = getattr(sys.modules.get("mpidist"), "__all__", ())
    return f"md.{name}" if name in public else name
