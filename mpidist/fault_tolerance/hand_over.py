"""A hand-over: a training run moves to newly started ranks, which are more than before.

    launch     mpidist grow               asks        decides
    2 ranks    steps ...................... last step, state .. | leave
    4 ranks    import, MPI_Init, data, wait . . . . . . . . . . | restore, steps

`mpidist launch` starts the new ranks while the old ranks still train. The new ranks import modules,
initialise MPI and open the data, and then wait for the state of the run. Only the old or the new
ranks may write to the run's folder, and a small file, DECIDED, says which of them. `mpidist launch`
makes this file as soon as it has decided for the new ranks. If the file is missing 10 seconds after
the old ranks have offered the state, the old ranks make it and keep the run.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from .. import events
from ..launch import heartbeat
from ..launch.environment import attempt_before, attempt_folder
from ..runtime import polling
from ..runtime.agreement.run_on_all import run_on_all
from .guard import Stopped

#: Seconds between two checks of a waiting rank. The checks take 1 % of a core.
_POLL = 0.004
#: How many seconds the old ranks wait for the decision after they have offered their state.
_PATIENCE = 10.0

#: Functions that a waiting rank calls when its attempt has taken over the run, which is called its
#: turn. Before its turn, a rank must not write to the run's folder.
at_turn: list[Callable[[], None]] = []
#: Whether the next attempt has taken over the run of this attempt.
handed = False
_turn_has_come = False


def is_waiting() -> bool:
    """Return whether these new ranks must still wait, because the old ranks still train the run.

    As long as the new ranks wait, they must not write to the run's folder.
    """
    return attempt_before() is not None and not _turn_has_come


def wait_for_turn(comm) -> str:
    """Wait until the earlier started ranks leave the run to these ranks. Collective over `comm`.

    Returns `heartbeat.IN_MEMORY` if the state of the run is in the memory of the host,
    `heartbeat.IN_STORE` if it is in the checkpoint store, or "" if there is nobody to wait for.
    """
    before = attempt_before()
    if before is None:
        return ""
    heartbeat.join()
    # After the death of a rank, the living ranks call this function again, and their turn may
    # already have come.
    if run_on_all(comm, "hand-over: ready", lambda: _turn_has_come, any):
        _begin_turn()
        return ""
    if comm.rank == 0:
        heartbeat.tell_launcher(heartbeat.READY)
    looks, text = 0, ""
    # If the previous attempt keeps the run (KEPT), `mpidist launch` kills the waiting ranks.
    while text in ("", heartbeat.KEPT):
        looks += 1  # this number changes, so `watch` sees that the rank does not hang
        time.sleep(_POLL)
        if polling.look is not None:
            polling.look()
        text = heartbeat.decision(before)
    _begin_turn()
    return text


def _begin_turn() -> None:
    global _turn_has_come
    _turn_has_come = True
    while at_turn:
        at_turn.pop(0)()


def announce(can: bool) -> None:
    """Tell `mpidist launch` whether newly started ranks could take over this run. One rank calls
    it.
    """
    folder = attempt_folder()
    if folder is None:
        return
    with suppress(OSError):
        if can:
            heartbeat.tell_launcher(heartbeat.CAN)
        else:
            (folder / heartbeat.CAN).unlink(missing_ok=True)


def asked(comm) -> str:
    """Return the place where new ranks expect the state of this run. Collective over `comm`.

    Returns `heartbeat.IN_MEMORY` (in the memory of the host), `heartbeat.IN_STORE` (in the
    checkpoint store), or "" if no new ranks ask for the run.
    """
    if attempt_folder() is None:
        return ""
    look = _asked if comm.rank == 0 else lambda: ""
    return run_on_all(comm, "hand-over: asked", look, lambda answers: answers[0])


def _asked() -> str:
    folder = attempt_folder()
    if folder is None:
        return ""
    with suppress(OSError):
        if heartbeat.has(folder, heartbeat.ASKED):
            return (folder / heartbeat.ASKED).read_text(encoding="utf-8")
    return ""


def offer(comm, where: str) -> bool:
    """Offer this run to the newly started ranks; return whether they take it over. Collective.

    `where` is `heartbeat.IN_MEMORY` if the state is in the memory of the host, or
    `heartbeat.IN_STORE` if it is in the checkpoint store.
    """

    def decide(_) -> bool:
        folder = attempt_folder()
        assert folder is not None
        heartbeat.tell_launcher(heartbeat.HANDED, where)
        end, text = time.monotonic() + _PATIENCE, ""
        while not (text := heartbeat.decision(folder)):
            time.sleep(_POLL / 2)
            if time.monotonic() > end or not heartbeat.is_launched():
                heartbeat.make_decision(folder, heartbeat.KEPT)
        return text != heartbeat.KEPT

    return _note(run_on_all(comm, "hand-over: decision", lambda: None, decide))


def is_handed(comm) -> bool:
    """Return whether newly started ranks have taken over this run. Collective over `comm`."""
    folder = attempt_folder()
    if folder is None:
        return False

    # Only one rank reads a decision first. If it dies, the others learn the decision here.
    def decided(_) -> bool:
        return heartbeat.decision(folder) not in ("", heartbeat.KEPT)

    return _note(run_on_all(comm, "hand-over: decided", lambda: None, decided))


def _note(decided: bool) -> bool:
    global handed
    handed = decided
    if handed:
        _give_way()
    return handed


@contextmanager
def leaving(comm) -> Iterator[None]:
    """Context manager that lets newly started ranks continue the loop in its ``with`` block.

    After the guard (see `md.guard`) has stopped the loop so that new ranks can continue it, the
    context manager tells `mpidist launch` that they can load the checkpoint.
    """
    try:
        yield
    except Stopped:
        folder = attempt_folder()
        if folder is not None and comm.rank == 0 and not handed and _asked():
            _give_way()
            with suppress(OSError):
                # If there is a decision already, these ranks must keep the run.
                if not heartbeat.decision(folder):
                    heartbeat.tell_launcher(heartbeat.HANDED, heartbeat.IN_STORE)
        raise


def _give_way() -> None:
    """Close the event log, and lower the priority of this process so that new ranks run faster."""
    events.close_log()
    with suppress(OSError):
        os.nice(19)
