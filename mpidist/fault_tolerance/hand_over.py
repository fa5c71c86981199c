"""The ranks' part in a hand-over, in which an attempt with more ranks continues the run of another.

    launch     mpidist grow               asks        decides
    2 ranks    steps ...................... last step, state .. | leave
    4 ranks    import, MPI_Init, data, wait . . . . . . . . . . | restore, steps

`mpidist launch` starts the second attempt while the first one trains. The new ranks import modules,
initialise MPI and open the data, and then wait for the state of the run. The two attempts speak
with `mpidist launch` by files in the folder of the first attempt: CAN, ASKED, HANDED and DECIDED
(`launch.heartbeat`). The new ranks write READY to the folder of their own attempt. Only one of the
two attempts may write to the run, and the file DECIDED says which one. This file can be made only
once: by `mpidist launch` in favour of the new ranks, or by the old ranks in their own favour, if
they have waited too long.
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

#: Seconds between two looks of a rank that waits: 1 % of a core.
_POLL = 0.004
#: Seconds that the old ranks, whose state is handed over, wait for the decision.
_PATIENCE = 10.0

#: What a waiting rank calls when its turn has come, for it must not write to the run before.
at_turn: list[Callable[[], None]] = []
#: Whether the next attempt has got the run of this one.
handed = False
_turn_has_come = False


def is_waiting() -> bool:
    """Whether this attempt must not write to the run, because the one before goes on with it."""
    return attempt_before() is not None and not _turn_has_come


def wait_for_turn(comm) -> str:
    """Wait until the attempt before hands the run over. Collective over `comm`.

    Returns where the state is: `heartbeat.IN_MEMORY` or `heartbeat.IN_STORE`. Returns "" if this
    attempt need not wait, or has waited already.
    """
    before = attempt_before()
    if before is None:
        return ""
    heartbeat.join()
    # After a death, ranks come here again, and their turn may have come.
    if run_on_all(comm, "hand-over: ready", lambda: _turn_has_come, any):
        _begin_turn()
        return ""
    if comm.rank == 0:
        heartbeat.tell_launcher(heartbeat.READY)
    looks, text = 0, ""
    while text in ("", heartbeat.KEPT):  # the launcher ends ranks that wait in vain
        looks += 1  # `watch` sees by this number that the rank does not hang
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
    """Tell `mpidist launch` whether this run can be handed over. Only one rank calls this."""
    folder = attempt_folder()
    if folder is None:
        return
    with suppress(OSError):
        if can:
            heartbeat.tell_launcher(heartbeat.CAN)
        else:
            (folder / heartbeat.CAN).unlink(missing_ok=True)


def asked(comm) -> str:
    """Return where the next attempt wants the state, or "" if none has asked. Collective."""
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
    """Offer the state to the next attempt; return whether that attempt goes on. Collective.

    `where` says where the state is: `heartbeat.IN_MEMORY` or `heartbeat.IN_STORE`.
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
    """Return whether the next attempt has got the run already. Collective over `comm`.

    After a death the ranks may not know this, because the one that knew it has died.
    """
    folder = attempt_folder()
    if folder is None:
        return False

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
    """Offer the state in the store to the next attempt, if the block stops for a hand-over."""
    try:
        yield
    except Stopped:
        folder = attempt_folder()
        if folder is not None and comm.rank == 0 and not handed and _asked():
            _give_way()
            with suppress(OSError):
                # After a decision these ranks had to keep the run.
                if not heartbeat.decision(folder):
                    heartbeat.tell_launcher(heartbeat.HANDED, heartbeat.IN_STORE)
        raise


def _give_way() -> None:
    """Close the event log, and lower this process's priority in favour of the ranks that go on."""
    events.close_log()
    with suppress(OSError):
        os.nice(19)
