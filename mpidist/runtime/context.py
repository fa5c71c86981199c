"""What hangs on a communicator: private duplicates, operation numbers, cached plans.

One `Context` per communicator, hung on it as an MPI attribute, so users pass their mpi4py
communicator and nothing else. It is closed by `free(comm)`, or at exit before MPI is finalised
(MPI never runs delete callbacks for COMM_WORLD).

A context also knows how to wait: `wait(test)` polls, and once it has waited longer than a moment
it exchanges statuses with the other ranks (`statuses.py`), so that ranks in different operations
raise `MismatchError` together instead of hanging. What one rank raises the others hear: `call`.
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
from operator import attrgetter

import numpy as np
from mpi4py import MPI

from .. import arrays, events
from ..errors import ClosedError, MismatchError, described
from .agreement.calls import Call, Running, mark_told, refusal, was_told, wrong_thread
from .agreement.crossed_waits import open_contexts
from .agreement.mismatch import BALLOT, BROKEN, CROSSED, RAISED, Signature
from .agreement.statuses import HISTORY, Statuses
from .agreement.tell_others import contexts
from .buffer_pool import BufferPool
from .communicator import handle_of
from .context_end import leave_together
from .context_setup import Making
from .failure import hook, is_child
from .polling import wait_until

#: Plans kept per communicator; of too many, one that has not run lately is dropped (and closed).
MAX_PLANS = 256

#: Nonblocking operations that this thread has under way. Every wait makes progress for all of them,
#: so ranks may wait for theirs in different orders.
running = Running()

_keyval = MPI.KEYVAL_INVALID
# Operations that can no longer end: MPI may still write into their buffers.
_abandoned: list = []
_making: dict[int, Making] = {}
_one_thread = threading.RLock()  # again in one: a signal handler may call


class Context:
    """Everything mpidist keeps for one communicator. Made by `of`, closed by `free`."""

    __slots__ = ("__dict__", "__weakref__", "stopped")  # its short paths write it twice a call

    def __init__(self, comm: MPI.Comm, private: tuple[MPI.Comm, MPI.Comm, int]):
        self.comm = comm
        self.rank, self.size = comm.rank, comm.size
        self.host = socket.gethostname()
        # Plans send on `data`. Statuses travel on `control`: a probe with wildcards meets no data.
        self.data, self.control, self.identity = private
        self.thread = threading.get_ident()  # of the newest call
        self.tag_limit = (self.data.Get_attr(MPI.TAG_UB) or 32767) - 1
        self.sent = events.Counters()
        self.runs: list[events.Runs] = []
        self.plans: OrderedDict = OrderedDict()
        self.quick: dict = {}
        self.store: dict = {}
        self.pool = BufferPool()
        self.begun = 0  # operations, without those that plans count
        self.heard = time.monotonic()  # when this rank last listened to the others, or need not
        self.chain = 0  # of the operations in which not every rank waits for all: `transfer`
        self.history: deque[Signature] = deque(maxlen=HISTORY)
        self.failed: str | None = None
        #: True: whoever begins an operation must ask `begin` whether it may. So while a call is
        #: under way (`caller` is its thread), and for good once this has failed or was closed.
        self.closed = self.stopped = self.under_way = False
        self.caller: int | None = None
        self.unconfirmed, self.confirmed = False, 0  # this rank raised: have all? how often so?
        #: The one thread that may call, where MPI allows one only.
        self.owner = None if MPI.Query_thread() == MPI.THREAD_MULTIPLE else threading.get_ident()
        self.handles: list = []  # nonblocking operations, of all threads
        self.leftovers = False  # messages of a broken server group are still on their way
        self.statuses = Statuses(self)

    @property
    def counters(self) -> events.Counters:
        """Messages and bytes of this rank so far on this communicator.

        For reading: it asks every plan. Operations add to their `Runs` or to ``sent``.
        """
        for runs in self.runs:
            runs.take(self.sent)
        return self.sent

    def count(
        self,
        counters: events.Counters,
        reader: Callable[[], int] | None = None,
        *,
        numbers: bool = False,
    ) -> events.Runs:
        """Return a new `Runs` that belongs to this context until `uncount`."""
        runs = events.Runs(counters, reader, numbers)
        self.runs.append(runs)
        return runs

    def uncount(self, runs: events.Runs) -> None:
        """Forget `runs`, not what they sent. All ranks must do it at the same operation."""
        runs.take(self.sent)
        self.runs.remove(runs)
        if runs.numbers:
            self.begun += runs.number()

    # -- operation numbers -------------------------------------------------------------

    @property
    def sequence(self) -> int:
        """Number of the newest operation, the same on all ranks that are in it.

        Plans on which every microsecond counts do not count their operations twice, for themselves
        and here: their runs are added where somebody asks.
        """
        return self.begun + sum(runs.number() for runs in self.runs if runs.numbers)

    def operation(self, sequence: int) -> Signature | None:
        """Return the signature of an operation; None for one forgotten or yet to come."""
        back = self.sequence - sequence
        return self.history[-1 - back] if 0 <= back < len(self.history) else None

    def begin(self, signature: Signature, runs: events.Runs | None = None) -> int:
        """Begin the next operation; every rank's n-th call must have the same signature.

        Counts it in `runs`. Returns a number for `tag`: the same on all ranks, and another one for
        each operation that has a tag. If `runs` number the operations, these have no tag: 0.
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
        """Raise what forbids this thread to begin an operation now; whether it is in a call.

        The first call after an exception is collective: see `raised`.
        """
        self._check_thread(kind)
        if self.failed:
            raise MismatchError(f"this communicator failed earlier: {self.failed}")
        if self.closed:
            raise ClosedError("the context of this communicator was freed by md.free(comm)")
        me = threading.get_ident()
        if self.caller == me:
            return True
        if self.stopped and (self.caller is not None or not self.unconfirmed):
            raise refusal(kind, self)
        if self.unconfirmed:
            self._confirm(me)
        return False

    def _confirm(self, me: int) -> None:
        """Prove that all ranks raised in place of an operation, as this one did. Collective."""
        self.caller = me
        try:
            self.agree(Signature(RAISED, "", ""))
            self.confirmed += 1
            self.unconfirmed = False
        finally:
            self.caller = None
            self.stopped = bool(self.failed) or self.unconfirmed

    def _check_thread(self, kind: str) -> None:
        if self.owner is not None and threading.get_ident() != self.owner:
            raise wrong_thread(kind, self)

    def begin_agreed(self, signature: Signature, what: str) -> None:
        """Begin what comes before `signature`, such as "first call", and `agree`. Collective.

        It is an operation of its own, so that a rank that has made the plan before and goes
        straight on into `signature` does not share a number with the ranks that still agree on it.
        """
        extra = f"{what}, {signature.extra}" if signature.extra else what
        signature = signature._replace(extra=extra)
        self.begin(signature)
        self.agree(signature)
        self.under_way = False

    def tag(self, number: int) -> int:
        """Message tag of operation `number`; what it is stands in `executor.heading`."""
        return number % self.tag_limit

    # -- waiting -----------------------------------------------------------------------

    def wait(self, test: Callable[[], bool], sequence: int | None = None) -> None:
        """Poll `test` until true; raise MismatchError when the ranks turn out to disagree.

        `sequence` is the number of the operation waited for: the newest one by default, an older
        one for a nonblocking operation that others have been begun after.
        """
        if self.failed and not test():
            raise MismatchError(f"this communicator failed earlier: {self.failed}")
        self.statuses.awaited = sequence
        try:
            wait_until(running.progress(test) if running else test, self.statuses.look_around)
        except BaseException as error:
            _abandoned.append(test)
            self.break_off(error, sequence)
            raise

    def disagree(self, sequence: int | None = None) -> None:
        """Raise MismatchError: the data showed that the ranks were in different operations."""
        self.statuses.disagree(sequence)

    # -- exceptions --------------------------------------------------------------------

    def call(self, kind: str) -> Call:
        """Return a ``with`` for a public call of the name `kind`.

        Raises ProtocolError while another thread has a call under way. An exception inside it is
        told to the other ranks: see `raised`, `break_off`. May be nested in one thread.
        """
        self._check_thread(kind)
        return Call(self, kind)

    def raised(self, error: BaseException) -> None:
        """Tell the others that `error` came in place of this rank's next operation.

        A rank that is in that operation, or comes to it, raises MismatchError with these words.
        Before its next operation this rank makes sure that all have raised in its place. So the
        communicator stays usable after an argument that is bad everywhere.
        """
        if self.size == 1 or self.closed:
            return
        self.unconfirmed = True
        self.begun += 1
        mark_told(error, self, for_now=True)
        self.history.append(Signature(RAISED, described(error), ""))
        self.statuses.tell_raised(self.sequence)

    def break_off(self, error: BaseException, sequence: int | None = None) -> None:
        """Give up an operation that has begun, here and on all other ranks.

        Who waits for this rank raises MismatchError naming it and `error`; nothing more can be done
        on this communicator. Does not raise; the caller raises `error` again.
        """
        mark_told(error, self)
        if self.failed or self.size == 1:
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
        """Tell the others of what was raised on the way into a call, unless they know."""
        if was_told(error, self) or self.failed or self.closed or self.caller is not None:
            return
        self.raised(error)
        self.stopped = bool(self.failed) or self.unconfirmed

    def give_up(self, text: str) -> None:
        """Begin nothing any more, and make no progress for what has begun."""
        self.failed, self.stopped = text, True
        self._abandon()

    def _abandon(self) -> None:
        """Keep what MPI may still write into; waits on other communicators go on without it."""
        _abandoned.append((self, tuple(self.handles)))
        for handle in tuple(self.handles):
            running.remove(handle)

    # -- agreement ---------------------------------------------------------------------

    def agree(self, signature: Signature, *facts: int) -> list[int]:
        """Prove that all ranks begin the same new operation. Collective, polled.

        One small nonblocking allreduce of (key, -key): equal on all ranks only when both
        maxima belong to one key. Runs when a plan is made, never when it is re-used. Up to
        `FACTS` numbers of each rank come with it; their maxima are returned (`run_on_all`).
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
        """Close a plan and forget it. All ranks must drop the same ones."""
        self.quick.pop(key[1:], None)
        self.plans.pop(key).close()

    def close(self) -> None:
        """Wait for the other ranks, then free what was made. Collective; idempotent.

        Nonblocking operations are finished first. A rank that leaves early tells those that still
        wait for it: they raise MismatchError, as it does, instead of waiting for ever.
        """
        if self.closed:
            return
        self.closed = self.stopped = True
        if self in open_contexts:
            open_contexts.remove(self)
        usable = False
        try:
            usable = not self.failed and leave_together(self)
        finally:
            if not usable:
                self._abandon()
        if not usable:
            return
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
    """Return the context of `comm`, made on first use. Collective over `comm` on first use."""
    context = contexts.get(getattr(comm, "handle", 0))  # `_make` refuses what has none
    return _make(comm) if context is None else context


def _make(comm: MPI.Comm) -> Context:
    global _keyval
    with _one_thread:
        hook(comm)
        arrays.set_direct(arrays.direct_wanted(os.environ))
        if _keyval == MPI.KEYVAL_INVALID:
            _keyval = MPI.Comm.Create_keyval(delete_fn=_forget)
            # Handlers run last in, first out: before the exit barrier and MPI_Finalize.
            atexit.register(_close_all)
        if comm.handle not in _making:
            _making[comm.handle] = Making(comm)
            comm.Set_attr(_keyval, None)  # so that `_forget` is told when the communicator goes
        making = _making[comm.handle]
    with making:
        if comm.handle not in contexts:  # another thread may have come before
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
    """Free everything mpidist keeps for `comm`. Collective over `comm`; a second call does nothing.

    Needed only for communicators that come and go; what is left is freed at exit.
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
    for context in sorted(open_contexts, key=attrgetter("identity")):  # alike everywhere
        try:
            context.close()
        except (MismatchError, MPI.Exception) as error:
            # Whoever was told of it is not alone with it: one rank speaks.
            if context.statuses.found or isinstance(error, MPI.Exception):
                print(f"mpidist: error: {error}", file=sys.stderr, flush=True)
