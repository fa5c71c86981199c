"""Whatever the stops of a run, each record of an epoch is used once, or counted as bad (issue 4).

A case is a list of jobs that continue each other. Each job has its own number of ranks and batch
size, and commits a checkpoint every few steps. A job ends by a planned stop, with a checkpoint, or
by a kill, after which the next job continues from the last checkpoint. This test simulates the loop
of `md.train`, with its real sampler, filter of bad records, quarantine and checkpoint entries.
``tests/mpi/test_exactly_once.py`` makes the same test with the loop itself.
"""

from itertools import cycle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpidist.data import ArraySource, Position, Sampler
from mpidist.data.skip_bad import BadRecordFilter
from mpidist.errors import BadRecord
from mpidist.partition import BlockPartition
from mpidist.training.quarantine import Quarantine

EPOCHS = 2


class Source(ArraySource):
    """Knows which records are broken."""

    def __init__(self, count, bad):
        super().__init__(np.arange(count))
        self.bad = bad

    def take(self, indices):
        for index in indices:
            if index in self.bad:
                raise BadRecord(int(index), "broken")
        return super().take(indices)


@pytest.fixture(autouse=True, scope="module")
def _without_mpi():
    """What is gathered from all ranks is what `Ranks` says they told."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mpidist.training.quarantine.run_on_all", lambda comm, *_: comm.everyone())
        yield


class Ranks:
    """As many quarantines as ranks; `everyone` gives each what all have found."""

    rank = 0

    def __init__(self, size, source):
        self.all = [Quarantine(self, source, 1.0) for _ in range(size)]

    def everyone(self):
        return [(False, False, found) for found in self.told]

    def agree(self):
        self.told = [quarantine.found for quarantine in self.all]
        assert len({each.agree() for each in self.all}) == 1


def one_step(position, sampler, careful, ranks):
    """What `md.train` does of one step, without model and MPI; returns the records used."""
    indices, after = sampler.batch(position)
    wanted = [quarantine.wanted(indices) for quarantine in ranks.all]
    used = []
    for rank, quarantine in enumerate(ranks.all):
        np.testing.assert_array_equal(wanted[rank], wanted[0])
        start, stop = BlockPartition(len(wanted[rank]), len(ranks.all)).range(rank)
        mine = wanted[rank][start:stop]
        taken = careful.take(mine)
        quarantine.note(taken.bad)
        np.testing.assert_array_equal(mine[taken.kept], taken.batch[0])
        used.extend(taken.batch[0].tolist())
    if any(quarantine.found for quarantine in ranks.all):
        ranks.agree()
    for quarantine in ranks.all:
        quarantine.skipped += len(indices) - len(wanted[0])
    return after, used


job = st.tuples(
    st.integers(1, 6),  # ranks
    st.integers(1, 30),  # global batch
    st.integers(1, 9),  # steps until it ends
    st.integers(1, 4),  # steps between checkpoints
    st.booleans(),  # killed, or stopped with a checkpoint
)


HISTORIES = given(
    count=st.integers(1, 50),
    seed=st.integers(0, 2),
    shuffle=st.sampled_from(["permutation", "bijection", "none"]),
    bad=st.sets(st.integers(0, 49), max_size=8),
    history=st.lists(job, min_size=1, max_size=8).filter(
        lambda jobs: any(not killed or steps >= every for _, _, steps, every, killed in jobs)
    ),
)


@settings(max_examples=120)
@HISTORIES
def test_any_history_uses_every_record_once(**case):
    check(**case)


@pytest.mark.exhaustive
@settings(max_examples=300)
@HISTORIES
def test_many_histories(**case):
    check(**case)


def check(count, seed, shuffle, bad, history):
    bad = {index for index in bad if index < count}
    committed = (Position(), {"bad": [], "skipped": 0})
    used: list[int] = []  # in the committed history
    for size, global_batch, steps, every, killed in cycle(history):
        position, facts = committed
        source = Source(count, bad)
        sampler = Sampler(count, global_batch, seed, shuffle)
        ranks, careful = Ranks(size, source), BadRecordFilter(source)
        for quarantine in ranks.all:
            quarantine.restore(facts["bad"], facts["skipped"], retry=False)
        since: list[int] = []  # the checkpoint: what a kill undoes
        for number in range(1, steps + 1):
            position, records = one_step(position, sampler, careful, ranks)
            since += records
            last = position.epoch == EPOCHS or (number == steps and not killed)
            if number % every == 0 or last:
                committed = (position, ranks.all[0].facts())
                used += since
                since = []
            if position.epoch == EPOCHS:
                break
        if committed[0].epoch == EPOCHS:
            break
    good = sorted(set(range(count)) - bad)
    assert sorted(used) == sorted(good * EPOCHS)
    assert committed[1]["skipped"] == EPOCHS * len(bad)
    assert [index for index, _ in committed[1]["bad"]] == sorted(bad)
