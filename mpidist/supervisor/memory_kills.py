"""Find the rank that the kernel killed for lack of memory, so that `mpidist launch` can name it.

The control group (cgroup) of a process counts the kills for lack of memory, and each rank records
its memory use with every heartbeat.

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
    """Finds out whether the kernel has killed one of the ranks for lack of memory."""

    def __init__(self, order: Sequence[int], host: str | None = None, root: Path = Path("/")):
        self._host = socket.gethostname() if host is None else host
        self._root = root
        self._order = order  # the processes that have ended, first to last
        self._groups: dict[int, ControlGroup] = {}
        self._own = group_of("self", root)
        self._before = self._own.kills() if self._own else None

    def see(self, signs: Sequence[Sign]) -> None:
        """Find the control groups (cgroups) of this host's ranks, while their processes exist."""
        for sign in signs:
            here = sign.host == self._host and sign.rank not in self._groups
            if here and (group := group_of(sign.pid, self._root)):
                self._groups[sign.rank] = group

    def text(self, signs: Sequence[Sign]) -> str:
        """Return a text that names the rank killed for lack of memory, or "" for none."""
        lost = [sign for sign in signs if not (sign.left or sign.heard or sign.failed)]
        killed = [sign for sign in lost if self._kills(sign, signs) > 0]
        if killed:
            first = self._first(killed)
            return (
                f"rank {first.rank} on {first.host} was killed by the kernel for lack of memory: "
                f"it used {gibibytes(first.peak)} at its last heartbeat, {_limit(first.limit)}"
            )
        if not signs and self._own and self._before is not None:
            now = self._own.kills()
            if now is not None and now > self._before:
                return (
                    "the kernel killed a process here for lack of memory, "
                    f"{_limit(self._own.limit() or 0)}; without md.guard the rank is unknown"
                )
        return ""

    def _kills(self, lost: Sign, signs: Sequence[Sign]) -> int:
        """Return how many processes in the cgroup of rank `lost` were killed for lack of memory."""
        group = self._groups.get(lost.rank, self._own if lost.host == self._host else None)
        now = group.kills() if group else None
        if now is not None and lost.kills_before >= 0:
            return now - lost.kills_before
        # If the group is on another host or no longer exists, use the counts that its ranks have
        # recorded.
        told = [
            sign.kills - sign.kills_before
            for sign in signs
            if sign.group == lost.group and sign.host == lost.host and sign.kills_before >= 0
        ]
        return max(told, default=0)

    def _first(self, killed: Sequence[Sign]) -> Sign:
        gone = [sign for sign in killed if sign.pid in self._order and sign.host == self._host]
        if gone:
            return min(gone, key=lambda sign: self._order.index(sign.pid))
        return max(killed, key=lambda sign: sign.peak)  # the kernel kills the largest process


def gibibytes(count: int) -> str:
    """Return a number of bytes as text, such as ``3.1 GiB``."""
    return f"{count / 2**30:.3g} GiB"


def _limit(count: int) -> str:
    if not count:
        return "and its control group has no limit, so its host had no free memory"
    return f"and the limit of its control group is {gibibytes(count)}"
