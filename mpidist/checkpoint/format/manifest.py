"""MANIFEST.json commits a checkpoint: a folder without a valid manifest is no checkpoint.

    MANIFEST.json       step, names and shapes of all tensors, extras, digests of the tables
    shard-00003.table   the table of a shard: its checksums, and the position of each piece in it
    shard-00003.h5      the numbers

Each writing rank writes a table (the list of what its shard file holds) after the shard is on
stable storage. So a table proves that its shard is complete. The manifest and the first line of a
table are lines of JSON that end with their own SHA-256.

Each block of 1 MiB of a shard has a CRC-32, which readers check. With the option ``sha256`` of a
store, the whole file also has a SHA-256. Neither protects against forgery: whoever can write the
files can also write the checksums.
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

    `rows` is the table of all parts of tensors; its column `FILE` has indices into `files`.
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
    """The part of a manifest that one rank needs: stored parts of tensors, and their files."""

    block: int
    files: dict[int, File]
    tensors: Sequence[Fact]
    rows: np.ndarray


class Table(NamedTuple):
    """The manifest's entry for a table, the file that lists what a shard contains."""

    name: str
    size: int
    sha256: str


# ----------------------------------------------------------------------------------- writing


def numbers(rows: np.ndarray) -> bytes:
    """Return the integers of the piece table `rows` as bytes, without the column `FILE`.

    Each row describes a part of an array in a shard file. A table file holds these bytes after its
    first line.
    """
    return np.delete(rows, piece_table.FILE, axis=1).astype("<i8").tobytes()


def encode_head(file: File, count: int, data: bytes) -> bytes:
    """Return the first line of a table file, the file that lists the parts in one shard file.

    The line describes the shard `file`, the number `count` of its parts, and the rest of the table
    file, `data`.
    """
    head = {"format": TABLE, "version": VERSION}
    body = {**file._asdict(), "crc32": list(file.crc32), "pieces": count, "bytes": len(data)}
    return encode_digested({**head, **body, "numbers": hashlib.sha256(data).hexdigest()}, "digest")


def table_name(shard: str, suffix: str = ".table") -> str:
    """Return the name of a shard's table file, which lists the parts of arrays in the shard."""
    return shard.removesuffix(".h5") + suffix


def check_head(head: bytes, block: int, digest: bytes) -> Table:
    """Check `head`, the first line of the file that lists a shard's parts; return its `Table`.

    Raises Damaged unless the shard is complete.
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

    A shard file has one checksum for every `block` bytes. `extras` has a (path of keys, value) pair
    for each value that is not an array.
    """
    body = {"format": FORMAT, "version": VERSION, "step": step, "block": block, "writers": writers}
    body["tables"] = [table._asdict() for table in tables]
    body["extras"] = [{"path": list(path), "value": value} for path, value in extras]
    return encode_digested(body | {"software": software}, "sha256", f',"tensors":{tensors}')


# ----------------------------------------------------------------------------------- reading


def tables_of(data: bytes) -> tuple[Table, ...]:
    """Return a `Table` for each table file (list of a shard's parts) that MANIFEST.json names."""
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
    """Return the format version in the JSON `body` of a file; raise Unreadable if unknown."""
    if body.get("format") != form:
        raise Damaged(f"{name} was written by another program")
    version = body.get("version")
    if type(version) is not int or not 1 <= version <= VERSION:
        raise Unreadable(
            f"{name} has format version {version!r}, this mpidist reads 1 to {VERSION}"
        )
    return version


def manifest_of(body: dict, listed: list[File], tensors: list[Fact], rows: list) -> Manifest:
    """Return the Manifest of a decoded JSON `body`; the arrays `rows` list the parts of tensors."""
    table = piece_table.joined(rows, max([1, *(len(tensor.shape) for tensor in tensors)]))
    table = table[np.argsort(table[:, piece_table.TENSOR], kind="stable")]
    step, block = integer_of(body["step"]), integer_of(body["block"], 1)
    writers, software = integer_of(body["writers"], 1), dict(body["software"])
    extras = [(path_of(one["path"]), from_json(one["value"])) for one in list_of(body["extras"])]
    return Manifest(step, block, writers, (*listed,), (*tensors,), table, (*extras,), software)


def listed_shard(body: dict, table: Table, suffix: str) -> File:
    """Return the name, size and checksums of a shard file.

    `body` is the decoded first line of a table file, the file that lists the parts in the shard.
    `table` is the manifest's entry for this table file. Raises Damaged.
    """
    version_of(body, TABLE, table.name)
    file = file_of(body)
    if table_name(file.name, suffix) != table.name:
        raise Damaged(f"{table.name} is the table of {file.name}")
    return file


def file_of(item: dict) -> File:
    """Return the `File` that the JSON object `item` describes. Raises Damaged."""
    name, sha = item["name"], item["sha256"]
    if not isinstance(name, str) or not _SHARD.fullmatch(name):
        raise Damaged(f"{NAME} names the file {name!r}; expected shard-NNNNN.h5")
    if not isinstance(sha, str | None):
        raise Damaged(f"{name} has the digest {str(sha)[:40]}; expected a text, or none")
    crc = tuple(integer_of(value) for value in list_of(item["crc32"]))
    return File(name, integer_of(item["size"]), sha, crc)


def tensor_of(path, dtype, shape) -> Fact:
    """Return the description of a tensor from its JSON values. Raises Damaged."""
    if not isinstance(dtype, str):
        raise Damaged(f"dtype {dtype!r} is not a name")
    fact = Fact(path_of(path), dtype, integers_of(shape))
    most = prod(max(1, n) for n in fact.shape) * named_dtype(dtype).itemsize
    if len(fact.shape) > MAX_AXES or most >= BIG:
        raise Damaged(f"{show(fact.path)} has the impossible shape {fact.shape}")
    return fact
