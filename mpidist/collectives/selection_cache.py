"""The measurements of ``algorithm="auto"``, in one file for each kind of machine and launch.

The name of the file is a digest of everything that decides which algorithm is the fastest, for
example the software, the number of ranks on each node, the processor and the network. A choice is
stored only if the second-best algorithm took at least 1.1 times as long (`MARGIN`), the best one
was the fastest in most rounds, and no other program was running (`busy`). For a job that `mpidist
launch` runs, all choices are stored in the folder of the job, because a restarted job must choose
the same algorithms to get the same bits.
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
_MOST_BYTES = 1 << 20  # a table needs 20 entries of 100 bytes


class Remembered:
    """A file that stores which algorithms were the fastest, for all jobs with the same `facts`.

    `facts` describe the machine and the launch. If `folder` is None, nothing is stored. If
    `all_choices` is true, the file also stores choices for which no algorithm was clearly the
    fastest.
    """

    def __init__(self, facts: dict, folder: Path | None, all_choices: bool = False):
        self.facts, self.fingerprint, self.all_choices = facts, fingerprint(facts), all_choices
        self.path = folder / f"selection-{self.fingerprint}.json" if folder else None

    def read(self, now: float) -> dict[str, dict]:
        """Return the stored choices that are not too old at time `now`; {} for a damaged file."""
        if self.path is None:
            return {}
        try:
            with self.path.open("rb") as file:
                content = json.loads(file.read(_MOST_BYTES))
            entries = content["entries"] if content["format"] == _FORMAT else {}
            return {key: e for key, e in entries.items() if _valid(key, e, now)}
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
            return {}

    def keep(self, key: str, entry: dict, now: float) -> None:
        """Store the chosen algorithm if it was clearly the fastest, or if `all_choices` is set."""
        clear = margin(entry["us"]) >= MARGIN and entry["won"] >= WON
        if self.path is None or not (clear or self.all_choices):
            return
        entries = {**self.read(now), key: {**entry, "time": int(now)}}
        content = {"format": _FORMAT, "facts": self.facts, "entries": entries}
        # If the home folder is full, read-only or missing, nothing is stored, and the next run
        # measures again.
        with contextlib.suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(self.path, json.dumps(content, indent=1) + "\n")


def write_whole(path: Path, text: str) -> None:
    """Write `text` to a file in such a way that readers see all of it or none of it."""
    # Two jobs may write at once, perhaps on two hosts. Each writes a temporary file of its own, and
    # the last one to rename its file wins.
    handle, part = tempfile.mkstemp(prefix=f"{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        Path(part).replace(path)
    except OSError:
        Path(part).unlink(missing_ok=True)
        raise


def busy(ranks: int) -> bool:
    """Whether programs other than this job's `ranks` ranks are working on this machine."""
    try:
        return os.getloadavg()[0] > ranks + 1
    except OSError:
        return False


def margin(us: dict[str, float]) -> float:
    """Return the ratio of the second-best time in `us` to the best; infinity for a single time."""
    times = sorted(us.values())
    return times[1] / times[0] if len(times) > 1 and times[0] > 0 else math.inf


def fingerprint(facts: dict) -> str:
    """Return a digest of the description `facts`, as sixteen hexadecimal digits."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def facts_of(node_of: Sequence[int], mpi: Mapping[str, object]) -> dict:
    """Return a description of all facts that decide which algorithm is fastest on these nodes."""
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


def _valid(key: str, entry: dict, now: float) -> bool:
    us = entry["us"]
    numbers = all(isinstance(t, int | float) and 0 < t < math.inf for t in us.values())
    # An entry may be from the near future, because the clock of another host may be ahead. An entry
    # from the far future is not valid, because it would not become too old for a long time.
    fresh = -3600 <= now - entry["time"] < DAYS * 86400
    return key.isdecimal() and numbers and entry["algorithm"] in us and fresh


def _digest(parts: Iterable[bytes]) -> str:
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:12]


def _cpu() -> str:
    with contextlib.suppress(OSError):
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
        # On Arm, /proc/cpuinfo has no name of the processor, only its part number.
        if found := re.search(r"^(?:model name|CPU part)\s*:\s*(.*)$", text, re.MULTILINE):
            return found[1]
    return ""


def _network(root: Path = Path("/sys/class")) -> list[str]:
    """Return names and speeds of the real network devices of this host."""
    found = []
    speeds = [p / "speed" for p in root.glob("net/*") if (p / "device").exists()]
    for path in sorted([*speeds, *root.glob("infiniband/*/ports/*/rate")]):
        with contextlib.suppress(OSError):  # an interface that is down has no speed
            found.append(f"{path.relative_to(root)} {path.read_text().strip()}")
    return found
