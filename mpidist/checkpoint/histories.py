r"""Histories (branches) of a store: which step continues which, and which history is the newest.

    save 800 900 1000     restore(step=900), save 950 960     fresh=True, save 10

    history 0    800 -- 900 -- 1000           (left at step 900)
    history 1              \\-- 950 -- 960     (set aside)
    history 2    10                           the newest: `restore`, retention and readers follow it

A save continues the step that the same store object restored or saved last. If a save continues the
newest step of the newest history, the save belongs to that history. A save begins a new history in
two cases. First, the run went back to an older step, so the save continues a step that is not the
newest. Second, the new step has a lower number than the step that the save continues. A new history
gets the next free number. A new history branches off at the step that its first save continues. If
the number of the new step is not higher than the number of the continued step, the history branches
off just before the new step's number. A save may begin without an earlier step only if the folder
holds no good step, or if the store ignores the steps in the folder (``fresh=True``). The line of a
history is the whole sequence of steps that led to its last step. A line begins with steps of the
older histories that this history continues, each up to the step where the next history branches
off, and ends with the history's own steps. In the line of a history, the step numbers increase. Of
the histories that have a committed step, the newest is the history with the highest number. Saves
add steps only to the newest history. The last step of the newest history is called the newest step
of the store, even if another step has a higher number.

The names of folders and files show which steps and histories exist, so one listing of the store's
folder is enough to find them:

    PATH/step-000000000950-h1             a step of history 1; without -h, of history 0
    PATH/history-1-after-0-step-900       the mark of history 1, an empty file: where it begins
    PATH/history-2                        the mark of a history that continues no step

A mark, the file that says where a history begins, is on stable storage before the first step of the
history is renamed to its final name. The mark stays while the store has a step of this history, or
of a history that continues it. A history without a committed step is never the newest. If the
process is killed while it begins a history, the newest history afterwards is either the new
history, or the history that was the newest before. Only the process that holds the store's lock
creates marks. In a store without marks, all steps belong to history 0.
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
    """The file that says where a history begins: after which step of which older history.

    If a history continues no other history, `after` is None. `beginning` is a digest of the text
    that the user gave as the option `fresh`, or empty if there was no text.
    """

    number: int
    after: int | None = None
    step: int = 0
    beginning: str = ""

    @property
    def name(self) -> str:
        """Name of the file that says where the history begins."""
        after = "" if self.after is None else f"-after-{self.after}-step-{self.step}"
        return f"history-{self.number}{after}{self.beginning and f'-of-{self.beginning}'}"


def _mark_of(name: str) -> Mark | None:
    """Return the mark that the file name `name` describes, or None if the file is not a mark."""
    match = _MARK.fullmatch(name)
    if match is None or (match[2] and int(match[2]) >= int(match[1])):
        return None  # a history can continue only an older one
    after = int(match[2]) if match[2] else None
    return Mark(int(match[1]), after, int(match[3] or 0), match[4] or "")


class Histories:
    """The histories (sequences of saved steps) of a store, read from one listing of its folder.

    Attributes
    ----------
    own : dict
        The step folders (entries) of each history, newest first, whether or not they are committed
        (complete).
    marks : dict
        The mark (the file that says where a history begins) of each history that has one.
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
        """Whether a step folder holds a manifest. The answer is cached for the next call.

        An interrupted removal leaves a step folder without a manifest; such a folder counts as
        removed.
        """
        if entry not in self._committed:
            self._committed[entry] = False
            gone = suppress(FileNotFoundError, NotADirectoryError)
            with gone, files.folder(entry.name, self._root) as folder:
                self._committed[entry] = files.is_there(NAME, folder)
        return self._committed[entry]

    def committed(self, entries: Iterable[Entry]) -> Iterator[Entry]:
        """Yield those step folders of `entries` that are committed (that have a manifest)."""
        return filter(self.is_committed, entries)

    def numbers(self) -> Iterator[int]:
        """Return the numbers of the histories (branches) with a committed step, newest first."""
        numbers = sorted(self.own, reverse=True)
        return (number for number in numbers if any(self.committed(self.own[number])))

    def newest(self) -> int | None:
        """Return the number of the newest history (branch), or None where no step is committed."""
        return next(self.numbers(), None)

    def parts(self, number: int | None) -> Iterator[tuple[int, int]]:
        """Yield history `number` and the older histories that it continues, newest first.

        Each history is yielded as a tuple of its own number and a step number. The steps of the
        yielded history up to this step number led to the last step of history `number`; its later
        steps did not.
        """
        last = MAX_STEP
        while number is not None:
            yield number, last
            mark = self.marks.get(number, Mark(number))
            number, last = mark.after, min(last, mark.step)

    def line(self, number: int | None = None) -> list[Entry]:
        """Return the step folders that led to the last step of a history (branch), newest first.

        The default is the newest history.
        """
        return [
            entry
            for history, last in self.parts(self.newest() if number is None else number)
            for entry in self.own.get(history, ())
            if entry.step <= last
        ]

    def everything(self) -> list[Entry]:
        """Return the step folders of all histories (branches), newest first."""
        return sorted((entry for own in self.own.values() for entry in own), reverse=True)

    def beginning(self, number: int) -> str:
        """Return a text for error messages that says after which step a history (branch) begins."""
        mark = self.marks.get(number, Mark(number))
        if mark.after is None:
            return f"history {number}"
        return f"history {number}, after step {mark.step} of history {mark.after}"

    def next_mark(self, after: int | None = None, step: int = 0, beginning: str = "") -> Mark:
        """Return the mark of a new history, which is the file that says where the history begins.

        If the first save of the most recent history has failed, and the new history begins at the
        same step, the mark of that failed history is used again.
        """
        last = max([*self.own, *self.marks], default=-1)
        mark = Mark(last, after, step, beginning)
        if last not in self.own and self.marks.get(last) == mark:
            return mark
        return mark._replace(number=last + 1)

    def idle_marks(self, newest: int) -> list[Mark]:
        """Return the marks (files) of histories older than `newest` that led to no stored step."""
        needed = {part for number in self.own for part, _ in self.parts(number)}
        return [m for m in self.marks.values() if m.number < newest and m.number not in needed]


