r"""Histories: which step goes on from which, and which of them is the newest.

    save 800 900 1000     restore(step=900), save 950 960     fresh=True, save 10

    history 0    800 -- 900 -- 1000           (left)
    history 1              \\-- 950 -- 960     (set aside)
    history 2    10                           the newest: `restore`, retention and readers follow it

Each save names the step that it continues, the one that its store restored or saved last. While
that is the newest of all, the save is of the same history. Where it is not (the run went back), or
the numbers go down, the save begins a branch: the next number, after that step of that history.
Where it continues nothing, the folder must hold nothing good, or what it holds be set aside.
The line of a history is its own steps, and those of the ones that it continues up to where it
left them: numbers ascend along it. The newest history is the one of the highest number that has a
committed step. Only that one grows, so what is newest is never a question of step numbers.

All of it is in names, read with one look at the store's folder, however many steps it holds:

    PATH/step-000000000950-h1             a step of history 1; without -h, of history 0
    PATH/history-1-after-0-step-900       its mark, an empty file: where it begins
    PATH/history-2                        a history that continues nothing

A mark is on stable storage before the first step of its history is renamed into place, and stays
as long as a step needs it. One that has no step yet is nobody's newest history: a kill at any
moment leaves the newest of before, or the new one. Only who holds the store's lock makes marks.
A store without marks and -h, of whatever age, is history 0.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple, TypeVar

from .. import events
from ..errors import CheckpointError, NoCheckpoint, StorageError
from .format.manifest import NAME
from .storage import files
from .storage.steps import MAX_STEP, Entry, entry_of

T = TypeVar("T")

_MARK = re.compile(
    r"history-(0|[1-9][0-9]*)(?:-after-(0|[1-9][0-9]*)-step-([0-9]{1,12}))?(?:-of-([0-9a-f]{16}))?",
    re.ASCII,
)


class Mark(NamedTuple):
    """Where a history begins: after a step of another one, or of nothing.

    `beginning`: the digest of the name under which it was begun, for `fresh`; often none.
    """

    number: int
    after: int | None = None
    step: int = 0
    beginning: str = ""

    @property
    def name(self) -> str:
        """Name of the file."""
        after = "" if self.after is None else f"-after-{self.after}-step-{self.step}"
        return f"history-{self.number}{after}{self.beginning and f'-of-{self.beginning}'}"


def _mark_of(name: str) -> Mark | None:
    match = _MARK.fullmatch(name)
    if match is None or (match[2] and int(match[2]) >= int(match[1])):
        return None  # a history continues an older one
    after = int(match[2]) if match[2] else None
    return Mark(int(match[1]), after, int(match[3] or 0), match[4] or "")


class Histories:
    """What the names in an open folder say, at one moment.

    Attributes
    ----------
    own : dict
        By history, its step folders by name, newest first, committed or not.
    marks : dict
        By history, its mark.
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
        """Whether a step folder holds a manifest. Opens it, once.

        One without is what an interrupted removal leaves: no checkpoint, and no damage.
        """
        if entry not in self._committed:
            self._committed[entry] = False
            gone = suppress(FileNotFoundError, NotADirectoryError)
            with gone, files.folder(entry.name, self._root) as folder:
                self._committed[entry] = files.is_there(NAME, folder)
        return self._committed[entry]

    def committed(self, entries: Iterable[Entry]) -> Iterator[Entry]:
        """Yield those that are committed; each folder is opened when it is its turn."""
        return filter(self.is_committed, entries)

    def numbers(self) -> Iterator[int]:
        """Yield the histories that have a committed step, newest first."""
        for number in sorted(self.own, reverse=True):
            if next(self.committed(self.own[number]), None):
                yield number

    def newest(self) -> int | None:
        """Return the newest history, or None where nothing is committed."""
        return next(self.numbers(), None)

    def parts(self, number: int) -> Iterator[tuple[int, int]]:
        """Yield of which histories the line of one is made, newest first, and up to which step."""
        at: int | None = number
        below = MAX_STEP
        while at is not None:
            yield at, below
            mark = self.marks.get(at, Mark(at))
            at, below = mark.after, min(below, mark.step)

    def line(self, number: int | None) -> list[Entry]:
        """Return the steps of a history and of those that it continues, newest first."""
        return [
            entry
            for history, below in (() if number is None else self.parts(number))
            for entry in self.own.get(history, ())
            if entry.step <= below
        ]

    def everything(self) -> list[Entry]:
        """Return all step folders, newest first."""
        return sorted((entry for own in self.own.values() for entry in own), reverse=True)

    def beginning(self, number: int) -> str:
        """Say where a history begins."""
        mark = self.marks.get(number, Mark(number))
        if mark.after is None:
            return f"history {number}"
        return f"history {number}, after step {mark.step} of history {mark.after}"

    def next_mark(self, after: int | None = None, step: int = 0, beginning: str = "") -> Mark:
        """Return the mark of a history that is begun now.

        One that was begun alike, and whose first save has failed, is it.
        """
        last = max([*self.own, *self.marks], default=-1)
        mark = Mark(last, after, step, beginning)
        if last not in self.own and self.marks.get(last) == mark:
            return mark
        return mark._replace(number=last + 1)

    def idle_marks(self, newest: int) -> list[Mark]:
        """Return the marks of histories before the `newest` that no step needs any more."""
        needed = {part for number in self.own for part, _ in self.parts(number)}
        return [m for m in self.marks.values() if m.number < newest and m.number not in needed]


