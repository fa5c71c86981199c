"""``md.elastic``: a loop of the user's own that goes on after a rank has died.

    RUN      the ranks do steps; a rank is killed, and a rank that waits for it raises RankFailure
    BROKEN   that rank revokes all communicators of the group, so all ranks leave their calls
    SHRINK   the living ranks make a smaller communicator
    SYNC     ranks that are behind get the state of the newest living rank (`peer_state`)
    RUN      the ranks repeat the step that was broken off

A death at any place leads to BROKEN again. A step is done on a rank when this rank has changed its
state (`Group.done`). Steps that one living rank has done are not repeated, so no step is lost, and
no step is done twice.
"""

from __future__ import annotations

import secrets
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

from mpi4py import MPI

from .. import events
from ..collectives import selection
from ..errors import ConfigError, ProtocolError, RankFailure, shown
from ..launch import heartbeat
from ..launch.environment import has_ulfm
from ..registry import checked_whole
from ..runtime import polling, ulfm
from ..runtime.agreement.run_on_all import run_on_all, same_on_all
from ..runtime.agreement.tell_others import contexts
from ..runtime.failure import is_whole_job, this_rank
from ..runtime.polling import wait_until
from ..runtime.topology import topology_of
from ..runtime.ulfm import Membership, is_death, rank_failure
from . import peer_state
from .evict import Deadline, cause_in_words, parse_deadline
from .node_board import OUTSIDE, NodeBoard
from .node_watch import NodeWatch
from .repair_deadline import RepairDeadline

T = TypeVar("T")

_STOPPED = Deadline()

