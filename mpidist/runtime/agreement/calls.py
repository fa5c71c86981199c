"""The guard of public functions: it admits one thread at a time, and sends exceptions to all ranks.

    with context.call("broadcast"):     raises ProtocolError if another thread is in a call
        check all arguments             an exception here is sent to the other ranks; ranks that are
                                        already in the operation raise an error
        begin ... wait ... deliver      an exception here ends the operation on all ranks

`Context` is mpidist's state for a communicator.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress

from ...errors import ProtocolError


class Call:
    """The context manager that `Context.call` returns, around the work of a public function.

    It admits one thread at a time, and sends an exception of its ``with`` block to the other ranks.
    """

    __slots__ = ("context", "kind", "nested")

    def __init__(self, context, kind: str):
        self.context, self.kind = context, kind

    def __enter__(self):
        context, me = self.context, threading.get_ident()
        while context.stopped:
            if context.check_free(self.kind):
                self.nested = True
                return self
        # No function is called between reading `stopped` and setting it, so the interpreter cannot
        # change threads in between.
        context.stopped, context.caller, context.under_way = True, me, False
        context.thread, self.nested = me, False
        return self

    def __exit__(self, kind, error, trace):
        context = self.context
        if self.nested:
            return
        try:
            if error is not None and not context.failed and not was_told(error, context):
                report = context.break_off if context.under_way else context.raised
                report(error)
        finally:
            context.under_way, context.caller = False, None
            context.stopped = bool(context.failed) or context.unconfirmed


def mark_told(error: BaseException, context, *, for_now: bool = False) -> None:
    """Record that the other ranks already know `error`, so it need not be sent to them.

    If `for_now` is true, the record is valid only until the next operation.
    """
    with suppress(Exception):
        told = error.__dict__.setdefault("told_to_ranks", {})
        told[context] = _now(context) if for_now else None


def _now(context) -> tuple[int, int]:
    return context.sequence, context.confirmed


def was_told(error: BaseException, context) -> bool:
    """Return whether `mark_told` has recorded that the other ranks already know `error`."""
    told = getattr(error, "told_to_ranks", {})
    return None in told or (context in told and told[context] in (None, _now(context)))


def refusal(kind: str, context=None) -> ProtocolError:
    """Return the error for a call of the function `kind` while another such call is running."""
    error = ProtocolError(
        f"{kind}: another call on this communicator is under way, in another thread or in code "
        "that a signal interrupted; use one thread at a time, or a communicator for each "
        "(comm.Dup())"
    )
    mark_told(error, context)  # only this rank raises the error, and the other call continues
    return error


def wrong_thread(kind: str, context) -> ProtocolError:
    """Return the error for a call that was made in a thread that must not call MPI."""
    error = ProtocolError(
        f"{kind}: called in thread {threading.current_thread().name!r}, but this MPI was started "
        "for one thread only; call it in the thread that initialised MPI, or leave "
        "mpi4py.rc.thread_level at 'multiple'"
    )
    mark_told(error, context)
    return error


class Running(threading.local):
    """The handles of the nonblocking operations that this thread has begun and that still run.

    A handle has an attribute `context` and a method `test`.
    """

    def __init__(self):
        self.handles: list = []

    def append(self, handle) -> None:
        """Add the operation `handle`, so that every wait of this thread makes progress for it."""
        self.handles.append(handle)
        handle.context.handles.append(handle)

    def remove(self, handle) -> None:
        """Remove the operation `handle`, which another thread may have begun."""
        for kept in (self.handles, handle.context.handles):
            if handle in kept:
                kept.remove(handle)

    def progress(self, test: Callable[[], bool]) -> Callable[[], bool]:
        """Return a function that continues this thread's open operations, then calls `test`."""

        def look() -> bool:
            for handle in tuple(self.handles):
                if handle.context.failed:
                    self.handles.remove(handle)  # another thread has given up the communicator
                else:
                    handle.test()
            return test()

        return look

    def __iter__(self):
        return iter(tuple(self.handles))

    def __len__(self) -> int:
        return len(self.handles)
