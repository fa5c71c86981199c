"""Plan which rank writes which data in a save; use the plan again while no array changes its shape.

    all ranks  compare their state with the state of the present plan
               a rank with no fitting plan and no shards makes a plan as if all had its state
               --agreement-->  if all ranks have the same plan and equal extras, they are done
    else       --gather-->  the state of each rank, unless rank 0 has the same
               rank 0 plans  --scatter-->  the pieces that each rank gives and writes

A plan depends on the names, dtypes, shapes and regions (index ranges of shards) of the arrays of
all ranks. The key of a plan is a digest of all of them, so two plans with equal keys are equal.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from ...errors import MismatchError
from ...runtime.agreement.run_on_all import difference
from ..control import run_on_all
from ..format import manifest, piece_table
from ..format.state import Fact
from ..storage import files
from . import write_plan
from .describe import Survey, describe, digest, survey
from .rank_work import Work
from .write_plan import Description, Extras

#: Upper bounds on the bytes of a table's head without its checksums, of a checksum, and of the
#: header of a data set.
_HEAD, _CHECKSUM, _DATASET = 1024, 12, 1024


class _Word(NamedTuple):
    """The first message of a rank in a save: its plan's key, and digests that describe its arrays.

    `facts` and `shards` are empty if the rank uses its last plan again.
    """

    step: int
    plan: bytes
    facts: bytes
    shards: bytes
    extras: bytes


class _Told(NamedTuple):
    """The second message of a rank in a save: how its arrays and other values differ from rank 0's.

    A field is None if rank 0 has the same value.
    """

    facts: tuple[tuple[Fact, ...], tuple[bool, ...]] | None
    shards: np.ndarray | None
    extras: Extras | None


class Leader(NamedTuple):
    """The part of a save's plan that only rank 0 has.

    `pieces` has a digest for each rank that writes: a hash of the list of the parts of arrays that
    this rank writes.
    """

    facts: list[Fact]
    tensors: str
    nbytes: int
    pieces: dict[int, bytes]


class SavePlan(NamedTuple):
    """The plan of a save, and the description of the state for which it was made."""

    word: _Word
    marks: list[tuple]
    work: Work
    leader: Leader | None
    room: int


class Begun(NamedTuple):
    """A save that all ranks have agreed on.

    Only rank 0 has `extras`: all values, except arrays, from the states of all ranks.
    """

    step: int
    nonce: int
    arrays: list
    plan: SavePlan
    extras: Extras


class Planner:
    """Plans which rank writes what in a save, and uses the last plan again if it still fits.

    `writer_of` has, for each rank, the rank that writes its shards.
    """

    def __init__(self, writer_of: Sequence[int]):
        self._writer_of = writer_of
        #: Whether some ranks write the data of other ranks.
        self.forwards = any(writer != rank for rank, writer in enumerate(writer_of))
        self._plan: SavePlan | None = None
        #: The plan and the names of extras that were checked last: no tensor of the plan has the
        #: name of an extra.
        self._checked: tuple[Leader | None, list] = None, []

    def begin(
        self, comm, check: Callable[[], Any], state: Mapping, prepare: Callable[[int, int], None]
    ) -> Begun:
        """Agree with all ranks on a save of `state`, and on a plan. Collective over `comm`.

        The caller's function ``check()`` must check the arguments of the save, and return the
        number of the step.
        """
        found: Survey
        nonce = secrets.randbits(63)
        extras: Extras = ()
        plan: SavePlan | None = None
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
                prepare(step, nonce)
                is_open = True
            return plan.word

        def same(words: list[_Word]) -> tuple[_Word, bytes]:
            if text := difference([{"step": repr(word.step)} for word in words]):
                raise MismatchError(f"save: {text}; pass one value everywhere")
            first = words[0]
            if first.plan and all(one.plan == first.plan for one in words):
                return first, first.plan
            return first, digest([(one.plan, one.facts, one.shards) for one in words])

        def decide(told: list[_Told]) -> list:
            nonlocal extras, leader
            answers: list = [None] * len(told)
            if name != first.plan:
                leader, answers = _planned(_everyone(told), self._writer_of)
            extras = self._agreed([one.extras or () for one in told], leader)
            if not is_open:
                prepare(first.step, nonce)
            return answers

        answer, nonce = run_on_all(comm, "save", look, same, if_differs=True, number=lambda: nonce)
        if plan is None or not isinstance(answer, _Word):
            first, name = same([answer] * comm.size) if isinstance(answer, _Word) else answer
            leader = plan.leader if plan else None
            word = _word(first.step, found)
            doing = f"save of step {first.step}"
            tell = partial(_told, found, word, first, comm.rank == 0, name)
            share = run_on_all(comm, doing, tell, decide, each=True)
            if share is not None:
                facts = share[1] or write_plan.in_order(describe(found).facts)
                work = Work(share[0], facts, found.marks)
                plan = SavePlan(word._replace(plan=name), found.marks, work, leader, share[2])
        assert plan is not None
        self._plan = plan
        return Begun(plan.word.step, nonce, found.arrays, plan, extras)

    def _fitting(self, comm, step: int, found: Survey) -> SavePlan | None:
        """Return a plan that fits this rank's state; None if all ranks must make a new one."""
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
        work = Work(share, facts or write_plan.in_order(mine.facts), found.marks)
        return SavePlan(word, found.marks, work, leader, room)

    def _agreed(self, all_ranks: Sequence[Extras], leader: Leader | None) -> Extras:
        """On rank 0, check that the ranks' values other than arrays agree; return these values."""
        assert leader is not None
        extras = write_plan.agree_on_extras(all_ranks)
        names = [path for path, _ in extras]
        if self._checked[0] is not leader or self._checked[1] != names:
            write_plan.check_names(leader.facts, names)
            self._checked = leader, names
        return extras


