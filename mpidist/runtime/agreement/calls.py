"""One call of a collective on one communicator: by one thread at a time, and never half silent.

    with context.call("broadcast"):     refuses a second thread
        check all arguments             an exception here: this rank raised in place of the
        begin ... wait ... deliver      operation, and the ranks that are in it are told
                                        an exception here: the operation is broken off for all

The short paths of allreduce do the same by hand (`native`, `node_short`): `Context.stopped` is true
while a call is under way, so that the one look that every operation makes at it anyway is enough.
Only who finds it true asks `Context.check_free` why.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress

from ...errors import ProtocolError


class Call:
    """What `Context.call` returns; see the module."""

    __slots__ = ("context", "kind", "nested")

    def __init__(self, context, kind: str):
        self.context, self.kind = context, kind

    def __enter__(self):
        context, me = self.context, threading.get_ident()
        while context.stopped:
            if context.check_free(self.kind):
                self.nested = True
                return self
        # Nothing is called between the look and the claim: another thread cannot come between.
        context.stopped, context.caller, context.under_way = True, me, False
        context.thread = me
        self.nested = False
        return self

    def __exit__(self, kind, error, trace):
        context = self.context
        if self.nested:
            return
        try:
            if error is not None and not context.failed and not was_told(error, context):
                if context.under_way:
                    context.break_off(error)
                else:
                    context.raised(error)
        finally:
            context.under_way, context.caller = False, None
            context.stopped = bool(context.failed) or context.unconfirmed


def mark_told(error: BaseException, context, *, for_now: bool = False) -> None:
    """Note that the other ranks of `context` know of `error`, or need not.

    `for_now`: until the next operation, in which the same exception raised again is news. `context`
    None: before there is one.
    """
    with suppress(Exception):
        told = error.__dict__.setdefault("told_to_ranks", {})
        told[context] = _now(context) if for_now else None


def _now(context) -> tuple[int, int]:
    return context.sequence, context.confirmed


def was_told(error: BaseException, context) -> bool:
    """Whether the other ranks of `context` know of `error`."""
    told = getattr(error, "told_to_ranks", {})
    return None in told or (context in told and told[context] in (None, _now(context)))


def refusal(kind: str, context=None) -> ProtocolError:
    """Return the error of a call that another thread's call is in the way of."""
    error = ProtocolError(
        f"{kind}: another call on this communicator is under way, in another thread or in what a "
        "signal handler interrupted; use one thread at a time, or a communicator for each "
        "(comm.Dup())"
    )
    mark_told(error, context)  # it is this rank's alone: the call that is in its way goes on
    return error


def wrong_thread(kind: str, context) -> ProtocolError:
    """Return the error of a call in a thread that may not call this MPI."""
    error = ProtocolError(
        f"{kind}: called in thread {threading.current_thread().name!r}, but this MPI was started "
        "for one thread only; call it in the thread that initialised MPI, or leave "
        "mpi4py.rc.thread_level at 'multiple'"
    )
    mark_told(error, context)
    return error


class Running(threading.local):
    """Nonblocking operations that this thread has begun: objects with `context` and `test`.

    Every wait makes progress for all of its thread's, so ranks may wait for theirs in different
    orders. Another thread's are not touched.
    """

    def __init__(self):
        self.handles: list = []

    def append(self, handle) -> None:
        """Let waits of this thread make progress for `handle`."""
        self.handles.append(handle)
        handle.context.handles.append(handle)

    def remove(self, handle) -> None:
        """Forget it, if it is there. Another thread may have begun it."""
        for kept in (self.handles, handle.context.handles):
            if handle in kept:
                kept.remove(handle)

    def progress(self, test: Callable[[], bool]) -> Callable[[], bool]:
        """Return a test that makes progress for all of these as well."""

        def look() -> bool:
            for handle in tuple(self.handles):
                if handle.context.failed:
                    self.handles.remove(handle)  # given up in another thread
                else:
                    handle.test()
            return test()

        return look

    def __contains__(self, handle) -> bool:
        return handle in self.handles

    def __iter__(self):
        return iter(tuple(self.handles))

    def __len__(self) -> int:
        return len(self.handles)
