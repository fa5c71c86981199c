"""Do the ranks agree on the operation they are in? Pure: statuses in, one line out.

Every operation on a communicator has a number and a `Signature`. A rank that waits too long
tells the others where it stands (a `Status`, packed into `STATUS_BYTES`); whoever sees two
different signatures under one number composes the message and tells all (`context.py`).
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable
from typing import NamedTuple

STATUS_BYTES = 512
_TEXT_BYTES = 360
_HEAD = struct.Struct("<qqq")

#: What a status says: waiting inside an operation, or has raised in its place; has left the
#: communicator; a verdict; a question to all, where they are; the verdict that a rank broke an
#: operation off; waits on another communicator; the verdict that ranks wait for each other so.
WAITING, LEFT, VERDICT, ROLL_CALL, BROKEN, ELSEWHERE, CROSSED = range(7)

#: What all ranks vote on before they begin: a key, its negative, and up to so many facts. As
#: many in every vote, for ranks that disagree meet in it, and MPI cannot bear other lengths.
FACTS = 5
BALLOT = 2 + FACTS

#: The kind in the signature of a call that ended by an exception before its operation began.
RAISED = "raised"


class Signature(NamedTuple):
    """What must be equal on all ranks of one operation."""

    kind: str
    dtype: str
    shape: str
    op: str = ""
    algorithm: str = ""
    extra: str = ""

    @property
    def key(self) -> int:
        """A 63-bit number, the same in every process, for tags and headers."""
        text = "\x1f".join(self).encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1

    def text(self) -> str:
        """Everything in a few words."""
        return " ".join(part for part in self if part)


class Status(NamedTuple):
    """Where one rank stands."""

    rank: int
    state: int
    sequence: int
    signature: str
    host: str
    site: str

    def pack(self) -> bytes:
        """Encode in exactly `STATUS_BYTES` bytes; long texts lose their end."""
        text = "\x1f".join((self.signature, self.host, self.site)).encode()
        room = STATUS_BYTES - _HEAD.size
        text = text[:room].decode(errors="ignore").encode()
        return (_HEAD.pack(self.rank, self.state, self.sequence) + text).ljust(STATUS_BYTES, b"\0")

    @classmethod
    def unpack(cls, data: bytes | bytearray) -> Status:
        """Decode what `pack` made."""
        rank, state, sequence = _HEAD.unpack_from(data)
        text = bytes(data[_HEAD.size :]).rstrip(b"\0").decode(errors="replace")
        signature, host, site = ([*text.split("\x1f"), "", "", ""])[:3]
        return cls(rank, state, sequence, signature, host, site)


def encode_signature(signature: Signature) -> str:
    """Write a signature as the text that a `Status` carries, equal only for equal ones.

    A long one (the counts of a hundred ranks) is cut, with its key in place of the rest: what a
    status cut off by itself would look like another signature.
    """
    text = "\x1e".join(signature)
    data = text.encode()
    if len(data) <= _TEXT_BYTES:
        return text
    return f"{data[:_TEXT_BYTES].decode(errors='ignore')}... ({signature.key:x})"


def decode_signature(text: str) -> Signature:
    """Read back what `encode_signature` wrote."""
    parts = [*text.split("\x1e"), *[""] * 6]
    return Signature(*parts[:6])


def raised(text: str) -> bool:
    """Whether a text of `encode_signature` stands for a call that ended by an exception."""
    return text.startswith(RAISED + "\x1e")


def rank_list(ranks: Iterable[int]) -> str:
    """Name ranks as ``rank 2`` or ``ranks 0,1,3`` or ``ranks 0-62``."""
    ranks = sorted(ranks)
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    words = [
        f"{a}-{b}" if b > a + 1 else ",".join(str(r) for r in range(a, b + 1)) for a, b in runs
    ]
    return ("rank " if len(ranks) == 1 else "ranks ") + ",".join(words)


def conflict(statuses: Iterable[Status]) -> str | None:
    """Return the message when statuses of one operation number disagree, else None.

    The smallest group is named first: it is most often the one that is wrong.
    """
    statuses = list(statuses)
    here = [s for s in statuses if s.state == WAITING]
    gone = [s for s in statuses if s.state == LEFT]
    groups: dict[str, list[Status]] = {}
    for status in here:
        groups.setdefault(status.signature, []).append(status)
    if len(groups) < 2 and not (gone and here):
        return None
    sequence = max(s.sequence for s in here)
    signatures = [decode_signature(text) for text in groups]
    differing = [
        field for field in Signature._fields if len({getattr(s, field) for s in signatures}) > 1
    ]
    if gone and not differing:
        differing = ["kind"]
    parts = []
    for text, members in sorted(groups.items(), key=lambda g: (len(g[1]), g[1][0].rank)):
        signature = decode_signature(text)
        what = (
            signature.text()
            if "kind" in differing
            else " ".join(_word(signature, field) for field in differing)
        )
        where = ", ".join(word for word in (members[0].host, members[0].site) if word)
        parts.append(f"{rank_list(s.rank for s in members)} {what} ({where})")
    if gone:
        who = rank_list(s.rank for s in gone)
        parts.insert(0, f"{who} left after {gone[0].sequence} operations ({gone[0].host})")
    kind = signatures[0].kind if "kind" not in differing or len(groups) == 1 else "operation"
    return f"{kind} #{sequence}: " + ", ".join(parts) + "; all ranks must make the same calls"


def _word(signature: Signature, field: str) -> str:
    value = getattr(signature, field)
    named = {"shape": f"shape {value}", "algorithm": f"algorithm={value}", "op": f"op={value}"}
    return named.get(field, value)