def _word(step: int, found: Survey) -> _Word:
    """Return the first message of a rank whose last plan does not fit the state `found`."""
    mine = describe(found)
    shards = hashlib.sha256(mine.shards.tobytes()).digest()
    return _Word(step, b"", digest(mine.facts, mine.sharded), shards, digest(found.extras))


def _told(found: Survey, word: _Word, first: _Word, is_first: bool, plan: bytes) -> _Told:
    """Return the second message of a rank, where `first` is the first message of rank 0."""
    extras = None if word.extras == first.extras and not is_first else found.extras
    if plan == first.plan:
        return _Told(None, None, extras)
    mine = describe(found)
    if is_first or word.facts != first.facts:
        return _Told((mine.facts, mine.sharded), mine.shards, extras)
    return _Told(None, None if word.shards == first.shards else mine.shards, extras)


def _everyone(told: Sequence[_Told]) -> list[Description]:
    """Return, on rank 0, a description of each rank's arrays, from the second messages `told`."""
    facts, shards = told[0].facts, told[0].shards  # rank 0 sends all fields
    assert facts is not None
    assert shards is not None
    return [
        Description(*(one.facts or facts), shards if one.shards is None else one.shards)
        for one in told
    ]


def _planned(
    everyone: Sequence[Description], writer_of: Sequence[int], rank: int = 0
) -> tuple[Leader | None, list]:
    """Make a plan for a save; return rank 0's part, and (share, tensors, room) for each rank."""
    tensors = write_plan.agree(everyone)
    plan = write_plan.shares(tensors, everyone, writer_of)
    leader = None
    if rank == 0:
        pieces = {
            writer: hashlib.sha256(manifest.numbers(share.writes)).digest()
            for writer, share in enumerate(plan)
            if len(share.writes)
        }
        nbytes = sum(fact.nbytes for fact in tensors.facts)
        leader = Leader(tensors.facts, manifest.encode_tensors(tensors.facts), nbytes, pieces)
    facts = None if len(tensors.kinds) == 1 else tensors.facts
    size = write_plan.itemsizes(tensors.facts)
    most = max(_end(share.writes, size) for share in plan)
    room = _HEAD + _CHECKSUM * (most // files.BLOCK + 1)
    return leader, [(share, facts, room) for share in plan]


def _end(rows: np.ndarray, itemsize: np.ndarray) -> int:
    """Return an upper bound, in bytes, on the size of a shard file with the parts `rows`."""
    nbytes = piece_table.sizes(rows) * itemsize[rows[:, piece_table.TENSOR]]
    return int(nbytes.sum()) + _DATASET * len(rows)
