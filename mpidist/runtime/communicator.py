"""Can we work on what was given as `comm`? Asked where its context is made, never in a hot path."""

from __future__ import annotations

import sys
import types

from mpi4py import MPI

from ..errors import ConfigError
from ..events import is_ours


def check_comm(comm) -> None:
    """Raise ConfigError unless `comm` is a communicator that all who are in it can work on.

    The line names the public function that was called.
    """
    problem = _problem(comm)
    if problem:
        raise ConfigError(f"{_entry()}: comm is {problem}")


def handle_of(comm) -> int:
    """Return MPI's handle of a communicator, also of one that was freed. Or raise ConfigError."""
    if not isinstance(comm, MPI.Comm):
        check_comm(comm)
    return comm.handle


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
    except MPI.Exception as error:  # another name of a communicator that was freed
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
    """Return the function of ours that the user has called, as ``md.allreduce``."""
    frame: types.FrameType | None = sys._getframe(2)
    name = "mpidist"
    while frame is not None and is_ours(frame.f_code.co_filename):
        # What `tells` puts around a call has the call's name in its own variables only.
        inner = frame.f_code.co_qualname
        name = name if inner.startswith("tells.") else inner
        frame = frame.f_back
    for method in (".__init__", ".__enter__", ".__call__"):
        name = name.removesuffix(method)
    public = getattr(sys.modules.get("mpidist"), "__all__", ())
    return f"md.{name}" if name in public else name
