"""MANIFEST.json, the commit record: a checkpoint is what its manifest says, or it is nothing.

    MANIFEST.json       step, names and shapes of all tensors, extras, digests of the tables
    shard-00003.json    the table of a shard: its checksums, and which piece lies where in it
    shard-00003.h5      the numbers

Each writer makes its table when its shard is on stable storage, so a table is its receipt, and a
manifest stays small however many pieces a thousand writers cut a thousand tensors into. Manifest
and tables are one line of JSON each, the last field the SHA-256 of everything before it, so the
digest is checked before the JSON is parsed. Checksums cover each shard, metadata and padding
included:

* CRC-32 of each block of 1 MiB, checked by every reader for the blocks it touches. A reader that
  wants a tenth of a file cannot check a digest of the whole. CRC-32 finds every error within 32
  neighbouring bits for certain and misses any other damage once in 4 billion, at 3-4 GB/s.
* SHA-256 of the file, on request, checked by ``verify``: it identifies the content, ``sha256sum``
  computes it too, and the digest of the manifest then names the whole checkpoint. It takes twice
  the processor's time of all the rest of a save, and four times that where the processor has no
  instructions for it.

Neither authenticates: who can write the folder can write both.

What travels from who reads them to who needs them is the manifest with its tables behind it, a
line each (`decode`). In format 1, which is read for ever, the manifest itself held the tables.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence
from itertools import pairwise
from math import prod
from typing import NamedTuple

from mpidist.checkpoint.layout import Path, Unreadable, dtype_of, from_json, show, tree
from mpidist.checkpoint.regions import Box, Flat, Region, untiled
from mpidist.checkpoint.sealed import (
    BIG,
    Damaged,
    integer_of,
    integers_of,
    list_of,
    path_of,
    seal,
    told,
    unseal,
)

NAME = "MANIFEST.json"
FORMAT, TABLE, VERSION = "mpidist-checkpoint", "mpidist-shard", 2
MAX_BYTES = 64 << 20
#: Of all tables together: a million pieces have 120 MB.
MAX_TABLES_BYTES = 1 << 30
_SHARD = re.compile(r"shard-[0-9]{5}\.h5", re.ASCII)
_TABLE = re.compile(r"shard-[0-9]{5}\.json", re.ASCII)


class File(NamedTuple):
    """One shard file."""

    name: str
    size: int
    sha256: str | None
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


class Table(NamedTuple):
    """What the manifest says of the table of a shard."""

    name: str
    size: int
    sha256: str


# ----------------------------------------------------------------------------------- writing


def encode_table(file: File, pieces: Iterable[tuple[Path, int, Region]]) -> bytes:
    """Return the bytes of a shard's table: (path, byte offset, region) of what it holds. Local."""
    listed = [{"path": list(path), "offset": o, **_region_out(r)} for path, o, r in pieces]
    head = {"format": TABLE, "version": VERSION}
    return seal({**head, **file._asdict(), "crc32": list(file.crc32), "pieces": listed}, "digest")


def table_name(shard: str) -> str:
    """Return the name of the table of a shard. Local."""
    return shard.removesuffix(".h5") + ".json"


def encode(
    step: int,
    block: int,
    writers: int,
    tables: Sequence[bytes],
    tensors: Iterable[tuple[Path, str, tuple[int, ...]]],
    extras: Iterable[tuple[Path, object]],
    software: dict,
) -> bytes:
    """Return the bytes of MANIFEST.json. Local. The same state gives the same bytes.

    `tables` are those of all shards; `tensors` (path, dtype, shape).
    """
    listed = [
        {
            "name": table_name(_table(data).name),
            "size": len(data),
            "sha256": hashlib.sha256(data).hexdigest(),
        }
        for data in tables
    ]
    body = {
        "format": FORMAT,
        "version": VERSION,
        "step": step,
        "block": block,
        "writers": writers,
        "tables": listed,
        "tensors": [{"path": list(p), "dtype": d, "shape": list(s)} for p, d, s in tensors],
        "extras": [{"path": list(path), "value": value} for path, value in extras],
        "software": software,
    }
    return seal(body, "sha256")


def _region_out(region: Region) -> dict:
    if isinstance(region, Box):
        return {"start": list(region.start), "extent": list(region.extent)}
    return {"flat": [region.start, region.size]}


# ----------------------------------------------------------------------------------- reading


def tables_of(data: bytes) -> tuple[Table, ...]:
    """Return what a MANIFEST.json says of the tables to be read with it. Local.

    None in format 1. Raises as `decode`.
    """
    body = unseal(data, NAME, "sha256")
    tables: list[Table] = []
    with told(NAME):
        if _version(body, FORMAT, NAME) > 1:
            tables = [
                Table(item["name"], integer_of(item["size"]), item["sha256"])
                for item in list_of(body["tables"])
            ]
        for table in tables:
            if not isinstance(table.name, str) or not _TABLE.fullmatch(table.name):
                raise Damaged(f"{NAME} names the table {table.name!r}; expected shard-NNNNN.json")
            if table.size > MAX_BYTES:
                raise Damaged(f"{table.name} is said to have {table.size} bytes")
        total = sum(table.size for table in tables)
        if total > MAX_TABLES_BYTES:  # a reader takes them all into memory
            raise Damaged(f"the tables are said to have {total} bytes together")
        if len({table.name for table in tables}) != len(tables):  # each would be read
            raise Damaged(f"{NAME} names a table twice")
    return tuple(tables)


