"""Which parts of a model one message carries, and where they lie in it. Pure arithmetic.

A part is a whole piece, or some rows of it. On the wire a selection is a list of int64:
``tensor, -1`` for a whole piece, ``tensor, n, row 1, ... row n`` for rows; their data follow in
the same order, each part aligned to 8 bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from ...errors import ProtocolError
from .placement import Piece, ServerLayout

_ALIGN = 8


class ShardPart(NamedTuple):
    """A whole piece (`rows` is None), or these rows of it, by their index in the tensor."""

    piece: Piece
    rows: np.ndarray | None = None

    def elements(self, layout: ServerLayout) -> int:
        """Number of elements."""
        if self.rows is None:
            return self.piece.stop - self.piece.start
        return len(self.rows) * layout.tensors[self.piece.tensor].width

    def local_rows(self, layout: ServerLayout) -> np.ndarray:
        """Rows counted from the start of the piece; only for a part that has rows."""
        width = max(1, layout.tensors[self.piece.tensor].width)
        return np.asarray(self.rows) - self.piece.start // width


def whole_parts(layout: ServerLayout, server: int) -> list[ShardPart]:
    """Everything that `server` holds."""
    return [ShardPart(piece) for piece in layout.pieces[server]]


def route(
    layout: ServerLayout, server: int, wanted: Mapping[int, np.ndarray | None]
) -> list[ShardPart]:
    """Return the parts of `wanted` (tensor number to rows, or None for all) on `server`.

    Rows keep their order. Cuts of a tensor whose rows are asked for must be between rows.
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
    """Mask of the rows that `piece` holds."""
    width = max(1, layout.tensors[piece.tensor].width)
    return (rows >= piece.start // width) & (rows < piece.stop // width)


def encode_parts(parts: Sequence[ShardPart]) -> np.ndarray:
    """Selection words of `parts`."""
    words: list[np.ndarray] = []
    for part in parts:
        count = -1 if part.rows is None else len(part.rows)
        words.append(np.array([part.piece.tensor, count], np.int64))
        if part.rows is not None:
            words.append(part.rows.astype(np.int64, copy=False))
    return np.concatenate(words) if words else np.empty(0, np.int64)


def decode_parts(words: np.ndarray, layout: ServerLayout, server: int) -> list[ShardPart]:
    """Parts that selection words mean on `server`; rows are copied out of the message.

    Raises
    ------
    ProtocolError
        The words do not fit this server's pieces.
    """
    here = {piece.tensor: piece for piece in layout.pieces[server]}
    parts, at = [], 0
    while at < len(words):
        tensor, count = (
            (int(word) for word in words[at : at + 2]) if at + 2 <= len(words) else (-1, 0)
        )
        rows = None if count == -1 else words[at + 2 : at + 2 + count].copy()
        if tensor not in here or count < -1 or (rows is not None and len(rows) != count):
            raise ProtocolError(f"parameter server {server}: selection asks for tensor {tensor}")
        if rows is not None and not owned(layout, here[tensor], rows).all():
            raise ProtocolError(f"parameter server {server}: selection asks for rows not held here")
        parts.append(ShardPart(here[tensor], rows))
        at += 2 + max(count, 0)
    return parts


def data_bytes(layout: ServerLayout, parts: Sequence[ShardPart]) -> int:
    """Bytes that the data of `parts` take in a message."""
    return sum(_room(layout, part) for part in parts)


def views(
    layout: ServerLayout, parts: Sequence[ShardPart], buffer: np.ndarray, offset: int
) -> Iterator[tuple[ShardPart, np.ndarray]]:
    """Yield each part with its data in `buffer`, from byte `offset` on, as a 1-D view."""
    for part in parts:
        dtype = layout.tensors[part.piece.tensor].dtype
        stop = offset + part.elements(layout) * dtype.itemsize
        if stop > buffer.size:
            raise ProtocolError(f"parameter server: message ends before tensor {part.piece.tensor}")
        yield part, buffer[offset:stop].view(dtype)
        offset += _room(layout, part)


def _room(layout: ServerLayout, part: ShardPart) -> int:
    nbytes = part.elements(layout) * layout.tensors[part.piece.tensor].dtype.itemsize
    return -(-nbytes // _ALIGN) * _ALIGN
