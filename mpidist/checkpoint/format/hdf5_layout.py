"""Make the HDF5 metadata of a shard file as bytes, without the HDF5 library.

    0      superblock with the position of the root group
    512    the data of the pieces, parameters first, each aligned to 64 bytes
    end    root group, its names, and for each data set a header with the position of its data

A piece is a part of an array, and each piece is one data set of the file. The HDF5 library would
take 0.3 ms to create a data set (the code here takes a few microseconds), and it reports success
after a failed write. All structures use the oldest version of the HDF5 format:
https://docs.hdfgroup.org/hdf5/v1_14/_f_m_t3.html
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from struct import pack

import numpy as np

from ...arrays import unique_numbers
from . import piece_table
from .state import Fact, named_dtype, show

#: The data of each data set begin at a multiple of this number, so that the elements are aligned if
#: the file is mapped into memory.
_ALIGNMENT = 64
#: The position of the first byte of data in a shard file.
_DATA = 512
#: The largest number of bytes of a tensor's name in the attribute ``name``. A longer name is cut
#: there; the manifest has the full name.
_LONGEST = 1024
#: The largest number of data set names in one group node, and of texts in one global heap
#: collection.
_NODE, _COLLECTION = 1024, 4096
_UNDEFINED = b"\xff" * 8
#: Bytes of the header of the root group.
_GROUP = 40
#: HDF5's encoding of a text of any length in UTF-8, as a reference of 16 bytes.
_TEXT = pack("<4BI4BIHH", 0x19, 1, 1, 0, 16, 0x10, 0, 0, 0, 1, 0, 8)
#: Size of a floating-point number -> bits of its mantissa.
_MANTISSA = {2: 10, 4: 23, 8: 52}


def place(nbytes: np.ndarray) -> tuple[np.ndarray, int]:
    """Return the offset of each part of an array in a shard file, and the end of the last part.

    `nbytes` has the number of bytes of each part.
    """
    padded = -(-nbytes // _ALIGNMENT) * _ALIGNMENT
    ends = np.add.accumulate(np.concatenate([[_DATA], padded]))
    return ends[:-1], int(ends[-1])


def face(name: str) -> tuple[np.dtype, tuple[int, ...]]:
    """Return the dtype and shape with which HDF5 stores one element of the dtype `name`."""
    dtype = named_dtype(name)
    known = name[0] in "<>|" and dtype.kind in "biufc"
    if known and dtype.itemsize <= (16 if dtype.kind == "c" else 8):
        return dtype, ()
    return np.dtype(np.uint8), (dtype.itemsize,)


def around(facts: Sequence[Fact], rows: np.ndarray, end: int) -> tuple[bytes, bytes]:
    """Return the HDF5 metadata of a shard file: the bytes before and after its data."""
    held, tensor = np.unique(rows[:, piece_table.TENSOR], return_inverse=True)
    mine = [facts[number] for number in held.tolist()]
    dtypes = sorted({fact.dtype for fact in mine})
    tree_at = end + _GROUP
    each = min(_NODE, max(8, len(rows) + len(rows) % 2))
    k = max(16, -(-len(rows) // (2 * each)))
    nodes_at = tree_at + 32 + 32 * k
    heap_at = nodes_at + -(-len(rows) // each) * (8 + 40 * each)
    heap, names, order = _names(len(rows), heap_at)
    texts_at = heap_at + len(heap)
    texts, places = _texts([*(name.encode() for name in dtypes), *map(_shown, mine)], texts_at)
    headers, addresses = _headers(mine, tensor, rows, dtypes, places, texts_at + len(texts))
    tree = _tree(k, nodes_at, names[order], each)
    nodes = _nodes(names[order], addresses[order], each)
    behind = b"".join([_group(tree_at, heap_at), tree, nodes, heap, texts, headers])
    versions = (0, 0, 0, 0, 0, 8, 8, 0)
    before = pack("<8s8BHHI", b"\x89HDF\r\n\x1a\n", *versions, each // 2, k, 0)
    before += pack("<Q8sQ8s", 0, _UNDEFINED, end + len(behind), _UNDEFINED)
    before += pack("<QQIIQQ", 0, end, 1, 0, tree_at, heap_at)
    return before.ljust(_DATA, b"\0"), behind


# ------------------------------------------------------------------------------------ the group


def _group(tree: int, heap: int) -> bytes:
    """Return the header of the root group, which has 40 bytes."""
    return pack("<BBHII4x", 1, 0, 1, 1, 24) + pack("<HHB3xQQ", 0x11, 16, 0, tree, heap)


def _names(count: int, at: int) -> tuple[bytes, np.ndarray, np.ndarray]:
    """Return an HDF5 heap of the names "0", "1", ..., each name's offset, and their sort order."""
    names = np.arange(count).astype("S8")
    heap = pack("<4sB3xQQQ", b"HEAP", 0, 8 + 8 * count, 1, at + 32) + bytes(8) + names.tobytes()
    return heap, 8 + 8 * np.arange(count), np.argsort(names, kind="stable")