#: Why and what instead, for a job that cannot survive a death.
_CURE = "use mpidist launch, which starts the job again from the newest checkpoint"


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
        The communicator of the living ranks. After a death this is a new communicator. What was
        made from an older one, such as a plan, an arena or a communicator, raises ClosedError.
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
        self._names, self._members = names, Membership(base, names, places, number, active)
        self._members.open()
        self.watch = NodeWatch(NodeBoard(base), deadline)
        self.watch.end_steps()
        ulfm.why_gone = self._why_gone

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

        The function is called when the state is up to date, before the step is repeated. It may
        make arenas, plans and communicators anew from `comm`.
        """
        self._on_resize.append(function)

    def done(self, step: int) -> None:
        """Say that this rank has done `step` and has changed its state; local and cheap.

        Call this function as soon as the state has the result of the step. If a rank dies later in
        the same step, the step is not repeated.
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

    def steps(self, first: int, last: int) -> Iterator[ElasticStep]:
        """Yield the numbers of the steps ``first, ..., last - 1``. Collective.

        Each number is an `ElasticStep`, whose ``with`` block is the body of the step. Steps that
        are done already are left out, so the numbers of a second loop must be larger than those of
        the first. When the loop has ended, all living ranks have done all steps.
        """
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
                if self._all_here():
                    return
                self._repair()
        finally:
            self.watch.end_steps()

    # -- a death -------------------------------------------------------------------------

    def _end_of_body(self, step: int, error: BaseException | None) -> bool:
        """Return whether `error`, raised in the body of `step`, ends here."""
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
        doing = f"md.elastic: the end of the steps before {self.step}"

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
        then calls `function` too. If it does not step in, it returns the result of rank 0, which
        `encode` has made a text of less than 4,000 bytes.
        """
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
        workers = {name for name, active in zip(names, self._members.active, strict=True) if active}
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
                self._bring_up_to_date()
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
        gone = [name for name in names if name not in self._members.names]
        self.deaths += len(gone)
        heartbeat.note_deaths(self.deaths)
        if self.is_spare:
            return
        seconds = time.monotonic() - began
        evicted = {name: why for name in gone if (why := self._fate(name))}
        died = [name for name in gone if name not in evicted]
        # Also those of the time in which this rank was a spare.
        dead = {*self._names} - {*self._members.names}
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
            text = f"{', '.join(what)} at step {step}; {left} after {seconds * 1e3:.0f} ms"
            print(f"mpidist: {text}", file=sys.stderr, flush=True)
        self.watch.begin_steps()

    def _state_bytes(self) -> int:
        """Return about how many bytes a rank that is behind gets from another one."""
        return peer_state.size_of(self.state)

    def _bring_up_to_date(self) -> None:
        """Give the state of the newest rank to the ranks that are behind. Collective."""
        self.step = peer_state.bring_up_to_date(self.comm, self.state, self.step)

    def _shrink(self) -> None:
        self._members.end("a rank has died; group.comm is a new communicator, and what was made "
                          "from the old one must be made again")  # fmt: skip
        living = self._members.shrink(self._agreed, self._deadline.begin)
        self._agreed, size = False, living.active.count(True)
        if size < self.min_ranks:
            gone = [name for name in self._members.names if name not in living.names]
            text = f"{', '.join(map(self._why_gone, gone))} died; only {size} ranks live"
            raise RankFailure(f"{text}, and min_ranks is {self.min_ranks}")
        if is_smaller_side(self._members.names, living.names):
            lost = len(self._members.names) - size
            text = f"{lost} ranks have died or cannot be reached, and may go on without this host"
            raise RankFailure(f"{text}; {size} rank{'s end' if size > 1 else ' ends'} here")
        self._members = living

    @property
    def original_ranks(self) -> list[int]:
        """For each rank of `comm`, its rank in the communicator with which the group was made."""
        members = self._members
        pairs = zip(members.names, members.active, strict=True)
        return [self._names.index(name) for name, active in pairs if active]

    def _fate(self, name: str) -> str:
        """Return in words why a rank was evicted, as far as this rank knows, or ""."""
        why, amount = self.watch.board.fate(self._names.index(name))
        return cause_in_words(why, amount) if why else ""

    def _why_gone(self, name: str) -> str:
        known = name in self._names and self._fate(name)
        return f"{name} (it {known} and is evicted)" if known else name


def _numbered(names: list[str]) -> tuple[tuple[str, ...], int]:
    return tuple(names), secrets.randbits(60)


def _first_of(comm, table: dict) -> dict:
    """Return the table of rank 0. Collective over `comm`; the tables are nearly always equal."""
    doing = "md.elastic: chosen algorithms"
    return run_on_all(comm, doing, lambda: table, lambda tables: tables[0], if_differs=True)


def is_smaller_side(before: Sequence[str], living: Sequence[str]) -> bool:
    """Return whether other ranks than `living` may go on, too, and have the better right to it.

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


def _open(comm, state, min_ranks, deadline, restarts: bool, spares=0) -> Group:
    """Check the arguments on all ranks and make the group. Collective over `comm`."""
    limit: list[Deadline] = []

    def facts() -> dict:
        limit.append(parse_deadline(deadline))
        return {
            **check_possible(comm, min_ranks, spares),
            "deadline": shown(deadline),
            **peer_state.description(state),
        }

    same_on_all(comm, "md.elastic", facts)
    heartbeat.join()
    try:
        return Group(comm, state, min_ranks, restarts, limit[0], spares)
    except MPI.Exception as error:  # a rank has died in the making of the group
        if is_death(error):
            raise rank_failure(error) from error
        raise


def check_possible(comm, min_ranks, spares=0) -> dict:
    """Return the checked settings of a group; raise ConfigError if `comm` cannot survive a death.

    Not collective: call this function on all ranks by `same_on_all`.
    """
    if checked_whole("spares", spares, 0) >= comm.size:
        raise ConfigError(f"spares={spares}: at least one of {comm.size} ranks must work")
    if not isinstance(min_ranks, int) or not 1 <= min_ranks <= comm.size - spares:
        raise ConfigError(f"min_ranks={shown(min_ranks)}; expected 1 to {comm.size - spares}")
    if not is_whole_job(comm):
        raise ConfigError(f"comm has only {comm.size} ranks of this job; expected all")
    if comm.size > 1 and not has_ulfm():
        raise ConfigError(why_not(MPI.Get_library_version()))
    return {"min_ranks": min_ranks, "spares": spares}


