"""The group of the living ranks of an elastic program, which goes on after a rank has died.

    RUN      the ranks do steps; a rank is killed, and a rank that waits for it raises RankFailure
    BROKEN   the waiting rank revokes all communicators of the group, so all ranks leave their calls
    SHRINK   the living ranks make a smaller communicator
    SYNC     ranks that are behind get the state of the newest living rank (`peer_state`)
    RUN      the ranks repeat the interrupted step

If any living rank has done a step, the other ranks get its state in SYNC, and the step is not
repeated. So each step is done exactly once. After a death during these phases, the ranks start
again with BROKEN.
"""

from __future__ import annotations

import atexit
import secrets
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from itertools import compress
from operator import index
from typing import Any, TypeVar

from mpi4py import MPI

from .. import events
from ..collectives import selection
from ..errors import ConfigError, ProtocolError, RankFailure, shown
from ..launch import heartbeat
from ..runtime import polling, ulfm
from ..runtime.agreement.run_on_all import run_on_all
from ..runtime.agreement.tell_others import contexts, tell
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

#: The groups whose loops the program is running: at most one.
working: list[Group] = []


class ElasticStep(int):
    """The number of a step, and a context manager for the body of the step.

    If a rank dies, the ``with`` block ends early without an exception, and the loop yields the same
    number again.
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
        The communicator of the living ranks. After a death it is a new communicator, and whatever
        mpidist has made from the old one raises ClosedError.
    rank, size : int
        The rank of this process in `comm`, and the number of living ranks.
    step : int
        The number of this rank's next step; this rank has done all steps before it.
    deaths, evicted : int
        How many ranks have died so far, and how many of them the other ranks have killed because
        they were stopped, hung or slow.
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
        self._restarts = restarts  # whether `run_elastic` calls its function again after a death
        self._on_resize: list[Callable[[int, int], Any]] = []
        self._broken_at: float | None = None  # when this rank has noticed the death
        self._agreed = False  # whether this rank has noticed the death in `Membership.all_here`
        names, number = run_on_all(comm, "md.elastic: names", this_rank, _numbered)
        topology = topology_of(comm)
        places = tuple((node, topology.hosts[node]) for node in topology.node_of)
        base = MPI.Intracomm(comm.Dup())
        wait_until(comm.Ibarrier().Test)  # all ranks have made `base`
        active = [rank < comm.size - spares for rank in range(comm.size)]
        self._number = {name: rank for rank, name in enumerate(names)}
        self._members = Membership(base, names, places, number, active)
        self._members.open()
        self.watch = NodeWatch(NodeBoard(base), deadline)
        self.watch.end_steps()
        self._has_state = not self.is_spare
        self._repeated: int | None = None  # the step of the last repair, if it found no dead rank
        ulfm.why_gone = self._why_gone
        if spares:
            # Handlers that were registered earlier wait for all ranks of the job, also for spares.
            # This handler runs before them, because atexit runs the newest handler first.
            atexit.register(lambda: self._members.release())

    @property
    def comm(self) -> MPI.Intracomm:
        """The communicator of the living ranks."""
        return self._members.comm

    @property
    def spares(self) -> int:
        """The number of living ranks outside `comm` that wait to replace dead ranks."""
        return self._members.active.count(False)

    @property
    def is_spare(self) -> bool:
        """Whether this rank waits to replace a dead rank; then `comm` is ``MPI.COMM_NULL``."""
        return self.comm == MPI.COMM_NULL

    @property
    def rank(self) -> int:
        """The rank of this process in `comm`."""
        return self.comm.rank

    @property
    def size(self) -> int:
        """The number of living ranks in `comm`."""
        return self.comm.size

    def on_resize(self, function: Callable[[int, int], Any]) -> None:
        """Register a function that is called as ``function(old_size, new_size)`` after each death.

        All living ranks, parameter servers too, call it when their state is up to date and before
        the interrupted step is repeated.
        """
        self._on_resize.append(function)

    def done(self, step: int) -> None:
        """Declare that this rank has done `step` and that its state has the result.

        Call this method as soon as the state has the result; the step is then not repeated after a
        death.
        """
        if step != self.step:
            raise ProtocolError(f"done({shown(step)}): step {self.step} is the next one")
        self.step += 1
        self.watch.step_done(self.step)
        heartbeat.note_steps(self.step)

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Return a context manager for work for which the other ranks may have to wait.

        `name` is "save", "data", "evaluate" or "plan". In the ``with`` block, this rank is not
        evicted (killed by the other ranks) for taking long, nor for a native call that holds
        Python's global lock.
        """
        return polling.phase(name)

    def steps(self, first: int, last: int, *, together: bool = True) -> Iterator[ElasticStep]:
        """Yield the numbers of the steps ``first, ..., last - 1``. Collective.

        Each number is an `ElasticStep`: write the body of the step into ``with step:``. Steps that
        are already done are left out. At the end of the loop, all living ranks have done all steps.

        With ``together=False``, which works only in `run_elastic`, a rank does not wait for the
        others at the end of its loop.
        """
        try:
            if not together and not self._restarts:
                raise ConfigError("steps: together=False needs md.run_elastic")
            self.step, last = max(self.step, index(first)), index(last)
        except Exception as error:
            tell(self.comm, error)
            raise
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
                        raise ProtocolError(f"step {int(step)} has ended but is not done; {cure}")
                if not together or self._all_here():
                    return
                self._repair()
        finally:
            self.watch.end_steps()

    # -- a death -------------------------------------------------------------------------

    def _end_of_body(self, step: int, error: BaseException | None) -> bool:
        """Record the end of a step's body; return whether `error` is a death, to be suppressed."""
        if error is None:
            if self.step == step:
                self.done(step)
            return False
        if not is_death(error) or self._restarts:
            return False
        self._broken_at = time.monotonic()
        return True

    def _all_here(self, done: bool = False, result: bytes = b"") -> bool:
        """Wait until all ranks have come here; return False on all living ranks if one has died.

        With `done`, ranks that wait to replace dead ranks receive `result` and end.
        """
        # At the end of a function, this text must not contain the step, because servers do no steps
        # and all ranks must have the same text.
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
        """Call `function`, and again after each death of a rank; return its result. Collective.

        `broken` is called after each death. A spare rank that has replaced no dead rank gets rank
        0's result. `encode` turns the result into at most 4,000 bytes, and `decode` turns the bytes
        back.
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
        """Go on with the living ranks; if this takes too long, end this process. Collective."""
        self.watch.repairs = True
        with RepairDeadline(this_rank(), self._state_bytes()) as self._deadline:
            self._go_on()
        self.watch.repairs = False

    def _go_on(self) -> None:
        """Make a communicator of the living ranks, and update their state. Collective over them."""
        began = time.monotonic() if self._broken_at is None else self._broken_at
        self.watch.end_steps()
        old, names, step = self._members.active.count(True), self._members.names, self.step
        workers = {*compress(names, self._members.active)}
        # The fastest algorithms on more ranks are used again, because a new measurement takes long.
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
                self._deadline.begin("")  # the user's functions have no time limit
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
        # This includes the ranks that died while this rank was a spare.
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
        """Return about how many bytes of state a rank may receive from another rank."""
        return peer_state.size_of(self.state)

    def _bring_up_to_date(self, step: int) -> int:
        """Give all ranks the state with the most steps; return its number of steps."""
        return peer_state.bring_up_to_date(self.comm, self.state, step)

    def _check_progress(self, gone: list[str]) -> None:
        """Raise RankFailure if a step fails again and again although no rank dies."""
        if not gone and self._repeated == self.step:
            raise RankFailure(
                f"calls in step {self.step} report a dead rank although all ranks of group.comm "
                "live; use only group.comm for communication"
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
        """Raise RankFailure if the program cannot go on with these ranks in `comm`.

        `ranks` are numbers in the first communicator. Subclasses override this method.
        """

    @property
    def original_ranks(self) -> list[int]:
        """Return, for each rank of `comm`, its rank in the communicator before all deaths."""
        return self._numbers(self._members)

    def _numbers(self, members: Membership) -> list[int]:
        return [self._number[name] for name in compress(members.names, members.active)]

    def _fate(self, name: str) -> str:
        """Return in words why a rank was evicted; "" if unknown."""
        why, amount = self.watch.board.fate(self._number[name])
        return cause_in_words(why, amount) if why else ""

    def _why_gone(self, name: str) -> str:
        known = name in self._number and self._fate(name)
        return f"{name} (it {known} and is evicted)" if known else name


def _numbered(names: list[str]) -> tuple[tuple[str, ...], int]:
    return tuple(names), secrets.randbits(60)


def _first_of(comm, table: dict) -> dict:
    """Return rank 0's table of selected collective algorithms. Collective over `comm`."""
    # The tables are nearly always equal, so rank 0 sends its table only if they differ.
    doing = "md.elastic: chosen algorithms"
    return run_on_all(comm, doing, lambda: table, lambda tables: tables[0], if_differs=True)


def is_smaller_side(before: Sequence[str], living: Sequence[str]) -> bool:
    """Return whether the ranks `living` are the smaller part of a job, which must end.

    If a network failure cuts the job in two, each part loses contact with the other part, which may
    still run. Only one part may go on: the part with more ranks, or, if both have the same number,
    the part with the first rank.
    """
    here = {host(name) for name in living}
    far = [name for name in before if host(name) not in here]
    return len(far) > len(living) or (len(far) == len(living) and before[0] in far)


def host(name: str) -> str:
    """Return the host in the name of a rank: n2 for ``rank 3 of 8 on n2``."""
    return name.rpartition(" on ")[2]
