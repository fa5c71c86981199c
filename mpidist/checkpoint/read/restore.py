"""Restore: find the newest step that is good for every rank, then fill every rank's arrays.

    all ranks  say what they want        --agreement-->  the same? (a gather only where it is not)
    rank 0     finds the step, proves its manifest and tables, compares them with what is wanted
    all ranks  <--bcast--  the step, and where what lies
               read their parts; what all want is read once and passed on (`read_once`)
               --agreement-->  all have read all, or rank 0 looks for an older step

Each rank reads what it wants, whatever the layout it was saved with. Where a checkpoint of very
many pieces is restored to shards, each rank is told those that it wants (`shard_layouts`). A step
counts only if all ranks can read theirs. Each block is checked before its bytes go where they
belong, so arrays are filled in one pass without a copy of anything; damage in a later block is
answered by filling them all from an older step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from ... import events
from ...arrays import is_writable
from ...errors import CheckpointError, ForeignCheckpoint, MismatchError, MpidistError, NoCheckpoint
from ...runtime.agreement.mismatch import rank_list
from ...runtime.agreement.run_on_all import difference
from ..control import run_on_all
from ..format import shard_layouts
from ..format.manifest import Damaged, Layout, Manifest
from ..format.state import (
    Fact,
    Path,
    Shard,
    array_of,
    dtype_name,
    dtype_of,
    has_array,
    leaves,
    shape_of,
    show,
    tree,
)
from ..load import Search
from ..place import Place
from ..storage import steps
from ..storage.steps import Entry
from ..storage.worker_thread import Beside
from . import fill
from .fill import Filling, is_whole, staged_bytes
from .read_once import message_room
from .reader import opened

_LISTED = 8
#: Bytes read over those of the state up to which nobody else is said to read the same.
_MOSTLY = 1.25
#: Bytes of an answer that go to all ranks at once: the manifest of some thousand tensors.
_ROOM = 1 << 18
#: Pieces up to which all ranks are told all of them, whatever they want.
_FEW = 2048


class Leaf(NamedTuple):
    """What a rank says of a leaf that it wants: `shape` is None of what is no array.

    `whole`: it can be filled by what other ranks have read. `staged` bytes of it come to host
    memory first.
    """

    path: Path
    dtype: str
    shape: tuple[int, ...] | None
    sharded: bool
    whole: bool
    staged: int


class Wish(NamedTuple):
    """What a rank asks for: its arguments as texts, and its leaves; None for every array whole."""

    given: dict[str, str]
    leaves: tuple[Leaf, ...] | None


class FoundStep(NamedTuple):
    """What rank 0 tells all ranks of the step that they try.

    tensors, extras : what the step holds.
    common : numbers of the tensors that all ranks want whole, so that each of them reads a part.
    ends : behind which tensors a batch ends, where not all are filled at once.
    large : whether some rank needs much memory of its own for what it reads, or to plan that.
    found : where all pieces lie; None where each rank asks for what it wants.
    """

    entry: Entry
    tensors: Sequence[Fact]
    extras: tuple
    common: list[int]
    ends: list[int]
    large: bool
    found: Layout | None


class Restore:
    """One restore, done by `run`. Only rank 0 searches, and keeps the manifest that it has read.

    Parameters
    ----------
    comm : mpi4py.MPI.Comm
    place : Place
        Rank 0 asks its line for the entry to try, and adds to its damaged ones.
    like : dict or None
    check : callable
        Returns the arguments step, history and verify, or raises.
    """

    manifest: Manifest

    def __init__(self, comm, place: Place, like: Mapping | None, check: Callable[[], dict]) -> None:
        self._comm, self._place, self._like, self._check = comm, place, like, check
        self._given: dict[str, Any] = {}
        self._items: list | None = None
        self._search: Search | None = None
        self._room = np.empty(0, np.uint8)

    def run(self) -> tuple[Entry, dict]:
        """Return (entry, state); see `CheckpointStore.restore`. Collective."""
        spoils = False  # parts of a step may be in the caller's arrays
        reason: str | None = None
        try:
            while True:
                decide = partial(self._next, reason)
                answer = run_on_all(self._comm, "restore", self._ask, decide, room=_ROOM)
                items = self._items
                if items is None:  # new arrays: nothing of anybody's is changed
                    items = run_on_all(self._comm, "restore", partial(_fresh, answer.tensors))
                else:
                    spoils = True
                found = answer.found or shard_layouts.wanted(
                    self._comm, self, answer.tensors, items
                )
                found = found._replace(tensors=answer.tensors)
                arrays: dict[Path, Any] = {}
                for start, end in pairwise([0, *answer.ends]):
                    reason = self._fill(answer, found, range(start, end), items, arrays)
                    if reason is not None:
                        break
                else:
                    step, ranks = answer.entry.step, self._comm.size
                    path = self._place.path
                    events.emit("checkpoint_restored", path=path, step=step, ranks=ranks)
                    return answer.entry, _state(answer.extras, items, arrays)
        except MpidistError as error:
            if spoils:
                raise spoiled(error) from error
            raise

    def _ask(self) -> Wish:
        """Say what this rank wants, or raise."""
        if not self._given:
            self._given = self._check()
            self._items = None if self._like is None else _wanted(self._like)
            if self._comm.size > 1:
                self._room = message_room()  # here a rank without memory can tell the others
        given = {name: repr(value) for name, value in self._given.items()}
        return Wish(given, _described(self._items))

    def _next(self, reason: str | None, wishes: Sequence[Wish]) -> FoundStep:
        """Rank 0: return the next step to try, `reason` being what was wrong with the last one."""
        path, line = self._place.path, self._place.line
        if self._search is None:
            _check_same(wishes)
            step, history = self._given["step"], self._given["history"]
            self._search = Search(path, step, history, line.first, self._place.keep.bad)
        while True:
            if reason is not None:
                self._search.pass_over(reason)
            entry = self._search.next()
            try:
                self.manifest = steps.read_manifest(path, entry)
            except Damaged as damage:
                reason = str(damage)
            else:
                return _answer(f"{path}/{entry.name}", entry, self.manifest, wishes)

    def _fill(
        self, answer: FoundStep, found: Layout, batch: range, items: list, filled: dict
    ) -> str | None:
        """Fill the leaves of `items` in a batch, and put them into `filled`; why not, if not.

        Collective. Damage is an answer, on which all ranks go on to an older step; any other error
        ends the restore on all ranks.
        """
        comm = self._comm
        names = {found.tensors[number].path for number in batch}
        some = [(name, leaf) for name, leaf in items if name in names]
        common = {found.tensors[number].path for number in answer.common if number in batch}
        common = common if comm.size > 1 else set()
        plan = partial(Filling, found, some, common, comm.rank, comm.size, self._room)
        filling: Any = None
        if answer.large:
            filling = run_on_all(comm, "restore", plan)
        elif common:
            filling = plan()  # a small one, for which the room is there
        direct = self._place.how.direct and _is_alone(comm.size, answer, items)

        def read() -> None:
            with opened(
                self._place.path, answer.entry, found, self._given["verify"], direct
            ) as reader:
                reader.read(filling.wants, wanted=lambda: not reading.abandoned)

        # What one rank reads for all goes round while the rest is read. Damage is found on the
        # way: the others then have got it as well, and an older step fills all that it has changed.
        reading = Beside(read, "mpidist-restore")
        error: Exception | None = None
        try:
            if filling is None:  # nobody waits for this rank: what fails is told with the outcome
                filling = plan()
            if common:
                with reading:
                    filling.shared.exchange(comm, reading.over)
                reading.result()
            else:
                read()
        except Exception as raised:
            error = raised

        def outcome() -> str | None:
            if isinstance(error, Damaged):
                return f"rank {comm.rank}: {error}"
            if error is not None:
                raise error
            filled.update(filling.finish())
            return None

        def damage(reasons: list) -> str | None:
            return next((text for text in reasons if text), None)

        return run_on_all(comm, "restore", outcome, damage, if_differs=True)


def spoiled(error: MpidistError) -> MpidistError:
    """Return `error`, raised on all ranks, for arrays that may be filled in part.

    Nobody may take it for that of an empty store, and go on with them.
    """
    kind = CheckpointError if isinstance(error, NoCheckpoint) else type(error)
    told = kind(f"{error}; arrays may hold parts of that now: set them anew before use")
    told.everywhere, told.secondary = True, error.secondary
    return told


def _wanted(like: Mapping) -> list:
    """Return the leaves to fill; raises CheckpointError for what cannot be."""
    items = list(leaves(like))
    for path, leaf in items:
        if has_array(leaf):
            array = array_of(leaf)
            if not isinstance(leaf, np.generic) and not is_writable(array):
                raise CheckpointError(
                    f"{show(path)} is read-only and cannot be filled; pass a writable array"
                )
    return items


def _described(items: list | None) -> tuple[Leaf, ...] | None:
    """Return what is told of the leaves to fill."""
    if items is None:
        return None
    told = []
    for path, leaf in items:
        if has_array(leaf):
            dtype, sharded = dtype_name(array_of(leaf).dtype), isinstance(leaf, Shard)
            shape, size = shape_of(leaf), staged_bytes(leaf)
            told.append(Leaf(path, dtype, shape, sharded, is_whole(leaf), size))
        else:
            told.append(Leaf(path, type(leaf).__name__, None, False, False, 0))
    return tuple(told)


def _is_alone(size: int, answer: FoundStep, items: list) -> bool:
    """Whether hardly any byte is read by two ranks, if the others hold about as much."""
    common = {answer.tensors[number].path for number in answer.common}
    own = sum(array_of(x).nbytes for path, x in items if has_array(x) and path not in common)
    shared = sum(answer.tensors[number].nbytes for number in answer.common)
    return shared + own * size <= _MOSTLY * sum(tensor.nbytes for tensor in answer.tensors)


# ------------------------------------------------------------------------------ the same model


def _check_same(wishes: Sequence[Wish]) -> None:
    """Raise MismatchError where the ranks do not ask for the same."""
    text = difference([wish.given for wish in wishes])
    if text is not None:
        raise MismatchError(f"restore: {text}; pass one value everywhere")
    without = [wish.leaves is None for wish in wishes]
    if any(without) and not all(without):
        raise MismatchError(
            f"like is None on rank {without.index(True)} and a state on rank "
            f"{without.index(False)}; pass {{}} where no array is wanted"
        )


def _answer(name: str, entry: Entry, manifest: Manifest, wishes: Sequence[Wish]) -> FoundStep:
    """Return what all ranks are told of the step `name`.

    Raises ForeignCheckpoint where it is of another model than a rank wants to fill.
    """
    tensors, count = manifest.tensors, len(manifest.tensors)
    found = shard_layouts.layout_of(manifest, manifest.rows)
    if wishes[0].leaves is None:
        return FoundStep(entry, tensors, manifest.extras, [*range(count)], [count], True, found)
    number = {tensor.path: place for place, tensor in enumerate(tensors)}
    groups: dict[tuple[Leaf, ...], list[int]] = {}
    for rank, wish in enumerate(wishes):
        groups.setdefault(wish.leaves or (), []).append(rank)
    takers, seen = np.zeros(count, np.int64), np.zeros(count, bool)
    most, needs = np.zeros(count, np.int64), np.zeros(count, np.int64)
    lines: dict[str, list[int]] = {}
    for told, ranks in groups.items():
        for line in _differences(told, number, tensors, dict(manifest.extras)):
            lines.setdefault(line, []).extend(ranks)
        needs[:] = 0
        for leaf in told:
            if leaf.shape is not None and leaf.path in number:
                place = number[leaf.path]
                seen[place], needs[place] = True, leaf.staged
                takers[place] += leaf.whole * len(ranks)
        if needs.sum() > fill.STAGED:
            np.maximum(most, needs, out=most)
    texts = [
        f"{line} {'here' if len(ranks) == len(wishes) else f'on {rank_list(ranks)}'}"
        for line, ranks in lines.items()
    ]
    missing = [show(tensors[place].path) for place in np.flatnonzero(~seen).tolist()]
    texts += [f"{path} is in the checkpoint only" for path in missing]
    if texts:
        more = f"; and {len(texts) - _LISTED} more" if len(texts) > _LISTED else ""
        raise ForeignCheckpoint(f"{name} is of another model: {'; '.join(texts[:_LISTED])}{more}")
    every = [leaf for told in groups for leaf in told]
    few = len(manifest.rows) <= _FEW or not any(leaf.sharded for leaf in every)
    return FoundStep(
        entry,
        tensors,
        manifest.extras,
        np.flatnonzero(takers == len(wishes)).tolist(),
        fill.batches(most.tolist()),
        len(manifest.rows) > _FEW or any(leaf.staged and leaf.shape for leaf in every),
        found if few else None,
    )


def _differences(
    told: Sequence[Leaf], number: Mapping, tensors: Sequence[Fact], extras: Mapping
) -> list[str]:
    """Say what a rank wants and was not saved so; "here", or the ranks, come behind."""
    lines = []
    for leaf in told:
        name, there = show(leaf.path), "in the checkpoint"
        if leaf.shape is None:
            if leaf.path in number:
                lines.append(f"{name} is an array {there}, {leaf.dtype}")
        elif leaf.path in extras:
            lines.append(f"{name} is a plain value {there}, an array")
        elif leaf.path not in number:
            lines.append(f"{name} is missing {there}, an array")
        else:
            tensor = tensors[number[leaf.path]]
            if tensor.shape != leaf.shape:
                lines.append(f"{name} has shape {tensor.shape} {there}, {leaf.shape}")
            if tensor.dtype != leaf.dtype:
                lines.append(f"{name} has dtype {tensor.dtype} {there}, {leaf.dtype}")
    return lines


# ------------------------------------------------------------------------------------- filling


def _fresh(tensors: Sequence[Fact]) -> list[tuple[Path, np.ndarray]]:
    return [(tensor.path, np.empty(tensor.shape, dtype_of(tensor.dtype))) for tensor in tensors]


def _state(extras, items: list, filled: dict[Path, Any]) -> dict:
    """Return the state that holds the arrays that were filled."""
    saved = dict(extras)
    kept = [(p, leaf) for p, leaf in items if p not in filled and not _related(p, saved, filled)]
    return tree(iter([*filled.items(), *kept, *saved.items()]))


def _related(path: Path, saved: Mapping, filled: Mapping) -> bool:
    """Whether a saved leaf has this path, or lies above or below it."""
    return any(
        path[: len(other)] == other[: len(path)] for known in (saved, filled) for other in known
    )
