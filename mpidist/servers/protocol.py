"""What travels between workers and servers: one format, and how a message of any size is received.

One message per server per push, pull or fused push-pull, each way, in one contiguous buffer:

    | header: 16 int64 | push selection | pull selection | push data, parts aligned to 8 bytes |

A selection says which tensors, or rows of tensors, are meant (`routing`). A message above
`MESSAGE_BYTES` is cut: the first piece carries the header, and with it the number of bytes to
come. Nothing is pickled: the step loop sends raw bytes, set-up exchanges JSON.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import numpy as np
from mpi4py import MPI

from ..errors import ProtocolError
from ..partition import pieces

MAGIC = 0x6D70696470737276  # "mpidpsrv"
FORMAT = 1

#: Largest single MPI message in bytes; a count must fit in 31 bits. Tests lower it.
MESSAGE_BYTES = 1 << 30

# What a request asks for: bits, so that a fused request is one message.
PUSH, CLOCK, PULL, LEAVE, PAUSE, BYE, ADD = 1, 2, 4, 8, 16, 32, 64

_REQUESTS = ("push", "clock", "pull", "leave", "pause", "bye", "add")


def _name(flags: int) -> str:
    return "+".join(name for bit, name in enumerate(_REQUESTS) if flags >> bit & 1)


#: What a request is called in a report, by its flags; and its handling on the server.
NAMES = [_name(flags) for flags in range(1 << len(_REQUESTS))]
SERVED = [f"serve {name}" for name in NAMES]

ALL = -1  # as the length of a selection: everything that the server holds

# Own tags for the two directions: a rank may be worker and server at once, and talk to itself.
TO_SERVER, TO_WORKER, NOTICE, VALUES, UP, DOWN = 1, 2, 3, 4, 5, 6

# Groups share the control communicator of their context: each has tags of its own there. 32,767
# is what MPI promises at least; so many groups later numbers are used again.
_FIRST_TAG, _TAGS, _GROUPS = 16_384, 8, 2_000


def first_tag(group: int) -> int:
    """Return what is added to the tags of group number `group` of a communicator."""
    return _FIRST_TAG + _TAGS * (group % _GROUPS)


_STRUCT = struct.Struct("<16q")
HEADER_BYTES = _STRUCT.size


class Header(NamedTuple):
    """The numbers in front of every message; requests and replies share them."""

    flags: int
    model: int = 0
    clock: int = 0
    total: int = HEADER_BYTES  # bytes of the whole message
    push_words: int = 0  # int64 words of the push selection, or ALL
    pull_words: int = 0  # int64 words of the pull selection, or ALL
    samples: int = -1  # of a push; -1 is not given
    version: int = 0  # reply: updates that this server has applied
    gap: int = 0  # reply: clocks ahead of the slowest worker
    held_ns: int = 0  # reply: how long the clocks held the pull back
    staleness: int = -1  # reply: of the worker's newest applied push; -1 is none
    queue: int = 0  # reply: workers with a message waiting when this one was taken up
    note0: int = 0  # request: two numbers that a worker tells the first server, see `Link.on_note`
    note1: int = 0

    def write(self, buffer: np.ndarray) -> None:
        """Put the header at the front of a byte buffer."""
        _STRUCT.pack_into(buffer.data, 0, MAGIC, FORMAT, *self)


def read_header(buffer: np.ndarray, nbytes: int, rank: int) -> Header:
    """Parse the first `nbytes` received from `rank`.

    Raises
    ------
    ProtocolError
        Too short, no message of ours, or of another format.
    """
    if nbytes < HEADER_BYTES:
        raise ProtocolError(f"parameter server: {nbytes} bytes from rank {rank} are no message")
    magic, form, *fields = _STRUCT.unpack_from(buffer.data, 0)
    if magic != MAGIC:
        raise ProtocolError(f"parameter server: unknown message from rank {rank} ({magic:#x})")
    if form != FORMAT:
        raise ProtocolError(
            f"parameter server: rank {rank} speaks message format {form}, this rank {FORMAT}; "
            "all ranks must run the same mpidist"
        )
    header = Header(*fields)
    if header.total < nbytes or min(header.push_words, header.pull_words) < ALL:
        raise ProtocolError(f"parameter server: damaged header from rank {rank}: {header}")
    return header


class Pool:
    """Byte buffers that are used again and again."""

    def __init__(self, keep: int):
        self.keep = keep
        self._free: list[np.ndarray] = []

    def take(self, nbytes: int) -> np.ndarray:
        """Return the smallest free buffer of at least `nbytes`, or a new one."""
        fitting = [i for i, buffer in enumerate(self._free) if buffer.size >= nbytes]
        if fitting:
            return self._free.pop(min(fitting, key=lambda i: self._free[i].size))
        return np.empty(-(-max(nbytes, 1) // 4096) * 4096, np.uint8)

    def give(self, buffer: np.ndarray) -> None:
        """Take a buffer back; the smallest is dropped when there are too many."""
        self._free.append(buffer)
        if len(self._free) > self.keep:
            del self._free[min(range(len(self._free)), key=lambda i: self._free[i].size)]


class Incoming:
    """One message that is being received into a buffer of the pool.

    Attributes
    ----------
    header : Header
        Known once the first piece is here, see `opened`.
    buffer : ndarray of uint8
        The whole message once `test` is true; the owner gives it back to the pool.
    """

    def __init__(self, link, source: int, tag: int, nbytes: int):
        self.source, self._link, self._tag = source, link, tag
        # Its owner may lose it to an exception, but MPI goes on writing until it is here.
        link.receiving.add(self)
        self.header, self.opened = Header(0), False
        self.buffer = link.pool.take(nbytes)
        first = self.buffer[: min(nbytes, MESSAGE_BYTES)]
        self._requests = [link.comm.Irecv([first, MPI.BYTE], source, tag)]

    def test(self) -> bool:
        """Whether the whole message is here. Makes progress."""
        while self._requests:
            status = MPI.Status()
            if not self._requests[0].Test(status):
                return False
            del self._requests[0]
            if not self.opened:
                self._open(status.Get_count(MPI.BYTE))
        self._link.receiving.discard(self)
        return True

    def _open(self, got: int) -> None:
        """Read the header in the first piece and post receives for the pieces to come."""
        self.header, self.opened = read_header(self.buffer, got, self.source), True
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
        # The pieces follow on the same tag: a sender's messages arrive in order, and nobody
        # probes this source until they are all here.
        for start, stop in pieces(got, total, MESSAGE_BYTES):
            view = [self.buffer[start:stop], MPI.BYTE]
            self._requests.append(self._link.comm.Irecv(view, self.source, self._tag))
