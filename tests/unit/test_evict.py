"""Whom the ranks of a node evict: the decision alone, without MPI (R45, R46)."""

import os
import signal
import subprocess
import sys
import time
from math import inf

import numpy as np
import pytest

from mpidist.elasticity.deadline import Deadline, EvictionLimits, parse_deadline
from mpidist.elasticity.evict import (
    Eviction,
    cause_in_words,
    kill,
    update_stop,
    whom_to_evict,
)
from mpidist.elasticity.node_board import (
    COMPUTE,
    LATE,
    OUTSIDE,
    PLAN,
    SILENT,
    SLOW,
    STOPPED,
    WAIT,
    Record,
)
from mpidist.elasticity.repair_deadline import PHASES as GIVEN_UP
from mpidist.elasticity.slow_ranks import SlowRanks, slow_ranks, slowest
from mpidist.errors import ConfigError, shown
from mpidist.launch.process_table import born, state_and_birth
from mpidist.runtime.polling import PHASES

NOW = 1000.0
BY_DEFAULT = EvictionLimits(5.0, 5.0, inf)
IN_A_SECOND = EvictionLimits(1.0, 5.0, 1.0)


def record(rank, phase=WAIT, for_seconds=10.0, *, beat=0.1, stopped=None, state="R"):
    seen = 0.0 if stopped is None else NOW - stopped
    state = state if stopped is None else "T"
    return Record(rank, 100 + rank, 7, NOW - beat, phase, NOW - for_seconds, 3, seen, NOW, state)


def evicted(records, limits=IN_A_SECOND, fresh=-inf):
    return [(one.rank, one.why) for one in whom_to_evict(records, NOW, limits, fresh)[0]]


def test_a_stopped_rank():
    assert evicted([record(0), record(1, COMPUTE, stopped=6)], BY_DEFAULT) == [(1, STOPPED)]
    assert evicted([record(0), record(1, COMPUTE, stopped=4)], BY_DEFAULT) == []
    assert evicted([record(0), record(1, COMPUTE, stopped=4)]) == [(1, STOPPED)]


@pytest.mark.parametrize("phase", range(len(PHASES)))
def test_a_stop_counts_in_each_phase_of_the_loop(phase):
    """It cannot save while it is stopped; outside of the loop nobody is judged."""
    found = evicted([record(0), record(1, phase, beat=30, stopped=6)], BY_DEFAULT)
    assert found == ([] if phase == OUTSIDE else [(1, STOPPED)])


@pytest.mark.parametrize("phase", range(len(PHASES)))
def test_a_rank_without_a_beat(phase):
    """A native call holds Python's lock: in a save that is usual."""
    found = evicted([record(0), record(1, phase, beat=6)], BY_DEFAULT)
    assert found == ([(1, SILENT)] if phase in (COMPUTE, WAIT) else [])


@pytest.mark.parametrize("phase", range(len(PHASES)))
def test_a_late_rank(phase):
    found = evicted([record(0), record(1, phase), record(2)])
    assert found == ([(1, LATE)] if phase == COMPUTE else [])
    assert evicted([record(0), record(1, phase), record(2)], BY_DEFAULT) == []


@pytest.mark.parametrize(
    ("computes", "waits"), [(10.0, 0.5), (0.5, 10.0)], ids=["the waits are short", "it has moved"]
)
def test_a_rank_is_late_only_while_others_wait(computes, waits):
    """A long step makes nobody late, nor does a rank that is met again and again."""
    assert evicted([record(0, WAIT, waits), record(1, COMPUTE, computes)]) == []


def test_nobody_is_late_where_most_ranks_take_long():
    late, waiting = [record(r, COMPUTE) for r in range(2)], [record(r) for r in range(2, 4)]
    assert evicted([*late, *waiting]) == [(0, LATE), (1, LATE)]
    assert evicted([*late, waiting[0]]) == []


def test_who_waits_longest_counts():
    """Ranks that meet each other in short waits hide nobody who does not come."""
    short = [record(rank, WAIT, 0.01) for rank in range(2)]
    assert evicted([*short, record(2, WAIT, 5), record(3, COMPUTE, 5)]) == [(3, LATE)]


def test_a_debugger_may_hold_a_rank():
    held = record(1, COMPUTE, beat=60, state="t")
    assert evicted([record(0), held], BY_DEFAULT) == evicted([record(0), held]) == []


