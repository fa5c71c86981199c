"""The format of the messages between workers and servers, and the class that receives a message.

A push (gradients), a pull (a request for parameters) or a push_pull (both in one) sends one message
to a server. The server answers a pull or a push_pull with one message. A message has these parts in
one contiguous buffer:

    | header: 128 bytes | push selection | pull selection | push data, parts aligned to 8 bytes |

A selection lists the tensors, or the rows of tensors, to push or pull. A message of more than 1 GiB
(`MESSAGE_BYTES`) is sent in several MPI messages.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from ..errors import ProtocolError
from ..partition import pieces
from ..runtime.elastic_requests import test_one

MAGIC = 0x6D70696470737276  # the characters "mpidpsrv"
FORMAT = 2

#: The largest single MPI message in bytes; a count must fit in 31 bits. Tests lower this number.
MESSAGE_BYTES = 1 << 30

# What a request asks for. The values are bits, so that one message can carry several requests.
PUSH, CLOCK, PULL, LEAVE, PAUSE, BYE, ADD, BARRIER, DROP = 1, 2, 4, 8, 16, 32, 64, 128, 256
CHANGE = 512

_REQUESTS = ("push", "clock", "pull", "leave", "pause", "bye", "add", "barrier", "drop", "change")


def _name(flags: int) -> str:
    return "+".join(name for bit, name in enumerate(_REQUESTS) if flags >> bit & 1)


#: The name of each combination of requests in the log of a worker, and in the log of the server
#: that handles it. The index is the flags of the header.
NAMES = [_name(flags) for flags in range(1 << len(_REQUESTS))]
SERVED = [f"serve {name}" for name in NAMES]

# In place of the length of a selection, a header may have one of the following negative numbers.
# Each of them means all tensors that the server holds.
ALL = -1  # the data are in this message
# PIECES, STREAM: the data are sent in pieces, see the folder `wire`. With PIECES, the server
# handles the push when all its pieces have arrived; with STREAM, it updates and answers each piece.
# MEMORY: the selection has the addresses of the gradients in the worker's memory (`memory_push`).
PIECES, STREAM, MEMORY = -2, -3, -4

# Messages to servers and to workers have different tags, because a rank that is both worker and
# server sends messages to itself.
DECISION, TO_SERVER, TO_WORKER, NOTICE, VALUES, UP, DOWN, VOTE, COPY = 0, 1, 2, 3, 4, 5, 6, 7, 8
PIECE_UP, PIECE_DOWN, SQUARES = 9, 10, 11
#: The tag of a piece's checksum is this number plus the tag of the piece, see `checksums`.
SUMS = 3

#: Flags of messages between servers that keep copies of shards (`shard_copies`): the next server
#: has received an update for its copy; and the previous server will send no more updates.
ACKNOWLEDGE, NO_MORE = CLOCK, BYE

# Groups share the control communicator of their context, and each group has its own tags there.
# MPI only guarantees tags up to 32,767, so tags are used again after `GROUPS` groups.
FIRST_TAG, TAGS, GROUPS = 16_384, 14, 1_170

# The magic number, the format, the checksum or 0, and the fields of `Header`.
_STRUCT = struct.Struct("<qII14q")
HEADER_BYTES = _STRUCT.size
CHECKED_FROM = 16  # the checksum covers all bytes from this byte on


class Header(NamedTuple):
    """The numbers at the front of every request and every answer; each field has a comment."""

    flags: int
    model: int = 0
    clock: int = 0
    total: int = HEADER_BYTES  # bytes of the whole message
    push_words: int = 0  # int64 words of the push selection, or ALL, PIECES, ...
    pull_words: int = 0  # int64 words of the pull selection, or ALL, PIECES or STREAM
    samples: int = -1  # request: samples of the push; -1 if the worker gave no number
    version: int = 0  # reply: updates that this server has applied
    #: Request: 1 if a server has let the worker enter its clock. Reply: how many clocks the worker
    #: is ahead of the slowest worker.
    gap: int = 0
    held_ns: int = 0  # reply: how long the pull waited for slower workers
    staleness: int = -1  # reply: staleness of the worker's newest applied push; -1 without a push
    queue: int = 0  # reply: workers whose messages waited when the server received this request
    #: Request: two numbers for the first server, see `Link.on_note`. Reply: how many pushes of the
    #: worker were dropped.
    note0: int = 0
    note1: int = 0

    def write(self, buffer: np.ndarray) -> None:
        """Write the header to the front of a byte buffer."""
        _STRUCT.pack_into(buffer.data, 0, MAGIC, FORMAT, 0, *self)


def write_header(buffer: np.ndarray, *fields: int) -> None:
    """Write all fields of a `Header` to the front of a byte buffer, without making a `Header`."""
    _STRUCT.pack_into(buffer.data, 0, MAGIC, FORMAT, 0, *fields)


def read_header(buffer: np.ndarray, nbytes: int, rank: int) -> Header:
    """Return the header of a message from `rank`, of which `nbytes` bytes have arrived.

    Raises ProtocolError if the message is too short, damaged, or in another format.
    """
    if nbytes < HEADER_BYTES:
        raise ProtocolError(f"parameter server: {nbytes} bytes from rank {rank} are no message")
    numbers = _STRUCT.unpack_from(buffer.data)
    magic, form = numbers[:2]
    if magic != MAGIC:
        raise ProtocolError(f"parameter server: unknown message from rank {rank} ({magic:#x})")
    if form != FORMAT:
        raise ProtocolError(
            f"parameter server: rank {rank} speaks message format {form}, this rank {FORMAT}; "
            "all ranks must run the same mpidist"
        )
    header = tuple.__new__(Header, numbers[3:])  # takes half of the time of `Header`
    words = header.push_words
    if header.total < nbytes or words < MEMORY or header.pull_words < MEMORY:
        raise ProtocolError(f"parameter server: damaged header from rank {rank}: {header}")
    return header


def largest(headers: Sequence[Header]) -> tuple[int, int, int, int]:
    """Return the largest values of four fields of the headers, in the answers to one worker.

    The fields are: how long the pull waited for slower workers (in nanoseconds), how many steps the
    worker is ahead of the slowest, how many pushes were dropped, and the staleness of the newest
    applied push.
    """
    if len(headers) == 1:
        (only,) = headers
        return only.held_ns, only.gap, only.note0, only.staleness
    # The nanoseconds for which the pull waited for slower workers, the steps ahead of the slowest
    # worker, the dropped pushes, and the staleness of the newest applied push.
    held = gap = dropped = 0
    oldest = -1
    for header in headers:
        held, gap = max(held, header.held_ns), max(gap, header.gap)
        dropped, oldest = max(dropped, header.note0), max(oldest, header.staleness)
    return held, gap, dropped, oldest


def selection_words(selection: Any) -> int:
    """Return the number for `selection` in a header: the length of the array, or a code."""
    # The length of an array, or one of `ALL`, `PIECES`, `STREAM` and `MEMORY`.
    if isinstance(selection, np.ndarray):
        return selection.size
    return ALL if selection is None else selection


def check_piece(got: int, expected: int, rank: int) -> None:
    """Raise ProtocolError if a piece of a message has `got` bytes instead of `expected` bytes."""
    if got != expected:
        raise ProtocolError(
            f"parameter server: a piece from rank {rank} has {got} bytes, expected {expected}; all "
            "ranks must run the same mpidist"
        )


# `BufferPool` does not suit messages, whose sizes vary: each of its buffers serves one size only.
class MessagePool:
    """A pool of byte buffers for messages; a short message may use the buffer of a longer one.

    The pool keeps at most `keep` idle buffers; when there are more, it frees the smallest.
    """

    def __init__(self, keep: int):
        self.keep = keep
        self._idle: list[np.ndarray] = []

    def take(self, nbytes: int) -> np.ndarray:
        """Return `nbytes` bytes of the smallest idle buffer that is big enough, or of a new one."""
        best, least = -1, sys.maxsize
        for i, buffer in enumerate(self._idle):
            if nbytes <= buffer.size < least:
                best, least = i, buffer.size
        if best >= 0:
            return self._idle.pop(best)[:nbytes]
        return np.empty(-(-max(nbytes, 1) // 4096) * 4096, np.uint8)[:nbytes]

    def give(self, taken: np.ndarray | None) -> None:
        """Return to the pool an array that `take` has returned; None does nothing."""
        if taken is None:
            return
        assert taken.base is not None  # `take` returns a view
        self._idle.append(taken.base)
        if len(self._idle) > self.keep:
            del self._idle[min(range(len(self._idle)), key=lambda i: self._idle[i].size)]


_NO_HEADER = Header(0)


class Incoming:
    """One message that MPI is receiving into a buffer of the link's pool of buffers.

    When `test` returns true, `buffer` has the whole message; the caller gives it back to the pool
    after use.
    """

    def __init__(self, link, source: int, tag: int, nbytes: int):
        self.source, self._link, self._tag = source, link, tag
        # The link keeps a reference too, because after an exception the caller drops its own while
        # MPI may still write into the buffer.
        link.receiving.add(self)
        self.header, self._opened = _NO_HEADER, False
        self.buffer = link.pool.take(nbytes)
        first = self.buffer[: min(nbytes, MESSAGE_BYTES)]
        self._requests = [link.comm.Irecv([first, MPI.BYTE], source, tag)]

    def test(self) -> bool:
        """Return whether the whole message has arrived; receive more of it if MPI has it."""
        while self._requests:
            status = MPI.Status()
            if not test_one(self._requests[0], status):
                return False
            del self._requests[0]
            if not self._opened:
                self._open(status.Get_count(MPI.BYTE))
        if self in self._link.receiving:
            self._link.receiving.remove(self)
            if self._link.checksums is not None:
                self._link.checksums.check(self.buffer, self.header, self.source, self._tag)
            self._link.taken[self.source] += self._tag == self._link.tag + TO_SERVER
        return True

    def _open(self, got: int) -> None:
        """Read the header in a message's first piece; post the receives for all further pieces."""
        self.header, self._opened = read_header(self.buffer, got, self.source), True
        total = self.header.total
        if total > got and got != MESSAGE_BYTES:
            raise ProtocolError(
                f"parameter server: rank {self.source} sent {got} bytes of {total}; a message is "
                f"cut at {MESSAGE_BYTES} bytes"
            )
        if total > self.buffer.size:
            small, self.buffer = self.buffer, self._link.pool.take(total)
            self.buffer[:got] = small[:got]
            self._link.pool.give(small)
        # All pieces have the same tag. Messages of one sender arrive in order, and no function
        # probes this source until all pieces have arrived.
        for start, stop in pieces(got, total, MESSAGE_BYTES):
            view = [self.buffer[start:stop], MPI.BYTE]
            self._requests.append(self._link.comm.Irecv(view, self.source, self._tag))
