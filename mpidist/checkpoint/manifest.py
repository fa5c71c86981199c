"""MANIFEST.json, the commit record: a checkpoint is what its manifest says, or it is nothing.

One line of JSON, its fields in a fixed order and the last one the SHA-256 of everything before
it, so the digest is checked before the JSON is parsed. Two checksums cover each shard file,
metadata and padding included:

* CRC-32 of each block of 4 MiB, checked by every reader for the blocks it touches. A reader that
  wants a tenth of a file cannot check a digest of the whole. CRC-32 finds every error within 32
  neighbouring bits for certain and misses any other damage once in 4 billion, at 3-4 GB/s.
* SHA-256 of the file, checked by ``verify``: it identifies the content, ``sha256sum`` computes it
  too, and the digest of the manifest therefore names the whole checkpoint. It would be four times
  slower than the rest of a restore on processors without instructions for it.

Neither authenticates: who can write the folder can write both.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from itertools import pairwise
from math import prod
from typing import NamedTuple

from mpidist.checkpoint.layout import (
    MAX_DEPTH,
    Path,
    Unreadable,
    dtype_of,
    from_json,
    show,
    tree,
)
from mpidist.checkpoint.regions import Box, Flat, Region, untiled
from mpidist.errors import CheckpointError

NAME = "MANIFEST.json"
FORMAT, VERSION = "mpidist-checkpoint", 1
MAX_BYTES = 64 << 20
_SHARD = re.compile(r"shard-[0-9]{5}\.h5", re.ASCII)
_BIG = 1 << 62
_TAIL = len(',"sha256":""}\n') + 64


class Damaged(CheckpointError):
    """What is on disk is not what was written. Raised by readers; the store then looks further."""


class File(NamedTuple):
    """One shard file."""

    name: str
    size: int
    sha256: str
    crc32: tuple[int, ...]


class Piece(NamedTuple):
    """Where one region of a tensor lies: number of the file, dataset, byte offset."""

    file: int
    dataset: str
    offset: int
    region: Region


class Tensor(NamedTuple):
    """One global array."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the whole array."""
        return prod(self.shape) * dtype_of(self.dtype).itemsize


class Manifest(NamedTuple):
    """Everything about one checkpoint but the numbers themselves."""

    step: int
    block: int
    writers: int
    files: tuple[File, ...]
    tensors: tuple[Tensor, ...]
    extras: tuple[tuple[Path, object], ...]
    software: dict

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(tensor.nbytes for tensor in self.tensors)


# ----------------------------------------------------------------------------------- writing


def encode(manifest: Manifest) -> bytes:
    """Return the bytes of MANIFEST.json. Local. The same manifest gives the same bytes."""
    body = {
        "format": FORMAT,
        "version": VERSION,
        "step": manifest.step,
        "block": manifest.block,
        "writers": manifest.writers,
        "files": [{**f._asdict(), "crc32": list(f.crc32)} for f in manifest.files],
        "tensors": [
            {
                "path": list(t.path),
                "dtype": t.dtype,
                "shape": list(t.shape),
                "pieces": [_piece_out(piece) for piece in t.pieces],
            }
            for t in manifest.tensors
        ],
        "extras": [{"path": list(path), "value": value} for path, value in manifest.extras],
        "software": manifest.software,
    }
    head = json.dumps(body, separators=(",", ":"), allow_nan=False)[:-1].encode()
    digest = hashlib.sha256(head).hexdigest()
    return head + f',"sha256":"{digest}"}}\n'.encode()


def _piece_out(piece: Piece) -> dict:
    out = {"file": piece.file, "dataset": piece.dataset, "offset": piece.offset}
    if isinstance(piece.region, Box):
        return {**out, "start": list(piece.region.start), "extent": list(piece.region.extent)}
    return {**out, "flat": [piece.region.start, piece.region.size]}


# ----------------------------------------------------------------------------------- reading


def decode(data: bytes) -> Manifest:
    """Check and read the bytes of a MANIFEST.json. Local.

    Raises
    ------
    Damaged
        When the digest, the form, a name, a size or the tiling is not what a writer makes.
    Unreadable
        When it is whole and this installation cannot read it: a newer format, an unknown dtype.
    """
    head, tail = data[:-_TAIL], data[-_TAIL:]
    digest = hashlib.sha256(head).hexdigest()
    if len(data) <= _TAIL or tail != f',"sha256":"{digest}"}}\n'.encode():
        raise Damaged(f"{NAME} fails its own digest ({len(data)} bytes)")
    try:
        body = json.loads(
            head + b"}", object_pairs_hook=_no_duplicates, parse_constant=_no_constants
        )
        found = _manifest(body)
        _prove(found)
    except (Damaged, Unreadable):
        raise
    except (ValueError, KeyError, TypeError, RecursionError, CheckpointError) as error:
        raise Damaged(f"{NAME} is not a manifest that mpidist wrote: {error}") from error
    return found


