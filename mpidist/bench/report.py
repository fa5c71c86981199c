"""The summary of `mpidist bench allreduce`: mean ratios, and cases where MPI is faster."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import geometric_mean

#: If "auto" takes at least this many times as long as the fastest candidate, the summary says so.
TOLERANCE = 1.05


def lines(rows: Sequence[dict]) -> list[str]:
    """Return the lines of the summary: mean speedups over MPI, and cases where MPI is faster."""
    means, chosen = [], []
    for name in _names(rows):
        mine = [row for row in rows if row["algorithm"] == name]
        limit = _mean(mine, "limit", "; of the memory limit over")
        means.append(f"native over {name}: {_mean(mine, 'ratio')}{limit}")
        if best := _mean(mine, "against_best"):
            worst = min(mine, key=lambda row: row.get("against_best", math.inf))
            best = f"{best} ({worst['best']})"
            chosen.append(f"{name} against the best that was chosen by hand: {best}")
    return [*means, *chosen, *_guidelines(rows), *_torch(rows), *_losing(rows)]


def _mean(rows, key: str, words: str = "geometric mean over", digits: int = 3) -> str:
    """Return a text with the mean and the least value of `key` in `rows`; "" if no row has it."""
    rows = [row for row in rows if key in row]
    if not rows:
        return ""
    least = min(rows, key=lambda row: row[key])
    sizes = "1 size" if len(rows) == 1 else f"{len(rows)} sizes"
    return (
        f"{words} {sizes} {geometric_mean([row[key] for row in rows]):.{digits}f}, "
        f"least {least[key]:.{digits}f} at {size_label(least['bytes'])}"
    )


def _guidelines(rows) -> list[str]:
    asked = [row for row in rows if "consistent" in row]
    broken = [
        f"{row['algorithm']} at {size_label(row['bytes'])} takes {1 / row['consistent']:.2f} times "
        "as long as the fastest candidate"
        for row in asked
        if row["consistent"] * TOLERANCE < 1
    ]
    return broken or (["self-consistent at every size"] if asked else [])


def _torch(rows) -> list[str]:
    names = [row["algorithm"] for row in rows if "over_arena" in row]
    return [f"{name} over arena: {_mean(rows, 'over_arena', digits=2)}" for name in names[:1]]


def _losing(rows) -> list[str]:
    lost = [row for row in rows if row["algorithm"] in _names(rows) and row["ratio"] < 1]
    if not lost:
        return ["losing cases: none"]
    return [
        "losing cases (native is faster):",
        *(
            f"  {size_label(row['bytes']):>8}  {row['algorithm']:<24}{row['ratio']:.3f} "
            f"[{row['low']:.3f}, {row['high']:.3f}]"
            for row in sorted(lost, key=lambda row: (row["algorithm"], row["bytes"]))
        ),
    ]


def _names(rows) -> list[str]:
    """Return the names of mpidist's own algorithms in `rows`, without the references."""
    names = dict.fromkeys(row["algorithm"] for row in rows)
    yardsticks = ("memory copy", "torch gloo")
    return [n for n in names if not n.startswith("native") and n not in yardsticks]


def size_label(nbytes: int) -> str:
    """Return a size as text, such as "128 KiB"; in bytes if it is not a multiple of 1 KiB."""
    for power, unit in ((20, "MiB"), (10, "KiB")):
        if nbytes >= 1 << power and nbytes % (1 << power) == 0:
            return f"{nbytes >> power} {unit}"
    return f"{nbytes} B"
