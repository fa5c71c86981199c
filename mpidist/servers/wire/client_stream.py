"""How a worker sends gradients in pieces, and receives the answers in pieces into `out`.

::

    gradients   | 0 | 1 | 2 | 3 | 4 | ...     from the worker to the server
    out         | 0 | 1 | ...                 from the server to the worker, in the same order

At most 4 pieces (`WINDOW`) of the gradients are on the way. If the server answers single
pieces (under BSP), the worker sends piece 4 when it has received the answer to piece 0. If the
server answers only whole pushes, the worker sends piece 4 when MPI has sent piece 0.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np

from ..layout.placement import ServerLayout
from ..link import Link
from ..pieces.piece_transfers import PieceReceives, PieceSends
from ..protocol import PIECE_DOWN, PIECE_UP
from .wire_pieces import WirePiece, allowed

#: If a server receives no piece of a `push` (without a pull) for so many seconds, MPI gets all
#: other pieces at once. Tests change this number.
LATE = 0.25


class ClientStream:
    """Sends the gradients of a call in pieces to one server, and receives its answer in pieces.

    MPI uses the arrays in `gradients` and `out` until `progress` has returned True.
    """

    def __init__(
        self,
        link: Link,
        rank: int,
        layout: ServerLayout,
        pieces: Sequence[WirePiece],
        gradients: Mapping[str, np.ndarray] | None,
        out: Mapping[str, np.ndarray] | None,
        in_step: bool,
    ):
        self._link, self._ranks, self._layout, self._pieces = link, [rank], layout, pieces
        # `in_step`: the server answers each piece as soon as it has updated it.
        self._gradients, self._out, self._in_step = _raw(gradients), _raw(out), in_step
        self._sends = PieceSends(link, PIECE_UP)
        self._answers = PieceReceives(link, rank, PIECE_DOWN, pieces if out else (), self._target)
        self._begun, self._all = 0, len(pieces) if gradients else 0
        nbytes, sent, received = sum(p.nbytes for p in pieces), bool(gradients), bool(out)
        link.count_pieces(
            sent * len(pieces), sent * nbytes, received * len(pieces), received * nbytes
        )
        self._post()

    @property
    def handed(self) -> bool:
        """Whether the worker may send its request to the next server."""
        # If the server answers only whole pushes, MPI must first have all pieces of this push.
        return self._in_step or self._begun == self._all

    def progress(self) -> bool:
        """Receive pieces of the answer, and send pieces if allowed; return whether all is done."""
        for number, answer in self._answers.take():
            piece = self._pieces[number]
            if len(piece.spans) > 1:
                for raw, place in places_in(self._layout, self._out, piece):
                    raw[...] = answer[place]
                self._link.pool.give(answer)
        self._sends.reap()
        self._link.reap()  # free the buffers of checksums that have been sent
        self._post()
        return not self._sends and self.handed and self._answers.done

    def _post(self) -> None:
        """Post receives of answers, and send pieces."""
        # The receive is posted before the send, so that MPI need not buffer the answer. For a whole
        # push, it is posted only after the send, because answer and push may share memory.
        sends, begun = self._sends, self._begun
        if self._in_step or (self.handed and not sends):
            self._answers.post(self._answers.here)
        done = self._answers.here if self._in_step else begun - len(sends)
        for number in allowed(self._all, begun, done):
            piece = self._pieces[number]
            memory = self._memory(self._gradients, piece)
            if len(piece.spans) > 1:
                for raw, place in places_in(self._layout, self._gradients, piece):
                    memory[place] = raw
            sends.send(memory, self._ranks, len(piece.spans) > 1)
            self._link.moved = True
            self._begun = number + 1

    def _target(self, number: int) -> np.ndarray:
        return self._memory(self._out, self._pieces[number])

    def _memory(self, arrays: Mapping[str, np.ndarray], piece: WirePiece) -> np.ndarray:
        """Return the bytes of a piece in `arrays`, or a buffer for a piece with several ranges."""
        if len(piece.spans) > 1:
            return self._link.pool.take(piece.nbytes)
        ((raw, _),) = places_in(self._layout, arrays, piece)
        return raw


def places_in(layout: ServerLayout, arrays: Mapping[str, np.ndarray], piece: WirePiece):
    """Yield (bytes in `arrays`, slice of `piece`) for each range of a tensor in `piece`."""
    for tensor, start, stop, at in piece.spans:
        name, _, dtype, *_ = layout.tensors[tensor]
        size = dtype.itemsize
        raw = arrays[name][start * size : stop * size]
        yield raw, slice(at, at + raw.size)


def _raw(arrays: Mapping[str, np.ndarray] | None) -> dict[str, np.ndarray]:
    return {} if arrays is None else {name: array.view(np.uint8) for name, array in arrays.items()}


def can_share(gradients: Mapping[str, np.ndarray], out: Mapping[str, np.ndarray]) -> bool:
    """Whether new parameters may be written to `out` while `gradients` are still being sent.

    It is false if arrays overlap in part, or if an array has different names in the mappings.
    """
    # An answer overwrites only gradients that its server has already received.
    users: dict[tuple[int, int], list[tuple[int, str]]] = {}
    for side, arrays in enumerate((gradients, out)):
        for name, array in arrays.items():
            first = array.__array_interface__["data"][0]
            if array.nbytes:
                users.setdefault((first, first + array.nbytes), []).append((side, name))
    if any(start < stop for (_, stop), (start, _) in pairwise(sorted(users))):
        return False
    return all(1 in map(len, map(set, zip(*each, strict=True))) for each in users.values())


class CopiedPush:
    """Sends gradients in pieces. A piece is copied, and the copy is sent.

    Usually at most 4 copies (`WINDOW`) exist at a time. If the server receives no piece for 0.25 s
    (`LATE`), or if the argument `late` is true, all remaining pieces are copied and passed to MPI.
    """

    def __init__(
        self,
        link: Link,
        rank: int,
        layout: ServerLayout,
        pieces: Sequence[WirePiece],
        gradients: Mapping[str, np.ndarray],
        late: bool = False,
    ):
        self._link, self._rank, self._layout, self._pieces = link, rank, layout, pieces
        self._gradients, self._begun = _raw(gradients), 0
        self._flying: list[Sequence] = []
        # A push must not wait for a busy server, whose rank may also be a worker that computes.
        self._deadline, self.late = time.monotonic() + LATE, late

    def handed(self) -> bool:
        """Begin to send the pieces that may be sent now; return whether all sends have begun."""
        self._link.reap()
        self._flying = [requests for requests in self._flying if requests]
        number, now = len(self._pieces), time.monotonic()
        todo = allowed(number, self._begun, self._begun - len(self._flying))
        self.late |= now > self._deadline
        if self.late:
            todo = range(self._begun, number)
        if todo:
            self._deadline, self._link.moved = now + LATE, True
        for piece in map(self._pieces.__getitem__, todo):
            memory = self._link.pool.take(piece.nbytes)
            for raw, place in places_in(self._layout, self._gradients, piece):
                memory[place] = raw
            self._flying.append(self._link.send(memory, piece.nbytes, self._rank, PIECE_UP))
            self._begun += 1
        return self._begun == number
