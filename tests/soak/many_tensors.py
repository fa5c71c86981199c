"""Measure the CPU time of saves and restores of many tensors: `many_tensors.py [FOLDER]`.

The program is one process, and takes about a minute. The first part is a job of one rank with 1,000
to 20,000 arrays of 256 bytes: a first save, a second save with the same shapes, and a restore. The
second part is the work of one of 1,000 ranks for 1,000 tensors, of each of which every rank holds a
shard, so there are a million pieces. The messages of the other ranks are made here, and are packed
and unpacked as in a real job, but nothing is sent, and no array data are written.
"""

from __future__ import annotations

import pickle
import sys
import tempfile
import time
from collections.abc import Callable

import numpy as np
from mpi4py import MPI

import mpidist as md
from mpidist.checkpoint.format import manifest, piece_table
from mpidist.checkpoint.format.decode import decode
from mpidist.checkpoint.format.state import leaves
from mpidist.checkpoint.read import share_manifest
from mpidist.checkpoint.read.fill import Filling
from mpidist.checkpoint.write import describe, planner
from mpidist.checkpoint.write.rank_work import Work
from mpidist.checkpoint.write.write_plan import in_order

RANKS, TENSORS = 1000, 1000


def seconds(call: Callable[[], object]) -> tuple[float, object]:
    """CPU seconds of a call, and what it returned."""
    begin = time.process_time()
    found = call()
    return time.process_time() - begin, found


def one_rank(folder: str, count: int) -> list[float]:
    """Seconds of a first save, of the least of three more, of the least of three restores."""
    state: dict = {"parameters": {}}
    for n in range(count):
        layer = state["parameters"].setdefault(f"layer{n // 10}", {})
        layer[f"w{n % 10}"] = np.full(64, n, np.float32)
    with md.CheckpointStore(MPI.COMM_WORLD, folder) as store:
        first, *more = [seconds(lambda: store.save(step, state))[0] for step in range(4)]  # noqa: B023
        restores = [seconds(lambda: store.restore(state))[0] for _ in range(3)]
    return [first, min(more), min(restores)]


def state_of(rank: int) -> dict:
    """A block of two rows of each tensor."""
    rows = np.zeros((2, 8), np.float32)
    names = (f"layer{n // 10}/w{n % 10}" for n in range(TENSORS))
    return {name: md.Shard(rows, (2 * RANKS, 8), (2 * rank, 0)) for name in names}


class Sharded:
    """The ranks of a job, one after the other."""

    def __init__(self):
        self.told: list[bytes] = []
        self.wants: list = []
        first = describe.describe(describe.survey(state_of(0)))
        for rank in range(RANKS):
            table = first.shards.copy()
            table[:, piece_table.START] = 2 * rank
            facts = (first.facts, first.sharded) if rank == 0 else None
            self.told.append(pickle.dumps(planner._Told(facts, table, ())))
            self.wants.append((np.packbits(np.zeros(TENSORS, bool)).tobytes(), table))

    def plan(self) -> list[bytes]:
        """Rank 0: from what is told to what each is told."""
        told = [pickle.loads(one) for one in self.told]
        self.leader, answers = planner._planned(planner._everyone(told), range(RANKS))
        return [pickle.dumps(answer) for answer in answers]

    def describe(self) -> None:
        """Another rank: look at its state, and say what is in it."""
        self.survey = describe.survey(state_of(1))
        mine = describe.describe(self.survey)
        describe.digest(mine.facts, mine.sharded)
        self.facts = in_order(mine.facts)

    def prepare(self, answer: bytes) -> Work:
        """Another rank: make all that it keeps of the plan."""
        share, _, _ = pickle.loads(answer)
        work = Work(share, self.facts, self.survey.marks)
        _ = work.sources, work.given_bytes, work.gaps, work.size, work.numbers
        return work

    def write(self, answers: list[bytes]) -> None:
        """Make the tables of all ranks."""
        self.heads, self.tables = [], []
        for rank, answer in enumerate(answers):
            work = self.prepare(answer)
            crc = [0] * -(-work.size // (1 << 20))
            file = manifest.File(f"shard-{rank:05d}.h5", work.size, None, crc)
            self.heads.append(manifest.encode_head(file, work.writes, work.numbers))
            self.tables.append(self.heads[-1] + work.numbers)

    def commit(self) -> None:
        """Rank 0: make the manifest of the heads of all tables."""
        tables = [
            manifest.check_head(head, 1 << 20, digest)
            for head, digest in zip(self.heads, self.leader.pieces.values(), strict=True)
        ]
        self.data = manifest.encode(1, 1 << 20, RANKS, tables, self.leader.tensors, (), {})

    def look_up(self) -> list[bytes]:
        """Rank 0: decode and prove all, and tell each what it wants."""
        self.found = decode(self.data, self.tables)
        _, each = share_manifest._looked_up(self.found, self.wants)
        return [pickle.dumps(part) for part in each]

    def fill(self, part: bytes) -> None:
        """Another rank: make of what it is told what it reads."""
        (mine,) = pickle.loads(part)
        Filling(mine._replace(tensors=self.found.tensors), list(leaves(state_of(1))))


def main() -> None:
    """Print both tables."""
    print(f"{'tensors':>10}{'first save':>12}{'again':>12}{'restore':>12}    CPU seconds, one rank")
    for count in (1000, 4000, 20_000):
        with tempfile.TemporaryDirectory(dir=sys.argv[1] if sys.argv[1:] else None) as folder:
            row = one_rank(folder, count)
        print(f"{count:>10,}" + "".join(f"{value:>12.3f}" for value in row))
    print(f"\n{RANKS:,} ranks, {TENSORS:,} tensors, a shard of each on each: CPU seconds")
    job = Sharded()
    plan, answers = seconds(job.plan)
    described, _ = seconds(job.describe)
    prepared, _ = seconds(lambda: job.prepare(answers[1]))
    job.write(answers)
    commit, _ = seconds(job.commit)
    looked_up, parts = seconds(job.look_up)
    filled, _ = seconds(lambda: job.fill(parts[1]))
    print(f"save     rank 0  {plan + commit:.3f}   each other rank  {described + prepared:.3f}")
    print(f"again    rank 0  {commit:.3f}   (and what each rank does)")
    print(f"restore  rank 0  {looked_up:.3f}   each other rank  {filled:.3f}")


if __name__ == "__main__":
    main()
