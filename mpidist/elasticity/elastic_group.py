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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from mpi4py import MPI

from .. import events
from ..collectives import selection
from ..errors import ConfigError, ProtocolError, RankFailure, shown
from ..launch.environment import has_ulfm
from ..runtime.agreement.run_on_all import run_on_all, same_on_all
from ..runtime.agreement.tell_others import contexts
from ..runtime.failure import is_whole_job, this_rank
from ..runtime.polling import wait_until
from ..runtime.ulfm import Membership, is_death, rank_failure
from . import peer_state

T = TypeVar("T")

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
    deaths : int
        How many ranks have died so far.
    """

    def __init__(
        self, comm: MPI.Intracomm, state: peer_state.State, min_ranks: int, restarts: bool
    ):
        self.state, self.min_ranks = state, min_ranks
        self.step, self.deaths = 0, 0
        self._restarts = restarts  # `run_elastic` begins its function again after a death
        self._on_resize: list[Callable[[int, int], Any]] = []
        self._broken_at: float | None = None  # when this rank has noticed the death
        self._agreed = False  # this rank has noticed it in `Membership.all_here`
        names, number = run_on_all(comm, "md.elastic: names", this_rank, _numbered)
        base = MPI.Intracomm(comm.Dup())
        wait_until(comm.Ibarrier().Test)  # all ranks have made it
        self._members = Membership(base, names, number)
        self._members.open()

    @property
    def comm(self) -> MPI.Intracomm:
        """The communicator of the living ranks."""
        return self._members.comm

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

    def steps(self, first: int, last: int) -> Iterator[ElasticStep]:
        """Yield the numbers of the steps ``first, ..., last - 1``. Collective.

        Each number is an `ElasticStep`, whose ``with`` block is the body of the step. Steps that
        are done already are left out, so the numbers of a second loop must be larger than those of
        the first. When the loop has ended, all living ranks have done all steps.
        """
        self.step = max(self.step, first)
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

    def _all_here(self) -> bool:
        """Wait until all ranks are here; return false on all living ranks if one has died."""
        doing = f"md.elastic: the end of the steps before {self.step}"
        if self._members.all_here(lambda: run_on_all(self.comm, doing, lambda: None)):
            return True
        self._broken_at, self._agreed = time.monotonic(), True
        if self._restarts:
            raise self._members.failure()
        return False

    def _repair(self) -> None:
        """Go on with the living ranks: shrink, bring the state up to date. Collective over them."""
        began = time.monotonic() if self._broken_at is None else self._broken_at
        old, names, step = self.size, self._members.names, self.step
        # Algorithms that were fast on more ranks are used again, for measuring takes long.
        table = selection.table(self.comm) if self.comm.handle in contexts else {}
        whole = False
        while not whole:
            self._shrink()
            try:
                self._members.open()
                self.step = peer_state.bring_up_to_date(self.comm, self.state, self.step)
                table = _first_of(self.comm, table)
                same = {key: {**entry, "ranks": self.size} for key, entry in table.items()}
                selection.restore(self.comm, same, "more ranks")
                for function in self._on_resize:
                    function(old, self.size)
                whole = True
            except Exception as error:
                if not is_death(error):
                    raise
        self._broken_at = None
        gone = [name for name in names if name not in self._members.names]
        self.deaths += len(gone)
        seconds = time.monotonic() - began
        events.emit("died", ranks=gone, step=self.step, ranks_left=self.size, seconds=seconds)
        if self.rank == 0 and events.VERBOSITY:
            left = f"{self.size} rank{'s go' if self.size > 1 else ' goes'} on"
            text = f"{', '.join(gone)} died at step {step}; {left} after {seconds * 1e3:.0f} ms"
            print(f"mpidist: {text}", file=sys.stderr, flush=True)

    def _shrink(self) -> None:
        self._members.end("a rank has died; group.comm is a new communicator, and what was made "
                          "from the old one must be made again")  # fmt: skip
        living = self._members.shrink(self._agreed)
        self._agreed, size = False, living.base.size
        if size < self.min_ranks:
            raise RankFailure(f"only {size} ranks live, and min_ranks is {self.min_ranks}")
        self._members = living


def _numbered(names: list[str]) -> tuple[tuple[str, ...], int]:
    return tuple(names), secrets.randbits(60)


def _first_of(comm, table: dict) -> dict:
    """Return the table of rank 0. Collective over `comm`; the tables are nearly always equal."""
    doing = "md.elastic: chosen algorithms"
    return run_on_all(comm, doing, lambda: table, lambda tables: tables[0], if_differs=True)


def _open(comm, state, min_ranks, restarts: bool) -> Group:
    """Check the arguments on all ranks and make the group. Collective over `comm`."""

    def facts() -> dict:
        if not isinstance(min_ranks, int) or not 1 <= min_ranks <= comm.size:
            raise ConfigError(f"min_ranks={shown(min_ranks)}; expected 1 to {comm.size}")
        if not is_whole_job(comm):
            raise ConfigError(f"comm has only {comm.size} ranks of this job; expected all")
        if comm.size > 1 and not has_ulfm():
            raise ConfigError(why_not(MPI.Get_library_version()))
        return {"min_ranks": min_ranks, **peer_state.description(state)}

    same_on_all(comm, "md.elastic", facts)
    return Group(comm, state, min_ranks, restarts)


def why_not(library: str) -> str:
    """Return why a job with this MPI library, started without ULFM, cannot survive a death."""
    name = library.splitlines()[0].split(",")[0].strip()
    if name.startswith("Open MPI"):
        return f"md.elastic: start the job with mpirun --with-ft ulfm, or {_CURE}"
    return f"md.elastic needs Open MPI 5.0.11 or newer; {name} cannot go on after a death: {_CURE}"


@contextmanager
def elastic(comm: MPI.Intracomm, state: peer_state.State, *, min_ranks: int = 1):
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
    group = _open(comm, state, min_ranks, restarts=False)
    try:
        yield group
    except MPI.Exception as error:
        if is_death(error):
            raise rank_failure(error) from error
        raise
    while not group._all_here():
        group._repair()


def run_elastic(
    comm: MPI.Intracomm,
    function: Callable[[Group], T],
    state: peer_state.State,
    *,
    min_ranks: int = 1,
) -> T:
    """Call ``function(group)``, and call it again after each death. Collective over `comm`.

    Unlike in `elastic`, RankFailure leaves the function, which begins again on the living ranks
    with the newest state. The function may make plans and arenas from ``group.comm`` and call any
    collective on it. In ``group.steps`` the steps that are done already are left out.

    `comm`, `state` and `min_ranks` are those of `elastic`, and so are the errors.

    Returns
    -------
    object
        What the function has returned in its last call.
    """
    group = _open(comm, state, min_ranks, restarts=True)
    while True:
        try:
            result = function(group)
            group._all_here()
            return result
        except Exception as error:
            if not is_death(error):
                raise
        group._repair()