def _no_duplicates(pairs: list) -> dict:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise Damaged(f"{NAME} holds a key twice: {sorted(key for key, _ in pairs)[:8]}")
    return found


def _no_constants(word: str):
    raise Damaged(f"{NAME} holds {word}, which is not JSON")


def _manifest(body) -> Manifest:
    if not isinstance(body, dict) or body.get("format") != FORMAT:
        raise Damaged(f"{NAME} is of another program")
    if body.get("version") != VERSION:
        raise Unreadable(
            f"{NAME} has format version {body.get('version')!r}, this mpidist reads {VERSION}"
        )
    files = tuple(_file(item) for item in _list(body["files"]))
    return Manifest(
        _integer(body["step"]),
        _integer(body["block"], 1),
        _integer(body["writers"], 1),
        files,
        tuple(_tensor(item) for item in _list(body["tensors"])),
        tuple((_path(item["path"]), from_json(item["value"])) for item in _list(body["extras"])),
        dict(body["software"]),
    )


def _file(item: dict) -> File:
    name, sha = item["name"], item["sha256"]
    if not isinstance(name, str) or not _SHARD.fullmatch(name):
        raise Damaged(f"{NAME} names the file {name!r}; expected shard-NNNNN.h5")
    if not isinstance(sha, str):
        raise Damaged(f"{name} has no digest")
    crc = tuple(_integer(value) for value in _list(item["crc32"]))
    return File(name, _integer(item["size"]), sha, crc)


def _tensor(item: dict) -> Tensor:
    name = item["dtype"]
    if not isinstance(name, str):
        raise Damaged(f"dtype {name!r} is not a name")
    shape = _integers(item["shape"])
    pieces = tuple(_piece(piece) for piece in _list(item["pieces"]))
    return Tensor(_path(item["path"]), name, shape, pieces)


def _piece(item: dict) -> Piece:
    region: Region
    if "flat" in item:
        start, count = _integers(item["flat"])
        region = Flat(start, count)
    else:
        region = Box(_integers(item["start"]), _integers(item["extent"]))
    return Piece(_integer(item["file"]), str(item["dataset"]), _integer(item["offset"]), region)


def _list(value) -> list:
    if not isinstance(value, list):
        raise Damaged(f"expected a list, got {type(value).__name__}")
    return value


def _integer(value, least: int = 0) -> int:
    if type(value) is not int or not least <= value < _BIG:
        raise Damaged(f"expected an integer of {least} or more, got {str(value)[:40]}")
    return value


def _integers(values) -> tuple[int, ...]:
    return tuple(_integer(value) for value in _list(values))


def _path(value) -> Path:
    if not _list(value) or len(value) > MAX_DEPTH or not all(isinstance(k, str) for k in value):
        raise Damaged(f"{str(value)[:60]} is not a path of keys")
    return tuple(value)


def _prove(manifest: Manifest) -> None:
    """Raise unless the files hold every element of every tensor exactly once."""
    if len({file.name for file in manifest.files}) != len(manifest.files):
        raise Damaged(f"{NAME} names a file twice")
    for file in manifest.files:
        if len(file.crc32) != -(-file.size // manifest.block):
            raise Damaged(f"{file.name} of {file.size} bytes has {len(file.crc32)} checksums")
    tree((path, None) for path in paths(manifest))
    used: list[list[tuple[int, int]]] = [[] for _ in manifest.files]
    for tensor in manifest.tensors:
        _prove_tensor(manifest, tensor, used)
    for file, spans in zip(manifest.files, used, strict=True):
        spans.sort()
        for (_, stop), (start, _) in pairwise(spans):
            if start < stop:
                raise Damaged(f"two tensors share bytes {start}:{stop} of {file.name}")


def _prove_tensor(manifest: Manifest, tensor: Tensor, used: list) -> None:
    itemsize = dtype_of(tensor.dtype).itemsize
    if prod(max(1, n) for n in tensor.shape) * itemsize >= _BIG or len(tensor.shape) > 32:
        raise Damaged(f"{show(tensor.path)} has the impossible shape {tensor.shape}")
    reason = untiled(tensor.shape, [piece.region for piece in tensor.pieces])
    if reason:
        raise Damaged(f"{show(tensor.path)}: {reason}")
    for piece in tensor.pieces:
        if piece.file >= len(manifest.files):
            raise Damaged(f"{show(tensor.path)} lies in file {piece.file}, which is not listed")
        end = piece.offset + piece.region.size * itemsize
        if end > manifest.files[piece.file].size:
            raise Damaged(f"{show(tensor.path)} ends at byte {end}, behind the end of its file")
        used[piece.file].append((piece.offset, end))


def paths(manifest: Manifest) -> Sequence[Path]:
    """Return the paths of all leaves. Local."""
    return [*(t.path for t in manifest.tensors), *(path for path, _ in manifest.extras)]
