"""Which rank did the kernel kill for want of memory? For the words of `mpidist launch`.

A process that is killed tells nothing. But its control group counts such kills, the ranks tell
their memory with every beat, and of those that are gone the one that was gone first is it: the
launcher ends the others.

    rank 0   peak 3.1 GiB   gone at 10.031 s, ended by the launcher
    rank 1   peak 7.8 GiB   gone at 10.002 s, and oom_kill of its group went from 0 to 1
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from pathlib import Path

from ..launch.control_groups import ControlGroup, group_of
from ..launch.heartbeat import Sign


class MemoryKills:
    """What an attempt's ranks and control groups tell of memory."""

    def __init__(self, order: Sequence[int], host: str | None = None, root: Path = Path("/")):
        self._host = socket.gethostname() if host is None else host
        self._root = root
        self._order = order  # of the processes that have ended
        self._groups: dict[int, ControlGroup] = {}
        self._own = group_of("self", root)
        self._before = self._own.kills() if self._own else None

    def see(self, signs: Sequence[Sign]) -> None:
        """Take note of the groups that ranks of this host are in, while they are there."""
        for sign in signs:
            here = sign.host == self._host and sign.rank not in self._groups
            if here and (group := group_of(sign.pid, self._root)):
                self._groups[sign.rank] = group

    def text(self, signs: Sequence[Sign]) -> str:
        """Return the line that names the rank, "" where nobody was killed for want of memory."""
        lost = [sign for sign in signs if not (sign.left or sign.heard or sign.failed)]
        killed = [sign for sign in lost if self._kills(sign, signs) > 0]
        if killed:
            first = self._first(killed)
            return (
                f"rank {first.rank} on {first.host} was killed by the kernel for want of memory: "
                f"it held {gibibytes(first.peak)} at its last sign, {_limit(first.limit)}"
            )
        if not signs and self._own and self._before is not None:
            now = self._own.kills()
            if now is not None and now > self._before:
                return (
                    "the kernel killed a process here for want of memory, "
                    f"{_limit(self._own.limit() or 0)}; its ranks tell nothing (md.guard does)"
                )
        return ""

    def _kills(self, lost: Sign, signs: Sequence[Sign]) -> int:
        """How many the kernel has killed of the control group that this rank was in."""
        group = self._groups.get(lost.rank, self._own if lost.host == self._host else None)
        now = group.kills() if group else None
        if now is not None and lost.kills_before >= 0:
            return now - lost.kills_before
        # On another host, or the group is gone: those that were in it have told.
        told = [
            sign.kills - sign.kills_before
            for sign in signs
            if sign.group == lost.group and sign.host == lost.host and sign.kills_before >= 0
        ]
        return max(told, default=0)

    def _first(self, killed: Sequence[Sign]) -> Sign:
        order = self._order
        gone = [sign for sign in killed if sign.pid in order and sign.host == self._host]
        if gone:
            return min(gone, key=lambda sign: order.index(sign.pid))
        return max(killed, key=lambda sign: sign.peak)  # whom the kernel chooses


def gibibytes(count: int) -> str:
    """Say it in words: ``3.1 GiB``."""
    return f"{count / 2**30:.3g} GiB"


def _limit(count: int) -> str:
    if not count:
        return "and its control group has no limit, so it was its host that had no more"
    return f"and the limit of its control group is {gibibytes(count)}"
