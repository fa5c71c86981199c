"""`mpidist bench allreduce --explain`: what ``auto`` chooses for each size, why, and since when."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence

import numpy as np

from ..checkpoint import load
from ..checkpoint.arguments import path_of
from ..checkpoint.format.manifest import Manifest
from ..checkpoint.format.state import tree
from ..checkpoint.storage import steps
from ..collectives import selection
from ..collectives.allreduce import plan
from ..collectives.selection_cache import margin
from ..errors import ConfigError


def saved_table(path: str | os.PathLike) -> dict[str, dict]:
    """Return the choices that the newest good checkpoint in `path` has frozen."""
    path = path_of("path", path)

    def read(entry: steps.Entry) -> Manifest:
        return steps.read_manifest(path, entry)

    _, manifest = load.newest_good(path, None, None, read)
    return tree(iter(manifest.extras)).get("run", {}).get("selection", {})


def explain(
    comm, sizes: Sequence[int], dtype="f4", saved: dict[str, dict] | None = None
) -> tuple[list[dict], float]:
    """Let ``auto`` choose for vectors of `sizes` bytes. Collective over `comm`.

    Returns
    -------
    list of dict
        bytes, algorithm, from ("measured", "cache" or "checkpoint"), won, margin (second best over
        chosen), us (candidate -> microseconds). `saved` is put back first, as a resume does.
    float
        Seconds that it took.
    """
    if comm.size == 1:
        raise ConfigError("--explain on 1 rank: there is nothing to choose; start it on more")
    if saved:
        selection.restore(comm, saved)
    start = time.perf_counter()
    for nbytes in sizes:
        plan(comm, np.zeros(max(1, nbytes // np.dtype(dtype).itemsize), dtype))
    seconds = time.perf_counter() - start
    table = selection.table(comm)
    keys = dict.fromkeys(str(1 << selection.size_class(nbytes)) for nbytes in sizes)
    return [_row(key, table[key]) for key in keys], seconds


def _row(key: str, entry: dict) -> dict:
    return {
        "bytes": int(key),
        "algorithm": entry["algorithm"],
        "from": entry["from"],
        "won": entry.get("won"),
        "margin": round(margin(entry["us"]), 3) if len(entry["us"]) > 1 else None,
        "us": entry["us"],
    }


def explanation_lines(rows: Sequence[dict]) -> Iterable[str]:
    """Print rows as a table: what was chosen, by how much, from where, and all times."""
    names = list(dict.fromkeys(name for row in rows for name in row["us"]))
    head = ("margin", "rounds won", "from", *(f"{name}(us)" for name in names))
    yield f"# {'Size':<10}" + "".join(f"{name:>14}" for name in ("chosen", *head))
    for row in rows:
        cells = [
            "-" if row["margin"] is None else f"{row['margin']:.2f}",
            "-" if row["won"] is None else f"{row['won']:.0%}",
            row["from"],
            *(f"{row['us'][name]:.2f}" if name in row["us"] else "-" for name in names),
        ]
        cells = [row["algorithm"], *cells]
        yield f"{row['bytes']:<12}" + "".join(f"{cell:>14}" for cell in cells)