@contextmanager
def opened(path: str) -> Iterator[tuple[int, Histories]]:
    """Keep a store's folder open during the ``with`` block; yield it and its `Histories`.

    Raises NoCheckpoint if the folder does not exist.
    """
    try:
        with files.folder(path) as root:
            yield root, Histories(root)
    except (FileNotFoundError, NotADirectoryError) as error:
        reason = "is not a folder" if isinstance(error, NotADirectoryError) else "does not exist"
        raise NoCheckpoint(f"no checkpoint: {path} {reason}") from None


def _found(path: str, pick: Callable[[Histories], T]) -> tuple[T, Histories]:
    """List the folder of a store; return what `pick` finds in the listing, and the listing.

    While a folder is listed, a job may give a new step its final name and remove an old step, and
    then the listing may contain neither of the two steps. Because a listing may miss steps, `pick`
    is called again with new listings until it finds something, or until two successive listings are
    equal.
    """
    with opened(path) as (root, listed):
        seen: frozenset[str] | None = None
        while not (result := pick(listed)) and listed.names != seen:
            seen, listed = listed.names, Histories(root)
        return result, listed


def first(
    path: str, step: int | None = None, history: int | None = None, passed: Collection = ()
) -> Entry | None:
    """Return the newest committed step folder of a history, except the folders in `passed`.

    The search covers the whole line of the history: its own steps, and the steps of older histories
    that led to them. If `history` is None, the newest history is searched. If `step` is given, only
    folders of this step are searched. Returns None if all folders found are in `passed`. Raises
    NoCheckpoint if no step folder is found; the message lists the steps or histories that exist.
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
    """Return the numbers of the committed steps that led to a history's last step, ascending.

    The default is the newest history. If there is no store, the list is empty. Raises NoCheckpoint
    if `history` is given and does not exist.
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
    """Return the committed step folders of all histories, newest first, and the folder's listing.

    With `history`, return only the step folders of this history and of the older histories that it
    continues. With `step`, return only folders of this step. Raises NoCheckpoint if no step folder
    fits `step` and `history`.
    """

    def pick(listed: Histories) -> list[Entry]:
        line = listed.everything() if history is None else listed.line(history)
        return [*listed.committed(entry for entry in line if step in (None, entry.step))]

    entries, listed = _found(path, pick)
    if not entries:
        raise _missing(path, step, history)
    return entries, listed


