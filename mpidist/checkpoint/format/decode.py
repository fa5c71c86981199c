"""Read a manifest and its tables: digests, forms, and the proof that each element is there once."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from . import old_formats, piece_table
from .digested_json import BIG, Damaged, as_damage, decode_digested, integer_of, list_of
from .manifest import (
    MAX_AXES,
    MAX_BYTES,
    NAME,
    TABLE,
    VERSION,
    Manifest,
    Table,
    file_of,
    manifest_of,
    table_name,
    tables_of,
    tensor_of,
    version_of,
)
from .state import dtype_of, show, tree


def decode(data: bytes, contents: Sequence[bytes]) -> Manifest:
    """Check and read a MANIFEST.json and the tables that it names, in its order.

    Raises
    ------
    Damaged
        When a digest, the form, a name, a size or the tiling is not what a writer makes.
    Unreadable
        When it is whole and this installation cannot read it: a newer format, an unknown dtype.
    """
    tables = tables_of(data)
    if len(tables) != len(contents):
        raise Damaged(f"{NAME} names {len(tables)} tables, {len(contents)} are there")
    heads = []
    for table, content in zip(tables, contents, strict=True):
        heads.append(content[: content.find(b"\n") + 1])
        if len(content) != table.size or hashlib.sha256(heads[-1]).hexdigest() != table.sha256:
            raise Damaged(f"{table.name} is not the one that {NAME} names")
    body = decode_digested(data, NAME, "sha256")
    with as_damage(NAME):
        if body["version"] < VERSION:
            found = old_formats.read(body, tables, contents)
        else:
            found = _read(body, tables, heads, contents)
        _prove(found)
    return found


def _read(body: dict, tables: Sequence[Table], heads, contents: Sequence[bytes]) -> Manifest:
    columns = [list_of(body["tensors"][name]) for name in ("paths", "dtypes", "shapes")]
    tensors = [tensor_of(*item) for item in zip(*columns, strict=True)]
    listed, rows = [], []
    for number, (table, head, content) in enumerate(zip(tables, heads, contents, strict=True)):
        found = decode_digested(head, table.name, "digest")
        with as_damage(table.name):
            version_of(found, TABLE, table.name)
            listed.append(file_of(found))
            if table_name(listed[-1].name) != table.name:
                raise Damaged(f"{table.name} is the table of {listed[-1].name}")
            rows.append(_rows(found, memoryview(content)[len(head) :], number, table.name))
    return manifest_of(body, listed, tensors, rows)


def _rows(head: dict, data: memoryview, file: int, name: str) -> np.ndarray:
    """Return the pieces of the table `name`, as those of `file`."""
    count = integer_of(head["pieces"])
    if hashlib.sha256(data).hexdigest() != head["numbers"]:
        raise Damaged(f"{name}: its pieces fail their digest")
    dims = (len(data) // (8 * count) + 1 - piece_table.START) // 2 if count else 1
    if not 1 <= dims <= MAX_AXES or len(data) != 8 * count * (piece_table.START - 1 + 2 * dims):
        raise Damaged(f"{name} has {count} pieces in {len(data)} bytes")
    rows = piece_table.blank(count, dims)
    table = np.frombuffer(data, "<i8").reshape(count, rows.shape[1] - 1)
    rows[:, : piece_table.FILE], rows[:, piece_table.FILE] = table[:, : piece_table.FILE], file
    rows[:, piece_table.FILE + 1 :] = table[:, piece_table.FILE :]
    return rows


def _prove(manifest: Manifest) -> None:
    """Raise unless the files hold every element of every tensor exactly once."""
    if len({file.name for file in manifest.files}) != len(manifest.files):
        raise Damaged(f"{NAME} names a file twice")
    if manifest.block > MAX_BYTES:  # a reader makes room for one
        raise Damaged(f"{NAME} has blocks of {manifest.block} bytes")
    for file in manifest.files:
        if len(file.crc32) != -(-file.size // manifest.block):
            raise Damaged(f"{file.name} of {file.size} bytes has {len(file.crc32)} checksums")
    if len({tensor.path for tensor in manifest.tensors}) != len(manifest.tensors):
        raise Damaged(f"{NAME} names a tensor twice")
    leaves = [*(t.path for t in manifest.tensors), *(path for path, _ in manifest.extras)]
    tree((path, None) for path in leaves)
    rows = manifest.rows
    for column, count, what in (
        (piece_table.TENSOR, len(manifest.tensors), "tensor"),
        (piece_table.FILE, len(manifest.files), "file"),
        (piece_table.OFFSET, BIG, "byte"),
    ):
        if len(rows) and not (rows[:, column].min() >= 0 and rows[:, column].max() < count):
            raise Damaged(f"a piece is of a {what} that is not there")
    fault = piece_table.untiled_tensor([tensor.shape for tensor in manifest.tensors], rows)
    if fault:
        raise Damaged(f"{show(manifest.tensors[fault[0]].path)}: {fault[1]}")
    _prove_bytes(manifest)


def _prove_bytes(manifest: Manifest) -> None:
    """Raise unless each piece has bytes of its own in its file. All lie inside their tensors."""
    rows = manifest.rows
    if not len(rows):
        return
    sizes = np.array([dtype_of(tensor.dtype).itemsize for tensor in manifest.tensors], np.int64)
    file, begin = rows[:, piece_table.FILE], rows[:, piece_table.OFFSET]
    end = begin + piece_table.sizes(rows) * sizes[rows[:, piece_table.TENSOR]]
    behind = np.flatnonzero(end > np.array([one.size for one in manifest.files], np.int64)[file])
    if len(behind):
        path = manifest.tensors[rows[behind[0], piece_table.TENSOR]].path
        raise Damaged(f"{show(path)} ends at byte {end[behind[0]]}, behind the end of its file")
    order = np.lexsort((end, begin, file))
    one, other = order[:-1], order[1:]
    shared = np.flatnonzero((file[one] == file[other]) & (begin[other] < end[one]))
    if len(shared):
        name = manifest.files[file[one[shared[0]]]].name
        first, last = begin[other[shared[0]]], end[one[shared[0]]]
        raise Damaged(f"two tensors share bytes {first}:{last} of {name}")
