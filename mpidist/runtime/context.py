"""The context of a communicator: duplicates, operation numbers and plans (prepared operations).

A `Context`, mpidist's state for a communicator, is an MPI attribute of the communicator, so users
pass only their mpi4py communicator. `free(comm)` closes the context. A context that is still open
when the program exits is closed before MPI is finalised.
"""

from __future__ import annotations

import atexit
import os
import socket
import sys
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from contextlib import ExitStack
from operator import attrgetter

import numpy as np
from mpi4py import MPI

from .. import arrays, events
from ..errors import ClosedError, MismatchError, MpidistError, RankFailure, described
from .agreement.calls import Call, Running, mark_told, refusal, was_told, wrong_thread
from .agreement.crossed_waits import open_contexts
from .agreement.mismatch import BALLOT, BROKEN, CROSSED, RAISED, Signature
from .agreement.statuses import HISTORY, Statuses
from .agreement.tell_others import contexts
from .buffer_pool import BufferPool
from .communicator import handle_of
from .context_end import end_after_death, leave_together
from .context_setup import Making
from .failure import hook, is_child
from .polling import wait_until
from .ulfm import is_death, rank_failure

#: The largest number of plans; beyond it, a plan that has not run lately is closed.
MAX_PLANS = 256

#: The running nonblocking operations of this thread. Every wait makes progress for all of them, so
#: ranks may wait for them in different orders.
running = Running()

_keyval = MPI.KEYVAL_INVALID
# Operations that can never end; they are kept, because MPI may still write into their memory.
_abandoned: list = []
_making: dict[int, Making] = {}
_one_thread = threading.RLock()  # reentrant, because a signal handler may make a first call


