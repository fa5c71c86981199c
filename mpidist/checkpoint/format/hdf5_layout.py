"""The face that a shard shows to h5ls and h5py, made as bytes, without HDF5.

    0      superblock: the root group is at ...
    512    the data of the pieces, parameters first, each aligned to 64 bytes
    end    root group, its names, and for each data set a header that says where its data lie

The reasons to write this ourselves: HDF5 takes 0.3 ms for a data set, and this takes a few
microseconds; where data lie follows from their sizes alone; after a failed write HDF5's own flush
and close report success; and every write goes through one module that tests can interrupt. All
structures are of the oldest version, which every HDF5 reads. Format:
https://docs.hdfgroup.org/hdf5/v1_14/_f_m_t3.html

Dataset names are numbers, so no text of the user becomes a path; the attribute ``name`` says what
it is. Types that HDF5 has no name for (bfloat16) are there as bytes, one axis longer.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from struct import pack

import numpy as np

from . import piece_table
from .state import Fact, dtype_of, show

#: Every data set begins on such a byte: elements are aligned for those who map the file.
_ALIGNMENT = 64
#: Where the data begin.
_DATA = 512
#: Longest name that is told, in bytes; the manifest is exact.
_LONGEST = 1024
#: Most names of data sets in a node of their group; texts in one collection.
_NODE, _COLLECTION = 1024, 4096
_UNDEFINED = b"\xff" * 8
#: Bytes of the header of the group.
_GROUP = 40


def place(nbytes: np.ndarray) -> tuple[np.ndarray, int]:
    """Return the offsets of pieces of `nbytes` in their file, and where the last ends."""
    padded = -(-nbytes // _ALIGNMENT) * _ALIGNMENT
    ends = np.add.accumulate(np.concatenate([[_DATA], padded]))
    return ends[:-1], int(ends[-1])


def face(name: str) -> tuple[np.dtype, tuple[int, ...]]:
    """Return the dtype and shape with which HDF5 stores elements of dtype `name`."""
    dtype = dtype_of(name)
    known = name[0] in "<>|" and dtype.kind in "biufc"
    if known and dtype.itemsize <= (16 if dtype.kind == "c" else 8):
        return dtype, ()
    return np.dtype(np.uint8), (dtype.itemsize,)


def around(facts: Sequence[Fact], rows: np.ndarray, end: int) -> tuple[bytes, bytes]:
    """Return what stands before and behind the data of a file that holds the pieces `rows`.

    `facts` are those of all tensors, `end` is what `place` returned. The same pieces give the same
    bytes: there is no time, host or name of a run inside.
    """
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
    """Return the header of the root group, of `_GROUP` bytes."""
    return pack("<BBHII4x", 1, 0, 1, 1, 24) + pack("<HHB3xQQ", 0x11, 16, 0, tree, heap)


def _names(count: int, at: int) -> tuple[bytes, np.ndarray, np.ndarray]:
    """Return the heap of the names "0", "1", ..., where each lies in it, and their order."""
    texts = [str(number).encode() for number in range(count)]
    data = bytes(8) + b"".join(text.ljust(8, b"\0") for text in texts)
    heap = pack("<4sB3xQQQ", b"HEAP", 0, len(data), 1, at + 32) + data
    order = sorted(range(count), key=texts.__getitem__)
    return heap, 8 + 8 * np.arange(count), np.array(order, np.int64)


def _tree(k: int, nodes_at: int, names: np.ndarray, each: int) -> bytes:
    """Return the B-tree, of one level: where each node is, and the last name in it."""
    starts = range(0, len(names), each)
    pairs = [
        (nodes_at + number * (8 + 40 * each), names[min(start + each, len(names)) - 1])
        for number, start in enumerate(starts)
    ]
    head = pack("<4sBBH8s8sQ", b"TREE", 0, 0, len(pairs), _UNDEFINED, _UNDEFINED, 0)
    return (head + b"".join(pack("<QQ", *pair) for pair in pairs)).ljust(32 + 32 * k, b"\0")


def _nodes(names: np.ndarray, addresses: np.ndarray, each: int) -> bytes:
    """Return the nodes that hold, by name, the address of each data set."""
    entries = _records(len(names), [names, addresses, bytes(24)])
    parts = []
    for start in range(0, len(names), each):
        some = entries[start : start + each]
        node = pack("<4sBBH", b"SNOD", 1, 0, len(some)) + some.tobytes()
        parts.append(node.ljust(8 + 40 * each, b"\0"))
    return b"".join(parts)


def _shown(fact: Fact) -> bytes:
    """Return the name of a tensor, without what is legal in keys and not in HDF5's text."""
    text = show(fact.path).encode("utf-8", "replace").replace(b"\0", b"?")[:_LONGEST]
    return text.decode("utf-8", "ignore").encode()