@contextmanager
def opened(path: str) -> Iterator[tuple[int, Histories]]:
    """Hold a store's folder open, for what its names say. NoCheckpoint where it is none."""
    try:
        with files.folder(path) as root:
            yield root, Histories(root)
    except FileNotFoundError:
        raise NoCheckpoint(f"no checkpoint: {path} does not exist") from None
    except NotADirectoryError:
        raise NoCheckpoint(f"no checkpoint: {path} is not a folder") from None


def _found(path: str, pick: Callable[[Histories], T]) -> tuple[T, Histories]:
    """Return what `pick` finds in a store's folder, and in which listing.

    A saver may be at work: a name that comes or goes while a folder is listed may be missed with
    the one that it replaces. So that nothing is there is believed when two listings are the same.
    """
    with opened(path) as (root, listed):
        seen: frozenset[str] | None = None
        while not (result := pick(listed)) and listed.names != seen:
            seen, listed = listed.names, Histories(root)
        return result, listed


def first(
    path: str, step: int | None = None, history: int | None = None, passed: Collection = ()
) -> Entry | None:
    """Return the newest committed entry that is asked for and none of `passed`.

    None where all of them are passed. Raises NoCheckpoint where there is none, naming what is
    there.
    """

    def pick(listed: Histories) -> Entry | None:
        line = listed.line(listed.newest() if history is None else history)
        asked = (e for e in line if step in (None, e.step) and e not in passed)
        return next(listed.committed(asked), None)

    entry, _ = _found(path, pick)
    if entry is None and not passed:
        raise _missing(path, step, history)
    return entry


def _missing(path: str, step: int | None, history: int | None) -> NoCheckpoint:
    with opened(path) as (_, listed):
        numbers = sorted(listed.numbers())
        if not numbers:
            return NoCheckpoint(f"no checkpoint: {path} holds no step-* folder with a {NAME}")
        if history is not None and history not in numbers:
            return NoCheckpoint(f"no history {history} in {path}; histories there: {numbers}")
        line = listed.line(numbers[-1] if history is None else history)
        there = sorted({entry.step for entry in listed.committed(line)})
        same = (entry for entry in listed.everything() if entry.step == step)
        other = next(listed.committed(same), None)
        hint = f"; history={other.history} has it" if other else ""
        return NoCheckpoint(f"no checkpoint of step {step} in {path}; steps there: {there}{hint}")


def all_steps(path: str, history: int | None = None) -> list[int]:
    """Return the committed steps of a history, ascending; empty where there is no store.

    Raises NoCheckpoint where `history` is given and is not there.
    """

    def pick(listed: Histories) -> set[int]:
        line = listed.line(listed.newest() if history is None else history)
        return {entry.step for entry in listed.committed(line)}

    try:
        found, _ = _found(path, pick)
    except NoCheckpoint:
        if history is None:
            return []
        raise
    if history is not None and not found:
        raise _missing(path, None, history)
    return sorted(found)


