"""Cut the part of a model on one server into pieces, and decide how many may be on the way.

::

    shard of a server    | a: 300 KiB            | b: 2 KiB | c: 1 KiB | d: 200 KiB   |
    pieces               | a 128 | a 128 | a 44  | b and c             | d 128 | d 72 |

A piece has at most 128 KiB (`PIECE_BYTES`) between nodes, and 1 MiB (`NODE_PIECE_BYTES`) within a
node. A long tensor has pieces of its own, which are sent without a copy; short tensors share a
piece.

Under BSP a worker sends piece k + 4 of its gradients only when the server has answered piece k (4
is `WINDOW`). In the other modes, it sends piece k + 4 when MPI has sent piece k.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from ..layout.placement import ServerLayout

#: The largest number of bytes of a piece, between nodes and within a node; and how many pieces of a
#: worker may be on the way to one server. Tests lower these numbers. Within a node the ranks share
#: no network link, and fewer and longer pieces take less time.
# Without `WINDOW`, pieces would not save time: answers would wait behind pieces that MPI has
# accepted. No deadlock: under BSP the first unanswered piece is always being sent; in other modes a
# push that has begun waits only for its worker, which sends nothing else before MPI has taken the
# whole push.
PIECE_BYTES, NODE_PIECE_BYTES, WINDOW = 128 << 10, 1 << 20, 4

_ALIGN = 8


class PieceSpan(NamedTuple):
    """A range of a tensor in a piece of a message: elements ``start:stop`` of the flat tensor."""

    tensor: int
    start: int
    stop: int
    # The byte of the piece at which the range begins.
    at: int


class WirePiece(NamedTuple):
    """A piece of gradients or parameters that is sent as one message."""

    # Ranges of tensors; together they are bytes `start:stop` of the data of the whole message.
    spans: tuple[PieceSpan, ...]
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        """The length of the message with this piece, in bytes."""
        return self.stop - self.start


def piece_limit(hosts: Collection[str], nbytes: int) -> int:
    """Return how many bytes of a server's part of the model may be sent in one message.

    `hosts` are the hosts of the ranks, and `nbytes` is the size of the server's part.
    """
    if len(hosts) > 1:
        return PIECE_BYTES
    return min(NODE_PIECE_BYTES, max(2 * PIECE_BYTES, nbytes // 8))


def cut_shard(layout: ServerLayout, server: int, limit: int) -> list[WirePiece]:
    """Return the pieces, of at most `limit` bytes, in which the parameters on `server` are sent."""
    # Rounded down to a multiple of 8.
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

    The first `begun` of all `pieces` have begun, and the first `done` pieces are answered. At most
    4 pieces (`WINDOW`) may have begun without being answered.
    """
    return range(begun, min(pieces, done + WINDOW))
