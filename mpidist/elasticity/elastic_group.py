"""The group of an elastic program, which goes on with the living ranks after a death.

    RUN      the ranks do steps; a rank is killed, and a rank that waits for it raises RankFailure
    BROKEN   that rank revokes all communicators of the group, so all ranks leave their calls
    SHRINK   the living ranks make a smaller communicator
    SYNC     ranks that are behind get the state of the newest living rank (`peer_state`)
    RUN      the ranks repeat the interrupted step

A death at any place leads to BROKEN again. A step is done on a rank when this rank has changed its
state (`Group.done`). Steps that one living rank has done are not repeated, so no step is lost, and
no step is done twice.
"""

from __future__ import annotations

import atexit
import secrets
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from itertools import compress
from typing import Any, TypeVar

from mpi4py import MPI

from .. import events
from ..collectives import selection
from ..errors import ConfigError, ProtocolError, RankFailure, shown
from ..launch import heartbeat
from ..runtime import polling, ulfm
from ..runtime.agreement.run_on_all import run_on_all
from ..runtime.agreement.tell_others import contexts
from ..runtime.failure import this_rank
from ..runtime.polling import wait_until
from ..runtime.topology import topology_of
from ..runtime.ulfm import Membership, is_death
from . import peer_state
from .deadline import Deadline
from .evict import cause_in_words
from .node_board import OUTSIDE, NodeBoard
from .node_watch import NodeWatch
from .peer_state import NOTHING
from .repair_deadline import RepairDeadline

T = TypeVar("T")

_STOPPED = Deadline()

#: The group in whose loop this program is, if it is in one.
working: list[Group] = []


class ElasticStep(int):
    """The number of a step, and a context manager for the body of the step.

    A ``with`` block that ends without an exception means that the step is done. If a rank dies, the
    block ends early and silently, and the loop yields the same number again.
    """

    _group: Group

    def __enter__(self) -> ElasticStep:
        return self

    def __exit__(self, kind, error, trace) -> bool:
        return self._group._end_of_body(self, error)


