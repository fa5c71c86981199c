"""MANIFEST.json commits a checkpoint: a folder without a valid manifest is no checkpoint.

    MANIFEST.json       step, names and shapes of all tensors, extras, digests of the tables
    shard-00003.table   the table of a shard: its checksums, and the position of each piece in it
    shard-00003.h5      the numbers

Each writing rank writes a table (the list of what its shard file holds) after the shard is on
stable storage, so the existence of a table proves that its shard is complete. The manifest stays
small because the pieces are listed in the tables and not in the manifest. The manifest is one line
of JSON, and so is the head (first line) of a table. The last field of a manifest, and of the head
of a table, is the SHA-256 of all bytes before it, so a reader checks the digest before it parses
the JSON. After its head, a table lists its pieces (parts of tensors) as integers of 8 bytes. For
each piece, these integers are a row of a `piece_table` without the number of the file. The head of
a table holds the SHA-256 of all integers after the head. The integers of a table do not change from
save to save while the arrays keep their names, dtypes and shapes. The integers of a table are read
as one NumPy array, without a Python object for each piece. Checksums cover all bytes of a shard,
including metadata and padding:

* CRC-32 of each block of 1 MiB of a shard file. Every reader checks the CRC-32 of each block that
  it reads. (If there were only a digest of the whole file, a rank that reads a tenth of the file
  could check nothing.) CRC-32 detects every error within 32 neighbouring bits, and misses one in 4
  billion other errors. CRC-32 is computed at 3-4 GB/s.
* SHA-256 of the whole shard file, if the store has the option ``sha256``. ``verify`` checks the
  SHA-256 of a shard, and the command ``sha256sum`` computes the same value. With the option
  ``sha256``, the manifest's own digest identifies the whole checkpoint. SHA-256 takes twice as much
  processor time as all other work of a save. On a processor without SHA-256 instructions, it takes
  four times as long as on a processor with them.

Neither CRC-32 nor SHA-256 protects against forgery: whoever can write the files can also write the
checksums.

This module is for version 3 of the checkpoint format. The package also reads versions 1 and 2
(`old_formats`).
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
from .state import Fact, Path, Unreadable, from_json, named_dtype, show

NAME = "MANIFEST.json"
FORMAT, TABLE, VERSION = "mpidist-checkpoint", "mpidist-shard", 3
MAX_BYTES = 64 << 20
#: The largest number of bytes of all tables of a step together. A million pieces with two axes need
#: 56 MB.
MAX_TABLES_BYTES = 1 << 30
#: The largest number of axes of a tensor; NumPy's own limit is 64.
MAX_AXES = 64
_SHARD = re.compile(r"shard-[0-9]{5}\.h5", re.ASCII)
_TABLE = re.compile(r"shard-[0-9]{5}\.(table|json)", re.ASCII)


class File(NamedTuple):
    """A shard file: its size, the SHA-256 of all its bytes, and the CRC-32 of each block."""

    name: str
    size: int
    sha256: str | None
    crc32: Sequence[int]


class Manifest(NamedTuple):
    """The description of one checkpoint: everything except the data of its arrays.

    `rows` is the table of all pieces (parts of tensors; see `piece_table`), in the order of the
    tensors. `files` has the shard files. The column `FILE` of `rows` says in which shard file each
    piece is: the column holds indices into `files`.
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
        """Number of bytes of all arrays of the checkpoint together."""
        return sum(tensor.nbytes for tensor in self.tensors)


class Layout(NamedTuple):
    """The part of a manifest that one rank needs: stored parts of tensors to read, and their files.

    The keys of `files` are indices into `Manifest.files`. `rows` is the table of the pieces (stored
    parts) that the rank reads (see `piece_table`), in the order of the tensors.
    """

    block: int
    files: dict[int, File]
    tensors: Sequence[Fact]
    rows: np.ndarray


class Table(NamedTuple):
    """The manifest's entry for a shard's table, the file that lists what the shard contains.

    The entry has the name and the size of the table, and the digest of its head (first line).
    """

    name: str
    size: int
    sha256: str


# ----------------------------------------------------------------------------------- writing


def numbers(rows: np.ndarray) -> bytes:
    """Return the bytes that list the pieces `rows` (a piece table) in a shard's table file.

    The column `FILE` (the number of the shard file) is left out, because it is the same in all
    rows.
    """
    return np.delete(rows, piece_table.FILE, axis=1).astype("<i8").tobytes()


def encode_head(file: File, count: int, data: bytes) -> bytes:
    """Return the head of a shard's table file, which describes the bytes after it.

    The bytes after the head are `data`, which lists the `count` pieces (parts of arrays) in the
    shard.
    """
    head = {"format": TABLE, "version": VERSION}
    body = {**file._asdict(), "crc32": list(file.crc32), "pieces": count, "bytes": len(data)}
    return encode_digested({**head, **body, "numbers": hashlib.sha256(data).hexdigest()}, "digest")


def table_name(shard: str, suffix: str = ".table") -> str:
    """Return the name of a shard's table file, which lists the parts of arrays in the shard."""
    return shard.removesuffix(".h5") + suffix


