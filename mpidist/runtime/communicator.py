"""Checks of the argument `comm`, translation of ranks, and the communicators of elastic groups.

An elastic group is a group of ranks that goes on after a rank has died.
"""

from __future__ import annotations

import os
import sys
import time
import types
from collections.abc import Callable
from functools import partial, wraps
from pathlib import Path
from typing import Any

from mpi4py import MPI

from ..errors import ClosedError, ConfigError
from ..events import is_ours
from . import polling

#: The names of files that belong to mpidist or Python, and not to the user's program, begin with
#: these texts.
_INNER = (str(Path(__file__).parents[1]) + os.sep, str(Path(os.__file__).parent) + os.sep, "<")


def check_comm(comm) -> None:
    """Raise ConfigError unless `comm` is a valid intracommunicator that includes this rank.

    Raises ClosedError for a communicator that has ended because a rank has died.
    """
    if ended := getattr(comm, "ended", ""):
        raise ClosedError(f"{_entry()}: {ended}")
    if problem := _problem(comm):
        raise ConfigError(f"{_entry()}: comm is {problem}")


def handle_of(comm) -> int:
    """Return MPI's handle of `comm`, even if `comm` is freed; ConfigError for other objects."""
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


def one_step(call: Callable) -> Callable:
    """Return MPI's own method for `call`, a blocking method of an `ElasticComm`.

    MPI's own method does not check whether a rank has died, so the caller must.
    """
    inner = getattr(call, "__wrapped__", None)
    return call if inner is None else partial(inner, call.__self__)  # type: ignore[attr-defined]


def has_rank_of(comm: MPI.Comm, dead: MPI.Group) -> bool:
    """Return whether a rank of `comm` is in the group `dead`."""
    group = comm.Get_group()
    both = MPI.Group.Intersection(group, dead)
    found = both.size > 0
    group.Free()
    both.Free()
    return found


class ElasticComm(MPI.Intracomm):
    """A communicator of an elastic group, whose ranks go on after one of them has died.

    The blocking collectives of this class check before they return whether a rank has died.
    """

    #: The `ulfm.Membership` to which the communicator belongs.
    membership: Any
    #: The reason why the communicator cannot be used any more, or "".
    ended = ""
    #: The private communicators of its context and the number of its context, if these have been
    #: made already.
    prepared: Any = None
    #: For each rank, the number and the host of its node. Set only on `Membership.comm`.
    places: tuple[tuple[int, str], ...] | None = None

    def Idup(self, info=None):
        """Duplicate the communicator, and return a request that has ended. Collective, blocking."""
        return self.Dup(info), MPI.Request()

    def Create_group(self, group, tag=0):
        """Make a communicator of the ranks of `group`. Collective over `group`."""
        made = self.membership.register(super().Create_group(group, tag))
        return self.membership.settle(made, made)


class _Cart(ElasticComm, MPI.Cartcomm):
    pass


class _Graph(ElasticComm, MPI.Graphcomm):
    pass


class _Distgraph(ElasticComm, MPI.Distgraphcomm):
    pass


#: A dict from each communicator class of mpi4py to mpidist's subclass.
_KINDS: dict[type, type[ElasticComm]] = {
    MPI.Intracomm: ElasticComm,
    MPI.Cartcomm: _Cart,
    MPI.Graphcomm: _Graph,
    MPI.Distgraphcomm: _Distgraph,
}


def _blocking(comm: ElasticComm, call, arguments, settings):
    """Make a blocking call of MPI. If a rank's death has caused an error, raise RankFailure."""
    if comm.ended:
        raise ClosedError(comm.ended)
    told = polling.board_of_main_thread()
    before = told.begin_wait(time.monotonic()) if told is not None else 0
    try:
        return call(comm, *arguments, **settings)
    except Exception:  # also the exceptions of pickle for incomplete data
        comm.membership.look()
        raise
    finally:
        if told is not None:
            told.show(before, time.monotonic())


def _making(make):
    """Return a method that makes a communicator by MPI's method `make`, and records it."""

    @wraps(make)
    def registering(self, *args, **settings):
        made = self.membership.register(_blocking(self, make, args, settings))
        return self.membership.settle(self, made)

    return registering


def _looking(call):
    """Return a method that makes the blocking MPI call `call`, then checks whether a rank died."""

    @wraps(call)
    def looking(self, *args, **settings):
        result = _blocking(self, call, args, settings)
        self.membership.look()
        return result

    return looking


_MAKE = """Dup Dup_with_info Clone Split Split_type Create Create_cart Create_graph
    Create_dist_graph Create_dist_graph_adjacent Sub"""
_BLOCK = """Barrier Bcast Gather Gatherv Scatter Scatterv Allgather Allgatherv Alltoall Alltoallv
    Alltoallw Reduce Allreduce Reduce_scatter Reduce_scatter_block Scan Exscan Neighbor_allgather
    Neighbor_allgatherv Neighbor_alltoall Neighbor_alltoallv Neighbor_alltoallw barrier bcast gather
    scatter allgather alltoall reduce allreduce scan exscan neighbor_allgather neighbor_alltoall"""
for _plain, _kind in _KINDS.items():  # ElasticComm first: the other classes inherit its methods
    for _names, _how in ((_MAKE, _making), (_BLOCK, _looking)):
        for _name in _names.split():
            if hasattr(_plain, _name) and _name not in vars(ElasticComm):
                setattr(_kind, _name, _how(getattr(_plain, _name)))


def elastic_comm(comm: MPI.Comm, membership) -> MPI.Comm:
    """Return `comm` as an `ElasticComm` that belongs to `membership`."""
    ours = _KINDS.get(type(comm), type(comm))(comm)
    if isinstance(ours, ElasticComm):
        ours.membership = membership
    return ours


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
        # The decorator `tells` wraps public functions, and the user does not know the name of the
        # wrapper.
        inner = frame.f_code.co_qualname
        name = name if inner.startswith("tells.") else inner
        frame = frame.f_back
    return _public(name) or name


def public_call(frame: types.FrameType | None) -> str:
    """Return a text on what a thread does, such as ``, in md.allreduce (train.py:31)``, or ""."""
    name = ""
    while frame is not None and frame.f_code.co_filename.startswith(_INNER):
        name = name or _public(frame.f_code.co_qualname)
        frame = frame.f_back
    if frame is None:
        return f", in {name}" if name else ""
    line = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
    return f", in {name} ({line})" if name else f", in {line}"


def _public(name: str) -> str:
    """Return a name such as ``md.allreduce`` or ``md.Client.pull``, or "" if it is not public."""
    for method in (".__init__", ".__enter__", ".__call__"):
        name = name.removesuffix(method)
    public = getattr(sys.modules.get("mpidist"), "__all__", ())
    known = name.partition(".")[0] in public and "._" not in name
    return f"md.{name}" if known else ""


def shrunk(base: MPI.Intracomm) -> MPI.Intracomm:
    """Return a communicator of the living ranks of `base`. Collective over them, blocking."""
    # Open MPI 5.0.11 makes one communicator at a time, in the order of a queue. If a death
    # interrupts the making of a communicator, this communicator stays first in the queue, and the
    # shrink would wait for it for ever. When the making of any other communicator ends, the entry
    # is removed from the queue.
    MPI.COMM_SELF.Dup().Free()
    return MPI.Intracomm(base.Shrink())