def everything(
    path: str, step: int | None = None, history: int | None = None
) -> tuple[list[Entry], Histories]:
    """Return the committed entries of all histories, or of the line of one, newest first.

    And the listing. Raises NoCheckpoint where there is none.
    """

    def pick(listed: Histories) -> list[Entry]:
        line = listed.everything() if history is None else listed.line(history)
        return [*listed.committed(entry for entry in line if step in (None, entry.step))]

    entries, listed = _found(path, pick)
    if not entries:
        raise _missing(path, step, history)
    return entries, listed


def is_gone(path: str, entry: Entry) -> bool:
    """Whether a step that could not be read was removed by its job, which still runs.

    Removal deletes the manifest first. So a step that has its manifest and lacks another file is
    damaged, not removed.
    """
    with suppress(NoCheckpoint), opened(path) as (_, listed):
        return not listed.is_committed(entry)
    return False


def publish(name: str, history: int, step: int, root: int) -> Entry:
    """Rename a complete folder to the next free name of its step."""
    own = Histories(root).own.get(history, ())
    generation = max((entry.generation for entry in own if entry.step == step), default=-1) + 1
    while True:
        entry = Entry(history, step, generation)
        try:
            files.rename(name, entry.name, root)
        except FileExistsError:
            generation += 1
        except OSError as error:
            if not files.is_folder(entry.name, root):
                raise StorageError(f"cannot commit {entry.name}: {error}") from error
            generation += 1
        else:
            return entry


class Line:
    """Where a store stands: what its next save continues. For rank 0.

    Parameters
    ----------
    path : str
    fresh : bool or str
        Whether what is there is set aside, until this store has saved. A text names the beginning:
        whoever comes with the same one again goes on with what was begun under it.
    """

    def __init__(self, path: str, fresh: bool | str):
        self._path, self._fresh = path, bool(fresh)
        text = fresh if isinstance(fresh, str) else ""
        self._beginning = text and hashlib.sha256(text.encode()).hexdigest()[:16]
        self._at: Entry | None = None

    def stand(self, entry: Entry) -> None:
        """Take note of what was restored or saved."""
        self._at, self._fresh = entry, False

    def is_fresh(self) -> bool:
        """Whether the steps in the folder are set aside."""
        if self._fresh and self._beginning:
            with suppress(NoCheckpoint), opened(self._path) as (_, listed):
                begun = (listed.marks.get(number, Mark(number)) for number in listed.numbers())
                self._fresh = self._beginning not in [mark.beginning for mark in begun]
        return self._fresh

    def first(
        self, step: int | None = None, history: int | None = None, passed: Collection = ()
    ) -> Entry | None:
        """Do as `first`, for this store: what it has set aside must be asked for."""
        if history is None and self.is_fresh():
            raise NoCheckpoint(
                f"no checkpoint: fresh=True sets aside what {self._path} holds; history= takes it"
            )
        return first(self._path, step, history, passed)

    def latest(self) -> Entry | None:
        """Return the newest entry of the newest history, or None."""
        with suppress(NoCheckpoint):
            return self.first()
        return None

    def all_steps(self, history: int | None = None) -> list[int]:
        """Do as `all_steps`, for this store."""
        return [] if history is None and self.is_fresh() else all_steps(self._path, history)

    def is_next(self, history: int, step: int) -> bool:
        """Whether a step that is kept elsewhere is not older than the newest here."""
        latest = self.latest()
        return not self.is_fresh() if latest is None else (history, step) >= latest[:2]

    def is_of(self, history: int, step: int) -> bool:
        """Whether such a step is of the newest history's line, or could be its next."""
        latest = self.latest()
        if latest is None or self.is_next(history, step):
            return not self.is_fresh()
        with opened(self._path) as (_, listed):
            return any(part == history and step <= b for part, b in listed.parts(latest.history))

    def begin(self, root: int, step: int, is_good: Callable[[Entry], bool]) -> int:
        """Return the history that a save of `step` is of; its mark is made where it is new.

        Raises CheckpointError where it would continue nothing while good steps are there.
        """
        listed, fresh = Histories(root), self.is_fresh()
        line = [] if fresh else listed.line(listed.newest())
        tip = next(listed.committed(line), None)
        if self._at is not None:
            history, last, _ = self._at
            if step >= last and (tip is None or (history, last) >= tip[:2]):
                return history
            mark = listed.next_mark(history, min(last, step - 1)) if step else listed.next_mark()
        elif tip is None and not fresh:
            return 0
        else:
            good = next(filter(is_good, listed.committed(line)), None)
            if good is not None:
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
