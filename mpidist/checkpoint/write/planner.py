"""The plan of a save, kept for the next: as long as all ranks hold the same, it is made once.

    all ranks  look at their state: is it what the plan in hand was made for?
               --gather-->  rank 0: the same plan on all, and equal extras: a new folder is all
    else       --gather-->  what each rank holds, unless rank 0 holds the same
               rank 0 plans  --scatter-->  what each gives and writes

A plan is that of names, dtypes, shapes, shards and ranks. Each rank compares all of its own; the
plan's name is a digest of them all, by which the ranks see that they mean the same one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from ..control import run_on_all
from ..format import manifest
from ..format.state import Fact
from .describe import Survey, describe, digest, survey
from .work import Work
from .write_plan import (
    Description,
    Extras,
    Share,
    agree,
    agree_on_extras,
    check_names,
    in_order,
    shares,
)


class _Word(NamedTuple):
    """What a rank says first: the name of the plan that it has for its state, and digests."""

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
    """A plan in hand, and what it was made for; `leader` on rank 0."""

    word: _Word
    marks: list[tuple]
    work: Work
    leader: Leader | None


class Begun(NamedTuple):
    """A save that all ranks have agreed on; `leader` and the `extras` of all ranks on rank 0.

    `opened` is the name of its folder, and its history.
    """

    opened: tuple[str, int]
    arrays: list
    work: Work
    leader: Leader | None
    extras: Extras


class Planner:
    """The plan of a store's saves. Local, but for `begin`.

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

    def begin(self, comm, doing: str, state: Mapping, open_folder: Callable[[], tuple]) -> Begun:
        """Agree on a save of `state`, and on who does what. Collective over `comm`.

        `open_folder` is called on rank 0 when all is known to fit together; it returns the name of
        the save, and its history.
        """
        plan, found = self._plan, Survey([], [], ())
        word = _Word(b"", b"", b"", b"")
        extras: Extras = ()
        leader = plan.leader if plan else None

        def look() -> _Word:
            nonlocal found, word
            found = survey(state)
            word = self._word(found)
            return word

        def same(words: list[_Word]) -> tuple[tuple | None, _Word, bytes]:
            nonlocal extras
            first = words[0]
            if not first.plan or any(one.plan != first.plan for one in words):
                return None, first, digest([(one.facts, one.shards) for one in words])
            if any(one.extras != first.extras for one in words):
                return None, first, first.plan
            assert plan is not None
            extras = self._agreed([found.extras], plan.leader)
            return open_folder(), first, first.plan

        def tell() -> _Told:
            return _told(found, word, first, comm.rank == 0, name_of_plan)

        def decide(told: list[_Told]) -> list[tuple[tuple, Share | None, list[Fact] | None]]:
            nonlocal extras, leader
            answers: list = [(None, None)] * len(told)
            if name_of_plan != first.plan:
                leader, answers = _planned(told, self._writer_of)
            extras = self._agreed([one.extras or () for one in told], leader)
            made = open_folder()
            return [(made, *answer) for answer in answers]

        opened, first, name_of_plan = run_on_all(comm, doing, look, same)
        if opened is None:
            opened, share, facts = run_on_all(comm, doing, tell, decide, each=True)
            if share is not None:
                word = word._replace(plan=name_of_plan)
                facts = facts or in_order(describe(found).facts)
                plan = self._plan = _Plan(
                    word, found.marks, Work(share, facts, found.marks), leader
                )
        assert plan is not None
        return Begun(opened, found.arrays, plan.work, plan.leader, extras)

    def _word(self, found: Survey) -> _Word:
        plan, extras = self._plan, digest(found.extras)
        if plan is not None and plan.marks == found.marks:
            return plan.word._replace(extras=extras)
        mine = describe(found)
        shards = hashlib.sha256(mine.shards.tobytes()).digest()
        return _Word(b"", digest(mine.facts, mine.sharded), shards, extras)

    def _agreed(self, all_ranks: Sequence[Extras], leader: Leader | None) -> Extras:
        """Rank 0: return the extras that the ranks hold together."""
        assert leader is not None
        extras = agree_on_extras(all_ranks)
        names = [path for path, _ in extras]
        if self._checked[0] is not leader or self._checked[1] != names:
            check_names(leader.facts, names)
            self._checked = leader, names
        return extras


def _told(found: Survey, word: _Word, first: _Word, is_first: bool, plan: bytes) -> _Told:
    """Return what a rank tells rank 0, whose word is `first`. Local."""
    extras = None if word.extras == first.extras and not is_first else found.extras
    if plan == first.plan:
        return _Told(None, None, extras)
    mine = describe(found)
    if is_first or word.facts != first.facts:
        return _Told((mine.facts, mine.sharded), mine.shards, extras)
    return _Told(None, None if word.shards == first.shards else mine.shards, extras)


def _planned(told: Sequence[_Told], writer_of: Sequence[int]) -> tuple[Leader, list]:
    """Rank 0: plan; returns what it keeps, and the share of each rank with all tensors.

    Without them where each rank holds all.
    """
    everyone = []
    for one in told:
        facts, sharded = one.facts or told[0].facts  # type: ignore[misc]
        shards = told[0].shards if one.shards is None else one.shards
        assert shards is not None  # rank 0 tells all
        everyone.append(Description(facts, sharded, shards))
    tensors = agree(everyone)
    plan = shares(tensors, everyone, writer_of)
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
    return leader, [(share, facts) for share in plan]
