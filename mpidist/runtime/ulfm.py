"""Detect that a rank has died, and make a smaller communicator of the living ranks (ULFM).

ULFM (user-level failure mitigation) is the part of MPI with which a program can continue after a
rank has died. In Open MPI, a job has ULFM if it was started by ``mpirun --with-ft ulfm``.

    a rank is killed --> a waiting rank probes `base` --> RankFailure
                     --> revoke all: every other rank leaves its call of MPI with an error, too
                     --> shrink `base` to the living ranks --> a new `Membership`

Open MPI 5.0.11 reports a death only to a rank that makes progress in MPI on a communicator with the
dead rank. Therefore every wait of mpidist calls `Membership.look`, which probes `base`, a private
communicator of all ranks of the group.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import compress
from typing import Any

import numpy as np
from mpi4py import MPI

from ..errors import RankFailure
from ..launch.environment import has_ulfm
from . import failure, polling
from .agreement import agreed_bits
from .agreement.agreed_bits import DONE, GO_ON, LEAVE, SPARE, WELL
from .agreement.crossed_waits import open_contexts
from .before_exit import READ_BY
from .communicator import ElasticComm, elastic_comm, has_rank_of, shrunk
from .failure import leave_with, survive

#: A tag with which no rank sends, and the tag of the result that is sent to the spares.
_TAG, _RESULT = 9, 10
#: Seconds between two checks of a spare, a rank that waits to replace a dead rank. A waiting spare
#: takes about 1 % of a core.
_STAND_BY = 0.005
#: Objects that MPI may still use after a death; they are never freed.
_GRAVE: list = []
#: MPI reports a death within the first number of seconds if the kernel has shown the death already,
#: and within the second number if a call of MPI has noticed it. With 24 processes per core, the
#: report after a call of MPI took more than 0.5 s.
_REPORT, _SOON = 5.0, 3.0
_DEATH = (MPI.ERR_PROC_FAILED, MPI.ERR_PROC_FAILED_PENDING, MPI.ERR_REVOKED)

#: A function that takes the name of a dead rank, and returns it with the reason why the rank was
#: ended if a module knows the reason.
why_gone: Callable[[str], str] = str

#: The membership in which this process notices deaths; a process has at most one membership.
current: Membership | None = None


def is_death(error: BaseException | None) -> bool:
    """Return whether `error` says that a rank has died, or that another rank noticed a death."""
    if not isinstance(error, MPI.Exception) or error.Get_error_class() in _DEATH:
        return isinstance(error, RankFailure | MPI.Exception)
    # A blocking call of Open MPI 5.0.11 may report a death as MPI_ERR_OTHER or in a status.
    try:
        expect_death(_SOON)
    except RankFailure:
        return True
    return False


def rank_failure(error: BaseException) -> RankFailure:
    """Return the `RankFailure` to raise for an error for which `is_death` is true."""
    if isinstance(error, RankFailure):
        return error
    if current is not None:
        return current.failure()
    return RankFailure(f"a rank of this communicator has died ({error})")


def keep_alive(*objects) -> None:
    """Keep objects until the process ends, because MPI may still use them after a death."""
    if current is not None:
        _GRAVE.append(objects)


def expect_death(seconds: float = _REPORT) -> None:
    """Raise RankFailure if MPI reports a death within `seconds`.

    A rank calls this function after an error that the death of a rank may have caused. Does nothing
    in a program that ends when a rank dies.
    """
    end = time.monotonic() + seconds
    while current is not None and time.monotonic() < end:
        current.look()
        time.sleep(0.0005)


class Membership:
    """The living ranks of an elastic group, from one death of a rank to the next.

    An elastic group is a group of ranks that goes on after a rank has died.

    Parameters
    ----------
    base : MPI.Intracomm
        A private communicator of the living ranks.
    names : sequence of str
        The name of each rank of `base` in error texts, such as ``rank 3 of 8 on n2``.
    places : sequence of (int, str)
        The node of each rank: its number and its host.
    identity : int
        The number that stands for `comm` in messages between ranks, equal on all ranks.
    active : sequence of bool
        For each rank of `base`, whether it works and so is in `comm`. The other ranks are spares,
        which wait to take the place of a dead rank.

    Attributes
    ----------
    comm : ElasticComm
        The communicator of the active ranks, which is made by `open`; ``MPI.COMM_NULL`` on a spare.
    children : list of MPI.Comm
        `comm` and all communicators that were made from it. After a death, none of them can be used
        any more.
    """

    def __init__(
        self,
        base: MPI.Intracomm,
        names: tuple[str, ...],
        places: tuple[tuple[int, str], ...],
        identity: int,
        active: Sequence[bool],
    ):
        self.base, self.names, self.places, self.identity = base, names, places, identity
        self.active = tuple(active)
        self.cross: Any = None  # the `CrossMemory` of `comm`, if it is on one node
        self.children: list[MPI.Comm] = []
        self._settled: list[MPI.Comm] = [base]
        self.kept: list = []  # objects that MPI may use until the communicators are freed
        self._done = False  # whether the spares know that the group's work is done
        self._leave: int | None = None  # the code with which all active ranks exit

    def open(self) -> None:
        """Make `comm`, and from now on notice when a rank dies. Collective over `base`."""
        global current
        current, polling.look = self, self.look
        # The communicators of the context of `comm` are made now, because one agreement of the
        # ranks is then enough for all three communicators.
        self.comm: Any = MPI.COMM_NULL
        made = []
        if all(self.active):
            made = [self.register(self.base.Dup()) for _ in range(3)]
        else:
            color = 0 if self.active[self.base.rank] else MPI.UNDEFINED
            if (first := self.base.Split(color, self.base.rank)) != MPI.COMM_NULL:
                made = [self.register(each) for each in (first, first.Dup(), first.Dup())]
        self.settle(self.base, *made)
        if made:
            self.comm, data, control = made
            self.comm.prepared = data, control, self.identity
            self.comm.places = tuple(compress(self.places, self.active))
        if has_ulfm():  # a program of one rank may run without ULFM
            failure.elastic = self
        (survive if has_ulfm() else failure.set_exit_barrier)(self.base)

    def register(self, comm):
        """Add `comm` to `children`, and return it as an `ElasticComm`.

        After a death, the communicators in `children` cannot be used any more.
        """
        self.children = [child for child in self.children if child != MPI.COMM_NULL]
        self._settled = [comm for comm in self._settled if comm != MPI.COMM_NULL]
        self.children.append(elastic_comm(comm, self))
        return self.children[-1]

    def settle(self, around: MPI.Comm, *made):
        """Wait until all ranks have made the communicators `made`; return ``made[0]``.

        `around` is a communicator of all ranks that make them. Collective over `around`.
        """
        if around != MPI.COMM_NULL:  # COMM_NULL: this rank is not in the new communicator
            request = around.Ibarrier()
            try:
                polling.wait_until(request.Test)
            except Exception:
                keep_alive(request)
                raise
        self._settled += made
        return made[0] if made else None

    def look(self) -> None:
        """Raise RankFailure if a rank of the group has died; make progress in MPI."""
        try:
            self.base.Iprobe(MPI.ANY_SOURCE, _TAG)
        except MPI.Exception as error:
            if not is_death(error):
                raise
            raise self.failure() from None

    def dead(self) -> list[int]:
        """Return the ranks of `base` that are dead, as far as this rank knows."""
        failed, everyone = self.base.Get_failed(), self.base.Get_group()
        ranks = failed.Translate_ranks(range(failed.size), everyone)
        failed.Free()
        everyone.Free()
        return [*ranks]

    def failure(self) -> RankFailure:
        """Return the error that names the dead ranks."""
        dead = self.dead()
        who = ", ".join(why_gone(self.names[rank]) for rank in dead[:8]) or "a rank"
        more = f" and {len(dead) - 8} more" if len(dead) > 8 else ""
        verb = "has" if len(dead) < 2 else "have"
        return RankFailure(f"{who}{more} {verb} died", tuple(dead))

    def end(self, text: str) -> None:
        """Make all ranks leave all calls on all communicators of the group. Not collective.

        A later use of the communicators raises ClosedError with `text`.
        """
        global current
        current, polling.look = None, None
        for comm in self._settled:
            with suppress(MPI.Exception):
                if comm != MPI.COMM_NULL:
                    comm.Revoke()
        mine = [comm.handle for comm in self.children]
        self._end_contexts(text, lambda comm: comm.handle in mine)
        for comm in self.children:
            if isinstance(comm, ElasticComm):
                comm.ended = text

    def _end_contexts(self, text: str, which: Callable[[MPI.Comm], bool]) -> None:
        for context in tuple(open_contexts):
            if which(context.comm):
                self.kept.append(context.end(text))

    def shrink(
        self, agreed: bool = False, begin: Callable[[str], object] = lambda phase: None
    ) -> Membership:
        """Return a new `Membership` of the living ranks. Collective over the living ranks.

        This rank must have called the method `end` of this membership, and must call `open` of the
        new one later. `agreed` says that this rank has just called `all_here`. Before each phase of
        the work, `begin` is called with the name of the phase.
        """
        if not agreed:
            begin("MEET")
            self._agree(GO_ON)
        begin("SHRINK")
        base = shrunk(self.base)
        here, there = base.Get_group(), self.base.Get_group()
        before = here.Translate_ranks(range(here.size), there)
        dead = MPI.Group.Difference(there, here)
        # The program may have made communicators with a dead rank earlier, or from other
        # communicators than `comm`. Their contexts end here.
        self._end_contexts(
            "a rank of this communicator has died", lambda comm: has_rank_of(comm, dead)
        )
        for group in (here, there, dead):
            group.Free()
        for comm in (*self.children, self.base):
            with suppress(MPI.Exception):
                if comm != MPI.COMM_NULL:
                    comm.Free()
        for each in (self.kept, self.children, self._settled):
            each.clear()
        survive(base)
        names = tuple(self.names[rank] for rank in before)
        places = tuple(self.places[rank] for rank in before)
        active = [self.active[rank] for rank in before]
        while sum(active) < sum(self.active) and not all(active):
            active[active.index(False)] = True  # the first spare replaces a dead rank
        failure.elastic = living = Membership(base, names, places, self.identity + 1, active)
        # If there are spares, `comm` and `base` have different ranks, and cross memory is made
        # again later.
        if all(self.active) and self.cross:
            living.cross = self.cross.without(before)
        self.cross = None
        living._agree(GO_ON)  # now all ranks have made `base`, so it may be revoked
        return living

    def all_here(self, meet: Callable[[], object], done: bool = False) -> bool:
        """Wait for all ranks; return whether all of them are here and alive. Collective.

        The method first calls `meet`. This must be a collective function over `comm` that raises an
        error if ranks make different calls. All living ranks get the same answer. If the answer is
        false, all ranks must call `end` and ``shrink(agreed=True)``. If `done` is true, the spares
        (ranks that wait to replace a dead one) leave the job.
        """
        try:
            meet()
        except Exception as error:
            if not is_death(error):
                raise
            return self._agree(GO_ON)
        return self._agree(GO_ON | WELL | (DONE if done else 0))

    def give_result(self, result: bytes) -> None:
        """Send a short result to all spares (ranks that wait to replace a dead one).

        Only one active rank calls this method, before the spares leave the job.
        """
        for rank, active in enumerate(self.active):
            if not active:  # MPI sends such a short message at once, whatever the spare does
                keep_alive(result, self.base.Isend([result, MPI.BYTE], rank, _RESULT))

    def release(self) -> None:
        """Tell the spares (ranks that wait to replace a dead one) to exit. Collective over `comm`.

        The ranks of `comm` call this method when they exit. A rank whose exit code is nonzero waits
        at most 5 s for the other ranks.
        """
        patience = failure.LEAVE_TOGETHER if (code := failure.likely_exit_code()) else None
        if not (self._done or all(self.active) or self.comm == MPI.COMM_NULL):
            with suppress(TimeoutError):
                self._obey(self._meet(agreed_bits.exiting(code), patience, _STAND_BY)[0])

    def stand_by(self) -> bytes | None:
        """Wait as a spare (a rank that may replace a dead one) until the work is done.

        Returns the result of the work, or None if a rank has died; the caller must then call `end`
        and ``shrink(agreed=True)``. If the other ranks exit, this rank exits too.
        """
        while True:
            well = self._agree(GO_ON | WELL | DONE | LEAVE | SPARE, _STAND_BY)
            if self._leave is not None:
                sys.exit(self._leave)
            if not well:
                return None
            if self._done:
                status = MPI.Status()
                self.base.Probe(MPI.ANY_SOURCE, _RESULT, status)
                result = bytearray(status.Get_count(MPI.BYTE))
                self.base.Recv([result, MPI.BYTE], status.source, _RESULT)
                return bytes(result)

    def end_job(self, code: int, error: BaseException) -> bool:
        """End the job on all ranks; return whether this rank must print its error. Collective.

        The other ranks take part by calling `shrink`, `all_here` or `agree_at_exit`, and leave the
        job there with exit code `code`. Raises TimeoutError if they do not take part within some
        seconds. Afterwards this rank must call `failure.leave_with`.
        """
        self.end("the job ends")
        self._meet(agreed_bits.ending(code), READ_BY)
        hearsay = getattr(error, "secondary", False)
        # An exception of MPI usually means that another rank has ended the job.
        unnamed = isinstance(error, MPI.Exception | RankFailure) and not getattr(error, "ranks", ())
        return self._last_meeting(2 if hearsay else int(unnamed))

    def agree_at_exit(self) -> str:
        """Find out with the other ranks why the barrier at exit has failed. Collective.

        If a rank ends the job, this method does not return. If a rank has died, the lowest living
        rank gets the text that it must print, and the other ranks get "".
        """
        self._agree(GO_ON)
        dead = self.dead()
        living = [rank for rank in range(self.base.size) if rank not in dead]
        return f"{self.failure()}, at the end" if self.base.rank == living[0] else ""

    def _last_meeting(self, turn: int) -> bool:
        """Return whether this rank prints its error: the lowest rank of the smallest `turn` does.

        Collective.
        """
        base = shrunk(self.base)
        survive(base)
        mine = turn * base.size + base.rank
        first = np.array([mine])
        base.Allreduce(MPI.IN_PLACE, first, MPI.MIN)
        return bool(first[0] == mine)

    def _agree(self, mine: int, pause: float = 0.0) -> bool:
        """Return whether all ranks pass `WELL` (all is well) and none has died. Collective.

        If a rank ends the job because of its own error, this function does not return.
        """
        value, alive = self._meet(mine | agreed_bits.NO_CODE, pause=pause)
        self._obey(value)
        self._done = bool(value & DONE)
        self._leave = agreed_bits.leave_code(value)
        return alive and bool(value & WELL)

    def _obey(self, value: int) -> None:
        """Leave the job if `value`, the "and" of all ranks' ints, says that a rank ends the job."""
        if (code := agreed_bits.end_code(value)) is not None:
            self.end("the job ends")
            self._last_meeting(3)
            leave_with(code)

    def _meet(
        self, mine: int, patience: float | None = None, pause: float = 0.0
    ) -> tuple[int, bool]:
        """Combine the ints `mine` of all ranks by "and"; return the result, and if all are alive.

        All living ranks get the same result. After `patience` seconds, if given, ranks that wait
        for another rank raise TimeoutError.
        """

        def late(waited: float) -> None:
            if patience is not None and waited > patience:
                raise TimeoutError

        value = np.array([mine], np.intc)
        look, polling.look = polling.look, None  # a death must not interrupt an agreement
        request, alive = self.base.Iagree(value), True
        try:
            began = time.monotonic()
            while pause and not request.Test():
                late(time.monotonic() - began)
                time.sleep(pause)
            polling.wait_until(request.Test, late)
        except TimeoutError:
            _GRAVE.append((request, value))
            raise
        except MPI.Exception as error:
            alive = False
            if not is_death(error):
                raise
        finally:
            polling.look = look
        return int(value[0]), alive