class Context:
    """mpidist's state for one communicator. The function `of` makes it, and `free` closes it."""

    __slots__ = ("__dict__", "__weakref__", "stopped")  # the fast paths write `stopped` twice

    def __init__(self, comm: MPI.Comm, private: tuple[MPI.Comm, MPI.Comm, int]):
        self.comm = comm
        self.rank, self.size = comm.rank, comm.size
        self.host = socket.gethostname()
        # Plans send their messages on `data`. Statuses are sent on `control`, so that a probe for
        # statuses finds no data message.
        self.data, self.control, self.identity = private
        self.thread = threading.get_ident()  # the thread of the newest call
        self.tag_limit = (self.data.Get_attr(MPI.TAG_UB) or 32767) - 1
        self.sent = events.Counters()
        self.runs: list[events.Runs] = []
        self.plans: OrderedDict = OrderedDict()
        self.quick: dict = {}
        self.store: dict = {}
        self.pool = BufferPool()
        self.begun = 0  # the number of operations that have begun, except those that plans count
        self.heard = time.monotonic()  # when this rank last received statuses or did not need to
        self.chain = 0  # a digest of past operations in which not all ranks wait
        self.history: deque[Signature] = deque(maxlen=HISTORY)
        self.failed: str | None = None
        self.failed_as: type[MpidistError] = MismatchError  # or RankFailure
        self.ended = ""  # the reason why the context has ended without `free`
        #: If `stopped` is true, a thread must call `check_free` before it begins an operation.
        #: `stopped` is true while a call runs in the thread `caller`, and always after a failure or
        #: `close`.
        self.closed = self.stopped = self.under_way = False
        self.caller: int | None = None
        #: Whether this rank raised without a proof that all ranks did; the number of proofs so far.
        self.unconfirmed, self.confirmed = False, 0
        #: The only thread that may call, if MPI allows only one thread.
        self.owner = None if MPI.Query_thread() == MPI.THREAD_MULTIPLE else threading.get_ident()
        self.handles: list = []  # the nonblocking operations of all threads
        self.leftovers = False  # whether messages of a broken server group are still on their way
        self.statuses = Statuses(self)

    @property
    def counters(self) -> events.Counters:
        """The messages and bytes of this rank so far on this communicator."""
        for runs in self.runs:
            runs.take(self.sent)
        return self.sent

    def count(self, counters: events.Counters, reader=None, *, numbers=False) -> events.Runs:
        """Return a new counter of an operation's runs; the property `counters` includes it."""
        runs = events.Runs(counters, reader, numbers)
        self.runs.append(runs)
        return runs

    def uncount(self, runs: events.Runs) -> None:
        """Remove the counter `runs` (a `Runs` object); add its counts to the communicator's totals.

        All ranks must call this method at the same place in the order of their operations.
        """
        runs.take(self.sent)
        self.runs.remove(runs)
        if runs.numbers:
            self.begun += runs.number()

    # -- operation numbers -------------------------------------------------------------

    @property
    def sequence(self) -> int:
        """The number of the newest operation, equal on all ranks that are in it."""
        return self.begun + sum(runs.number() for runs in self.runs if runs.numbers)

    def operation(self, sequence: int) -> Signature | None:
        """Return the description of operation `sequence`; None if too old or not begun."""
        back = self.sequence - sequence
        return self.history[-1 - back] if 0 <= back < len(self.history) else None

    def begin(self, signature: Signature, runs: events.Runs | None = None) -> int:
        """Begin the next operation, which `signature` describes in the same way on all ranks.

        Returns the number of the operation, for the method `tag`. `runs`, if given, counts the runs
        of a prepared operation, and is increased by one; if it also numbers them (its attribute
        `numbers` is true), the method returns 0.
        """
        if self.stopped and (self.failed or self.caller != threading.get_ident()):
            self.check_free(signature.kind)
        self.under_way = True
        self.history.append(signature)
        if runs is not None:
            runs.times += 1
            if runs.numbers:
                return 0
        self.begun += 1
        return self.begun

    def check_free(self, kind: str) -> bool:
        """Raise an error if this thread must not begin an operation now.

        Returns whether this thread is inside another mpidist call. If this rank has raised an
        exception instead of beginning the last operation, the method checks that all other ranks
        have raised one, too. This check is collective.
        """
        self._check_thread(kind)
        if self.closed:
            raise ClosedError(self.ended or "this communicator was freed by md.free(comm)")
        if self.failed:
            raise self.earlier_failure()
        me = threading.get_ident()
        if self.caller == me:
            return True
        if self.stopped and (self.caller is not None or not self.unconfirmed):
            raise refusal(kind, self)
        if self.unconfirmed:
            # Prove that all ranks have raised instead of beginning an operation, as this rank has.
            self.caller = me
            try:
                self.agree(Signature(RAISED, "", ""))
                self.confirmed += 1
                self.unconfirmed = False
            finally:
                self.caller = None
                self.stopped = bool(self.failed) or self.unconfirmed
        return False

    def _check_thread(self, kind: str) -> None:
        if self.owner is not None and threading.get_ident() != self.owner:
            raise wrong_thread(kind, self)

    def begin_agreed(self, signature: Signature, what: str) -> None:
        """Begin to prepare an operation, and check that all ranks prepare the same one. Collective.

        `signature` describes the operation, and `what` is a text on what is prepared.
        """
        signature = signature._replace(extra=", ".join(filter(None, (what, signature.extra))))
        self.begin(signature)
        self.agree(signature)
        self.under_way = False

    def tag(self, number: int) -> int:
        """Return the message tag of operation `number`; tags begin again after `tag_limit`."""
        return number % self.tag_limit

    # -- waiting -----------------------------------------------------------------------

    def wait(self, test: Callable[[], bool], sequence: int | None = None, keep=True) -> None:
        """Call `test` until it is true; raise MismatchError if ranks are in different operations.

        `sequence` is the number of the operation that this rank waits for, by default the newest.
        After an exception, MPI may still write to memory that `test` refers to. So this memory is
        never freed, unless `keep` is false.
        """
        if self.failed and not test():
            raise self.earlier_failure()
        self.statuses.awaited = sequence
        try:
            wait_until(running.progress(test) if running else test, self.statuses.look_around)
        except BaseException as error:
            if keep:
                _abandoned.append(test)
            self.break_off(error, sequence)
            raise

    def disagree(self, sequence: int | None = None) -> None:
        """Raise MismatchError, as received data show that ranks are in different operations."""
        self.statuses.disagree(sequence)

    # -- exceptions --------------------------------------------------------------------

    def call(self, kind: str) -> Call:
        """Return the guard (a context manager) for a call of the public function named `kind`.

        Entering the guard raises ProtocolError while a call of another thread is running. An
        exception inside the ``with`` block is sent to the other ranks. Inside the block, the same
        thread may call other public functions.
        """
        self._check_thread(kind)
        return Call(self, kind)

    def raised(self, error: BaseException) -> None:
        """Tell the other ranks that this rank has raised `error` instead of beginning an operation.

        Any rank that begins the operation raises MismatchError with the text of `error`. If all
        ranks raise an exception instead, the communicator stays usable.
        """
        if self.size == 1 or self.closed:
            return
        self._check_death(error)
        self.unconfirmed = True
        self.begun += 1
        mark_told(error, self, for_now=True)
        self.history.append(Signature(RAISED, described(error), ""))
        self.statuses.tell_raised(self.sequence)

    def break_off(self, error: BaseException, sequence: int | None = None) -> None:
        """End an operation that has begun, on all ranks, because this rank has raised `error`.

        A rank that waits for this rank raises MismatchError, which names this rank and `error`. The
        communicator cannot be used afterwards. The caller must raise `error` again; if MPI has
        raised it because a rank has died, this method itself raises RankFailure.
        """
        mark_told(error, self)
        if self.failed or self.size == 1:
            return
        self._check_death(error)
        if self.failed:
            return
        number = self.sequence if sequence is None else sequence
        begun = self.operation(number)
        text = (
            f"{begun.kind if begun else 'operation'} #{number} was broken off by rank {self.rank} "
            f"of {self.size} ({self.host}): {described(error)}"
        )
        crossed = isinstance(error, MismatchError) and error.crossed
        self.statuses.sentence(str(error) if crossed else text, CROSSED if crossed else BROKEN)

    def escaped(self, error: BaseException) -> None:
        """Send `error` to the other ranks, unless a ``with`` block of `call` has sent it."""
        if was_told(error, self) or self.failed or self.closed or self.caller is not None:
            return
        self.raised(error)
        self.stopped = bool(self.failed) or self.unconfirmed

    def give_up(self, text: str) -> None:
        """Mark the communicator as failed: no operation begins or makes progress any more."""
        self.failed, self.stopped = text, True
        self._abandon()

    def _check_death(self, error: BaseException) -> None:
        """Give up the communicator if `error` reports a death; RankFailure if MPI raised it."""
        if is_death(error):
            found = rank_failure(error)
            self.failed_as = RankFailure
            self.give_up(str(found))
            if found is not error:
                raise found from error

    def earlier_failure(self) -> MpidistError:
        """Return the error for a new call on this communicator, which has already failed."""
        return self.failed_as(f"this communicator failed earlier: {self.failed}")

    def _abandon(self) -> None:
        """Keep the buffers into which MPI may still write; no operation makes progress any more."""
        _abandoned.extend((self, handle) for handle in self.handles)
        for handle in tuple(self.handles):
            running.remove(handle)

    # -- agreement ---------------------------------------------------------------------

    def agree(self, signature: Signature, *facts: int) -> list[int]:
        """Check that all ranks begin the same operation; return the maxima of `facts` over ranks.

        Collective. `signature` describes the operation, and `facts` are integers. Raises
        MismatchError on all ranks if their signatures differ.
        """
        if self.size == 1:
            return list(facts)
        key = signature.key
        values = np.zeros(BALLOT, np.int64)
        values[: 2 + len(facts)] = key, -key, *facts
        request = self.control.Iallreduce(MPI.IN_PLACE, [values, MPI.INT64_T], MPI.MAX)
        self.wait(request.Test)
        if values[0] != key or values[1] != -key:
            self.disagree()
        return values[2 : 2 + len(facts)].tolist()

    # -- end ---------------------------------------------------------------------------

    def drop(self, key) -> None:
        """Close the cached plan (prepared operation) `key`. All ranks must drop the same plans."""
        self.quick.pop(key[1:], None)
        self.plans.pop(key).close()

    def end(self, text: str) -> list:
        """End this context (mpidist's state for a communicator) after the death of a rank.

        Sends no messages. Later calls on the communicator raise an error with `text`. Returns the
        objects that own the context's buffers, which MPI may still use.
        """
        self.ended = text
        open_contexts.remove(self)
        self.give_up(self.failed or text)
        self.closed, self.failed_as = True, RankFailure
        _abandoned.append(self.statuses._outbox)
        return end_after_death(self)

    def close(self) -> None:
        """Wait for the other ranks, then free mpidist's state for the communicator.

        Collective; a second call does nothing. Nonblocking operations are finished first. If a rank
        leaves while other ranks still wait for it, all of them raise MismatchError.
        """
        if self.closed:
            return
        self.closed = self.stopped = True
        if self in open_contexts:
            open_contexts.remove(self)
        with ExitStack() as failing:
            failing.callback(self._abandon)
            if self.failed or not leave_together(self):
                return
            failing.pop_all()
        for item in (*self.plans.values(), *self.store.values()):
            if hasattr(item, "close"):
                item.close()
        self.plans.clear()
        self.quick.clear()
        self.store.clear()
        self.pool.close()
        self.data.Free()
        self.control.Free()