class Group:
    """The living ranks of an elastic program; made by `elastic` and `run_elastic`.

    Attributes
    ----------
    comm : MPI.Intracomm
        The communicator of the living ranks. After a death this is a new communicator. Plans,
        arenas and communicators that were made from an older communicator raise ClosedError.
    rank, size : int
        The rank of this process in `comm`, and the number of living ranks.
    step : int
        The number of the next step; all steps before are done on this rank.
    deaths, evicted : int
        How many ranks have died so far, and how many of them were killed because they were stopped,
        hung or were slow.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        state: peer_state.State,
        min_ranks: int,
        restarts: bool,
        deadline: Deadline = _STOPPED,
        spares: int = 0,
    ):
        self.state, self.min_ranks = state, min_ranks
        self.step, self.deaths, self.evicted = 0, 0, 0
        self._restarts = restarts  # `run_elastic` begins its function again after a death
        self._on_resize: list[Callable[[int, int], Any]] = []
        self._broken_at: float | None = None  # when this rank has noticed the death
        self._agreed = False  # this rank has noticed it in `Membership.all_here`
        names, number = run_on_all(comm, "md.elastic: names", this_rank, _numbered)
        topology = topology_of(comm)
        places = tuple((node, topology.hosts[node]) for node in topology.node_of)
        base = MPI.Intracomm(comm.Dup())
        wait_until(comm.Ibarrier().Test)  # all ranks have made it
        active = [rank < comm.size - spares for rank in range(comm.size)]
        self._number = {name: rank for rank, name in enumerate(names)}
        self._members = Membership(base, names, places, number, active)
        self._members.open()
        self.watch = NodeWatch(NodeBoard(base), deadline)
        self.watch.end_steps()
        self._has_state = not self.is_spare
        self._repeated: int | None = None  # the step of a repair after which no rank had died
        ulfm.why_gone = self._why_gone
        if spares:
            # Before the handlers that were registered earlier, which wait for all ranks of the job.
            atexit.register(lambda: self._members.release())

    @property
    def comm(self) -> MPI.Intracomm:
        """The communicator of the living ranks."""
        return self._members.comm

    @property
    def spares(self) -> int:
        """The number of living ranks that wait to step in; they are not in `comm`."""
        return self._members.active.count(False)

    @property
    def is_spare(self) -> bool:
        """Whether this rank waits to step in; then `comm` is ``MPI.COMM_NULL``."""
        return self.comm == MPI.COMM_NULL

    @property
    def rank(self) -> int:
        """The rank of this process in `comm`."""
        return self.comm.rank

    @property
    def size(self) -> int:
        """The number of living ranks."""
        return self.comm.size

    def on_resize(self, function: Callable[[int, int], Any]) -> None:
        """Call ``function(old_size, new_size)`` on all living ranks after each death.

        The function is called when the state is up to date, before the step is repeated, and also
        on parameter servers. It may make arenas, plans and communicators anew from `comm`.
        """
        self._on_resize.append(function)

    def done(self, step: int) -> None:
        """Say that this rank has done `step` and has changed its state; local and cheap.

        Call this function as soon as the state has the result of the step. If a rank dies after
        this call, the step is not repeated.
        """
        if step != self.step:
            raise ProtocolError(f"done({shown(step)}): step {self.step} is the next one")
        self.step += 1
        self.watch.step_done(self.step)
        heartbeat.note_steps(self.step)

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Return a context manager for work of a rank that the other ranks may wait for.

        `name` is "save", "data", "evaluate" or "plan". In the ``with`` block this rank is not
        evicted because it is late, or because a native call holds Python's lock.
        """
        return polling.phase(name)

    def steps(self, first: int, last: int, *, together: bool = True) -> Iterator[ElasticStep]:
        """Yield the numbers of the steps ``first, ..., last - 1``. Collective.

        Each number is an `ElasticStep`, whose ``with`` block is the body of the step. Steps that
        are done already are left out, so the numbers of a second loop must be larger than those of
        the first. When the loop has ended, all living ranks have done all steps.

        With ``together=False``, which only `run_elastic` allows, the loop does not wait for the
        other ranks at its end. Parameter servers do no steps, so their workers loop in this way.
        """
        if not together and not self._restarts:
            raise ConfigError("steps: together=False needs md.run_elastic")
        self.step = max(self.step, first)
        self.watch.begin_steps()
        try:
            while True:
                while self.step < last:
                    step = ElasticStep(self.step)
                    step._group = self
                    yield step
                    if self._broken_at is not None:
                        self._repair()
                    elif self.step == step:
                        cure = "use `with step:`, or call group.done(step)"
                        raise ProtocolError(f"step {int(step)} was left without being done; {cure}")
                if not together or self._all_here():
                    return
                self._repair()
        finally:
            self.watch.end_steps()

    # -- a death -------------------------------------------------------------------------

    def _end_of_body(self, step: int, error: BaseException | None) -> bool:
        """Note the end of a step's body; return whether to suppress `error`, as after a death."""
        if error is None:
            if self.step == step:
                self.done(step)
            return False
        if not is_death(error) or self._restarts:
            return False
        self._broken_at = time.monotonic()
        return True

    def _all_here(self, done: bool = False, result: bytes = b"") -> bool:
        """Wait until all ranks are here; return false on all living ranks if one has died.

        With `done`, the spares get the `result` and leave.
        """
        # At the end of a function, servers have done no steps.
        where = "function" if done else f"steps before {self.step}"
        doing = f"md.elastic: the end of the {where}"

        def meet() -> None:
            run_on_all(self.comm, doing, lambda: None)
            if done and self.rank == 0:
                self._members.give_result(result)

        if self._members.all_here(meet, done):
            return True
        self._broken_at, self._agreed = time.monotonic(), True
        if self._restarts:
            raise self._members.failure()
        return False

    def repeat(
        self,
        function: Callable[[], T],
        encode: Callable[[T], bytes] = lambda result: b"",
        decode: Callable[[bytes], Any] = lambda text: None,
        broken: Callable[[], Any] = lambda: None,
    ) -> T:
        """Call `function`, again after each death, and return its result. Collective.

        `broken` is called after a death, before the repair. A spare waits until it steps in, and
        then calls `function` too. If a spare is not needed, it returns the result of rank 0, which
        `encode` turns into a text of less than 4,000 bytes for the spares. If the others end
        without a result, the spare exits with them.
        """
        working.append(self)
        try:
            while True:
                try:
                    if self.is_spare:
                        if (text := self._members.stand_by()) is not None:
                            return decode(text)
                        self._broken_at, self._agreed = time.monotonic(), True
                    else:
                        result = function()
                        self._all_here(done=True, result=encode(result) if self.spares else b"")
                        return result
                except Exception as error:
                    if not is_death(error):
                        raise
                broken()
                self._repair()
                self.watch.end_steps()
        finally:
            working.remove(self)
            self.watch.end_steps(OUTSIDE)

    def _repair(self) -> None:
        """Go on with the living ranks, or end this process in time. Collective over them."""
        self.watch.repairs = True
        with RepairDeadline(this_rank(), self._state_bytes()) as self._deadline:
            self._go_on()
        self.watch.repairs = False

    def _go_on(self) -> None:
        """Go on with the living ranks: shrink, bring the state up to date. Collective over them."""
        began = time.monotonic() if self._broken_at is None else self._broken_at
        self.watch.end_steps()
        old, names, step = self._members.active.count(True), self._members.names, self.step
        workers = {*compress(names, self._members.active)}
        # Algorithms that were fast on more ranks are used again, for measuring takes long.
        known = not self.is_spare and self.comm.handle in contexts
        table = selection.table(self.comm) if known else {}
        whole = False
        while not whole:
            self._shrink()
            try:
                self._deadline.begin("REBUILD")
                self._members.open()
                if self.is_spare:
                    break
                self.step = self._bring_up_to_date(self.step if self._has_state else NOTHING)
                self._has_state = self.step != NOTHING
                if not self._has_state:
                    break
                table = _first_of(self.comm, table)
                same = {key: {**entry, "ranks": self.size} for key, entry in table.items()}
                selection.restore(self.comm, same, "more ranks")
                self._deadline.begin("")  # a function of the user may take any time
                for function in self._on_resize:
                    function(old, self.size)
                self.watch.board.agree_on_fates(self.comm)
                whole = True
            except Exception as error:
                if not is_death(error):
                    raise
        self._broken_at = None
        living = {*self._members.names}
        gone = [name for name in names if name not in living]
        self.deaths += len(gone)
        heartbeat.note_deaths(self.deaths)
        if self.is_spare:
            return
        if not self._has_state:
            text = f"all {old} ranks that trained have died, and the spares do not have their state"
            raise RankFailure(f"{text}; start the job again from the newest checkpoint")
        self._check_progress(gone)
        seconds = time.monotonic() - began
        evicted = {name: why for name in gone if (why := self._fate(name))}
        died = [name for name in gone if name not in evicted]
        # Also those of the time in which this rank was a spare.
        dead = {*self._number} - living
        self.evicted = sum(bool(self._fate(name)) for name in dead)
        common = {"step": self.step, "ranks_left": self.size, "seconds": seconds}
        if died:
            events.emit("died", ranks=died, **common)
        if evicted:
            events.emit("evicted", ranks=[*evicted], why=[*evicted.values()], **common)
        if self.rank == 0 and events.VERBOSITY:
            what = [f"{', '.join(died)} died"] if died else []
            what += [f"{name} {why} and is evicted" for name, why in evicted.items()]
            left = f"{self.size} rank{'s go' if self.size > 1 else ' goes'} on"
            left += ", with a spare," if self.size == old and workers & {*gone} else ""
            happened = ", ".join(what) or "a call reported an earlier death"
            text = f"{happened} at step {max(step, 0)}; {left} after {seconds * 1e3:.0f} ms"
            print(f"mpidist: {text}", file=sys.stderr, flush=True)
        self.watch.begin_steps()

    def _state_bytes(self) -> int:
        """Return about how many bytes a rank that is behind gets from another one."""
        return peer_state.size_of(self.state)

    def _bring_up_to_date(self, step: int) -> int:
        """Give the state of the newest rank to the ranks that are behind; return its step."""
        return peer_state.bring_up_to_date(self.comm, self.state, step)

    def _check_progress(self, gone: list[str]) -> None:
        """Raise RankFailure if a step fails again and again although no rank dies."""
        if not gone and self._repeated == self.step:
            raise RankFailure(
                f"calls in step {self.step} report a dead rank although all ranks of group.comm "
                "live; communicate on group.comm only"
            )
        self._repeated = None if gone else self.step

    def _shrink(self) -> None:
        self._members.end("a rank has died; group.comm is a new communicator, and what was made "
                          "from the old one must be made again")  # fmt: skip
        living = self._members.shrink(self._agreed, self._deadline.begin)
        self._agreed, size = False, living.active.count(True)
        if size < self.min_ranks:
            here = {*living.names}
            gone = [name for name in self._members.names if name not in here]
            text = f"{', '.join(map(self._why_gone, gone))} died; only {size} ranks live"
            raise RankFailure(f"{text}, and min_ranks is {self.min_ranks}")
        if is_smaller_side(self._members.names, living.names):
            lost = len(self._members.names) - size
            text = f"{lost} ranks have died or cannot be reached, and may go on without this host"
            raise RankFailure(f"{text}; {size} rank{'s end' if size > 1 else ' ends'} here")
        self._check_living(self._numbers(living))
        self._members = living

    def _check_living(self, ranks: list[int]) -> None:
        """Raise RankFailure if the program cannot go on with these original ranks as active ones.

        All living ranks, and spares, call this method with the same ranks.
        """

    @property
    def original_ranks(self) -> list[int]:
        """For each rank of `comm`, its rank in the communicator with which the group was made."""
        return self._numbers(self._members)

    def _numbers(self, members: Membership) -> list[int]:
        return [self._number[name] for name in compress(members.names, members.active)]

    def _fate(self, name: str) -> str:
        """Return in words why a rank was evicted, as far as this rank knows, or ""."""
        why, amount = self.watch.board.fate(self._number[name])
        return cause_in_words(why, amount) if why else ""

    def _why_gone(self, name: str) -> str:
        known = name in self._number and self._fate(name)
        return f"{name} (it {known} and is evicted)" if known else name


def _numbered(names: list[str]) -> tuple[tuple[str, ...], int]:
    return tuple(names), secrets.randbits(60)


def _first_of(comm, table: dict) -> dict:
    """Return the table of rank 0. Collective over `comm`; the tables are nearly always equal."""
    doing = "md.elastic: chosen algorithms"
    return run_on_all(comm, doing, lambda: table, lambda tables: tables[0], if_differs=True)


def is_smaller_side(before: Sequence[str], living: Sequence[str]) -> bool:
    """Return whether ranks that `living` cannot reach may also live, and must go on instead.

    If the network fails for so long that TCP gives up, each side takes the other one for dead. Only
    one side may go on, or two jobs would write the same files. That is the side with more ranks, or
    with the first rank if both have as many. Ranks of a host of `living` are really dead, because
    ranks of one host do not need the network.

    Parameters
    ----------
    before, living : sequence of str
        Names such as ``rank 3 of 8 on n2``, before the death and now.
    """
    here = {host(name) for name in living}
    far = [name for name in before if host(name) not in here]
    return len(far) > len(living) or (len(far) == len(living) and before[0] in far)


def host(name: str) -> str:
    """Return the host in the name of a rank."""
    return name.rpartition(" on ")[2]
