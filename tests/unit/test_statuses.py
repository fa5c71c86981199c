"""Waiting ranks send few status messages, and find every mismatch (R97, R98).

The tests simulate many ranks in one process. Each rank has a real `Statuses` object, and queues
replace the network.
"""

from collections import deque
from math import ceil, log2

import pytest

from mpidist.errors import MismatchError
from mpidist.runtime import polling
from mpidist.runtime.agreement.mismatch import RAISED, Signature
from mpidist.runtime.agreement.statuses import Statuses, neighbours

SUM = Signature("allreduce", "float32", "(10)", "sum", "ring")
MAX = Signature("allreduce", "float32", "(10)", "max", "ring")


class Sent:
    """A request that is done."""

    def Test(self):
        return True


class Control:
    """The control communicator of one rank, on queues that all ranks share."""

    def __init__(self, rank, queues):
        self.rank, self.queues, self.sent = rank, queues, 0

    def Isend(self, buffer, rank, tag):
        self.sent += 1
        self.queues[rank].append(bytes(buffer[0]))
        return Sent()

    def Iprobe(self, source, tag):
        return bool(self.queues[self.rank])

    def Recv(self, buffer, source, tag):
        buffer[0][:] = self.queues[self.rank].popleft()


class Rank:
    """What `Statuses` asks of a context."""

    def __init__(self, rank, size, queues):
        self.rank, self.size, self.host = rank, size, f"n{rank // 8:04d}"
        self.control = Control(rank, queues)
        self.failed, self.stopped, self.closed = None, False, False
        self.history: list[Signature] = []
        self.comm, self.thread, self.identity = None, None, rank
        self.statuses = Statuses(self)
        self.error = None

    def give_up(self, text):
        self.failed, self.stopped = text, True

    @property
    def sequence(self):
        return len(self.history)

    def operation(self, number):
        return self.history[number - 1] if 0 < number <= len(self.history) else None

    def look(self, waited):
        """One look of a waiting rank; keeps what it raises."""
        if self.error is None:
            try:
                self.statuses.look_around(waited)
            except MismatchError as error:
                self.error = str(error)


def job(size):
    queues = [deque() for _ in range(size)]
    return [Rank(rank, size, queues) for rank in range(size)]


def wait(ranks, seconds, start=1.0):
    """All `ranks` wait from `start` on for so many seconds, ten looks a second."""
    for tick in range(round(10 * seconds)):
        for rank in ranks:
            rank.look(start + tick / 10)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 8, 9, 16, 100, 256])
def test_neighbours_are_few_and_mutual(size):
    of = [neighbours(rank, size) for rank in range(size)]
    for rank, mine in enumerate(of):
        assert len(set(mine)) == len(mine) <= 2 * ceil(log2(size)) if size > 1 else not mine
        assert rank not in mine
        assert all(rank in of[other] for other in mine)
    reached, todo = {0}, [0]
    while todo:
        new = [other for other in of[todo.pop()] if other not in reached]
        reached.update(new)
        todo += new
    assert len(reached) == size


@pytest.mark.parametrize(("size", "late"), [(2, 5), (7, 5), (64, 5), (256, 1), (256, 2)])
def test_a_late_rank_costs_log_p_messages_a_second(size, late):
    """C1: a rank is late for some seconds; all others tell where they are, nobody is accused."""
    ranks = job(size)
    for rank in ranks[:-1]:
        rank.history.append(SUM)
    wait(ranks[:-1], late)
    most = max(rank.control.sent for rank in ranks)
    assert most <= 2 * ceil(log2(size)) * late
    ranks[-1].history.append(SUM)
    wait(ranks, 1.0, start=1.0 + late)
    assert not any(rank.error for rank in ranks)


def test_no_new_connection_is_made_while_a_host_is_away(monkeypatch):
    """R45: only neighbours, which have sent to each other before, get a message."""
    mine = Rank(0, 64, [deque() for _ in range(64)])
    mine.history.append(SUM)
    monkeypatch.setattr(polling, "unreachable", True)
    wait([mine], 5.0)
    asked = {rank for rank, queue in enumerate(mine.control.queues) if queue}
    assert asked == set(neighbours(0, 64))
    monkeypatch.setattr(polling, "unreachable", False)
    wait([mine], 5.0, start=6.0)
    assert len({rank for rank, queue in enumerate(mine.control.queues) if queue}) > len(asked)


def test_at_4096_ranks_the_messages_are_counted():
    """The table's row: 2 log2 p in the first late second, log2 p + 1 in each further one."""
    for rank in (0, 1, 2048, 4095):
        mine = Rank(rank, 4096, [deque() for _ in range(4096)])
        mine.history.append(SUM)
        sent = []
        for second in range(4):
            wait([mine], 1.0, start=1.0 + second)
            sent.append(mine.control.sent)
        assert sent[0] <= 24
        assert sent[3] <= 24 + 3 * 13


@pytest.mark.parametrize("size", [2, 3, 9, 64, 256])
def test_one_rank_elsewhere_is_named_to_all(size):
    ranks = job(size)
    for rank in ranks:
        rank.history.append(MAX if rank.rank == size // 2 else SUM)
    wait(ranks, 2.0)
    for rank in ranks:
        assert rank.failed
        assert f"rank {size // 2} op=max" in rank.error
        assert "op=sum" in rank.error
        if size > 3:
            assert f"ranks 0-{size // 2 - 1},{size // 2 + 1}-{size - 1} op=sum" in rank.error


@pytest.mark.parametrize("size", [3, 64])
def test_halves_that_disagree_hear_past_ranks_that_are_late(size):
    """Every tenth rank computes and does not listen; the others end all the same."""
    ranks = job(size)
    waiting = [rank for rank in ranks if rank.rank % 10 != 9]
    for rank in waiting:
        rank.history.append(MAX if rank.rank < size // 2 else SUM)
    wait(waiting, 2.0)
    assert all(rank.failed for rank in waiting)


@pytest.mark.parametrize("size", [2, 3, 64, 256])
def test_a_rank_that_raised_is_heard(size):
    ranks = job(size)
    odd = ranks[size // 2]
    for rank in ranks:
        rank.history.append(Signature(RAISED, "ValueError: no", "") if rank is odd else SUM)
    odd.statuses.tell_raised(1)
    others = [rank for rank in ranks if rank is not odd]
    wait(others, 1.0)
    for rank in others:
        assert f"rank {odd.rank} raised ValueError: no" in rank.error


def test_ranks_that_all_raised_have_nothing_to_tell():
    ranks = job(16)
    for rank in ranks:
        rank.history.append(Signature(RAISED, f"ValueError: {rank.rank}", ""))
        rank.statuses.tell_raised(1)
        rank.history.append(SUM)
    wait(ranks, 1.0)
    assert not any(rank.error for rank in ranks)


def test_whoever_left_is_found_by_a_wait_that_goes_on():
    """Rank 0 waits for rank 11 of 64 alone, no neighbour of it, which has left."""
    ranks = job(64)
    assert 11 not in neighbours(0, 64)
    ranks[0].history.append(SUM)
    for tick in range(150):
        ranks[0].look(1.0 + tick / 10)
        try:
            ranks[11].statuses.answer()
        except MismatchError:
            break
    assert "rank 11 left after 0 operations" in ranks[0].error
