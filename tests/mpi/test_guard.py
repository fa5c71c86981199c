"""The guard: arguments that it refuses, its cost, and which state counts as finite."""

import threading

import ml_dtypes
import numpy as np
import pytest

import mpidist as md
from mpidist.errors import ConfigError, ProtocolError
from mpidist.fault_tolerance.guard import is_finite


@pytest.mark.ranks(1)
@pytest.mark.parametrize("options", [{"time_limit": 0}, {"time_limit": -1.0}, {"every": 0}])
def test_bad_arguments(comm, options):
    with pytest.raises(ConfigError, match="guard: "):
        md.guard(comm, **options)
    with md.guard(comm) as run:
        for step in ("7", 1.5, None):
            with pytest.raises(ConfigError, match=r"step=.*; expected a whole"):
                run.should_stop(step)


@pytest.mark.ranks(1)
def test_other_threads_are_refused(comm):
    caught = []

    def enter():
        try:
            md.guard(comm).__enter__()
        except ProtocolError as error:
            caught.append(str(error))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert "main thread" in caught[0]


@pytest.mark.ranks(1, 3, 5)
def test_stop_is_agreed_at_the_next_multiple(comm):
    with md.guard(comm, signals=(), every=4) as run:
        if comm.rank == comm.size - 1:
            run.stop()
        assert [step for step in range(1, 9) if run.should_stop(step)] == [4, 8]
        assert run.exit_code == 75
        assert run.reason == f"requested on rank {comm.size - 1}"


@pytest.mark.ranks(2)
def test_leave_needs_an_agreement(comm):
    with md.guard(comm, signals=()) as run:
        assert not run.should_stop(1)
        with pytest.raises(ProtocolError, match="agreed"):
            run.leave(1)
        run.check_loss(0.5, 1)


@pytest.mark.ranks(1)
def test_is_finite_looks_everywhere(comm):
    good = {
        "a": {"b": np.ones(3), "c": [np.zeros(2, ml_dtypes.bfloat16), 1.5]},
        "n": 3, "s": "text", "i": np.arange(3), "z": np.ones(2, complex), "e": np.empty(0),
    }  # fmt: skip
    assert is_finite(good)
    for bad in (np.nan, float("inf"), np.array([1, np.nan], "f2"), np.array(complex(1, np.inf)),
                np.array([np.inf]).astype(ml_dtypes.bfloat16), [1.0, [float("nan")]]):  # fmt: skip
        assert not is_finite({**good, "a": {"x": bad}})
