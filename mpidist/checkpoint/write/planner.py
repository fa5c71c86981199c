"""The plan of a save, kept for the next: as long as all ranks hold the same, it is made once.

    all ranks  look at their state: is it what the plan in hand was made for?
               where it is not, and holds no shard: a plan for ranks that all hold the same
               --agreement-->  the same plan, and equal extras, on all: that is all
    else       --gather-->  what each rank holds, unless rank 0 holds the same
               rank 0 plans  --scatter-->  what each gives and writes

A plan is that of names, dtypes, shapes, shards and ranks. Each rank compares all of its own; the
plan's name is a digest of them all, by which the ranks see that they mean the same one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ...errors import MismatchError
from ...runtime.agreement.run_on_all import difference
from ..control import run_on_all
from ..format import manifest, piece_table
from ..format.state import Fact
from ..storage import files
from .describe import Survey, describe, digest, survey
from .work import Work
from .write_plan import (
    Description,
    Extras,
    agree,
    agree_on_extras,
    check_names,
    in_order,
    itemsizes,
    shares,
)

#: Bytes of the head of a table but for its checksums; of each of these; of a data set's header.
_HEAD, _CHECKSUM, _DATASET = 1024, 12, 1024


class _Word(NamedTuple):
    """What a rank says first: the name of the plan that it has for its state, and digests.

    Of facts and shards only where they are those of no plan, or all ranks may have the same.
    """

    step: int
    plan: bytes
    facts: bytes
    shards: bytes
    extras: bytes


class _Told(NamedTuple):
    """What a rank says then: only what rank 0 does not say of its own state alike."""

    facts: tuple[tuple[Fact, ...], tuple[bool, ...]] | None
    shards: np.ndarray | None
    extras: Extras | None


class Leader(NamedTuple):
    """What rank 0 keeps of a plan.

    tensors : as they stand in a manifest.
    nbytes : of all of them.
    pieces : by writer, the digest of its pieces.
    """

    facts: list[Fact]
    tensors: str
    nbytes: int
    pieces: dict[int, bytes]


class _Plan(NamedTuple):
    """A plan in hand, and what it was made for; `leader` on rank 0.

    `room` bytes are enough for the head of each table.
    """

    word: _Word
    marks: list[tuple]
    work: Work
    leader: Leader | None
    room: int


class Begun(NamedTuple):
    """A save that all ranks have agreed on; `leader` and the `extras` of all ranks on rank 0.

    `nonce` is rank 0's.
    """

    step: int
    nonce: int
    arrays: list
    work: Work
    room: int
    leader: Leader | None
    extras: Extras


class Planner:
    """The plan of a store's saves. Only `begin` is collective.

    Parameters
    ----------
    writer_of : list of int
        The rank that writes for each rank.
    """

    def __init__(self, writer_of: Sequence[int]):
        self._writer_of = writer_of
        #: Whether some ranks write for others.
        self.forwards = any(writer != rank for rank, writer in enumerate(writer_of))
        self._plan: _Plan | None = None
        #: Names of extras that go with the tensors of a plan.
        self._checked: tuple[Leader | None, list] = None, []

    def begin(
        self,
        comm,
        check: Callable[[], Any],
        state: Mapping,
        nonce: int,
        open_folder: Callable[[int], None],
    ) -> Begun:
        """Agree on a save of `state`, and on who does what. Collective over `comm`.

        `check` returns its step, or raises. `open_folder` is called with it on rank 0 when all that
        it knows fits together, once.
        """
        found = Survey([], [], ())
        extras: Extras = ()
        plan: _Plan | None = None
        leader: Leader | None = None
        is_open = False

        def look() -> _Word:
            nonlocal found, extras, plan, is_open
            step = check()
            found = survey(state)
            plan = self._fitting(comm, step, found)
            if plan is None:
                return _word(step, found)
            if plan.leader is not None:
                extras = self._agreed([found.extras], plan.leader)
                open_folder(step)
                is_open = True
            return plan.word

        def same(words: list[_Word]) -> tuple[_Word, bytes]:
            text = difference([{"step": repr(word.step)} for word in words])
            if text is not None:
                raise MismatchError(f"save: {text}; pass one value everywhere")
            first = words[0]
            if first.plan and all(one.plan == first.plan for one in words):
                return first, first.plan
            return first, digest([(one.plan, one.facts, one.shards) for one in words])

        def tell() -> _Told:
            return _told(found, word, first, comm.rank == 0, name)

        def decide(told: list[_Told]) -> list:
            nonlocal extras, leader
            answers: list = [None] * len(told)
            if name != first.plan:
                leader, answers = _planned(_everyone(told), self._writer_of)
            assert leader is not None
            extras = self._agreed([one.extras or () for one in told], leader)
            if not is_open:
                open_folder(first.step)
            return answers

        answer, nonce = run_on_all(comm, "save", look, same, if_differs=True, number=lambda: nonce)
        if plan is None or not isinstance(answer, _Word):
            first, name = same([answer] * comm.size) if isinstance(answer, _Word) else answer
            leader = plan.leader if plan else None
            word = _word(first.step, found)
            doing = f"save of step {first.step}"
            share = run_on_all(comm, doing, tell, decide, each=True)
            if share is not None:
                facts = share[1] or in_order(describe(found).facts)
                work = Work(share[0], facts, found.marks)
                plan = _Plan(word._replace(plan=name), found.marks, work, leader, share[2])
        assert plan is not None
        self._plan = plan
        step = plan.word.step
        return Begun(step, nonce, found.arrays, plan.work, plan.room, plan.leader, extras)

    def _fitting(self, comm, step: int, found: Survey) -> _Plan | None:
        """Return the plan in hand, or one for ranks that all hold the same, or None."""
        plan = self._plan
        if plan is not None and plan.marks == found.marks:
            word = _Word(step, plan.word.plan, b"", b"", digest(found.extras))
            return plan._replace(word=word)
        word, mine = _word(step, found), describe(found)
        if any(mine.sharded):
            return None
        word = word._replace(plan=digest([(b"", word.facts, word.shards)] * comm.size))
        leader, answers = _planned([mine] * comm.size, self._writer_of, comm.rank)
        share, facts, room = answers[comm.rank]
        work = Work(share, facts or in_order(mine.facts), found.marks)
        return _Plan(word, found.marks, work, leader, room)

    def _agreed(self, all_ranks: Sequence[Extras], leader: Leader | None) -> Extras:
        """Rank 0: return the extras that the ranks hold together."""
        assert leader is not None
        extras = agree_on_extras(all_ranks)
        names = [path for path, _ in extras]
        if self._checked[0] is not leader or self._checked[1] != names:
            check_names(leader.facts, names)
            self._checked = leader, names
        return extras


def _word(step: int, found: Survey) -> _Word:
    """Return what a rank says that has no plan for its state."""
    mine = describe(found)
    shards = hashlib.sha256(mine.shards.tobytes()).digest()
    return _Word(step, b"", digest(mine.facts, mine.sharded), shards, digest(found.extras))


def _told(found: Survey, word: _Word, first: _Word, is_first: bool, plan: bytes) -> _Told:
    """Return what a rank tells rank 0, whose word is `first`."""
    extras = None if word.extras == first.extras and not is_first else found.extras
    if plan == first.plan:
        return _Told(None, None, extras)
    mine = describe(found)
    if is_first or word.facts != first.facts:
        return _Told((mine.facts, mine.sharded), mine.shards, extras)
    return _Told(None, None if word.shards == first.shards else mine.shards, extras)


def _everyone(told: Sequence[_Told]) -> list[Description]:
    """Rank 0: return what each rank holds."""
    everyone = []
    for one in told:
        facts, sharded = one.facts or told[0].facts  # type: ignore[misc]
        shards = told[0].shards if one.shards is None else one.shards
        assert shards is not None  # rank 0 tells all
        everyone.append(Description(facts, sharded, shards))
    return everyone


def _planned(
    everyone: Sequence[Description], writer_of: Sequence[int], rank: int = 0
) -> tuple[Leader | None, list]:
    """Plan; returns what rank 0 keeps, and for each rank its share, all tensors, and the room.

    Without the tensors where each rank holds all.
    """
    tensors = agree(everyone)
    plan = shares(tensors, everyone, writer_of)
    leader = None
    if rank == 0:
        leader = Leader(
            tensors.facts,
            manifest.encode_tensors(tensors.facts),
            sum(fact.nbytes for fact in tensors.facts),
            {
                rank: hashlib.sha256(manifest.numbers(share.writes)).digest()
                for rank, share in enumerate(plan)
                if len(share.writes)
            },
        )
    facts = None if len(tensors.kinds) == 1 else tensors.facts
    size = itemsizes(tensors.facts)
    most = max(_end(share.writes, size) for share in plan)
    room = _HEAD + _CHECKSUM * (most // files.BLOCK + 1)
    return leader, [(share, facts, room) for share in plan]


def _end(rows: np.ndarray, itemsize: np.ndarray) -> int:
    """Return about where a file of these pieces ends."""
    nbytes = piece_table.sizes(rows) * itemsize[rows[:, piece_table.TENSOR]]
    return int(nbytes.sum()) + _DATASET * len(rows)
