"""What the rows of `mpidist bench allreduce` say together: means over sizes, and where we lose."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import geometric_mean

#: By how much auto may lose to anything else that adds, before that is told.
TOLERANCE = 1.05


def lines(rows: Sequence[dict]) -> list[str]:
    """Return the lines under the table: means, comparisons, and losing cases. Pure."""
    told = [*_means(rows), *_chosen(rows), *_guidelines(rows), *_torch(rows)]
    return [*told, *_losing(rows)]


def _means(rows) -> list[str]:
    told = []
    for name in _names(rows):
        mine = [row for row in rows if row["algorithm"] == name]
        least = min(mine, key=lambda row: row["ratio"])
        text = (
            f"{name}: native over it, geometric mean over {_count(mine)} "
            f"{geometric_mean([row['ratio'] for row in mine]):.3f}, "
            f"least {least['ratio']:.3f} at {size_label(least['bytes'])}"
        )
        if limited := [row for row in mine if "limit" in row]:
            of_limit = geometric_mean([row["limit"] for row in limited])
            least = min(limited, key=lambda row: row["limit"])
            text += (
                f"; of the memory limit over {_count(limited)} {of_limit:.3f}, "
                f"least {least['limit']:.3f} at {size_label(least['bytes'])}"
            )
        told.append(text)
    return told


def _chosen(rows) -> list[str]:
    told = []
    for name in _names(rows):
        mine = [row for row in rows if row["algorithm"] == name and "against_best" in row]
        if mine:
            worst = min(mine, key=lambda row: row["against_best"])
            told.append(
                f"{name} against the best that was chosen by hand: geometric mean over "
                f"{_count(mine)} {geometric_mean([row['against_best'] for row in mine]):.3f}, "
                f"least {worst['against_best']:.3f} at {size_label(worst['bytes'])} "
                f"({worst['best']})"
            )
    return told


def _guidelines(rows) -> list[str]:
    asked = [row for row in rows if "consistent" in row]
    broken = [
        f"{row['algorithm']} at {size_label(row['bytes'])} takes {1 / row['consistent']:.2f} times "
        "the best of all that adds"
        for row in asked
        if row["consistent"] * TOLERANCE < 1
    ]
    return broken or (["self-consistent at every size"] if asked else [])


def _torch(rows) -> list[str]:
    mine = [row for row in rows if "over_arena" in row]
    if not mine:
        return []
    least = min(mine, key=lambda row: row["over_arena"])
    return [
        f"{mine[0]['algorithm']} over arena: geometric mean over {_count(mine)} "
        f"{geometric_mean([row['over_arena'] for row in mine]):.2f}, "
        f"least {least['over_arena']:.2f} at {size_label(least['bytes'])}"
    ]


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
    """Ours: what is neither native, nor a yardstick."""
    names = dict.fromkeys(row["algorithm"] for row in rows)
    yardsticks = ("memory copy", "torch gloo")
    return [n for n in names if not n.startswith("native") and n not in yardsticks]


def _count(rows) -> str:
    return "1 size" if len(rows) == 1 else f"{len(rows)} sizes"


def size_label(nbytes: int) -> str:
    """Return 131072 as "128 KiB"; "96 B" where nothing rounder fits. Pure."""
    for power, unit in ((20, "MiB"), (10, "KiB")):
        if nbytes >= 1 << power and nbytes % (1 << power) == 0:
            return f"{nbytes >> power} {unit}"
    return f"{nbytes} B"