def of(comm: MPI.Comm) -> Context:
    """Return mpidist's state for `comm`; the first call for a communicator is collective."""
    context = contexts.get(getattr(comm, "handle", 0))  # `_make` raises if there is no handle
    return _make(comm) if context is None else context


def _make(comm: MPI.Comm) -> Context:
    global _keyval
    with _one_thread:
        hook(comm)
        arrays.set_direct(arrays.direct_wanted(os.environ))
        if _keyval == MPI.KEYVAL_INVALID:
            _keyval = MPI.Comm.Create_keyval(delete_fn=_forget)
            # The exit handler that was registered last runs first, so this handler runs before the
            # exit barrier and before MPI_Finalize.
            atexit.register(_close_all)
        if comm.handle not in _making:
            _making[comm.handle] = Making(comm)
            comm.Set_attr(_keyval, None)  # MPI calls `_forget` when the communicator is freed
        making = _making[comm.handle]
    with making:
        if comm.handle not in contexts:  # another thread may have made the context
            context = contexts[comm.handle] = Context(comm, making.finish())
            comm.Set_attr(_keyval, context)
            open_contexts.append(context)
            _making.pop(comm.handle, None)
        return contexts[comm.handle]


def _forget(comm: MPI.Comm, _keyval: int, _context: Context) -> None:
    if _context is not None or comm.handle not in contexts:
        contexts.pop(comm.handle, None)
        _making.pop(comm.handle, None)


def free(comm: MPI.Comm) -> None:
    """Free mpidist's state for `comm`. Collective over `comm`; a second call does nothing.

    A program needs `md.free` only for communicators that it frees itself. All other contexts are
    freed at exit.
    """
    context = contexts.get(handle_of(comm))
    if context is not None:
        try:
            context.close()
        finally:
            comm.Delete_attr(_keyval)


def _close_all() -> None:
    if MPI.Is_finalized() or is_child():
        return
    for context in sorted(open_contexts, key=attrgetter("identity")):  # in one order everywhere
        try:
            context.close()
        except (MismatchError, RankFailure, MPI.Exception) as error:
            # Other ranks print their own errors, and an elastic group prints deaths at its exit.
            heard = isinstance(error, MismatchError) and not context.statuses.found
            if not heard and not is_death(error):
                print(f"mpidist: error: {error}", file=sys.stderr, flush=True)
