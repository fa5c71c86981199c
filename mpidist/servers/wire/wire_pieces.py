"""Cut the part of a model on one server into pieces, and decide how many may be on the way.

::

    shard of a server    | a: 300 KiB            | b: 2 KiB | c: 1 KiB | d: 200 KiB   |
    pieces               | a 128 | a 128 | a 44  | b and c             | d 128 | d 72 |

A piece has at most 128 KiB (`PIECE_BYTES`) between nodes, and 1 MiB (`NODE_PIECE_BYTES`) within a
node. A long tensor has pieces of its own, which are sent without a copy; short tensors share a
piece. Each piece is a range of bytes of the data of a whole message (see `routing.WholeShard`), so
pieces may also be received into a buffer for a whole message. Worker and server cut the same
layout, so no message needs to name the parts of a piece.

Under BSP a server answers each piece as soon as it has updated the parameters of the piece. A
worker sends piece k + `WINDOW` of its push only when piece k is answered (`WINDOW` is 4). Without
this limit, pieces would not save time: the answers, or MPI's own control messages for them, would
wait behind pieces that MPI has already accepted. The server posts the receives of `WINDOW` pieces
of each worker in advance, and uses the memory of piece k again for piece k + `WINDOW`. A deadlock
is impossible: the first unanswered piece is always being sent, and its answer waits only for the
same piece of the other workers.

In the other modes, a server receives the whole push before it answers or updates anything. A worker
sends piece k + `WINDOW` when MPI has sent piece k. A worker sends its pushes to one server after
another: while it sends to the second server, the first server already answers. Worker number w
begins with server number w, so that at any time all servers have about the same amount to receive.
A deadlock is impossible: a push that has begun to arrive waits only for the worker that sends it,
and this worker sends nothing else before MPI has taken the whole push.

This module uses no MPI.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from ..layout.placement import ServerLayout

#: The largest number of bytes of a piece, between nodes and within a node; and how many pieces of a
#: worker may be on the way to one server. Tests lower these numbers. Within a node the ranks share
#: no network link, and fewer and longer pieces take less time.
PIECE_BYTES, NODE_PIECE_BYTES, WINDOW = 128 << 10, 1 << 20, 4

_ALIGN = 8


class PieceSpan(NamedTuple):
    """A range of a tensor in a piece of a message: elements ``start:stop`` of the flattened tensor.

    The range begins at byte `at` of the piece.
    """

    tensor: int
    start: int
    stop: int
    at: int


class WirePiece(NamedTuple):
    """A piece of a push or an answer that is sent as one message.

    It has ranges of one or several tensors (`spans`), and is bytes ``start:stop`` of the data of
    the whole push or answer. A piece with one range is not copied before it is sent.
    """

    spans: tuple[PieceSpan, ...]
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        """The length of the message with this piece, in bytes."""
        return self.stop - self.start


def piece_limit(hosts: Collection[str], nbytes: int) -> int:
    """Return the largest size of a piece of a message, for a group whose ranks are on these hosts.

    `nbytes` is how many bytes of parameters a server holds.
    """
    if len(hosts) > 1:
        return PIECE_BYTES
    return min(NODE_PIECE_BYTES, max(2 * PIECE_BYTES, nbytes // 8))


def cut_shard(layout: ServerLayout, server: int, limit: int) -> list[WirePiece]:
    """Return the pieces in which the parameters that `server` holds are sent.

    Each piece has at most `limit` bytes, rounded down to a multiple of 8.
    """
    limit = max(_ALIGN, limit // _ALIGN * _ALIGN)
    found: list[WirePiece] = []
    spans: list[PieceSpan] = []
    begin = end = 0  # the piece, in bytes of a whole message; `end` is a multiple of `_ALIGN`

    def close() -> None:
        nonlocal begin
        if spans:
            last = spans[-1]
            size = (last.stop - last.start) * layout.tensors[last.tensor].dtype.itemsize
            found.append(WirePiece(tuple(spans), begin, begin + last.at + size))
        spans.clear()
        begin = end

    for tensor, start, stop in layout.pieces[server]:
        size = layout.tensors[tensor].dtype.itemsize
        if (stop - start) * size > limit - (end - begin):
            close()
        while start < stop:
            take = min(stop - start, limit // size)
            spans.append(PieceSpan(tensor, start, start + take, end - begin))
            end += -(-take * size // _ALIGN) * _ALIGN
            start += take
            if start < stop:
                close()
    close()
    return found


def allowed(pieces: int, begun: int, done: int) -> range:
    """Return the numbers of the pieces that may begin to be sent or received now.

    Of all `pieces`, the first `begun` pieces have begun, and the first `done` pieces are answered
    (or their memory is free again). At most 4 pieces (`WINDOW`) have begun and are not answered.
    """
    return range(begun, min(pieces, done + WINDOW))
