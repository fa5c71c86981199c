"""The lines that a resumed run prints: its step, the remaining steps, and the changed settings.

    mpidist: resumed from step 1120 (saved by 4 ranks), 1130 to go
    mpidist: optimizer.lr: 0.02 when saved, 0.5 now

Each checkpoint contains the settings of its run as text.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping

from .. import events
from ..errors import ConfigError
from .settings import PRESENCE, shortened

#: Settings that belong to one start of a run, and may differ between its starts.
_OF_THIS_START = (
    *PRESENCE, "checkpoint", "checkpoint.path", "resume", "retry_bad", "stop_after", "time_limit",
    "watch_seconds",
)  # fmt: skip
#: Settings that a restore handles itself: it raises an error if `seed` differs, and keeps the saved
#: value of `shuffle`.
_SEEN_TO = ("seed", "shuffle")


def kept(words: Mapping[str, str]) -> dict[str, str]:
    """Return those settings of a run that a checkpoint stores, as {setting: text}."""
    without = (*_OF_THIS_START, *_SEEN_TO)
    return {
        name: value
        for name, value in words.items()
        if name not in without and not name.startswith(("model.", "order of ", "elastic"))
    }


def differences(old: Mapping[str, str], new: Mapping[str, str]) -> list[str]:
    """Return a line of text for each setting that differs between `old` and `new`."""
    lines: list[str] = []
    tables: list[str] = []
    for name in dict.fromkeys((*new, *old)):
        pair = old.get(name), new.get(name)
        kind = name.partition(".")[0]
        if pair[0] == pair[1] or name.startswith(tuple(f"{table}." for table in tables)):
            continue
        if None in pair and (kind == name or old.get(kind) != new.get(kind)):
            continue  # only one version of mpidist, or one kind of object, has this setting
        if ", an update of " in name and lines:
            continue  # this effect of a learning rate is reported only if nothing else changed
        if any(value and value.endswith(" entries") for value in pair):
            tables.append(name)
        lines.append(f"{name}: {_whole(old, name)} when saved, {_whole(new, name)} now")
    return lines


def _whole(words: Mapping[str, str], name: str) -> str:
    """Return the value of a setting as text; for a dict or a list, the text has all entries."""
    value = words.get(name, "none")
    if value.endswith(" entries"):
        inside = [key for key in words if key.startswith((f"{name}.", f"{name}["))]
        held = (f"{key.removeprefix(name).lstrip('.')} {words[key]}" for key in inside)
        value = "{" + ", ".join(held) + "}"
    return shortened(value)


def checkpoints_there(resume: bool | str, path: str, last: int) -> ConfigError:
    """Return the error for a run that must begin anew, but finds checkpoints up to step `last`."""
    given = "resume='fresh' (--fresh)" if resume else "resume=False (--no-resume)"
    cure = "resume='fresh' (--fresh) ignores them, or choose another folder"
    if resume:
        cure = "open the store with fresh=True"
    return ConfigError(f"{given}, but {path} has checkpoints up to step {last}; {cure}")


def save_failure(error: Exception, step: int | None, store) -> str:
    """Return the text of `error` with the step that was not saved, and the folder of the store."""
    if "save of step " in str(error):
        return str(error)
    of = "" if step is None else f" of step {step}"
    return f"save{of} to {getattr(store, 'path', 'the store')}: {error}"


def not_saved(failure: str, newest: int | None, goes_on: bool = True) -> str:
    """Return a text that says that a save has failed, and what to do."""
    what = "not saved, the run goes on" if goes_on else "the state could not be saved"
    step = "the newest good step, if any" if newest is None else f"step {newest}"
    return f"{what}: {failure}; free space or mend the folder; the same command resumes from {step}"


def tell_resume(run, end: int, last: int) -> None:
    """Print on rank 0 that `run` was resumed, and how many steps remain until step `end`."""
    if run.saved_step is None or run.comm.rank or not events.VERBOSITY:
        return
    ranks = "1 rank" if run.ranks_before == 1 else f"{run.ranks_before} ranks"
    where = f"step {run.step} (saved by {ranks})"
    first = f"resumed from {where}, {end - run.step} to go"
    if run.step >= end:
        why, cure = f"ends at {end}", "give more steps or epochs"
        if end < last:
            why, cure = f"stop_after={end} ends it there", "leave stop_after out, or raise it"
        first = f"nothing to do: the run is at {where} and {why}; {cure}"
    lines = [first, *run.changed]
    print("".join(f"mpidist: {line}\n" for line in lines), end="", file=sys.stderr, flush=True)
