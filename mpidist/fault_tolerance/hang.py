"""How a hang is recognised and reported: pure functions of what each rank has shown."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple


class Hang(NamedTuple):
    """A verdict: the ranks that give no sign, and those that may be the cause."""

    absent: list[int]
    suspects: list[int]


class Seen:
    """What one rank has seen of another: its newest record, and when it last changed."""

    def __init__(self, rank: int):
        self.rank = rank
        self.record: dict | None = None
        self.heard: float | None = None

    def update(self, record: dict | None, now: float) -> None:
        """Take the record that is on the board now; None keeps the former one."""
        if self.heard is None:
            self.heard = now
        if record is not None and (self.record is None or record["beat"] != self.record["beat"]):
            self.record, self.heard = record, now

    def forget(self, now: float) -> None:
        """Count silence and stillness anew."""
        self.heard = now
        if self.record is not None:
            self.record = {**self.record, "still": 0.0}

    def silent(self, now: float) -> float:
        """Seconds since its record changed."""
        return 0.0 if self.heard is None else now - self.heard

    def still(self, now: float) -> float:
        """Seconds since its main thread moved."""
        return 0.0 if self.record is None else self.record["still"] + self.silent(now)

    left = property(lambda self: self.record is not None and self.record["left"])
    state = property(lambda self: "unknown" if self.record is None else self.record["state"])
    host = property(lambda self: "?" if self.record is None else self.record["host"])
    pid = property(lambda self: self.record["pid"])
    born = property(lambda self: self.record["born"])
    where = property(lambda self: "?" if self.record is None else self.record["where"])
    event = property(lambda self: "" if self.record is None else self.record["event"])


def judge(peers: Sequence[Seen], seconds: float, now: float) -> Hang | None:
    """Return the verdict on what was seen, or None while all may be well.

    A rank that gives no sign for `seconds` is a hang. So is a job in which no rank moved for
    `seconds` while at least one waits: a rank that only waits cannot be what it waits for. Ranks
    that all loop without waiting are at work.
    """
    present = [peer for peer in peers if not peer.left]
    absent = [peer.rank for peer in present if peer.silent(now) >= seconds]
    if absent:
        return Hang(absent, [])
    waits = [peer for peer in present if peer.state in ("blocked", "waiting")]
    if len(peers) > 1 and waits and all(peer.still(now) >= seconds for peer in present):
        # The last sign of a rank came after its last move, so its silence is a little shorter.
        absent = [peer.rank for peer in present if peer.silent(now) >= seconds / 2]
        return Hang(absent, [] if absent else suspects(peers))
    return None


def suspects(peers: Sequence[Seen]) -> list[int]:
    """Return the ranks that are not where the others wait: left, looping, or the fewest."""
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
    peers: Sequence[Seen],
    hang: Hang,
    seconds: float,
    now: float,
    condition: Callable[[Seen], str],
) -> str:
    """Return the report: one line that names the rank and its host, then a line per rank."""
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
        named = [f"rank {r} on {peers[r].host} ({condition(peers[r])})" for r in hang.absent[:8]]
        more = f" and {len(hang.absent) - 8} more" if len(hang.absent) > 8 else ""
        return f"absent: {', '.join(named)}{more}"
    if hang.suspects:
        named = [f"rank {r} on {peers[r].host}" for r in hang.suspects[:8]]
        more = f" and {len(hang.suspects) - 8} more" if len(hang.suspects) > 8 else ""
        return f"not where the others wait: {', '.join(named)}{more}"
    return "all ranks wait at one place"