def why_not(library: str) -> str:
    """Return why a job with this MPI library, started without ULFM, cannot survive a death."""
    name = library.splitlines()[0].split(",")[0].strip()
    if name.startswith("Open MPI"):
        return f"md.elastic: start the job with mpirun --with-ft ulfm, or {_CURE}"
    return f"md.elastic needs Open MPI 5.0.11 or newer; {name} cannot go on after a death: {_CURE}"


@contextmanager
def elastic(
    comm: MPI.Intracomm,
    state: peer_state.State,
    *,
    min_ranks: int = 1,
    deadline: str | float = "stopped",
):
    """Let the loop in the ``with`` block go on when ranks die. Collective over `comm`.

    The job must be started with Open MPI by ``mpirun --with-ft ulfm``. Use ``group.comm``, and not
    `comm`, inside the block. The body of a step is itself a ``with`` block, which ends early if a
    rank dies; the loop then yields the same step again, on the living ranks.

    Parameters
    ----------
    comm : MPI.Intracomm
    state : dict, or a function that returns a dict
        All that the steps change: arrays of any shape and dtype, and numbers, in nested dicts. A
        function may give arrays only. After a death, ranks that are behind get the state of the
        newest living rank, in place. A step must change the state only when it has communicated
        for the last time, and then be done.
    min_ranks : int
        With fewer living ranks the program ends by RankFailure.
    deadline : str or float
        When the other ranks of its node kill a rank, after which they go on as after a death.
        "stopped": the rank has been stopped (SIGSTOP) for 5 s, or its threads have not run for 5 s.
        A number: it has been stopped, or has computed while others waited, for so many seconds.
        "auto": so for 20 median steps, but at least 1 s. Ranks in a ``group.phase`` are not late.

    Returns
    -------
    context manager of Group

    Raises
    ------
    ConfigError
        On all ranks, if the job cannot survive a death, or if an argument is wrong.
    MismatchError
        On all ranks, if names, shapes or dtypes of the state differ between ranks.
    RankFailure
        A rank has died outside the body of a step, or too few ranks live.

    Examples
    --------
    >>> with md.elastic(comm, state) as group:
    ...     for step in group.steps(0, 1000):
    ...         with step:
    ...             gradients = work(group.rank, group.size, step)
    ...             md.allreduce(group.comm, gradients)
    ...             update(state, gradients)
    """
    group = _open(comm, state, min_ranks, deadline, restarts=False)
    try:
        try:
            yield group
        except MPI.Exception as error:
            if is_death(error):
                raise rank_failure(error) from error
            raise
        while not group._all_here():
            group._repair()
    finally:
        group.watch.end_steps(OUTSIDE)


def run_elastic(
    comm: MPI.Intracomm,
    function: Callable[[Group], T],
    state: peer_state.State,
    *,
    min_ranks: int = 1,
    deadline: str | float = "stopped",
    spares: int = 0,
) -> T:
    """Call ``function(group)``, and call it again after each death. Collective over `comm`.

    Unlike in `elastic`, RankFailure leaves the function, which begins again on the living ranks
    with the newest state. The function may make plans and arenas from ``group.comm`` and call any
    collective on it. In ``group.steps`` the steps that are done already are left out.

    The last `spares` ranks of `comm` wait, with 1 % of a core, and are not in ``group.comm``. After
    a death, the first of them steps in: the group keeps its size, and the spare calls `function`,
    too. The other arguments are those of `elastic`, and so are the errors.

    Returns
    -------
    object
        What the function has returned in its last call; None on a spare that has not stepped in.
    """
    group = _open(comm, state, min_ranks, deadline, restarts=True, spares=spares)
    return group.repeat(lambda: function(group))
