"""List the parts of a model in a message, and the positions of their bytes; uses no MPI.

A piece is the range of a tensor that one server holds. A part is a whole piece, or some rows of a
piece. A message lists its parts in a selection (an array of int64): ``tensor, -1`` for a whole
piece, ``tensor, n, row 1, ... row n`` for rows. After the selection come the data of the parts in
the same order, each part aligned to 8 bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ...errors import ProtocolError
from ..rows.key_values import owners
from .placement import Piece, ServerLayout

_ALIGN = 8
# A `WholeShard` keeps the views of at most `_KEPT` buffers, each of at most `_SMALL` bytes.
_SMALL, _KEPT = 64 << 10, 16


class ShardPart(NamedTuple):
    """The elements of one tensor that a message has: a whole piece, or some rows of it.

    The piece is what one server holds of the tensor. `rows` are row numbers of the tensor, or None
    for the whole piece.
    """

    piece: Piece
    rows: np.ndarray | None = None

    def elements(self, layout: ServerLayout) -> int:
        """Return the number of elements of the tensor that this part has."""
        if self.rows is None:
            return self.piece.stop - self.piece.start
        return len(self.rows) * layout.tensors[self.piece.tensor].width

    def local_rows(self, layout: ServerLayout) -> np.ndarray:
        """Return the part's row numbers, counted from the first row that the server holds."""
        width = max(1, layout.tensors[self.piece.tensor].width)
        return np.asarray(self.rows) - self.piece.start // width

    def with_local_rows(self, layout: ServerLayout, rows: np.ndarray) -> ShardPart:
        """Return a `ShardPart` of the same piece with other rows.

        The piece is what one server holds of a tensor. `rows` are counted from the first row of the
        piece.
        """
        width = max(1, layout.tensors[self.piece.tensor].width)
        return self._replace(rows=rows + self.piece.start // width)


def whole_parts(layout: ServerLayout, server: int) -> list[ShardPart]:
    """Return a list with one `ShardPart` for each tensor of which `server` holds elements.

    The `ShardPart` contains all that the server holds of the tensor.
    """
    return [ShardPart(piece) for piece in layout.pieces[server]]


def route(
    layout: ServerLayout, server: int, wanted: Mapping[int, np.ndarray | None]
) -> list[ShardPart]:
    """Return the tensors and rows in `wanted` that `server` holds, as a list of `ShardPart`.

    `wanted` maps the number of a tensor to rows, or to None for all rows.
    """
    parts = []
    for piece in layout.pieces[server]:
        if piece.tensor not in wanted:
            continue
        rows = wanted[piece.tensor]
        if rows is None:
            parts.append(ShardPart(piece))
        elif (here := rows[owned(layout, piece, rows)]).size:
            parts.append(ShardPart(piece, here))
    return parts


def owned(layout: ServerLayout, piece: Piece, rows: np.ndarray) -> np.ndarray:
    """Return a boolean array that says which of `rows` are in `piece`.

    The piece is what one server holds of a tensor.
    """
    if layout.tensors[piece.tensor].open is not None:
        return owners(rows, layout.shares) == piece.start
    width = max(1, layout.tensors[piece.tensor].width)
    return (rows >= piece.start // width) & (rows < piece.stop // width)


def has_all(layout: ServerLayout, named: Mapping) -> bool:
    """Whether a mapping (name to rows, or to None for all rows) contains the whole model."""
    return len(named) == len(layout.tensors) and all(rows is None for rows in named.values())


def part_of(
    layout: ServerLayout, part: ShardPart, rows, flat: np.ndarray
) -> tuple[np.ndarray, Any]:
    """Return (array, index), so that ``array[index]`` are the values that `part` contains.

    `flat` has the values of `rows` of the tensor, or of the whole tensor if `rows` is None.
    """
    if rows is None:
        return flat, slice(part.piece.start, part.piece.stop)
    width = layout.tensors[part.piece.tensor].width
    return flat.reshape(len(rows), width), owned(layout, part.piece, rows)


def encode_parts(parts: Sequence[ShardPart]) -> np.ndarray:
    """Return the int64 array, called a selection, that lists `parts` in a message."""
    words = [np.empty(0, np.int64)]
    for (tensor, *_), rows in parts:
        words.append(np.array([tensor, -1 if rows is None else len(rows)], np.int64))
        if rows is not None:
            words.append(rows.astype(np.int64, copy=False))
    return np.concatenate(words)


def decode_parts(words: np.ndarray, layout: ServerLayout, server: int) -> list[ShardPart]:
    """Return the tensors and rows that a selection lists, as a list of `ShardPart` objects.

    A selection is an array `words` that `encode_parts` has made. Raises ProtocolError if `server`
    does not hold a tensor or a row that the selection lists.
    """
    here = {piece.tensor: piece for piece in layout.pieces[server]}
    parts, at = [], 0
    while at < len(words):
        tensor, count = words[at : at + 2].tolist() if at + 2 <= len(words) else (-1, 0)
        rows = None if count == -1 else words[at + 2 : at + 2 + count].copy()
        whole = rows is None and tensor in here and layout.tensors[tensor].open is not None
        if tensor not in here or count < -1 or whole or (rows is not None and len(rows) != count):
            raise ProtocolError(f"parameter server {server}: selection asks for tensor {tensor}")
        if rows is not None and not owned(layout, here[tensor], rows).all():
            raise ProtocolError(f"parameter server {server}: selection asks for rows not held here")
        parts.append(ShardPart(here[tensor], rows))
        at += 2 + max(count, 0)
    return parts


def data_bytes(layout: ServerLayout, parts: Sequence[ShardPart]) -> int:
    """Return how many bytes the data of `parts` take in a message."""
    return sum(_room(layout, part) for part in parts)


def views(
    layout: ServerLayout, parts: Sequence[ShardPart], buffer: np.ndarray, offset: int
) -> Iterator[tuple[ShardPart, np.ndarray]]:
    """Yield pairs (part, 1-D view of its data) for all `parts` of a message.

    A part is a `ShardPart`: what the message has of one tensor. The message is in `buffer`. The
    data of the first part begin at byte `offset`, and the data of the other parts follow.
    """
    for part in parts:
        dtype = layout.tensors[part.piece.tensor].dtype
        stop = offset + part.elements(layout) * dtype.itemsize
        if stop > buffer.size:
            raise ProtocolError(f"parameter server: message ends before tensor {part.piece.tensor}")
        yield part, buffer[offset:stop].view(dtype)
        offset += _room(layout, part)


class WholeParts(list):
    """A list of pairs (part, gradient), from a message with all that one server holds of a model.

    A part is all that the server holds of one tensor.
    """

    __slots__ = ("gradients",)

    def __init__(self, parts: Iterable[tuple[ShardPart, np.ndarray]]):
        super().__init__(parts)
        # A dict of the same arrays, once `ServerShard.merge` has made it. Later messages use the
        # same memory.
        self.gradients: Any = None


class WholeShard:
    """Where the data are in messages that contain all that one server holds of a model.

    Such a message has a part for each tensor: all that the server holds of the tensor.
    """

    def __init__(self, layout: ServerLayout, server: int):
        self.layout, self.parts = layout, whole_parts(layout, server)
        self.nbytes = data_bytes(layout, self.parts)
        self._places = []
        offset = 0
        for part in self.parts:
            dtype = layout.tensors[part.piece.tensor].dtype
            stop = offset + part.elements(layout) * dtype.itemsize
            self._places.append((part, dtype, offset, stop))
            offset += _room(layout, part)
        self._kept: dict[tuple[int, int], tuple[np.ndarray, WholeParts]] = {}

    def views(self, buffer: np.ndarray, offset: int) -> list[tuple[ShardPart, np.ndarray]]:
        """Return a list of pairs (part, 1-D view of its data) for a message in `buffer`.

        A part is all that the server holds of one tensor. The data of the first part begin at byte
        `offset`, and the data of the other parts follow.
        """
        if offset + self.nbytes > buffer.size:
            raise ProtocolError("parameter server: message ends before its last tensor")
        return [
            (part, buffer[offset + start : offset + stop].view(dtype))
            for part, dtype, start, stop in self._places
        ]

    def kept_views(
        self, buffer: np.ndarray, offset: int
    ) -> list[tuple[ShardPart, np.ndarray]] | WholeParts:
        """Return a list of pairs (part, 1-D view of its data) for a message in `buffer`.

        A part is all that the server holds of one tensor. The data of the first part begin at byte
        `offset`, and the data of the other parts follow.

        The views of small buffers are kept for the next message in the same buffer.
        """
        memory = buffer.base
        if memory is None or memory.nbytes > _SMALL:
            return self.views(buffer, offset)
        kept = self._kept.get((id(memory), offset))
        if kept is None or buffer.size < offset + self.nbytes:
            if len(self._kept) == _KEPT:
                self._kept.clear()
            # Kept with the memory itself, so that no other array gets the same id.
            kept = memory, WholeParts(self.views(buffer, offset))
            self._kept[id(memory), offset] = kept
        return kept[1]


def _room(layout: ServerLayout, part: ShardPart) -> int:
    nbytes = part.elements(layout) * layout.tensors[part.piece.tensor].dtype.itemsize
    return -(-nbytes // _ALIGN) * _ALIGN