def check_head(head: bytes, block: int, digest: bytes) -> Table:
    """Check the `head` of a shard's table, and return the manifest's entry for this table.

    Raises Damaged unless the head describes a complete shard whose list of pieces (parts of arrays)
    has the SHA-256 `digest`. `block` is the number of bytes for which the shard has a checksum.
    """
    body = decode_digested(head, "table", "digest")
    with as_damage("table"):
        file = file_of(body)
        if body["numbers"] != digest.hex() or len(file.crc32) != -(-file.size // block):
            raise Damaged(f"the table of {file.name} does not have the planned pieces")
        size = len(head) + integer_of(body["bytes"])
    return Table(table_name(file.name), size, hashlib.sha256(head).hexdigest())


def encode_tensors(tensors: Iterable[Fact]) -> str:
    """Return the JSON text that describes all tensors in a manifest."""
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
    """Return the bytes of MANIFEST.json, which depend only on the arguments.

    `block` is the number of bytes for which a file has a checksum, and `writers` the number of
    ranks that save together, including ranks that write no file. `tables` are the entries of the
    shards' tables, and `tensors` is the result of `encode_tensors`. `extras` are the (path, value)
    pairs of the values that are not arrays. `software` has names and versions of software.
    """
    body = {"format": FORMAT, "version": VERSION, "step": step, "block": block, "writers": writers}
    body["tables"] = [table._asdict() for table in tables]
    body["extras"] = [{"path": list(path), "value": value} for path, value in extras]
    return encode_digested(body | {"software": software}, "sha256", f',"tensors":{tensors}')


# ----------------------------------------------------------------------------------- reading


def tables_of(data: bytes) -> tuple[Table, ...]:
    """Return a `Table` for each table file (list of a shard's parts) that a MANIFEST.json names.

    The table files are not read. A manifest of format 1 names no tables. Raises Damaged if the
    manifest is damaged, and Unreadable if its format is not known here.
    """
    body = decode_digested(data, NAME, "sha256")
    with as_damage(NAME):
        listed = list_of(body["tables"]) if version_of(body, FORMAT, NAME) > 1 else []
        tables = [Table(one["name"], integer_of(one["size"]), one["sha256"]) for one in listed]
        for table in tables:
            if not isinstance(table.name, str) or not _TABLE.fullmatch(table.name):
                raise Damaged(f"{NAME} names the table {table.name!r}; expected shard-NNNNN.table")
        total = sum(table.size for table in tables)
        if total > MAX_TABLES_BYTES:  # a reader holds all tables in memory
            raise Damaged(f"the tables have {total} bytes together, more than {MAX_TABLES_BYTES}")
        if len({table.name for table in tables}) != len(tables):  # each table is read
            raise Damaged(f"{NAME} names a table twice")
    return tuple(tables)


def version_of(body: dict, form: str, name: str) -> int:
    """Return the format version in the JSON `body` of a file; raise Unreadable if it is unknown.

    `form` is the name that the format must have in the JSON, and `name` is the name of the file.
    Raises Damaged if the file has another format.
    """
    if body.get("format") != form:
        raise Damaged(f"{name} was written by another program")
    version = body.get("version")
    if type(version) is not int or not 1 <= version <= VERSION:
        raise Unreadable(
            f"{name} has format version {version!r}, this mpidist reads 1 to {VERSION}"
        )
    return version


def manifest_of(body: dict, listed: list[File], tensors: list[Fact], rows: list) -> Manifest:
    """Return the Manifest of a decoded JSON `body`.

    `rows` are tables of the pieces (stored parts of tensors), which the Manifest has in the order
    of the tensors.
    """
    table = piece_table.joined(rows, max([1, *(len(tensor.shape) for tensor in tensors)]))
    table = table[np.argsort(table[:, piece_table.TENSOR], kind="stable")]
    step, block = integer_of(body["step"]), integer_of(body["block"], 1)
    writers, software = integer_of(body["writers"], 1), dict(body["software"])
    extras = [(path_of(one["path"]), from_json(one["value"])) for one in list_of(body["extras"])]
    return Manifest(step, block, writers, (*listed,), (*tensors,), table, (*extras,), software)


def listed_shard(body: dict, table: Table, suffix: str) -> File:
    """Return the `File` (size and checksums) of the shard from `body`, the head of its `table`.

    Raises Damaged if the head belongs to the table of another shard.
    """
    version_of(body, TABLE, table.name)
    file = file_of(body)
    if table_name(file.name, suffix) != table.name:
        raise Damaged(f"{table.name} is the table of {file.name}")
    return file


def file_of(item: dict) -> File:
    """Return the `File` that the JSON object `item` describes.

    Raises Damaged if a value in the object is not valid.
    """
    name, sha = item["name"], item["sha256"]
    if not isinstance(name, str) or not _SHARD.fullmatch(name):
        raise Damaged(f"{NAME} names the file {name!r}; expected shard-NNNNN.h5")
    if not isinstance(sha, str | None):
        raise Damaged(f"{name} has the digest {str(sha)[:40]}; expected a text, or none")
    crc = tuple(integer_of(value) for value in list_of(item["crc32"]))
    return File(name, integer_of(item["size"]), sha, crc)


def tensor_of(path, dtype, shape) -> Fact:
    """Return a `Fact` (description of a tensor) from its path, dtype and shape in JSON.

    Raises Damaged if the path, the dtype or the shape is not valid.
    """
    if not isinstance(dtype, str):
        raise Damaged(f"dtype {dtype!r} is not a name")
    fact = Fact(path_of(path), dtype, integers_of(shape))
    most = prod(max(1, n) for n in fact.shape) * named_dtype(dtype).itemsize
    if len(fact.shape) > MAX_AXES or most >= BIG:
        raise Damaged(f"{show(fact.path)} has the impossible shape {fact.shape}")
    return fact