def test_a_rank_may_wait_for_a_disk():
    waits = record(1, COMPUTE, beat=60, state="D")
    assert evicted([record(0), waits], BY_DEFAULT) == []
    assert evicted([record(0), waits]) == [(1, LATE)], "if a number was given"


@pytest.mark.parametrize(
    "one", [record(1, COMPUTE, stopped=60), record(1, COMPUTE, beat=60), record(1, COMPUTE, 60)]
)
def test_the_whole_job_was_stopped(one):
    """Then the watching rank was stopped as well, and all times begin anew."""
    assert evicted([record(0, WAIT, 60), one]) != []
    assert evicted([record(0, WAIT, 60), one], fresh=NOW - 0.5) == []


def test_when_to_look_again():
    """In the moment in which a deadline passes."""
    stopped = [record(0), record(1, COMPUTE, stopped=0.75)]
    assert whom_to_evict(stopped, NOW, IN_A_SECOND)[1] == pytest.approx(NOW + 0.25)
    late = [record(0, WAIT, 0.4), record(1, COMPUTE, 0.8)]
    assert whom_to_evict(late, NOW, IN_A_SECOND)[1] == pytest.approx(NOW + 0.6)
    assert whom_to_evict([record(0, PLAN)], NOW, BY_DEFAULT)[1] == inf
    assert whom_to_evict([record(1, COMPUTE, stopped=2.0)], NOW, IN_A_SECOND) == (
        [Eviction(1, STOPPED, 2.0)],
        inf,
    )


def test_how_long_a_process_was_stopped():
    """From the first look that saw it; a sign of life or a gap between looks begins anew."""
    one = record(1, COMPUTE, 10, beat=9, stopped=0)._replace(seen=0.0, last=0.0)
    first = update_stop(one, NOW, gap=0.5)
    assert (first.seen, first.last) == (NOW, NOW)
    again = update_stop(first, NOW + 0.4, gap=0.5)
    assert (again.seen, again.last) == (NOW, NOW + 0.4)
    assert update_stop(again, NOW + 1.0, gap=0.5).seen == NOW + 1.0
    alive = again._replace(beat=NOW + 0.1)
    assert update_stop(alive, NOW + 0.5, gap=0.5).seen == NOW + 0.5
    assert update_stop(again._replace(state="S"), NOW + 0.5, gap=0.5).seen == 0


# ------------------------------------------------------------------------------- the arguments


@pytest.mark.parametrize(
    ("given", "late"),
    [("stopped", inf), ("auto", 0.0), (2, 2.0), (0.3, 0.3), (np.float32(0.5), 0.5)],
)
def test_a_deadline(given, late):
    assert parse_deadline(given) == Deadline(late, 0.0)
    assert parse_deadline(given, 2.5) == Deadline(late, 2.5)


@pytest.mark.parametrize("given", [0, -1, inf, np.nan, "soon", "2", None, True, [3]])
def test_no_deadline(given):
    with pytest.raises(ConfigError, match=r'; expected "stopped", "auto" or a number') as raised:
        parse_deadline(given)
    assert str(raised.value).startswith(f"deadline={shown(given)};")


@pytest.mark.parametrize("given", [1, -2, 0.5, inf, "2", True, None])
def test_no_factor(given):
    with pytest.raises(ConfigError, match=r"^slow=.*; expected 0 \(off\) or a factor > 1"):
        parse_deadline("stopped", given)


def test_the_limits():
    assert Deadline().limits([0.1] * 64) == EvictionLimits(5.0, 5.0, inf)
    assert Deadline(0.3).limits([]) == EvictionLimits(0.3, 5.0, 0.3)
    assert Deadline(60.0).limits([]) == EvictionLimits(60.0, 60.0, 60.0)
    assert Deadline(0.3).limits([], first=True) == EvictionLimits(0.3, 5.0, 5.0)
    assert Deadline(2.0).limits([], first=True) == EvictionLimits(2.0, 5.0, 20.0)
    for given in (Deadline(), Deadline(60.0)):  # before the repair is given up
        assert given.limits([], repairs=True).stopped == 2.5 < min(GIVEN_UP.values()) - 2
    assert Deadline(0.3).limits([], repairs=True).stopped == 0.3
    auto = Deadline(0.0)
    assert auto.limits([0.1] * 4) == EvictionLimits(5.0, 5.0, inf), "too few steps to know"
    assert auto.limits([9.0] + [0.1] * 9) == EvictionLimits(2.0, 5.0, 2.0)
    assert auto.limits([0.001] * 9) == EvictionLimits(1.0, 5.0, 1.0)
    assert auto.limits([3.0] * 9) == EvictionLimits(5.0, 5.0, 60.0)


