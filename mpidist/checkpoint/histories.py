r"""Histories (series of saved steps): which step continues which; which history is the newest.

    save 800 900 1000     restore(step=900), save 950 960     fresh=True, save 10

    history 0    800 -- 900 -- 1000           (left at step 900)
    history 1              \\-- 950 -- 960     (set aside)
    history 2    10                           the newest: `restore`, retention and readers follow it

A saved step follows the step that the same store object restored or saved last. If this is not the
newest step, or if the new step has a lower number, the save begins a new history, which branches
off there. The newest history has the highest number. The line of a history is its own steps, and
the steps of older histories that it continues.

The names of folders and files show which steps and histories exist:

    PATH/step-000000000950-h1             a step of history 1; without -h, of history 0
    PATH/history-1-after-0-step-900       the mark of history 1, an empty file: where it begins
    PATH/history-2                        the mark of a history that continues no step

Each mark is written before the first step of its history.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple, TypeVar

from .. import events
from ..errors import CheckpointError, NoCheckpoint, StorageError
from .arguments import MAX_STEP
from .format.manifest import NAME
from .storage import files
from .storage.steps import Entry, entry_of

T = TypeVar("T")

_MARK = re.compile(
    r"history-(0|[1-9][0-9]*)(?:-after-(0|[1-9][0-9]*)-step-([0-9]{1,12}))?(?:-of-([0-9a-f]{16}))?",
    re.ASCII,
)


class Mark(NamedTuple):
    """A file whose name says where a history (series of saved steps) begins.

    History `number` begins after step `step` of history `after`. If `after` is None, the history
    follows no step. `beginning` is a digest of the text that the user passed to the store as
    `fresh`, or empty.
    """

    number: int
    after: int | None = None
    step: int = 0
    beginning: str = ""

    @property
    def name(self) -> str:
        """Name of this file, such as ``history-1-after-0-step-900``."""
        after = "" if self.after is None else f"-after-{self.after}-step-{self.step}"
        return f"history-{self.number}{after}{self.beginning and f'-of-{self.beginning}'}"


def _mark_of(name: str) -> Mark | None:
    """Return the `Mark` that a file name describes, or None."""
    match = _MARK.fullmatch(name)
    if match is None or (match[2] and int(match[2]) >= int(match[1])):
        return None  # a history can continue only an older one
    after = int(match[2]) if match[2] else None
    return Mark(int(match[1]), after, int(match[3] or 0), match[4] or "")


class Histories:
    """The histories (series of saved steps) of a store, from one listing of its folder.

    Attributes
    ----------
    own : dict
        The step folders of each history, newest first, complete or not.
    marks : dict
        Number of a history -> the file that says where this history begins, if there is one.
    """

    def __init__(self, root: int):
        self._root, self._committed = root, dict[Entry, bool]()
        folders, others = files.folders_and_files(root)
        self.names = frozenset([*folders, *others])
        self.own: dict[int, list[Entry]] = {}
        for entry in sorted(filter(None, map(entry_of, folders)), reverse=True):
            self.own.setdefault(entry.history, []).append(entry)
        self.marks = {mark.number: mark for mark in filter(None, map(_mark_of, others))}

    def is_committed(self, entry: Entry) -> bool:
        """Whether a step folder is complete: it has the file MANIFEST.json."""
        if entry not in self._committed:
            self._committed[entry] = False
            gone = suppress(FileNotFoundError, NotADirectoryError)
            with gone, files.folder(entry.name, self._root) as folder:
                self._committed[entry] = files.is_there(NAME, folder)
        return self._committed[entry]

    def committed(self, entries: Iterable[Entry]) -> Iterator[Entry]:
        """Yield those step folders of `entries` that are complete."""
        return filter(self.is_committed, entries)

    def numbers(self) -> Iterator[int]:
        """Return the numbers of the histories (series of saved steps) with a complete step.

        The newest history comes first.
        """
        numbers = sorted(self.own, reverse=True)
        return (number for number in numbers if any(self.committed(self.own[number])))

    def newest(self) -> int | None:
        """Return the number of the newest series of saved steps with a complete step, or None."""
        return next(self.numbers(), None)

    def parts(self, number: int | None) -> Iterator[tuple[int, int]]:
        """Yield (history, last) for history `number` and the older histories that it continues.

        A history is a series of saved steps. History `number` is yielded first; of each older
        history, it continues only the steps up to number `last`.
        """
        last = MAX_STEP
        while number is not None:
            yield number, last
            mark = self.marks.get(number, Mark(number))
            number, last = mark.after, min(last, mark.step)

    def line(self, number: int | None = None) -> list[Entry]:
        """Return the step folders of a history (series of saved steps), newest first.

        The folders of older histories that it continues are included. None means the newest
        history.
        """
        return [
            entry
            for history, last in self.parts(self.newest() if number is None else number)
            for entry in self.own.get(history, ())
            if entry.step <= last
        ]

    def everything(self) -> list[Entry]:
        """Return the step folders of all histories (series of saved steps), newest first."""
        return sorted((entry for own in self.own.values() for entry in own), reverse=True)

    def beginning(self, number: int) -> str:
        """Return words for a history (series of saved steps) and the step after which it begins."""
        mark = self.marks.get(number, Mark(number))
        if mark.after is None:
            return f"history {number}"
        return f"history {number}, after step {mark.step} of history {mark.after}"

    def next_mark(self, after: int | None = None, step: int = 0, beginning: str = "") -> Mark:
        """Return the `Mark` of a new history (series of saved steps).

        The mark is a file name that says where the history begins: after step `step` of history
        `after`. If the newest history begins there as well and has no step yet, its mark is
        returned.
        """
        last = max([*self.own, *self.marks], default=-1)
        mark = Mark(last, after, step, beginning)
        if last not in self.own and self.marks.get(last) == mark:
            return mark
        return mark._replace(number=last + 1)

    def idle_marks(self, newest: int) -> list[Mark]:
        """Return the unneeded files that say where old histories (series of saved steps) begin.

        Such a file is needed while the folder has a step of the file's history, or of a later
        history that continues this history. Only histories with a number below `newest` are old.
        """
        needed = {part for number in self.own for part, _ in self.parts(number)}
        return [m for m in self.marks.values() if m.number < newest and m.number not in needed]


@contextmanager
def opened(path: str) -> Iterator[tuple[int, Histories]]:
    """Keep a store's folder open in a ``with`` block; yield it and a listing of its saved steps.

    Raises NoCheckpoint if the folder does not exist.
    """
    try:
        with files.folder(path) as root:
            yield root, Histories(root)
    except (FileNotFoundError, NotADirectoryError) as error:
        reason = "is not a folder" if isinstance(error, NotADirectoryError) else "does not exist"
        raise NoCheckpoint(f"no checkpoint: {path} {reason}") from None


def _found(path: str, pick: Callable[[Histories], T]) -> tuple[T, Histories]:
    """List the folder of a store; return what `pick` finds in the listing, and the listing."""
    with opened(path) as (root, listed):
        seen: frozenset[str] | None = None
        # While a folder is listed, a job may rename a new step and remove an old one, so that the
        # listing has neither. So the folder is listed again, until two listings are equal.
        while not (result := pick(listed)) and listed.names != seen:
            seen, listed = listed.names, Histories(root)
        return result, listed


def first(
    path: str, step: int | None = None, history: int | None = None, passed: Collection = ()
) -> Entry | None:
    """Return the newest complete step folder of a history, except the folders in `passed`.

    A history is a series of saved steps; None means the newest history. If `step` is not None, only
    folders of this step are searched. Returns None if all folders are in `passed`, and raises
    NoCheckpoint if there are none.
    """

    def pick(listed: Histories) -> Entry | None:
        line = listed.line(history)
        asked = (e for e in line if step in (None, e.step) and e not in passed)
        return next(listed.committed(asked), None)

    entry, _ = _found(path, pick)
    if entry is None and not passed:
        raise _missing(path, step, history)
    return entry


def _missing(path: str, step: int | None, history: int | None) -> NoCheckpoint:
    """Return the exception for a store that does not have the requested step or history."""
    with opened(path) as (_, listed):
        numbers = sorted(listed.numbers())
        if not numbers:
            return NoCheckpoint(f"no checkpoint: {path} holds no step-* folder with a {NAME}")
        if history is not None and history not in numbers:
            return NoCheckpoint(f"no history {history} in {path}; histories there: {numbers}")
        there = sorted({entry.step for entry in listed.committed(listed.line(history))})
        same = (entry for entry in listed.everything() if entry.step == step)
        other = next(listed.committed(same), None)
        hint = f"; history={other.history} has it" if other else ""
        return NoCheckpoint(f"no checkpoint of step {step} in {path}; steps there: {there}{hint}")


def all_steps(path: str, history: int | None = None) -> list[int]:
    """Return the numbers of the complete steps of a history, ascending.

    A history is a series of saved steps; None means the newest history. The steps of older
    histories that it continues are included. Raises NoCheckpoint if `history` does not exist.
    """
    with suppress(*([NoCheckpoint] if history is None else [])):
        found, _ = _found(path, lambda at: {e.step for e in at.committed(at.line(history))})
        if found or history is None:
            return sorted(found)
        raise _missing(path, None, history)
    return []


def everything(
    path: str, step: int | None = None, history: int | None = None
) -> tuple[list[Entry], Histories]:
    """Return all complete step folders of a store, newest first, and the listing of its folder.

    If `history` (the number of a series of saved steps) or `step` is given, only its folders are
    returned. Raises NoCheckpoint if there are none.
    """

    def pick(listed: Histories) -> list[Entry]:
        line = listed.everything() if history is None else listed.line(history)
        return [*listed.committed(entry for entry in line if step in (None, entry.step))]

    entries, listed = _found(path, pick)
    if not entries:
        raise _missing(path, step, history)
    return entries, listed


def is_gone(path: str, entry: Entry) -> bool:
    """Whether a step that could not be read was removed meanwhile by the job that saves."""
    with suppress(NoCheckpoint), opened(path) as (_, listed):
        # A removal deletes the manifest first. A step with a manifest that lacks another file is
        # damaged.
        return not listed.is_committed(entry)
    return False


def publish(name: str, history: int, step: int, root: int) -> Entry:
    """Rename the folder `name` to a free name for `history` and `step`; return it as an `Entry`."""
    own = Histories(root).own.get(history, ())
    generation = max((entry.generation for entry in own if entry.step == step), default=-1)
    while True:
        generation += 1
        entry = Entry(history, step, generation)
        try:
            files.rename(name, entry.name, root)
            return entry
        except OSError as error:
            if not isinstance(error, FileExistsError) and not files.is_folder(entry.name, root):
                raise StorageError(f"cannot commit {entry.name}: {error}") from error


class Line:
    """Remembers the step that was restored or saved last. Only rank 0 uses this class.

    With `fresh`, the steps that the folder already holds are ignored; see `is_fresh`.
    """

    def __init__(self, path: str, fresh: bool | str):
        self._path, self._fresh = path, bool(fresh)
        text = fresh if isinstance(fresh, str) else ""
        self._beginning = text and hashlib.sha256(text.encode()).hexdigest()[:16]
        self._at: Entry | None = None

    def stand(self, entry: Entry) -> None:
        """Record `entry` as the step that this store restored or saved last."""
        self._at, self._fresh = entry, False

    def is_fresh(self) -> bool:
        """Whether the steps that the folder already holds are ignored, as `fresh` asks.

        This ends when this store saves or restores a step. If `fresh` is the name of a run, it also
        ends as soon as the folder has a step of this run.
        """
        if self._fresh and self._beginning:
            with suppress(NoCheckpoint), opened(self._path) as (_, listed):
                begun = {n for n, m in listed.marks.items() if m.beginning == self._beginning}
                self._fresh = begun.isdisjoint(listed.numbers())
        return self._fresh

    def first(
        self, step: int | None = None, history: int | None = None, passed: Collection = ()
    ) -> Entry | None:
        """Return what the function `first` returns.

        Raises NoCheckpoint if `history` is None and the steps in the folder are ignored (see
        `is_fresh`).
        """
        if history is None and self.is_fresh():
            raise NoCheckpoint(
                f"no checkpoint: fresh=True ignores the steps in {self._path}; pass history= to "
                "read one of them"
            )
        return first(self._path, step, history, passed)

    def latest(self) -> Entry | None:
        """Return the newest complete step folder; None if there is none or it is ignored.

        The folder belongs to the newest history (series of saved steps); `is_fresh` says whether
        steps are ignored.
        """
        with suppress(NoCheckpoint):
            return self.first()
        return None

    def all_steps(self, history: int | None = None) -> list[int]:
        """Return what the function `all_steps` returns.

        Returns [] if `history` is None and the steps in the folder are ignored (see `is_fresh`).
        """
        return [] if history is None and self.is_fresh() else all_steps(self._path, history)

    def is_next(self, history: int, step: int) -> bool:
        """Whether a step that `TieredStore` has saved on the nodes is as new as this store's steps.

        `step` is the number of that step. `history` tells to which series of saved steps it
        belongs: a series begins after the restore of an older step, and the series are numbered.
        """
        latest = self.latest()
        return not self.is_fresh() if latest is None else (history, step) >= latest[:2]

    def is_of(self, history: int, step: int) -> bool:
        """Whether the nodes' checkpoint belongs to the newest series of saved steps, or is newer.

        `step` is the number of the step that is saved on the nodes, and `history` is the number of
        its series. The steps of older series that the newest series continues count as part of it.
        """
        latest = self.latest()
        if latest is None or self.is_next(history, step):
            return not self.is_fresh()
        with opened(self._path) as (_, listed):
            parts = listed.parts(latest.history)
            return any(part == history and step <= last for part, last in parts)

    def begin(self, root: int, step: int, is_good: Callable[[Entry], bool]) -> int:
        """Return the number of the history (series of saved steps) for a save of `step`.

        Raises CheckpointError if this store has neither restored nor saved a step, but the folder
        `root` has undamaged saved steps that are not ignored (see `is_fresh`).
        """
        listed, fresh = Histories(root), self.is_fresh()
        line = [] if fresh else listed.line()
        tip = next(listed.committed(line), None)
        if self._at is not None:
            history, last, _ = self._at
            if step >= last and (tip is None or (history, last) >= tip[:2]):
                return history
            mark = listed.next_mark(history, min(last, step - 1)) if step else listed.next_mark()
        elif tip is None and not fresh:
            return 0
        else:
            if good := next(filter(is_good, listed.committed(line)), None):
                raise CheckpointError(
                    f"{self._path} holds good steps up to {good.step}, which step {step} would not "
                    "continue; call restore() first, or set them aside with fresh=True"
                )
            mark = listed.next_mark(beginning=self._beginning)
        if mark != Mark(0):
            files.close(files.open_or_create(mark.name, root))
            files.sync(root)
            events.emit("checkpoint_history", path=self._path, history=mark.name, step=step)
        return mark.number