def is_gone(path: str, entry: Entry) -> bool:
    """Whether a step that could not be read was removed meanwhile by the job that saves.

    A removal deletes the manifest first, so a step that has a manifest but lacks another file is
    damaged, not removed.
    """
    with suppress(NoCheckpoint), opened(path) as (_, listed):
        return not listed.is_committed(entry)
    return False


def publish(name: str, history: int, step: int, root: int) -> Entry:
    """Rename a complete temporary folder to the next free name for its step.

    `name` is the name of this folder in the open folder `root`. Returns an `Entry`, which has the
    numbers in the new name.
    """
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
    """The step that the next save continues. Only rank 0 uses this class.

    Parameters
    ----------
    path : str
    fresh : bool or str
        Whether the steps that the folder already holds are ignored until this store has saved. If
        `fresh` is a text, a later store with the same text continues the history that this store
        begins.
    """

    def __init__(self, path: str, fresh: bool | str):
        self._path, self._fresh = path, bool(fresh)
        text = fresh if isinstance(fresh, str) else ""
        self._beginning = text and hashlib.sha256(text.encode()).hexdigest()[:16]
        self._at: Entry | None = None

    def stand(self, entry: Entry) -> None:
        """Record that the step `entry` was restored or saved; the next save continues this step."""
        self._at, self._fresh = entry, False

    def is_fresh(self) -> bool:
        """Whether this store still ignores the steps that the folder held before (`fresh`)."""
        if self._fresh and self._beginning:
            with suppress(NoCheckpoint), opened(self._path) as (_, listed):
                begun = {n for n, m in listed.marks.items() if m.beginning == self._beginning}
                self._fresh = begun.isdisjoint(listed.numbers())
        return self._fresh

    def first(
        self, step: int | None = None, history: int | None = None, passed: Collection = ()
    ) -> Entry | None:
        """Return the newest committed step folder of a history, except the folders in `passed`.

        The default is the newest history. If `step` is given, only folders of this step are
        searched.

        Raises NoCheckpoint if `fresh` makes the store ignore the steps in the folder and `history`
        is not given.
        """
        if history is None and self.is_fresh():
            raise NoCheckpoint(
                f"no checkpoint: fresh=True ignores the steps in {self._path}; pass history= to "
                "read one of them"
            )
        return first(self._path, step, history, passed)

    def latest(self) -> Entry | None:
        """Return the newest committed step folder of the newest history (branch), or None."""
        with suppress(NoCheckpoint):
            return self.first()
        return None

    def all_steps(self, history: int | None = None) -> list[int]:
        """Return the numbers of the committed steps that led to a history's last step, ascending.

        The default is the newest history.

        The list is empty if `fresh` makes the store ignore the steps in the folder and `history` is
        not given.
        """
        return [] if history is None and self.is_fresh() else all_steps(self._path, history)

    def is_next(self, history: int, step: int) -> bool:
        """Whether a step copied to a node is at least as new as the newest step of this store.

        `history` and `step` are the numbers of the copied step.
        """
        latest = self.latest()
        return not self.is_fresh() if latest is None else (history, step) >= latest[:2]

    def is_of(self, history: int, step: int) -> bool:
        """Whether a step copied to a node is in the newest history, or newer than that history.

        `history` and `step` are the numbers of the copied step. Steps of the older histories that
        the newest history continues count too.
        """
        latest = self.latest()
        if latest is None or self.is_next(history, step):
            return not self.is_fresh()
        with opened(self._path) as (_, listed):
            parts = listed.parts(latest.history)
            return any(part == history and step <= last for part, last in parts)

    def begin(self, root: int, step: int, is_good: Callable[[Entry], bool]) -> int:
        """Return the number of the history to which a save of `step` belongs.

        `root` is the descriptor of the open folder, and `is_good` says whether a step is undamaged.
        If the history is new, create its mark, the file that says where it begins.

        Raises CheckpointError if the folder holds good steps, but this store object has neither
        restored nor saved one of them. With ``fresh=True``, steps of earlier runs do not count.
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
