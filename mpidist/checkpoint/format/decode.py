"""Decode the manifest and tables of a checkpoint; check that they list every element just once.

The manifest describes the saved arrays, and the table of a shard file lists the parts of arrays
that this file holds.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from . import manifest, old_formats, piece_table
from .digested_json import BIG, Damaged, as_damage, decode_digested, integer_of, list_of
from .manifest import NAME, Manifest, Table
from .state import named_dtype, show, tree


def decode(data: bytes, contents: Sequence[bytes]) -> Manifest:
    """Return the `Manifest` from the bytes of MANIFEST.json and of the table files that it names.

    Raises Damaged if anything is wrong, and Unreadable if this software does not know the format.
    """
    tables = manifest.tables_of(data)
    if len(tables) != len(contents):
        raise Damaged(f"{NAME} names {len(tables)} tables, {len(contents)} are there")
    heads = []
    for table, content in zip(tables, contents, strict=True):
        heads.append(content[: content.find(b"\n") + 1])
        if len(content) != table.size or hashlib.sha256(heads[-1]).hexdigest() != table.sha256:
            raise Damaged(f"{table.name} is not the table that {NAME} names")
    body = decode_digested(data, NAME, "sha256")
    with as_damage(NAME):
        if body["version"] < manifest.VERSION:
            found = old_formats.read(body, tables, contents)
        else:
            found = _read(body, tables, heads, contents)
        _prove(found)
    return found


def _read(body: dict, tables: Sequence[Table], heads, contents: Sequence[bytes]) -> Manifest:
    columns = [list_of(body["tensors"][name]) for name in ("paths", "dtypes", "shapes")]
    tensors = [manifest.tensor_of(*item) for item in zip(*columns, strict=True)]
    listed, rows = [], []
    for number, (table, head, content) in enumerate(zip(tables, heads, contents, strict=True)):
        found = decode_digested(head, table.name, "digest")
        with as_damage(table.name):
            listed.append(manifest.listed_shard(found, table, ".table"))
            rows.append(_rows(found, memoryview(content)[len(head) :], number, table.name))
    return manifest.manifest_of(body, listed, tensors, rows)


def _rows(head: dict, data: memoryview, file: int, name: str) -> np.ndarray:
    """Decode `data`, the list of the parts of tensors in shard `file`, from the table `name`."""
    count = integer_of(head["pieces"])
    if hashlib.sha256(data).hexdigest() != head["numbers"]:
        raise Damaged(f"{name}: its pieces fail their digest")
    columns = len(data) // (8 * count) if count else piece_table.START + 1
    dims = (columns + 1 - piece_table.START) // 2
    good = len(data) == 8 * count * columns and columns == piece_table.START - 1 + 2 * dims
    if not good or not 1 <= dims <= manifest.MAX_AXES:
        raise Damaged(f"{name} has {count} pieces in {len(data)} bytes")
    table = np.frombuffer(data, "<i8").reshape(count, columns)
    return np.insert(table, piece_table.FILE, file, axis=1)


def _prove(found: Manifest) -> None:
    """Raise Damaged unless the stored parts cover every element of every tensor exactly once."""
    if len({file.name for file in found.files}) != len(found.files):
        raise Damaged(f"{NAME} names a file twice")
    if found.block > manifest.MAX_BYTES:  # a reader allocates memory for a block
        raise Damaged(f"{NAME} has blocks of {found.block} bytes")
    for file in found.files:
        if len(file.crc32) != -(-file.size // found.block):
            raise Damaged(f"{file.name} of {file.size} bytes has {len(file.crc32)} checksums")
    paths = [tensor.path for tensor in found.tensors]
    if len(set(paths)) != len(paths):
        raise Damaged(f"{NAME} names a tensor twice")
    tree((path, None) for path in [*paths, *(path for path, _ in found.extras)])
    rows = found.rows
    for column, count, what in (
        (piece_table.TENSOR, len(paths), "tensor"),
        (piece_table.FILE, len(found.files), "file"),
        (piece_table.OFFSET, BIG, "byte"),
    ):
        if ((rows[:, column] < 0) | (rows[:, column] >= count)).any():
            raise Damaged(f"a piece belongs to a {what} that is not there")
    if fault := piece_table.untiled_tensor([tensor.shape for tensor in found.tensors], rows):
        raise Damaged(f"{show(paths[fault[0]])}: {fault[1]}")
    _prove_bytes(found)


def _prove_bytes(found: Manifest) -> None:
    """Raise Damaged unless each part of a tensor lies inside its file and no two share bytes."""
    rows = found.rows
    sizes = np.array([named_dtype(tensor.dtype).itemsize for tensor in found.tensors], np.int64)
    file, begin = rows[:, piece_table.FILE], rows[:, piece_table.OFFSET]
    end = begin + piece_table.sizes(rows) * sizes[rows[:, piece_table.TENSOR]]
    behind = np.flatnonzero(end > np.array([one.size for one in found.files], np.int64)[file])
    if len(behind):
        path = found.tensors[rows[behind[0], piece_table.TENSOR]].path
        raise Damaged(f"{show(path)} ends at byte {end[behind[0]]}, behind the end of its file")
    order = np.lexsort((end, begin, file))
    one, other = order[:-1], order[1:]
    shared = np.flatnonzero((file[one] == file[other]) & (begin[other] < end[one]))
    if len(shared):
        name = found.files[file[one[shared[0]]]].name
        first, last = begin[other[shared[0]]], end[one[shared[0]]]
        raise Damaged(f"two tensors share bytes {first}:{last} of {name}")
