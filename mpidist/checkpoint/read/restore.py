"""Restore a step: find the newest step that all ranks can read, and fill the arrays of all ranks.

    all ranks  describe what they want   --agreement-->  equal? (a gather only if not)
    rank 0     finds the step, proves its manifest and tables, compares them with what is wanted
    all ranks  <--bcast--  the step, and the places of its pieces
               read their parts; arrays that all want are read once and broadcast (`read_once`)
               --agreement-->  all ranks have read all, or rank 0 looks for an older step

Each rank reads the parts of arrays that it wants, even if the save divided the arrays in another
way. Each block of a file is checked before its bytes are copied to the caller's arrays. If a block
is damaged, all arrays are filled again from an older step.
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
from ..format import state
from ..format.manifest import Damaged, Layout, Manifest
from ..format.state import Fact, Path, Shard, array_of, has_array, show
from ..load import Search
from ..storage import steps
from ..storage.steps import Entry
from ..storage.worker_thread import Beside
from ..store_folder import Place
from . import fill, share_manifest
from .fill import Filling, is_whole, staged_bytes
from .read_once import message_room
from .reader import open_reader

_LISTED = 8
#: If all ranks together read at most this many times the bytes of the state, they count as reading
#: different bytes.
_MOSTLY = 1.25
#: The size in bytes of the message with rank 0's answer, which is enough for the manifest of some
#: thousand tensors.
_ROOM = 1 << 18
#: If a step has at most this many pieces, every rank receives the positions of all of them.
_FEW = 2048


class Leaf(NamedTuple):
    """The description of a leaf of the state that a rank wants to fill.

    `shape` is the global shape, or None if the leaf is not an array. `whole` says whether the rank
    wants all of the array, so that other ranks may read parts of the array and send them to it.
    `staged` is the number of bytes of temporary host memory that the array needs on its way to a
    device.
    """

    path: Path
    dtype: str
    shape: tuple[int, ...] | None = None
    sharded: bool = False
    whole: bool = False
    staged: int = 0


class Wish(NamedTuple):
    """What a rank asks for in a restore.

    `given` has the arguments of the call as texts. `leaves` describes the values that are to be
    filled. If `leaves` is None, the rank wants every array of the saved step, in full.
    """

    given: dict[str, str]
    leaves: tuple[Leaf, ...] | None


class FoundStep(NamedTuple):
    """What rank 0 tells all ranks about the saved step that they try to read.

    `common` has the indices of the tensors that every rank wants in full. The tensors are filled in
    batches of successive tensors; `ends` has the index at which each batch ends. `found` has the
    positions of all stored parts of arrays, or None if each rank must ask for the parts that it
    wants.
    """

    entry: Entry
    tensors: Sequence[Fact]
    extras: tuple
    common: list[int]
    ends: list[int]
    large: bool
    found: Layout | None


class Restore:
    """One call of `restore`. Only rank 0 looks for a checkpoint, and has its list of contents.

    `like` is the state whose arrays are filled in place, or None for new arrays.
    """

    manifest: Manifest

    def __init__(self, comm, place: Place, like: Mapping | None, check: Callable[[], dict]) -> None:
        self._comm, self._place, self._like, self._check = comm, place, like, check
        self._given: dict[str, Any] = {}
        self._wish: Wish | None = None
        self._items: list | None = None
        self._search: Search | None = None
        self._room = np.empty(0, np.uint8)

    def run(self) -> tuple[Entry, dict]:
        """Restore the state; return the step folder that was read, and the state. Collective."""
        comm, spoils = self._comm, False  # spoils: the caller's arrays may hold parts of a step
        reason: str | None = None
        try:
            while True:
                decide = partial(self._next, reason)
                answer = run_on_all(comm, "restore", self._ask, decide, room=_ROOM)
                items = self._items
                if items is None:  # the arrays are new, so no array of the caller has changed
                    items = run_on_all(comm, "restore", partial(_fresh, answer.tensors))
                else:
                    spoils = True
                found = answer.found or share_manifest.wanted(comm, self, answer.tensors, items)
                found = found._replace(tensors=answer.tensors)
                arrays: dict[Path, Any] = {}
                for start, end in pairwise([0, *answer.ends]):
                    reason = self._fill(answer, found, range(start, end), items, arrays)
                    if reason is not None:
                        break
                else:
                    path, step, ranks = self._place.path, answer.entry.step, comm.size
                    events.emit("checkpoint_restored", path=path, step=step, ranks=ranks)
                    return answer.entry, _joined(answer.extras, items, arrays)
        except MpidistError as error:
            if spoils:
                raise spoiled(error) from error
            raise

    def _ask(self) -> Wish:
        """Check the arguments, and return a description of what this rank wants to fill."""
        if self._wish is None:
            self._given, leaves = self._check(), None
            if self._like is not None:
                self._items = list(state.leaves(self._like))
                leaves = tuple(_described(path, leaf) for path, leaf in self._items)
            if self._comm.size > 1:
                self._room = message_room()  # allocated here: if memory is lacking, all ranks raise
            self._wish = Wish({name: repr(value) for name, value in self._given.items()}, leaves)
        return self._wish

    def _next(self, reason: str | None, wishes: Sequence[Wish]) -> FoundStep:
        """Return, on rank 0, a description of the next step that all ranks try to read."""
        place, given = self._place, self._given
        if self._search is None:
            _check_same(wishes)
            asked = given["step"], given["history"]
            self._search = Search(place.path, *asked, place.line.first, place.keep.bad)
        while True:
            if reason is not None:
                self._search.pass_over(reason)
            entry = self._search.next()
            try:
                self.manifest = steps.read_manifest(place.path, entry)
            except Damaged as damage:
                reason = str(damage)
            else:
                return _answer(f"{place.path}/{entry.name}", entry, self.manifest, wishes)

    def _fill(
        self, answer: FoundStep, found: Layout, batch: range, items: list, filled: dict
    ) -> str | None:
        """Fill the arrays of a batch of tensors, and add them to `filled`. Collective.

        Returns a text if the step is damaged, and None otherwise.
        """
        comm = self._comm
        names = {found.tensors[number].path for number in batch}
        some = [(name, leaf) for name, leaf in items if name in names]
        shared = set(answer.common).intersection(batch) if comm.size > 1 else ()
        common = {found.tensors[number].path for number in shared}
        plan = partial(Filling, found, some, common, comm.rank, comm.size, self._room)
        filling: Any = None
        if answer.large:
            filling = run_on_all(comm, "restore", plan)
        elif common:
            filling = plan()  # the plan is small, and its buffer exists already
        direct = self._place.how.direct and _is_alone(comm.size, answer, items)

        def read() -> None:
            path, verify = self._place.path, self._given["verify"]
            with open_reader(path, answer.entry, found, verify, direct) as reader:
                reader.read(filling.wants, wanted=lambda: not reading.abandoned)

        # Ranks exchange common parts while they read their other parts. If a rank finds damage,
        # other ranks may have received the damaged part already. All arrays are then filled again
        # from an older step.
        reading = Beside(read, "mpidist-restore")
        error: Exception | None = None
        try:
            if filling is None:  # without an exchange, no rank waits if `plan` fails
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
    """Return an error with the text of `error` and a warning that arrays may be filled in part."""
    # After a NoCheckpoint, a program could take the store for empty, and go on with these arrays.
    kind = CheckpointError if isinstance(error, NoCheckpoint) else type(error)
    told = kind(f"{error}; arrays may hold parts of that step now; reset their values before use")
    told.everywhere, told.secondary = True, error.secondary
    return told


def _described(path: Path, leaf) -> Leaf:
    """Return a description of `leaf`, which is to be filled; raise CheckpointError if read-only."""
    if not has_array(leaf):
        return Leaf(path, type(leaf).__name__)
    array, shape = array_of(leaf), state.shape_of(leaf)
    if not isinstance(leaf, np.generic) and not is_writable(array):
        raise CheckpointError(
            f"{show(path)} is read-only and cannot be filled; pass a writable array"
        )
    dtype, sharded = state.dtype_name(array.dtype), isinstance(leaf, Shard)
    return Leaf(path, dtype, shape, sharded, is_whole(leaf), staged_bytes(leaf))


def _is_alone(size: int, answer: FoundStep, items: list) -> bool:
    """Whether ranks mostly read different bytes; reads without the page cache are then faster."""
    common = {answer.tensors[number].path for number in answer.common}
    own = sum(array_of(x).nbytes for path, x in items if has_array(x) and path not in common)
    shared = sum(answer.tensors[number].nbytes for number in answer.common)
    return shared + own * size <= _MOSTLY * sum(tensor.nbytes for tensor in answer.tensors)


# ------------------------------------------------------------------------------ the same model


def _check_same(wishes: Sequence[Wish]) -> None:
    """Raise MismatchError if the ranks give different arguments."""
    if text := difference([wish.given for wish in wishes]):
        raise MismatchError(f"restore: {text}; pass one value everywhere")
    without = [wish.leaves is None for wish in wishes]
    if any(without) and not all(without):
        raise MismatchError(
            f"like is None on rank {without.index(True)} and a state on rank "
            f"{without.index(False)}; pass {{}} where no array is wanted"
        )


def _answer(name: str, entry: Entry, manifest: Manifest, wishes: Sequence[Wish]) -> FoundStep:
    """Return what rank 0 sends to all ranks: a description of the step in the folder `name`.

    Raises ForeignCheckpoint if the arrays of the step do not match those of some rank.
    """
    tensors, count = manifest.tensors, len(manifest.tensors)
    found = share_manifest.layout_of(manifest, manifest.rows)
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
    many = len(manifest.rows) > _FEW
    large = many or any(leaf.staged and leaf.shape for leaf in every)
    layout = None if many and any(leaf.sharded for leaf in every) else found
    common, ends = np.flatnonzero(takers == len(wishes)).tolist(), fill.batches(most.tolist())
    return FoundStep(entry, tensors, manifest.extras, common, ends, large, layout)


def _differences(
    told: Sequence[Leaf], number: Mapping, tensors: Sequence[Fact], extras: Mapping
) -> list[str]:
    """Return one text for each difference between a rank's leaves and the saved leaves."""
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
    return [(x.path, np.empty(x.shape, state.named_dtype(x.dtype))) for x in tensors]


def _joined(extras, items: list, filled: dict[Path, Any]) -> dict:
    """Return nested dicts of the filled arrays, the saved extras, and the caller's other extras."""
    saved = dict(extras)
    kept = [(p, leaf) for p, leaf in items if p not in filled and not _related(p, saved, filled)]
    return state.tree(iter([*filled.items(), *kept, *saved.items()]))


def _related(path: Path, saved: Mapping, filled: Mapping) -> bool:
    """Whether `path` equals, begins with or is the beginning of the path of a saved leaf."""
    return any(
        path[: len(other)] == other[: len(path)] for known in (saved, filled) for other in known
    )
