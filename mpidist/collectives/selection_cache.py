"""What ``auto`` has measured, remembered from run to run: one file for each kind of launch.

The name of the file is a fingerprint of all that decides which algorithm is the fastest: versions
(also of our own code), the MPI library and how it is tuned, thread level, ranks and their places,
processor, network. Another cluster, another launch: another file.

A noisy measurement must not stay for ever. A choice is remembered only where the winner was ahead
by `MARGIN`, won most rounds, and nobody else worked on the machine (`busy`): what is close or was
disturbed is measured in every run. And for `DAYS` days, then it is measured anew. The attempts of
one job under `mpidist launch` are one run: they keep all choices, in the job's own folder.
Everything here is local and called on rank 0 alone; nothing here raises because of a file.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import re
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from .. import __version__

DAYS = 7
MARGIN = 1.1
WON = 0.9

_FORMAT = 1
_MOST_BYTES = 1 << 20  # a table has some twenty entries of a hundred bytes


class Remembered:
    """The file of one fingerprint; `folder` None: nothing is read or kept.

    `all_choices`: also what is not clear.
    """

    def __init__(self, facts: dict, folder: Path | None, all_choices: bool = False):
        self.facts, self.fingerprint, self.all_choices = facts, fingerprint(facts), all_choices
        self.path = folder / f"selection-{self.fingerprint}.json" if folder else None

    def read(self, now: float) -> dict[str, dict]:
        """Return what may be believed at the time `now`; a damaged file is no file."""
        if self.path is None:
            return {}
        try:
            with self.path.open("rb") as file:
                content = json.loads(file.read(_MOST_BYTES))
            entries = content["entries"] if content["format"] == _FORMAT else {}
            return {key: e for key, e in entries.items() if _believable(key, e, now)}
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
            return {}

    def keep(self, key: str, entry: dict, now: float) -> None:
        """Add a fresh entry to the file, if it is clear enough."""
        clear = margin(entry["us"]) >= MARGIN and entry["won"] >= WON
        if self.path is None or not (clear or self.all_choices):
            return
        entries = {**self.read(now), key: {**entry, "time": int(now)}}
        content = {"format": _FORMAT, "facts": self.facts, "entries": entries}
        # A home that is full, read-only or not there costs the next run a measurement, no more.
        with contextlib.suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(self.path, json.dumps(content, indent=1) + "\n")


def write_whole(path: Path, text: str) -> None:
    """Write a file that others see whole or not at all."""
    # Two jobs may write at once, perhaps on two hosts: names of their own, the last one stays.
    handle, part = tempfile.mkstemp(prefix=f"{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        Path(part).replace(path)
    except OSError:
        Path(part).unlink(missing_ok=True)
        raise


def busy(ranks: int) -> bool:
    """Whether this machine runs more than the `ranks` ranks of this job."""
    try:
        return os.getloadavg()[0] > ranks + 1
    except OSError:
        return False


def margin(us: dict[str, float]) -> float:
    """How many times as long the second best takes as the best; inf without a second."""
    times = sorted(us.values())
    return times[1] / times[0] if len(times) > 1 and times[0] > 0 else math.inf


def fingerprint(facts: dict) -> str:
    """Return sixteen hexadecimal digits that stand for `facts`."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def facts_of(node_of: Sequence[int], mpi: Mapping[str, object]) -> dict:
    """Return what decides which algorithm is the fastest for ranks on these nodes.

    `node_of` is rank -> node; `mpi` says which MPI it is, and how it is tuned.
    """
    return {
        "mpidist": __version__,
        "code": _digest(path.read_bytes() for path in sorted(Path(__file__).parent.rglob("*.py"))),
        "MPI": dict(mpi),
        "ranks": len(node_of),
        "nodes": len(set(node_of)),
        "places": _digest(str(node).encode() for node in node_of),
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "network": _network() if len(set(node_of)) > 1 else [],
    }


def _believable(key: str, entry: dict, now: float) -> bool:
    us = entry["us"]
    numbers = all(isinstance(t, int | float) and 0 < t < math.inf for t in us.values())
    # Another host's clock may be a little ahead; far ahead it would make an entry eternal.
    fresh = -3600 <= now - entry["time"] < DAYS * 86400
    return key.isdecimal() and numbers and entry["algorithm"] in us and fresh


def _digest(parts: Iterable[bytes]) -> str:
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:12]


def _cpu() -> str:
    with contextlib.suppress(OSError):
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
        # Arm has no name there; its part number tells as much.
        if found := re.search(r"^(?:model name|CPU part)\s*:\s*(.*)$", text, re.MULTILINE):
            return found[1]
    return ""


def _network(root: Path = Path("/sys/class")) -> list[str]:
    """Names and speeds of the real network devices of this host."""
    found = []
    speeds = [p / "speed" for p in root.glob("net/*") if (p / "device").exists()]
    for path in sorted([*speeds, *root.glob("infiniband/*/ports/*/rate")]):
        with contextlib.suppress(OSError):  # an interface that is down does not tell its speed
            found.append(f"{path.relative_to(root)} {path.read_text().strip()}")
    return found