def decode(data: bytes) -> Manifest:
    """Check and read a MANIFEST.json with its tables behind it, in its order. Local.

    Raises
    ------
    Damaged
        When a digest, the form, a name, a size or the tiling is not what a writer makes.
    Unreadable
        When it is whole and this installation cannot read it: a newer format, an unknown dtype.
    """
    first, *rest = data.splitlines(keepends=True) or [b""]
    tables = tables_of(first)
    if len(tables) != len(rest):
        raise Damaged(f"{NAME} names {len(tables)} tables, {len(rest)} are there")
    for table, line in zip(tables, rest, strict=True):
        if len(line) != table.size or hashlib.sha256(line).hexdigest() != table.sha256:
            raise Damaged(f"{table.name} is not the one that {NAME} names")
    body = unseal(first, NAME, "sha256")
    with told(NAME):
        found = _version_1(body) if body["version"] == 1 else _version_2(body, tables, rest)
        _prove(found)
    return found


def _version(body: dict, form: str, name: str) -> int:
    if body.get("format") != form:
        raise Damaged(f"{name} is of another program")
    version = body.get("version")
    if type(version) is not int or not 1 <= version <= VERSION:
        raise Unreadable(
            f"{name} has format version {version!r}, this mpidist reads 1 to {VERSION}"
        )
    return version


def _version_1(body: dict) -> Manifest:
    """The whole of format 1: files, and each tensor's pieces with the number of their file."""
    tensors = []
    for item in list_of(body["tensors"]):
        pieces = [
            _piece(p, integer_of(p["file"]), str(p["dataset"])) for p in list_of(item["pieces"])
        ]
        tensors.append(_tensor(item, pieces))
    return _manifest(body, [_file(item) for item in list_of(body["files"])], tensors)


def _version_2(body: dict, tables: Sequence[Table], lines: Sequence[bytes]) -> Manifest:
    listed: list[File] = []
    pieces: dict[Path, list] = {path_of(item["path"]): [] for item in list_of(body["tensors"])}
    if len(pieces) != len(body["tensors"]):  # each would get all pieces of its name
        raise Damaged(f"{NAME} names a tensor twice")
    for number, (table, line) in enumerate(zip(tables, lines, strict=True)):
        found = unseal(line, table.name, "digest")
        with told(table.name):
            _version(found, TABLE, table.name)
            listed.append(_file(found))
            if table_name(listed[-1].name) != table.name:
                raise Damaged(f"{table.name} is the table of {listed[-1].name}")
            for dataset, item in enumerate(list_of(found["pieces"])):
                pieces[path_of(item["path"])].append(_piece(item, number, str(dataset)))
    tensors = [_tensor(item, pieces[path_of(item["path"])]) for item in body["tensors"]]
    return _manifest(body, listed, tensors)


def _table(data: bytes) -> File:
    """Return the shard's record in its table. Local."""
    return _file(unseal(data, "table", "digest"))


def _manifest(body: dict, listed: list[File], tensors: list[Tensor]) -> Manifest:
    return Manifest(
        integer_of(body["step"]),
        integer_of(body["block"], 1),
        integer_of(body["writers"], 1),
        tuple(listed),
        tuple(tensors),
        tuple(
            (path_of(item["path"]), from_json(item["value"])) for item in list_of(body["extras"])
        ),
        dict(body["software"]),
    )


def _file(item: dict) -> File:
    name, sha = item["name"], item["sha256"]
    if not isinstance(name, str) or not _SHARD.fullmatch(name):
        raise Damaged(f"{NAME} names the file {name!r}; expected shard-NNNNN.h5")
    if not isinstance(sha, str | None):
        raise Damaged(f"{name} has the digest {str(sha)[:40]}; expected a text, or none")
    crc = tuple(integer_of(value) for value in list_of(item["crc32"]))
    return File(name, integer_of(item["size"]), sha, crc)


def _tensor(item: dict, pieces: list[Piece]) -> Tensor:
    name = item["dtype"]
    if not isinstance(name, str):
        raise Damaged(f"dtype {name!r} is not a name")
    return Tensor(path_of(item["path"]), name, integers_of(item["shape"]), tuple(pieces))


def _piece(item: dict, file: int, dataset: str) -> Piece:
    region: Region
    if "flat" in item:
        start, count = integers_of(item["flat"])
        region = Flat(start, count)
    else:
        region = Box(integers_of(item["start"]), integers_of(item["extent"]))
    return Piece(file, dataset, integer_of(item["offset"]), region)


def _prove(manifest: Manifest) -> None:
    """Raise unless the files hold every element of every tensor exactly once."""
    if len({file.name for file in manifest.files}) != len(manifest.files):
        raise Damaged(f"{NAME} names a file twice")
    if manifest.block > MAX_BYTES:  # a reader makes room for one
        raise Damaged(f"{NAME} has blocks of {manifest.block} bytes")
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
    if len(tensor.shape) > 32 or prod(max(1, n) for n in tensor.shape) * itemsize >= BIG:
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
