"""A worker's side of a push_pull in pieces: from the gradients and into the arrays `out`.

::

    gradients   | 0 | 1 | 2 | 3 | 4 | ...     piece 4 is sent when answer 0 is here
    out         | 0 |                         answers come in the order of the pieces
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from mpi4py import MPI

from ...runtime.elastic_requests import test_one
from ..layout.placement import ServerLayout
from ..layout.routing import has_all
from ..link import Link
from ..protocol import PIECE_DOWN, PIECE_UP, Incoming, check_piece
from .node_stream import NodeClientStream
from .wire_pieces import WirePiece, allowed


class ClientStream:
    """The pieces of one push_pull between this worker and one server.

    Parameters
    ----------
    link : Link
    rank : int
        The server.
    layout : ServerLayout
    pieces : sequence of WirePiece
        What the server holds, see `cut_shard`.
    out, gradients : mapping of str to ndarray
        One-dimensional contiguous arrays of the dtypes of the tensors, by name. MPI uses them until
        `progress` has returned true. Without `gradients`, the stream only receives. Where both
        share memory, see `can_share`.
    """

    def __init__(
        self,
        link: Link,
        rank: int,
        layout: ServerLayout,
        pieces: Sequence[WirePiece],
        out: Mapping[str, np.ndarray],
        gradients: Mapping[str, np.ndarray] | None = None,
    ):
        self._link, self._rank, self._layout, self._pieces = link, rank, layout, pieces
        self._gradients = None
        if gradients is not None:
            self._gradients = {name: array.view(np.uint8) for name, array in gradients.items()}
        self._out = {name: array.view(np.uint8) for name, array in out.items()}
        self._begun = self._answered = 0
        # Each request with the memory that goes back to the pool, if its piece has many spans.
        self._sends: deque[tuple[MPI.Request, np.ndarray | None]] = deque()
        self._answers: deque[tuple[MPI.Request, np.ndarray]] = deque()
        self._status = MPI.Status()
        # After an exception the link keeps all this, because MPI may still use the memory.
        link.receiving.add(self)
        nbytes = sum(piece.nbytes for piece in pieces)
        pushes = gradients is not None
        link.count_pieces(pushes * len(pieces), pushes * nbytes, len(pieces), nbytes)
        self._post()

    def progress(self) -> bool:
        """Receive answers, and send the pieces that they allow; return whether all is done."""
        answers, sends, status = self._answers, self._sends, self._status
        before = self._answered
        while answers and test_one(answers[0][0], status):
            piece, (_, answer) = self._pieces[self._answered], answers.popleft()
            check_piece(status.Get_count(MPI.BYTE), piece.nbytes, self._rank)
            if len(piece.spans) > 1:
                for raw, place in self._places(self._out, piece):
                    raw[...] = answer[place]
                self._link.pool.give(answer)
            self._answered += 1
        if self._answered > before:
            self._link.moved = True
            self._post()
        while sends and test_one(sends[0][0], status):
            packed = sends.popleft()[1]
            if packed is not None:
                self._link.pool.give(packed)
        if answers or sends or self._begun < len(self._pieces):
            return False
        self._link.receiving.discard(self)
        return True

    def _post(self) -> None:
        link, rank = self._link, self._rank
        for number in allowed(len(self._pieces), self._begun, self._answered):
            piece = self._pieces[number]
            answer = self._memory(self._out, piece)
            # The answer's receive comes first, so that MPI need not buffer the answer.
            request = link.comm.Irecv([answer, MPI.BYTE], rank, link.tag + PIECE_DOWN)
            self._answers.append((request, answer))
            if self._gradients is not None:
                push = self._memory(self._gradients, piece)
                if len(piece.spans) > 1:
                    for raw, place in self._places(self._gradients, piece):
                        push[place] = raw
                request = link.comm.Isend([push, MPI.BYTE], rank, link.tag + PIECE_UP)
                self._sends.append((request, push if len(piece.spans) > 1 else None))
            self._begun = number + 1

    def _memory(self, arrays: Mapping[str, np.ndarray], piece: WirePiece) -> np.ndarray:
        """Return the bytes of a piece in `arrays`, or memory for a piece with several spans."""
        if len(piece.spans) > 1:
            return self._link.pool.take(piece.nbytes)
        ((raw, _),) = self._places(arrays, piece)
        return raw

    def _places(self, arrays: Mapping[str, np.ndarray], piece: WirePiece):
        """Yield the bytes of each span of a piece in `arrays`, and their place in the piece."""
        for tensor, start, stop, at in piece.spans:
            name, _, dtype, *_ = self._layout.tensors[tensor]
            size = dtype.itemsize
            raw = arrays[name][start * size : stop * size]
            yield raw, slice(at, at + raw.size)


def is_here(parts, incoming: Incoming, operation, stream: Any) -> bool:
    """Whether an answer has arrived, and its pieces if it has some."""
    if isinstance(stream, NodeClientStream):
        return stream.is_here(incoming)
    return (stream is None or stream.progress()) and incoming.test()


def whole_push(layout: ServerLayout, pushes: Mapping, out: Mapping) -> dict[str, np.ndarray] | None:
    """Return the gradients to push in pieces, or None if this push is a whole message."""
    if not has_all(layout, {name: rows for name, (rows, _) in pushes.items()}):
        return None
    # A flat gradient may have gaps between its elements, and MPI sends bytes that have none.
    gradients = {name: np.ascontiguousarray(flat) for name, (_, flat) in pushes.items()}
    return gradients if can_share(gradients, out) else None


def can_share(gradients: Mapping[str, np.ndarray], out: Mapping[str, np.ndarray]) -> bool:
    """Whether answers may be written to `out` while `gradients` are still being sent.

    An answer overwrites only the gradients of its own piece, which the server has received already.
    So one array may have both the gradient and the new values of a tensor, unless it is also the
    gradient of another tensor.
    """
    users: dict[tuple[int, int], list[tuple[int, str]]] = {}
    for side, arrays in enumerate((gradients, out)):
        for name, array in arrays.items():
            first = array.__array_interface__["data"][0]
            if array.nbytes:
                users.setdefault((first, first + array.nbytes), []).append((side, name))
    if any(start < stop for (_, stop), (start, _) in pairwise(sorted(users))):
        return False
    return all(1 in map(len, map(set, zip(*each, strict=True))) for each in users.values())
