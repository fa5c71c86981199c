"""``md.elastic`` and ``md.run_elastic``: the user's own loops go on after a rank has died.

    with md.elastic(comm, state)       the body of a step is a ``with`` block; after a death it is
                                       repeated
    md.run_elastic(comm, f, state)     after a death the function f is called again; its loop leaves
                                       out the steps that are done

Both functions first check on all ranks whether the job can survive a death.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import contextmanager
from typing import TypeVar

from mpi4py import MPI

from ..errors import ConfigError, shown
from ..launch import heartbeat
from ..launch.environment import why_not_elastic
from ..registry import checked_whole
from ..runtime.agreement.run_on_all import same_on_all
from ..runtime.failure import is_whole_job
from ..runtime.ulfm import is_death, rank_failure
from . import peer_state
from .deadline import Deadline, parse_deadline
from .elastic_group import Group, working
from .node_board import OUTSIDE

T = TypeVar("T")


def _open(comm, state, min_ranks, deadline, restarts: bool, spares=0, function=None) -> Group:
    """Check the arguments on all ranks and make the group. Collective over `comm`."""
    limit: list[Deadline] = []

    def facts() -> dict:
        limit.append(parse_deadline(deadline))
        possible = check_possible(comm, min_ranks, spares)
        if restarts and not callable(function):
            raise ConfigError(f"md.run_elastic: function={shown(function)}; expected a function")
        return {
            **possible,
            "deadline": shown(deadline),
            **peer_state.description(state),
        }

    same_on_all(comm, "md.elastic", facts)
    heartbeat.join()
    try:
        return Group(comm, state, min_ranks, restarts, limit[0], spares)
    except MPI.Exception as error:  # a rank has died while the group was made
        if is_death(error):
            raise rank_failure(error) from error
        raise


def check_possible(comm, min_ranks, spares=0) -> dict:
    """Check that this job can go on after a death; return settings that all ranks must share.

    Raises ConfigError if it cannot.
    """
    if checked_whole("spares", spares, 0) >= comm.size:
        raise ConfigError(f"spares={spares}: at least one of {comm.size} ranks must work")
    if not isinstance(min_ranks, int) or not 1 <= min_ranks <= comm.size - spares:
        raise ConfigError(f"min_ranks={shown(min_ranks)}; expected 1 to {comm.size - spares}")
    if working:
        raise ConfigError("md.elastic: this program is in an elastic loop already; use that one")
    if not is_whole_job(comm):
        raise ConfigError(f"comm has only {comm.size} ranks of this job; expected all")
    if comm.size > 1 and (text := why_not_elastic(MPI.Get_library_version())):
        raise ConfigError(text)
    if comm.size > 1 and _has_window():
        raise ConfigError(
            "md.elastic: this program has a window (MPI.Win), and Open MPI cannot repair one-sided "
            "communication after a death; free the window first, or use mpidist launch"
        )
    return {"min_ranks": min_ranks, "spares": spares}


def _has_window() -> bool:
    """Return whether the program has a window (MPI.Win) that it has not freed."""
    found = (each for each in gc.get_objects() if isinstance(each, MPI.Win))
    return any(each != MPI.WIN_NULL for each in found)


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
    `comm`, inside the block. The body of a step is itself a ``with`` block. It ends early if a rank
    dies, and the loop repeats the step on the living ranks.

    Parameters
    ----------
    comm : MPI.Intracomm
    state : dict, or a function that returns a dict
        All data that the steps change: arrays of any shape and dtype, and numbers, in nested dicts.
        A dict that a function returns may contain only arrays. After a death, ranks that have done
        fewer steps get the newest state, in place. A step must change the state after its last
        communication, and must end directly after the change.
    min_ranks : int
        If fewer ranks live, all ranks raise RankFailure.
    deadline : str or float
        When the other ranks of a node kill a rank in order to go on without it. With "stopped",
        this happens after its process has been stopped (SIGSTOP), or its threads have not run, for
        5 s. If `deadline` is a number of seconds, it replaces the 5 s for a stopped process, and,
        if it is larger than 5, also for threads that do not run. A rank is then also killed if it
        computes for more than this number of seconds while other ranks wait. With "auto", the
        number is the time of 20 median steps, but at least 1 s, and a stopped process is killed
        after at most 5 s.

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
        A rank has died outside the body of a step, or fewer than `min_ranks` ranks live.

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
    working.append(group)
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
        working.remove(group)
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

    If a rank dies, a communication call in the function raises RankFailure, which the function must
    not catch. The function is then called again on the living ranks, with the newest state.
    ``group.steps`` leaves out the steps that are already done.

    The function may call any collective on ``group.comm``, and may make from it what it needs, such
    as arenas and prepared operations. The last `spares` ranks of `comm` wait, using 1 % of a core
    each, and are not in ``group.comm``. After a death, the first of them replaces the dead rank and
    calls `function`, too, so the group keeps its size. The docstring of `elastic` explains the
    other arguments and the errors.

    Returns
    -------
    object
        The result of the last call of the function; None on a rank that waited in vain.
    """
    group = _open(comm, state, min_ranks, deadline, True, spares, function)
    return group.repeat(lambda: function(group))
