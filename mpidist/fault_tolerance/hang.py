"""Recognise and report a hang from the status records that all ranks write. Uses no MPI."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple


class Hang(NamedTuple):
    """A hang: the ranks that write no more status records, and the ranks that may be its cause."""

    absent: list[int]
    suspects: list[int]


class Seen:
    """What this rank knows of another rank: its newest status record, and when it last changed."""

    def __init__(self, rank: int):
        self.rank = rank
        self.record: dict | None = None
        self.heard: float | None = None

    def update(self, record: dict | None, now: float) -> None:
        """Store the rank's newest status record; keep the previous one if `record` is None."""
        if self.heard is None:
            self.heard = now
        if record is not None and (self.record is None or record["beat"] != self.record["beat"]):
            self.record, self.heard = record, now

    def forget(self, now: float) -> None:
        """Let the times of `silent` and `still` begin at `now`, as this rank was suspended."""
        self.heard = now
        if self.record is not None:
            self.record = {**self.record, "still": 0.0}

    def silent(self, now: float) -> float:
        """Return how many seconds ago the rank last gave a sign of life."""
        return 0.0 if self.heard is None else now - self.heard

    def still(self, now: float) -> float:
        """Return the seconds since the main thread of the rank last made progress."""
        return 0.0 if self.record is None else self.record["still"] + self.silent(now)

    left = property(lambda self: self.record is not None and self.record["left"])
    state = property(lambda self: "unknown" if self.record is None else self.record["state"])
    host = property(lambda self: "?" if self.record is None else self.record["host"])
    pid = property(lambda self: self.record["pid"])
    born = property(lambda self: self.record["born"])
    where = property(lambda self: "?" if self.record is None else self.record["where"])
    event = property(lambda self: "" if self.record is None else self.record["event"])


def judge(peers: Sequence[Seen], seconds: float, now: float) -> Hang | None:
    """Return the hang that the ranks' status records show, or None if they show no hang."""
    present = [peer for peer in peers if not peer.left]
    absent = [peer.rank for peer in present if peer.silent(now) >= seconds]
    if absent:
        return Hang(absent, [])
    waits = [peer for peer in present if peer.state in ("blocked", "waiting")]
    if len(peers) > 1 and waits and all(peer.still(now) >= seconds for peer in present):
        # A rank that stops publishing has published after its last progress, so it has been silent
        # for less than `seconds`. Half of `seconds` therefore counts as silent here.
        absent = [peer.rank for peer in present if peer.silent(now) >= seconds / 2]
        return Hang(absent, [] if absent else suspects(peers))
    return None


def suspects(peers: Sequence[Seen]) -> list[int]:
    """Return the ranks that may be the cause of a hang.

    These are the ranks that have ended or are in an endless loop. If there are none, the ranks are
    grouped by the line of the program at which they wait, and the smallest groups are suspect.
    """
    left = [peer.rank for peer in peers if peer.left]
    looping = [peer.rank for peer in peers if not peer.left and peer.state == "looping"]
    if looping or left:
        return looping + left
    places: dict[str, list[int]] = {}
    for peer in peers:
        places.setdefault(peer.where, []).append(peer.rank)
    if len(places) == 1:
        return []
    fewest = min(len(ranks) for ranks in places.values())
    return sorted(rank for ranks in places.values() if len(ranks) == fewest for rank in ranks)


def hang_report(
    peers: Sequence[Seen], hang: Hang, seconds: float, now: float, condition: Callable[[Seen], str]
) -> str:
    """Return the report of a hang: a line with the suspect ranks and hosts, then a line per rank.

    ``condition(peer)`` must return in words what state a silent rank's process is in.
    """
    lines = [f"mpidist: watch: nothing moved for {seconds:g} s; {_accuse(peers, hang, condition)}"]
    lines[0] += "; the job ends with exit code 70"
    for peer in peers:
        if peer.left:
            state = "has left"
        elif peer.rank in hang.absent:
            state = f"gave no sign for {peer.silent(now):.0f} s; last seen at {peer.where}"
        else:
            state = f"{peer.state} for {peer.still(now):.0f} s at {peer.where}"
        event = f"; newest event: {peer.event}" if peer.event else ""
        lines.append(f"  rank {peer.rank} on {peer.host} {state}{event}")
    return "\n".join(lines) + "\n"


def _accuse(peers, hang: Hang, condition) -> str:
    if hang.absent:
        named = [f"rank {r} on {peers[r].host} ({condition(peers[r])})" for r in hang.absent]
        return f"absent: {_few(named)}"
    if hang.suspects:
        named = [f"rank {r} on {peers[r].host}" for r in hang.suspects]
        return f"not where the others wait: {_few(named)}"
    return "all ranks wait at one place"


def _few(named: list[str]) -> str:
    return ", ".join(named[:8]) + (f" and {len(named) - 8} more" if len(named) > 8 else "")
