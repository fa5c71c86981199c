"""End only the rank whose code raises an exception (``on_exception = "evict"``).

If a GPU fails or a host has no free memory, one rank raises an exception, and the others can go on.
But a mistake in the program raises on all ranks, and a bad sample raises again when its step is
repeated. So a rank that raises tells all others, waits a moment for their messages, and ends itself
only if all of these conditions are true:

    at most half of the workers raise              otherwise the mistake is in the program
    no rank has raised and was evicted in this     otherwise the mistake is in the data
    step before
    at least `min_ranks` ranks are left            otherwise the other ranks may not go on
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from mpi4py import MPI

from ..errors import MpidistError
from ..runtime.failure import HOLD_BACK, send_notes, this_rank
from ..runtime.ulfm import is_death
from .evict import end_itself
from .node_board import RAISED

if TYPE_CHECKING:
    from .elastic_group import Group

#: The tag of the messages by which ranks tell each other that they have raised an exception.
_RAISES = 11


class EvictOnException:
    """A context manager for the user's code: if it raises on one rank, the others may go on.

    Exceptions of mpidist leave the block as usual. ``step()`` must return the number of steps that
    this rank has done, and `servers` is the number of ranks of the `group` that do not run the
    user's code.
    """

    def __init__(self, group: Group | None = None, step: Callable[[], int] = int, servers: int = 0):
        self.group, self.step, self.servers = group, step, servers

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind, error, trace) -> None:
        if self.group is None or not isinstance(error, Exception):
            return
        step, board = self.step(), self.group.watch.board
        if isinstance(error, MpidistError) or is_death(error) or self._must_pass(self.group, step):
            return
        board.note_fate(board.rank, RAISED, step)
        text = "".join(traceback.format_exception(error))
        line = f"{this_rank()} failed and ends itself:\n{text}"
        end_itself(line, f"{type(error).__name__}: {error}", step=step)

    def _must_pass(self, group: Group, step: int) -> bool:
        if (RAISED, step) in group.watch.board.fates.values():
            return True
        raising = 1 + _count_notes(group._members.base)
        left = group.size + group.spares - raising
        return 2 * raising > group.size - self.servers or left < group.min_ranks


def _count_notes(base: MPI.Intracomm) -> int:
    """Tell all ranks of `base` that this rank raises; return how many other ranks raise, too."""
    found, until = 0, time.monotonic() + HOLD_BACK
    with suppress(MPI.Exception):  # a rank may die in the meantime
        notes = send_notes(base, _RAISES)
        while time.monotonic() < until:
            if base.Iprobe(MPI.ANY_SOURCE, _RAISES):
                base.Recv([bytearray(1), MPI.BYTE], MPI.ANY_SOURCE, _RAISES)
                found += 1
            else:
                time.sleep(0.001)
        MPI.Request.Testall(notes)
    return found
