"""Read manifests of formats 1 and 2, in which each piece (part of a tensor) is a JSON object.

In format 1 the manifest lists the pieces of each tensor. In format 2 each shard has a table, which
lists its pieces in one line of JSON.
"""

from __future__ import annotations

from collections.abc import Sequence

from . import manifest, piece_table
from .digested_json import Damaged, decode_digested, integer_of, integers_of, list_of, path_of
from .regions import Box, Flat, Region
from .state import Fact, Path


def read(body: dict, tables: Sequence, lines: Sequence[bytes]) -> manifest.Manifest:
    """Return the Manifest of a checkpoint in format 1 or 2.

    `body` is the decoded MANIFEST.json. In format 2, each shard has a file with one line of JSON,
    which lists the parts in the shard; `lines` has these lines, and `tables` has the manifest's
    entries for these files. The caller must check that the stored parts cover each tensor exactly
    once.
    """
    items = list_of(body["tensors"])
    tensors = [manifest.tensor_of(item["path"], item["dtype"], item["shape"]) for item in items]
    if body["version"] == 1:
        files = [manifest.file_of(item) for item in list_of(body["files"])]
        found = [
            (number, integer_of(piece["file"]), piece)
            for number, item in enumerate(items)
            for piece in list_of(item["pieces"])
        ]
    else:
        files, found = _tables(tensors, tables, lines)
    rows = piece_table.of_regions([(number, _region(piece)) for number, _, piece in found])
    rows[:, piece_table.FILE] = [file for _, file, _ in found]
    rows[:, piece_table.OFFSET] = [integer_of(piece["offset"]) for _, _, piece in found]
    for number, _, piece in found:
        if "flat" not in piece and len(piece["start"]) != len(tensors[number].shape):
            raise Damaged(f"a piece of {len(piece['start'])} axes of shape {tensors[number].shape}")
    return manifest.manifest_of(body, files, tensors, [rows])


def _tables(tensors: Sequence[Fact], tables: Sequence, lines: Sequence[bytes]):
    """Return the shard files of format 2, and (tensor number, file number, JSON) of each piece."""
    numbers: dict[Path, int] = {tensor.path: n for n, tensor in enumerate(tensors)}
    files, found = [], []
    for file, (table, line) in enumerate(zip(tables, lines, strict=True)):
        body = decode_digested(line, table.name, "digest")
        with manifest.as_damage(table.name):
            files.append(manifest.listed_shard(body, table, ".json"))
            for item in list_of(body["pieces"]):
                found.append((numbers[path_of(item["path"])], file, item))
    return files, found


def _region(item: dict) -> Region:
    if "flat" in item:
        start, count = integers_of(item["flat"])
        return Flat(start, count)
    return Box(integers_of(item["start"]), integers_of(item["extent"]))
