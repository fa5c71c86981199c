"""MANIFEST.json, the commit record: a checkpoint is what its manifest says, or it is nothing.

    MANIFEST.json       step, names and shapes of all tensors, extras, digests of the tables
    shard-00003.table   the table of a shard: its checksums, and which piece lies where in it
    shard-00003.h5      the numbers

Each writer makes its table when its shard is on stable storage, so a table is its receipt, and a
manifest stays small however many pieces a thousand writers cut a thousand tensors into. The
manifest and the head of a table are one line of JSON each, the last field the SHA-256 of everything
before it, so the digest is checked before the JSON is parsed. Behind the head of a table stand its
pieces, as numbers of 8 bytes (`piece_table`, without the file), whose SHA-256 is in the head: they
are the same at each save, and read without an object for each. Checksums cover each shard, metadata
and padding included:

* CRC-32 of each block of 1 MiB, checked by every reader for the blocks it touches. A reader that
  wants a tenth of a file cannot check a digest of the whole. CRC-32 finds every error within 32
  neighbouring bits for certain and misses any other damage once in 4 billion, at 3-4 GB/s.
* SHA-256 of the file, on request, checked by ``verify``: it identifies the content, ``sha256sum``
  computes it too, and the digest of the manifest then names the whole checkpoint. It takes twice
  the processor's time of all the rest of a save, and four times that where the processor has no
  instructions for it.

Neither authenticates: who can write the folder can write both.

This is format 3. Formats 1 and 2 are read for ever (`old_formats`).
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from math import prod
from typing import NamedTuple

import numpy as np

from . import piece_table
from .digested_json import (
    BIG,
    Damaged,
    as_damage,
    decode_digested,
    encode_digested,
    integer_of,
    integers_of,
    list_of,
    path_of,
)
from .state import Fact, Path, Unreadable, dtype_of, from_json, show

NAME = "MANIFEST.json"
FORMAT, TABLE, VERSION = "mpidist-checkpoint", "mpidist-shard", 3
MAX_BYTES = 64 << 20
#: Of a table, and of all together: a million pieces of two axes have 56 MB.
MAX_TABLES_BYTES = 1 << 30
#: Axes that a tensor may have; NumPy's own limit is 64.
MAX_AXES = 64
_SHARD = re.compile(r"shard-[0-9]{5}\.h5", re.ASCII)
_TABLE = re.compile(r"shard-[0-9]{5}\.(table|json)", re.ASCII)


class File(NamedTuple):
    """One shard file."""

    name: str
    size: int
    sha256: str | None
    crc32: Sequence[int]


class Manifest(NamedTuple):
    """Everything about one checkpoint but the numbers themselves.

    `rows` is the table of all pieces, in the order of the tensors, the file of each being its
    place in `files`.
    """

    step: int
    block: int
    writers: int
    files: tuple[File, ...]
    tensors: tuple[Fact, ...]
    rows: np.ndarray
    extras: tuple[tuple[Path, object], ...]
    software: dict

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(tensor.nbytes for tensor in self.tensors)


class Layout(NamedTuple):
    """The part of a manifest that one rank needs: where the pieces lie that it reads.

    `files` are by their number, `rows` in the order of the tensors.
    """

    block: int
    files: dict[int, File]
    tensors: Sequence[Fact]
    rows: np.ndarray


class Table(NamedTuple):
    """What the manifest says of the table of a shard: its size, and the digest of its head."""

    name: str
    size: int
    sha256: str


# ----------------------------------------------------------------------------------- writing


def numbers(rows: np.ndarray) -> bytes:
    """Return pieces as they stand in a table: without the file, which is its own."""
    return np.delete(rows, piece_table.FILE, axis=1).astype("<i8").tobytes()


def encode_head(file: File, count: int, data: bytes) -> bytes:
    """Return the head of a shard's table, behind which `data` of `count` pieces follow."""
    head = {"format": TABLE, "version": VERSION}
    body = {**file._asdict(), "crc32": list(file.crc32), "pieces": count, "bytes": len(data)}
    return encode_digested({**head, **body, "numbers": hashlib.sha256(data).hexdigest()}, "digest")


def table_name(shard: str) -> str:
    """Return the name of the table of a shard."""
    return shard.removesuffix(".h5") + ".table"