def _tree(k: int, nodes_at: int, names: np.ndarray, each: int) -> bytes:
    """Return an HDF5 B-tree of one level, with the position and last name of each group node."""
    count = -(-len(names) // each)
    nodes = nodes_at + np.arange(count) * (8 + 40 * each)
    last = names[np.minimum(each * np.arange(1, count + 1), len(names)) - 1]
    head = pack("<4sBBH8s8sQ", b"TREE", 0, 0, count, _UNDEFINED, _UNDEFINED, 0)
    return (head + np.stack([nodes, last], 1).tobytes()).ljust(32 + 32 * k, b"\0")


def _nodes(names: np.ndarray, addresses: np.ndarray, each: int) -> bytes:
    """Return HDF5 group nodes with the data sets' addresses, in the order of their names."""
    entries = _records(len(names), [names, addresses, bytes(24)])
    parts = []
    for start in range(0, len(names), each):
        some = entries[start : start + each]
        node = pack("<4sBBH", b"SNOD", 1, 0, len(some)) + some.tobytes()
        parts.append(node.ljust(8 + 40 * each, b"\0"))
    return b"".join(parts)


def _shown(fact: Fact) -> bytes:
    """Return the name of a tensor as HDF5 text, without characters that such text cannot hold."""
    text = show(fact.path).encode("utf-8", "replace").replace(b"\0", b"?")[:_LONGEST]
    return text.decode("utf-8", "ignore").encode()


def _texts(texts: Sequence[bytes], at: int) -> tuple[bytes, np.ndarray]:
    """Return HDF5 global heap collections that hold `texts`, and a reference to each text."""
    parts, places = [], []
    for start in range(0, len(texts), _COLLECTION):
        some = texts[start : start + _COLLECTION]
        items = b"".join(
            pack("<HHIQ", number, 1, 0, len(text)) + text + bytes(-len(text) % 8)
            for number, text in enumerate(some, 1)
        )
        size = max(4096, 32 + len(items))
        head = pack("<4sB3xQ", b"GCOL", 1, size)
        rest = pack("<HHIQ", 0, 0, 0, size - 16 - len(items))
        parts.append((head + items + rest).ljust(size, b"\0"))
        places += [pack("<IQI", len(text), at, number) for number, text in enumerate(some, 1)]
        at += size
    return b"".join(parts), np.frombuffer(b"".join(places), np.uint8).reshape(-1, 16)


# ----------------------------------------------------------------------------------- data sets

#: A field of several binary records: either bytes that are the same in all records, or an array
#: with one row per record.
Field = bytes | np.ndarray


def _headers(facts: Sequence[Fact], tensor, rows, dtypes: list[str], places, at: int):
    """Return the headers of all data sets, and their positions; the first is at position `at`."""
    forms: dict[tuple, int] = {}
    of = [forms.setdefault((fact.dtype, len(fact.shape)), len(forms)) for fact in facts]
    form = 2 * np.array(of, np.int64)[tensor] + (rows[:, piece_table.FLAT] != 0)
    addresses, parts = np.empty(len(rows), np.int64), []
    for number in unique_numbers(form).tolist():
        (dtype, ndim), flat = list(forms)[number // 2], bool(number % 2)
        which = np.flatnonzero(form == number)
        shapes = np.array([facts[i].shape for i in tensor[which].tolist()], np.int64)
        fields = _dataset(dtype, shapes.reshape(len(which), ndim), rows[which], flat)
        texts = (places[len(dtypes) + tensor[which]], places[dtypes.index(dtype)].tobytes())
        made = _records(len(which), _header([*fields, *_named(*texts)]))
        addresses[which] = at + made.shape[1] * np.arange(len(which))
        at += made.size
        parts.append(made.tobytes())
    return b"".join(parts), addresses


def _dataset(dtype: str, shapes, rows, flat: bool) -> list[list[Field]]:
    """Return the header messages of data sets, except for the attributes `name` and `dtype`."""
    kind, inner = face(dtype)
    dims, used = piece_table.axes(rows), 1 if flat else shapes.shape[1]
    start = rows[:, piece_table.START : piece_table.START + used]
    extent = rows[:, piece_table.START + dims : piece_table.START + dims + used]
    stored = np.concatenate([extent, *(np.full((len(rows), 1), n) for n in inner)], axis=1)
    nbytes = piece_table.sizes(rows) * named_dtype(dtype).itemsize
    integer, axes = _type(np.dtype("<i8")), _space(1) + pack("<Q", shapes.shape[1])
    return [
        _message(0x01, _space(stored.shape[1]), stored),
        _message(0x03, _type(kind)),
        _message(0x05, bytes([2, 1, 1, 0])),  # there is no fill value
        _message(0x08, bytes([3, 1]), rows[:, piece_table.OFFSET], nbytes),
        _attribute("global_shape", integer, axes, shapes),
        _attribute("flat_start" if flat else "start", integer, _space(0) if flat else axes, start),
    ]


def _named(name: np.ndarray, dtype: bytes) -> list[list[Field]]:
    """Return the header messages for the attributes ``name`` and ``dtype`` of a data set."""
    text, one = _TEXT, _space(0)
    return [_attribute("name", text, one, name), _attribute("dtype", text, one, dtype)]


def _header(messages: list[list[Field]]) -> list[Field]:
    size = sum(_width(field) for message in messages for field in message)
    head = pack("<BBHII4x", 1, 0, len(messages), 1, size)
    return [head, *(field for message in messages for field in message)]


def _attribute(name: str, kind: bytes, space: bytes, value: Field) -> list[Field]:
    text = name.encode() + b"\0"
    head = pack("<BBHHH", 1, 0, len(text), len(kind), len(space))
    parts = (part + bytes(-len(part) % 8) for part in (text, kind, space))
    return _message(0x0C, head + b"".join(parts), value)


def _message(kind: int, *body: Field) -> list[Field]:
    """Return an HDF5 header message, padded to a multiple of 8 bytes."""
    size = sum(map(_width, body))
    fill = -size % 8
    return [pack("<HHB3x", kind, size + fill, 0), *body, bytes(fill)]


def _space(axes: int) -> bytes:
    """Return the first bytes of an HDF5 dataspace, which come before the lengths of its axes."""
    return pack("<BB6x", 1, axes)


@cache
def _type(dtype: np.dtype) -> bytes:
    """Return the bytes with which the header of an HDF5 data set describes the type `dtype`."""
    size, big = dtype.itemsize, dtype.str[0] == ">"
    if dtype.kind in "iu":
        signed = 8 * (dtype.kind == "i")
        order = big and size > 1
        return bytes([0x10, signed | order, 0, 0]) + pack("<IHH", size, 0, 8 * size)
    if dtype.kind == "f" and size in _MANTISSA:
        mantissa = _MANTISSA[size]
        exponent = 8 * size - 1 - mantissa
        head = bytes([0x11, 0x20 | big, 8 * size - 1, 0]) + pack("<IHH", size, 0, 8 * size)
        return head + pack("<4BI", mantissa, exponent, 0, mantissa, 2 ** (exponent - 1) - 1)
    # Imported here, because few arrays are boolean or complex, and h5py takes 25 ms to import.
    import h5py

    return h5py.h5t.py_create(dtype, logical=True).encode()[2:]


def _width(field: Field) -> int:
    """Return the number of bytes that `field` has in each record that `_records` makes."""
    return len(field) if isinstance(field, bytes) else field[:1].nbytes


def _records(count: int, fields: Sequence[Field]) -> np.ndarray:
    """Return `count` binary records of these `fields`: an array of bytes, with a record per row."""
    out, at = np.empty((count, sum(map(_width, fields))), np.uint8), 0
    for field in fields:
        width = _width(field)
        if isinstance(field, bytes):
            out[:, at : at + width] = np.frombuffer(field, np.uint8)
        elif width:
            out[:, at : at + width] = np.ascontiguousarray(field).reshape(count, -1).view(np.uint8)
        at += width
    return out
