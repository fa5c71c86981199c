"""What a run says when it goes on: from where, how far, and what was set in another way before.

    mpidist: resumed from step 1120 (saved by 4 ranks), 1130 to go
    mpidist: optimizer.lr: 0.02 when saved, 0.5 now

The settings ride in each saved step as the words by which `settings` compares the ranks.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping

from .. import events
from .settings import PRESENCE, shortened

#: What belongs to one start and not to the run; and what a restore refuses, or keeps, by itself.
_OF_THIS_START = (
    *PRESENCE, "checkpoint", "checkpoint.path", "resume", "retry_bad", "stop_after", "time_limit",
    "watch_seconds",
)  # fmt: skip
_SEEN_TO = ("seed", "shuffle")


def kept(words: Mapping[str, str]) -> dict[str, str]:
    """Return the settings that a saved step keeps.

    Without the model's arrays, which a checkpoint describes by itself.
    """
    without = (*_OF_THIS_START, *_SEEN_TO)
    return {
        name: value
        for name, value in words.items()
        if name not in without and not name.startswith(("model.", "order of "))
    }


def differences(old: Mapping[str, str], new: Mapping[str, str]) -> list[str]:
    """Return a line for each setting that is another one than before. Pure."""
    lines: list[str] = []
    tables: list[str] = []
    for name in (*new, *(name for name in old if name not in new)):
        pair = old.get(name), new.get(name)
        kind = name.partition(".")[0]
        if pair[0] == pair[1] or name.startswith(tuple(f"{table}." for table in tables)):
            continue
        if None in pair and (kind == name or old.get(kind) != new.get(kind)):
            continue  # another version of mpidist has it, or another kind of thing, which is said
        if ", an update of " in name and lines:
            continue  # what a rate does is said where nothing else tells that it is another one
        if any(value and value.endswith(" entries") for value in pair):
            tables.append(name)
        lines.append(f"{name}: {_whole(old, name)} when saved, {_whole(new, name)} now")
    return lines


def _whole(words: Mapping[str, str], name: str) -> str:
    """Return a value; of a table what it holds."""
    value = words.get(name, "none")
    if value.endswith(" entries"):
        inside = [key for key in words if key.startswith((f"{name}.", f"{name}["))]
        held = (f"{key.removeprefix(name).lstrip('.')} {words[key]}" for key in inside)
        value = "{" + ", ".join(held) + "}"
    return shortened(value)


def tell_resume(run, end: int) -> None:
    """Say on rank 0 that `run` goes on, to step `end`, or is over."""
    if run.saved_step is None or run.comm.rank or not events.VERBOSITY:
        return
    ranks = "1 rank" if run.ranks_before == 1 else f"{run.ranks_before} ranks"
    where = f"step {run.step} (saved by {ranks})"
    lines = [f"resumed from {where}, {end - run.step} to go"]
    if run.step >= end:
        lines = [
            f"nothing to do: the run is at {where} and ends at {end}; give more steps or epochs"
        ]
    lines += run.changed
    print("".join(f"mpidist: {line}\n" for line in lines), end="", file=sys.stderr, flush=True)
