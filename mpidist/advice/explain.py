"""`mpidist bench allreduce --explain`: show what ``auto`` chooses for each size, and why."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from functools import partial

import numpy as np

from ..checkpoint import load
from ..checkpoint.arguments import checked_path
from ..checkpoint.format.state import tree
from ..checkpoint.storage import steps
from ..collectives import selection
from ..collectives.allreduce import plan
from ..collectives.selection_cache import margin
from ..errors import ConfigError


def saved_table(path: str | os.PathLike) -> dict[str, dict]:
    """Return which allreduce algorithms ``auto`` had chosen, from the newest good checkpoint."""
    path = checked_path("path", path)
    _, manifest = load.newest_good(path, None, None, partial(steps.read_manifest, path))
    return tree(iter(manifest.extras)).get("run", {}).get("selection", {})


def explain(
    comm, sizes: Sequence[int], dtype="f4", saved: dict[str, dict] | None = None
) -> tuple[list[dict], float]:
    """Let ``algorithm="auto"`` choose an allreduce algorithm for vectors of each of `sizes` bytes.

    Collective over `comm`. `saved` is a result of `saved_table`; its choices are restored first, as
    in a resumed run.

    Returns
    -------
    list of dict
        A row per size class (a range of sizes for which ``auto`` makes one common choice), with the
        keys ``bytes``, ``algorithm``, ``from``, ``won``, ``margin`` and ``us``. ``from`` says where
        the choice comes from: "measured", "cache" or "checkpoint". ``won`` is the fraction of the
        measurements in which the chosen algorithm was fastest. ``margin`` is the time of the second
        best algorithm divided by the time of the chosen one. ``us`` maps the name of each algorithm
        to its microseconds.
    float
        The seconds that all choices took together.
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
    """Yield the lines of a table of `rows`, the list that `explain` returns."""
    names = list(dict.fromkeys(name for row in rows for name in row["us"]))
    head = ("margin", "rounds won", "from", *(f"{name}(us)" for name in names))
    yield f"# {'Size':<10}" + "".join(f"{name:>14}" for name in ("chosen", *head))
    for row in rows:
        cells = [
            row["algorithm"],
            "-" if row["margin"] is None else f"{row['margin']:.2f}",
            "-" if row["won"] is None else f"{row['won']:.0%}",
            row["from"],
            *(f"{row['us'][name]:.2f}" if name in row["us"] else "-" for name in names),
        ]
        yield f"{row['bytes']:<12}" + "".join(f"{cell:>14}" for cell in cells)
