"""Optional checksums of messages: the receiver notices if bits have changed on the way.

::

    message   | header, with the CRC-32 of all that follows its first 16 bytes | data |
    piece     | CRC-32 |   | data |      a piece has no header, so its checksum is sent before it

The checksum is `zlib.crc32`, which finds every change of up to 32 consecutive bits. Memory that
ranks of one host share, and messages of a few words, are not checked.
"""

from __future__ import annotations

import struct
import zlib
from typing import Any

import numpy as np

from ...errors import ProtocolError
from ..protocol import CHECKED_FROM, COPY, NAMES, PIECE_UP, SUMS, TO_SERVER, TO_WORKER, VALUES

_SUM = struct.Struct("<I")
_AT = CHECKED_FROM - _SUM.size
# Not checked: notices of failures, sums for norms, and the messages by which servers agree on
# pushes.
_WITH_HEADER = (TO_SERVER, TO_WORKER, VALUES, COPY)


class Checksums:
    """Computes and compares the checksums of the messages that one rank sends and receives."""

    def __init__(self, link: Any, servers: list[int], workers: list[int]):
        self._link, self._workers, self._servers = link, workers, servers

    def before_send(self, buffer: np.ndarray, nbytes: int, dest: int, tag: int) -> None:
        """Write a checksum to a message's header; send the checksum of a piece before the piece."""
        if tag in _WITH_HEADER:
            self.seal(buffer, nbytes)
        elif tag == PIECE_UP:
            self.send_sum(buffer[:nbytes], dest, tag)

    def seal(self, buffer: np.ndarray, nbytes: int) -> None:
        """Write the checksum of a message, the first `nbytes` bytes of `buffer`, to its header."""
        _SUM.pack_into(buffer.data, _AT, _crc32(buffer[CHECKED_FROM:nbytes]))

    def send_sum(self, memory: np.ndarray, dest: int, tag: int) -> None:
        """Send the checksum of a piece that is about to be sent to `dest` with the tag `tag`."""
        words = self._link.pool.take(8)
        words.view(np.int64)[0] = _crc32(memory)
        self._link.send(words, 8, dest, tag + SUMS)

    def check(self, buffer: np.ndarray, header: Any, source: int, tag: int) -> None:
        """Raise ProtocolError if a message from rank `source` has changed on the way."""
        given = _SUM.unpack_from(buffer.data, _AT)[0]
        found = _crc32(buffer[CHECKED_FROM : header.total])
        if found == given:
            return
        kind, model = tag - self._link.tag, ""
        models = self._link.models
        if kind == TO_SERVER and 0 <= header.model < len(models):
            model = models[header.model].name
        what = NAMES[header.flags] if 0 < header.flags < len(NAMES) else "values"
        raise self._damaged(what, header.total, source, kind, model, (found, given))

    def check_piece(
        self, memory: np.ndarray, words: np.ndarray, source: int, tag: int, model: str
    ) -> None:
        """Raise ProtocolError if a piece in `memory` has changed on the way from rank `source`."""
        given, found = int(words.view(np.int64)[0]), _crc32(memory)
        if found != given:
            kind = tag - self._link.tag
            raise self._damaged("a piece", memory.nbytes, source, kind, model, (found, given))

    def _damaged(
        self, what: str, nbytes: int, source: int, kind: int, model: str, sums: tuple[int, int]
    ) -> ProtocolError:
        link = self._link
        link.touched = True  # so that all ranks get this error
        if not model:  # the newest call between the two ranks
            named = [one.model for one in link.trail.operations() if one.peer == source]
            model = next((name for name in reversed(named) if name), "")
        up = kind in (TO_SERVER, PIECE_UP, VALUES)
        sender = self._name(source, up)
        receiver = self._name(link.comm.rank, not up and kind != COPY)
        return ProtocolError(
            f"parameter server: {nbytes} bytes ({what}) of model {model!r} from {sender} to "
            f"{receiver} have changed on the way: CRC-32 {sums[0]:#010x}, sent with "
            f"{sums[1]:#010x}; check memory and network of both hosts, and restart from a "
            "checkpoint"
        )

    def _name(self, rank: int, worker: bool) -> str:
        ranks = self._workers if worker else self._servers
        number = f"{'worker' if worker else 'server'} {ranks.index(rank)}" if rank in ranks else ""
        return f"{number} (rank {rank})" if number else f"rank {rank}"


def _crc32(memory: np.ndarray) -> int:
    return zlib.crc32(memory.data)
