"""The time that Slurm leaves to a job, and whether a step and a save fit into it."""

import time

import pytest
from checkpoint_solo import Solo, state_of

from mpidist import events
from mpidist.checkpoint.store import CheckpointStore
from mpidist.fault_tolerance import time_limit
from mpidist.fault_tolerance.time_limit import RESERVE, Allotment, duration, seconds_left


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("0", 0), ("59", 59), ("1:00", 60), ("10:05", 605), ("2:00:01", 7201), ("1-00:00:00", 86400),
     ("3-04:05:06", 273906), ("UNLIMITED", None), ("NOT_SET", None), ("INVALID", None), ("", None)],
)  # fmt: skip
def test_durations_of_slurm(text, seconds):
    assert duration(text) == seconds


def test_who_says_when_the_allocation_ends(tmp_path, monkeypatch):
    assert seconds_left({}) is None
    end = str(int(time.time()) + 100)
    assert 50 < seconds_left({"SLURM_JOB_ID": "1", "SLURM_JOB_END_TIME": end}) <= 100
    monkeypatch.setenv("PATH", str(tmp_path))
    assert seconds_left({"SLURM_JOB_ID": "1"}) is None, "no squeue here"
    (tmp_path / "squeue").write_text("#!/bin/sh\necho 1:40\n")
    (tmp_path / "squeue").chmod(0o755)
    assert seconds_left({"SLURM_JOB_ID": "1"}) == 100


def test_a_step_and_two_saves_must_fit(monkeypatch):
    """The longest of each that was seen, and half a minute for what was not."""
    saves = []
    monkeypatch.setattr(time_limit, "longest_save", lambda: max(saves, default=0.0))
    left = Allotment(100.0, now=0.0)
    assert not left.is_over(100 - RESERVE - 0.1)
    assert left.is_over(100 - RESERVE)
    for now in (0.0, 1.0, 6.0, 7.0):
        left.step(now)
    assert left.is_over(95 - RESERVE)
    assert not left.is_over(95 - RESERVE - 0.1)
    saves.append(10.0)
    left.step(9.0)
    assert left.is_over(75 - RESERVE)
    assert not left.is_over(75 - RESERVE - 0.1)
    assert left.fits(89.9)
    assert not left.fits(90.1)


def test_saves_are_seen_in_the_events(monkeypatch):
    monkeypatch.setattr(events, "recent", events.deque(maxlen=8))
    assert time_limit.longest_save() == 0
    for seconds in (0.5, 2.0, 1.0):
        events.emit("checkpoint_saved", step=1, bytes=1, seconds=seconds)
    events.emit("other", seconds=9.0)
    assert time_limit.longest_save() == 2.0


def test_a_save_in_the_background_has_not_taken_as_long_as_the_steps_beside_it(
    monkeypatch, tmp_path
):
    """R52: else a job that saves every ten minutes would leave twenty before its end."""
    monkeypatch.setattr(events, "recent", events.deque(maxlen=8))
    with CheckpointStore(Solo(), tmp_path) as store:
        began = time.perf_counter()
        store.save_async(1, state_of(1))
        store._pending._thread.join()
        took = time.perf_counter() - began
        time.sleep(0.1)
        store.wait()
    assert 0 < time_limit.longest_save() < took + 0.05
