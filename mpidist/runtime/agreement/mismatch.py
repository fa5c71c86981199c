"""Compare the statuses of ranks: are all of them in the same operation? This module uses no MPI.

Every operation on a communicator has a number and a `Signature` (its kind, dtype, shape and so on).
A rank that waits sends its `Status`, packed into 512 bytes (`STATUS_BYTES`), to other ranks. A rank
that sees two different signatures with the same operation number composes the error text.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable
from itertools import groupby
from typing import NamedTuple

STATUS_BYTES = 512
_TEXT_BYTES = 360
_HEAD = struct.Struct("<qqq")

#: The values of the field `state` of a `Status`. WAITING: the rank waits in an operation, or has
#: raised an exception instead of beginning the operation. LEFT: the rank has left the communicator.
#: VERDICT: the text is an error for all ranks. ROLL_CALL: the rank asks all ranks for their status.
#: BROKEN: the text is an error for all ranks, because one rank has ended an operation by an
#: exception. ELSEWHERE: the rank waits on another communicator. CROSSED: the text is an error for
#: all ranks, because two ranks wait for each other on two communicators.
WAITING, LEFT, VERDICT, ROLL_CALL, BROKEN, ELSEWHERE, CROSSED = range(7)

#: Before an operation, all ranks reduce a ballot: a key, its negative, and at most FACTS numbers.
#: Every ballot has the same length, because ranks that begin different operations take part in the
#: same reduction, and MPI requires equal lengths in a reduction.
FACTS = 5
BALLOT = 2 + FACTS

#: The kind in the signature of a call that raised an exception before its operation began.
RAISED = "raised"


class Signature(NamedTuple):
    """The description of one operation; it must be equal on all ranks."""

    kind: str
    dtype: str
    shape: str
    op: str = ""
    algorithm: str = ""
    extra: str = ""

    @property
    def key(self) -> int:
        """A 63-bit digest of the signature, with which ranks compare their operations."""
        return digest_number("\x1f".join(self).encode())

    def text(self) -> str:
        """Return a text with all fields of the signature that are not empty."""
        return " ".join(part for part in self if part)


def digest_number(data: bytes) -> int:
    """Return a 63-bit digest of `data`."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little") >> 1


class Status(NamedTuple):
    """The operation that one rank is in, and the line of the user's program that called it."""

    rank: int
    state: int
    sequence: int
    signature: str
    host: str
    site: str

    def pack(self) -> bytes:
        """Encode the status in exactly 512 bytes, in which texts that are too long are cut."""
        text = "\x1f".join((self.signature, self.host, self.site)).encode()
        text = text[: STATUS_BYTES - _HEAD.size].decode(errors="ignore").encode()
        return (_HEAD.pack(self.rank, self.state, self.sequence) + text).ljust(STATUS_BYTES, b"\0")

    @classmethod
    def unpack(cls, data: bytes | bytearray) -> Status:
        """Decode the bytes that `pack` has returned."""
        rank, state, sequence = _HEAD.unpack_from(data)
        text = bytes(data[_HEAD.size :]).rstrip(b"\0").decode(errors="replace")
        signature, host, site = ([*text.split("\x1f"), "", "", ""])[:3]
        return cls(rank, state, sequence, signature, host, site)


def encode_signature(signature: Signature) -> str:
    """Encode a signature (the description of an operation) as a text for a `Status` message.

    Different signatures have different texts. If a text is too long, it is cut, and a digest of the
    whole signature is appended.
    """
    text = "\x1e".join(signature)
    data = text.encode()
    if len(data) <= _TEXT_BYTES:
        return text
    return f"{data[:_TEXT_BYTES].decode(errors='ignore')}... ({signature.key:x})"


def decode_signature(text: str) -> Signature:
    """Decode the text that `encode_signature` has returned."""
    return Signature(*[*text.split("\x1e"), *[""] * 6][:6])


def raised(text: str) -> bool:
    """Return whether `text`, an encoded `Signature`, stands for a call that raised an exception."""
    return text.startswith(RAISED + "\x1e")


def rank_list(ranks: Iterable[int]) -> str:
    """Return a text such as ``rank 2`` or ``ranks 0,1,3`` or ``ranks 0-62``."""
    ranks = sorted(ranks)
    words: list[str] = []
    # In a run of consecutive ranks, a rank minus its position in the list is constant.
    for _, pairs in groupby(enumerate(ranks), lambda pair: pair[1] - pair[0]):
        run = [str(rank) for _, rank in pairs]
        words += run if len(run) < 3 else [f"{run[0]}-{run[-1]}"]
    return ("rank " if len(ranks) == 1 else "ranks ") + ",".join(words)


def conflict(statuses: Iterable[Status]) -> str | None:
    """Return an error text if ranks are in different operations, otherwise None.

    Each status is the report of one rank, and all reports are about the operation with the same
    number on the communicator. A rank that has left the communicator earlier also gives a conflict.
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
    columns = zip(Signature._fields, zip(*signatures, strict=True), strict=True)
    differing = [field for field, values in columns if len(set(values)) > 1] or ["kind"]
    parts = []
    for text, members in sorted(groups.items(), key=lambda g: (len(g[1]), g[1][0].rank)):
        what = " ".join(_word(decode_signature(text), field) for field in differing)
        if "kind" in differing:
            what = decode_signature(text).text()
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