def check_head(head: bytes, block: int, digest: bytes) -> Table:
    """Return what a manifest says of the table with this head.

    Raises Damaged where it is not of a whole shard with the pieces whose digest is given.
    """
    body = decode_digested(head, "table", "digest")
    with as_damage("table"):
        file = file_of(body)
        if body["numbers"] != digest.hex() or len(file.crc32) != -(-file.size // block):
            raise Damaged(f"the table of {file.name} is not of what was planned")
        size = len(head) + integer_of(body["bytes"])
    return Table(table_name(file.name), size, hashlib.sha256(head).hexdigest())


def encode_tensors(tensors: Iterable[Fact]) -> str:
    """Return the tensors as they stand in a manifest; the same at each save."""
    paths, dtypes, shapes = zip(*tensors, strict=True) if tensors else ((), (), ())
    listed = {"paths": paths, "dtypes": dtypes, "shapes": shapes}
    return json.dumps(listed, separators=(",", ":"))


def encode(
    step: int,
    block: int,
    writers: int,
    tables: Sequence[Table],
    tensors: str,
    extras: Iterable[tuple[Path, object]],
    software: dict,
) -> bytes:
    """Return the bytes of MANIFEST.json. The same state gives the same bytes.

    `tensors` is what `encode_tensors` returned.
    """
    body = {
        "format": FORMAT,
        "version": VERSION,
        "step": step,
        "block": block,
        "writers": writers,
        "tables": [table._asdict() for table in tables],
        "extras": [{"path": list(path), "value": value} for path, value in extras],
        "software": software,
    }
    return encode_digested(body, "sha256", f',"tensors":{tensors}')


# ----------------------------------------------------------------------------------- reading


def tables_of(data: bytes) -> tuple[Table, ...]:
    """Return what a MANIFEST.json says of the tables to be read with it.

    None in format 1. Raises as `decode`.
    """
    body = decode_digested(data, NAME, "sha256")
    tables: list[Table] = []
    with as_damage(NAME):
        if version_of(body, FORMAT, NAME) > 1:
            tables = [
                Table(item["name"], integer_of(item["size"]), item["sha256"])
                for item in list_of(body["tables"])
            ]
        for table in tables:
            if not isinstance(table.name, str) or not _TABLE.fullmatch(table.name):
                raise Damaged(f"{NAME} names the table {table.name!r}; expected shard-NNNNN.table")
        total = sum(table.size for table in tables)
        if total > MAX_TABLES_BYTES:  # a reader takes them all into memory
            raise Damaged(f"the tables are said to have {total} bytes together")
        if len({table.name for table in tables}) != len(tables):  # each would be read
            raise Damaged(f"{NAME} names a table twice")
    return tuple(tables)


def version_of(body: dict, form: str, name: str) -> int:
    """Return the version of the format of a file. Raises Unreadable for a newer one."""
    if body.get("format") != form:
        raise Damaged(f"{name} is of another program")
    version = body.get("version")
    if type(version) is not int or not 1 <= version <= VERSION:
        raise Unreadable(
            f"{name} has format version {version!r}, this mpidist reads 1 to {VERSION}"
        )
    return version


def manifest_of(body: dict, listed: list[File], tensors: list[Fact], rows: list) -> Manifest:
    """Return the manifest of a body, with its pieces in the order of the tensors."""
    dims = max([1, *(len(tensor.shape) for tensor in tensors)])
    table = piece_table.joined(rows, dims)
    table = table[np.argsort(table[:, piece_table.TENSOR], kind="stable")]
    return Manifest(
        integer_of(body["step"]),
        integer_of(body["block"], 1),
        integer_of(body["writers"], 1),
        tuple(listed),
        tuple(tensors),
        table,
        tuple(
            (path_of(item["path"]), from_json(item["value"])) for item in list_of(body["extras"])
        ),
        dict(body["software"]),
    )


def file_of(item: dict) -> File:
    """Return the record of a shard."""
    name, sha = item["name"], item["sha256"]
    if not isinstance(name, str) or not _SHARD.fullmatch(name):
        raise Damaged(f"{NAME} names the file {name!r}; expected shard-NNNNN.h5")
    if not isinstance(sha, str | None):
        raise Damaged(f"{name} has the digest {str(sha)[:40]}; expected a text, or none")
    crc = tuple(integer_of(value) for value in list_of(item["crc32"]))
    return File(name, integer_of(item["size"]), sha, crc)


def tensor_of(path, dtype, shape) -> Fact:
    """Return what a manifest says of a tensor."""
    if not isinstance(dtype, str):
        raise Damaged(f"dtype {dtype!r} is not a name")
    fact = Fact(path_of(path), dtype, integers_of(shape))
    most = prod(max(1, n) for n in fact.shape) * dtype_of(dtype).itemsize
    if len(fact.shape) > MAX_AXES or most >= BIG:
        raise Damaged(f"{show(fact.path)} has the impossible shape {fact.shape}")
    return fact