def test_in_words():
    assert cause_in_words(STOPPED, 5.04) == "was stopped for 5 s"
    assert cause_in_words(SILENT, 5.2) == "gave no sign for 5 s"
    assert cause_in_words(LATE, 0.31) == "did not come for 0.3 s"
    assert cause_in_words(SLOW, 11.52) == "was 11.5 times slower than the others"


# ------------------------------------------------------------------------------------- the kill


def test_it_kills_the_process_that_is_meant_and_no_other():
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        os.kill(child.pid, signal.SIGSTOP)
        deadline = time.monotonic() + 5
        while state_and_birth(child.pid)[0] != "T" and time.monotonic() < deadline:
            time.sleep(0.01)
        state, birth = state_and_birth(child.pid)
        assert (state, str(birth)) == ("T", born(child.pid))
        one = record(1)._replace(pid=child.pid, born=birth)
        assert not kill(one._replace(born=birth - 1))
        assert child.poll() is None
        assert kill(one)
        assert child.wait(10) == -signal.SIGKILL
        assert not kill(one), "it has ended already"
    finally:
        child.kill()
        child.wait()
    assert state_and_birth(child.pid) == ("X", 0)


def test_without_a_descriptor_of_the_process(monkeypatch):
    """A Python that was built for an old kernel lacks pidfd_open."""
    monkeypatch.delattr(os, "pidfd_open")
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        one = record(1)._replace(pid=child.pid, born=state_and_birth(child.pid)[1])
        assert not kill(one._replace(born=1))
        assert kill(one)
        assert child.wait(10) == -signal.SIGKILL
    finally:
        child.kill()
        child.wait()


# ----------------------------------------------------------------------------------- slow ranks


class Windows:
    """What `SlowRanks` needs of `Stragglers`; this process is rank 0."""

    def __init__(self, size, crowded=frozenset()):
        self.comm = type("Comm", (), {"size": size, "rank": 0})
        self.ranks, self.newest, self.windows = range(size), None, 0
        self.crowded = crowded

    def share_cores(self):
        return self.crowded

    def add(self, *seconds):
        self.newest, self.windows = np.array(seconds)[:, None], self.windows + 1


def test_who_is_slow():
    times = np.array([[0.01, 0.01], [0.01, 0.19], [0.02, 0.0], [0.01, 0.02]])
    assert slow_ranks(times, 5) == {1: pytest.approx(10.0)}
    assert slow_ranks(times, 11) == {}
    assert slow_ranks(np.array([[0.0001], [0.0001], [0.004]]), 5) == {}, "less than 5 ms more"


def test_slow_in_two_windows_in_a_row():
    windows = Windows(4)
    slow = SlowRanks(windows, 5.0)
    assert slow.end_of_step() == []
    windows.add(0.01, 0.2, 0.01, 0.01)
    assert slow.end_of_step() == []
    assert slow.end_of_step() == [], "the same window again"
    windows.add(0.01, 0.01, 0.01, 0.2)
    assert slow.end_of_step() == []
    windows.add(0.01, 0.2, 0.01, 0.2)
    assert slow.end_of_step() == [3]
    windows.add(0.01, 0.2, 0.01, 0.01)
    windows.add(0.01, 0.2, 0.01, 0.01)
    assert slow.end_of_step() == [], "one of the two windows was not looked at"


def test_nobody_is_slow_if_it_is_off_or_if_ranks_share_cores():
    for slow, crowded in ((0, frozenset()), (5.0, frozenset({1}))):
        windows = Windows(3, crowded)
        judge = SlowRanks(windows, slow)
        for _ in range(3):
            windows.add(0.01, 0.2, 0.01)
            assert judge.end_of_step() == []


def test_enough_ranks_remain():
    windows = Windows(5)
    slow = SlowRanks(windows, 5.0, min_ranks=4)
    for _ in range(2):
        windows.add(0.01, 0.2, 0.01, 0.3, 0.01)
        found = slow.end_of_step()
    assert found == [3], "the slowest"
    assert slowest({1: 9.0, 3: 9.0, 4: 20.0}, 2) == [1, 4]
    assert slowest({1: 9.0}, 0) == slowest({1: 9.0}, -1) == []