def _texts(texts: Sequence[bytes], at: int) -> tuple[bytes, np.ndarray]:
    """Return collections of texts, and what refers to each: its length, collection and number."""
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

#: What stands in each of some records alike, or the columns of an array.
Field = bytes | np.ndarray


def _headers(facts: Sequence[Fact], tensor, rows, dtypes: list[str], places, at: int):
    """Return the headers of all data sets, from `at` on, and where each one is.

    Those of one dtype, kind and number of axes are made at once.
    """
    forms: dict[tuple, int] = {}
    of = [forms.setdefault((fact.dtype, len(fact.shape)), len(forms)) for fact in facts]
    form = 2 * np.array(of, np.int64)[tensor] + (rows[:, piece_table.FLAT] != 0)
    addresses, parts = np.empty(len(rows), np.int64), []
    for number in np.unique(form).tolist():
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
    """Return the messages of data sets but for their names: shape, type, place, attributes."""
    kind, inner = face(dtype)
    dims, used = piece_table.axes(rows), 1 if flat else shapes.shape[1]
    start = rows[:, piece_table.START : piece_table.START + used]
    extent = rows[:, piece_table.START + dims : piece_table.START + dims + used]
    stored = np.concatenate([extent, *(np.full((len(rows), 1), n) for n in inner)], axis=1)
    nbytes = piece_table.sizes(rows) * dtype_of(dtype).itemsize
    integer, axes = _type(np.dtype("<i8")), _space(1) + pack("<Q", shapes.shape[1])
    return [
        _message(0x01, _space(stored.shape[1]), stored),
        _message(0x03, _type(kind)),
        _message(0x05, bytes([2, 1, 1, 0])),  # no fill value, never written
        _message(0x08, bytes([3, 1]), rows[:, piece_table.OFFSET], nbytes),
        _attribute("global_shape", integer, axes, shapes),
        _attribute("flat_start", integer, _space(0), start)
        if flat
        else _attribute("start", integer, axes, start),
    ]


def _named(name: np.ndarray, dtype: bytes) -> list[list[Field]]:
    import h5py

    kind = _type(h5py.string_dtype())
    text = kind[:4] + pack("<I", 16) + kind[8:]  # a reference in the file, a pointer in memory
    return [_attribute("name", text, _space(0), name), _attribute("dtype", text, _space(0), dtype)]


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
    """Return a message of a header, filled up to a multiple of 8 bytes."""
    size = sum(map(_width, body))
    fill = -size % 8
    return [pack("<HHB3x", kind, size + fill, 0), *body, bytes(fill)]


def _space(axes: int) -> bytes:
    """Return the beginning of a dataspace, behind which the lengths of its axes stand."""
    return pack("<BB6x", 1, axes)


@cache
def _type(dtype: np.dtype) -> bytes:
    import h5py

    return h5py.h5t.py_create(dtype, logical=True).encode()[2:]  # behind a head of its own


def _width(field: Field) -> int:
    """Return the bytes of a field in one record."""
    if isinstance(field, bytes):
        return len(field)
    return field.itemsize * (field.shape[1] if field.ndim == 2 else 1)


def _records(count: int, fields: Sequence[Field]) -> np.ndarray:
    """Return records that are made of `fields`, one in a row of bytes."""
    out, at = np.empty((count, sum(map(_width, fields))), np.uint8), 0
    for field in fields:
        width = _width(field)
        if isinstance(field, bytes):
            out[:, at : at + width] = np.frombuffer(field, np.uint8)
        elif width:
            whole = np.ascontiguousarray(field).reshape(count, -1)
            out[:, at : at + width] = whole.view(np.uint8)
        at += width
    return out
