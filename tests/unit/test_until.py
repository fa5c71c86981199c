"""The function `until`, with which all tests wait: when it ends, and what its error says."""

import time
from types import SimpleNamespace

import pytest
from until import holds_within, wait_until


def test_what_the_look_gave_is_returned():
    looks = iter([0, [], "there"])
    assert wait_until(lambda: next(looks), every=0) == "there"


def test_too_late_is_told_with_what_was_there():
    with pytest.raises(AssertionError, match=r"not within 0\.02 s: said so far"):
        wait_until(lambda: False, 0.02, otherwise=lambda: "said so far")


def test_a_job_that_has_ended_is_looked_at_once_more_and_not_waited_for():
    ended = SimpleNamespace(poll=lambda: 3)
    assert wait_until(lambda: "there", job=ended) == "there"
    begin = time.monotonic()
    with pytest.raises(AssertionError, match="the job has ended: its output"):
        wait_until(lambda: False, otherwise="its output", job=ended)
    assert time.monotonic() - begin < 30


def test_what_is_judged_afterwards():
    looks = iter([False, True])
    assert holds_within(lambda: next(looks), every=0)
    assert not holds_within(lambda: False, 0.02)
