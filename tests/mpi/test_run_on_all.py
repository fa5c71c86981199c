"""`run_on_all`: any failure on one rank raises an error on all ranks."""

import socket
import time

import numpy as np
import pytest

import mpidist as md
from mpidist.errors import ConfigError, MismatchError, MpidistError
from mpidist.runtime.agreement import rounds
from mpidist.runtime.agreement.run_on_all import run_on_all
from mpidist.runtime.context import of

SIZES = pytest.mark.ranks(1, 2, 3, 5)


@SIZES
def test_results(comm):
    own = {comm.rank}
    assert run_on_all(comm, "own", lambda: own) is own
    everyone = run_on_all(comm, "all", lambda: (comm.rank, None), lambda all: all)
    assert everyone == [(rank, None) for rank in range(comm.size)]
    squares = run_on_all(comm, "each", lambda: comm.rank, lambda all: [n * n for n in all], True)
    assert squares == comm.rank**2


@pytest.mark.covering
@SIZES
@pytest.mark.parametrize("length", [0, 1, 900, 1100, 100_000, 3 << 20])
def test_messages_of_any_length(comm, length):
    """Short ones are filled up to one length, long ones go with theirs."""
    mine = bytes([comm.rank]) * length
    everyone = [bytes([rank]) * length for rank in range(comm.size)]
    assert run_on_all(comm, "same", lambda: mine, lambda all: all) == everyone
    assert run_on_all(comm, "each", lambda: mine, lambda all: all[::-1], True) == everyone[::-1][
        comm.rank
    ]  # fmt: skip
    uneven = run_on_all(comm, "uneven", lambda: mine if comm.rank == 0 else None, lambda all: all)
    assert uneven == [everyone[0], *[None] * (comm.size - 1)]


@pytest.mark.ranks(2, 3)
def test_one_round_where_nothing_is_decided(comm, monkeypatch):
    context = of(comm)
    waits = []
    wait = context.wait
    monkeypatch.setattr(context, "wait", lambda *a: (waits.append(1), wait(*a)))
    run_on_all(comm, "check", lambda: None)
    assert len(waits) == 1
    run_on_all(comm, "decide", lambda: 1, sum)  # rank 0 knows what the others found
    assert len(waits) == 3
    run_on_all(comm, "decide", lambda: comm.rank, sum)
    assert len(waits) == 6
    assert run_on_all(comm, "known to come", lambda: comm.rank, list, agreed=100) == [
        *range(comm.size)
    ]
    assert len(waits) == 8


@pytest.mark.ranks(1, 2, 3)
def test_a_number_of_rank_0_comes_with_the_agreement(comm):
    """Of 63 bits, also where nothing is decided; nobody else is asked."""
    number = (1 << 62) + 7 if comm.rank == 0 else None
    assert run_on_all(comm, "check", lambda: 5, number=lambda: number) == (5, (1 << 62) + 7)
    with pytest.raises(ConfigError, match="rank 0"):
        run_on_all(comm, "check", lambda: 5, number=refuse)


def refuse() -> int:
    raise ConfigError("no number")


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("length", [10, 300, 70_000])
def test_all_are_known_to_come(comm, length):
    """What a message is too short for, and errors, are told by an agreement after all."""
    mine = bytes([comm.rank]) * (length + comm.rank)
    everyone = [bytes([rank]) * (length + rank) for rank in range(comm.size)]
    assert run_on_all(comm, "known", lambda: mine, list, agreed=310) == everyone
    assert run_on_all(comm, "known", lambda: mine, list, agreed=0) == everyone

    def fails():
        if comm.rank == comm.size - 1:
            raise ConfigError("x" * length)

    with pytest.raises(ConfigError, match=r"known: .*x{10}") as caught:
        run_on_all(comm, "known", fails, list, agreed=310)
    assert len(set(comm.allgather(str(caught.value)))) == 1
    assert run_on_all(comm, "known", lambda: mine, list, agreed=310) == everyone


class Silent(Exception):
    def __str__(self):
        raise RuntimeError

    __repr__ = __str__


@pytest.mark.ranks(3, further=(2,))
@pytest.mark.parametrize("where", ["local", "result", "decide", "answer"])
@pytest.mark.parametrize("kind", [ConfigError, KeyboardInterrupt, MemoryError, Silent])
def test_one_rank_fails(comm, where, kind):
    """Nobody is left waiting, and the communicator is as good as before."""
    failing = 1 if where in ("local", "result") else 0

    class Unpicklable:
        def __reduce__(self):
            raise kind("no pickle")

    def local():
        if comm.rank == failing and where == "local":
            raise kind("because")
        return Unpicklable() if comm.rank == failing and where == "result" else 1

    def decide(results):
        if where == "decide":
            raise kind("because")
        return Unpicklable() if where == "answer" else sum(results)

    expected = kind if comm.rank == failing or kind is ConfigError else MpidistError
    with pytest.raises(expected) as caught:
        run_on_all(comm, "check", local, decide)
    if expected is not kind:
        host = socket.gethostname()
        head = f"check: rank {failing} of {comm.size} ({host}): {kind.__name__}"
        assert str(caught.value).startswith(head)
        assert caught.value.everywhere
        assert caught.value.secondary
    assert run_on_all(comm, "after", lambda: comm.rank, sum) == sum(range(comm.size))
    x = np.ones(3)
    assert md.allreduce(comm, x)[0] == comm.size


@pytest.mark.covering
@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("other", ["name", "allreduce", "plan"])
def test_a_rank_in_another_operation(comm, other, fails):
    def local():
        if fails:
            raise ConfigError("because")

    begin = time.monotonic()
    if other == "plan":
        md.allreduce(comm, np.ones(3))

    def call():
        if comm.rank != 1:
            run_on_all(comm, "one thing", local)
        elif other == "name":
            run_on_all(comm, "another thing", local)
        else:
            md.allreduce(comm, np.ones(3))

    with pytest.raises(MismatchError, match="one thing") as caught:
        call()
    assert "rank 1" in str(caught.value)
    assert time.monotonic() - begin < 8
    md.free(comm)


@pytest.mark.ranks(3, further=(2,))
@pytest.mark.parametrize("phase", ["gather", "hand_out"])
def test_a_rank_that_is_interrupted_between_two_rounds(comm, monkeypatch, phase):
    """Ctrl-C in the midst of it: the others hear of it, and nobody waits for ever."""
    if comm.rank == 1:

        def interrupted(*_):
            raise KeyboardInterrupt

        monkeypatch.setattr(rounds.Polled, phase, interrupted)

    def calls():
        # What rank 0 hands out needs nobody's answer: the others may learn it from the next call.
        for _ in range(3):
            run_on_all(comm, "check", lambda: comm.rank, sum)

    with pytest.raises((KeyboardInterrupt, MismatchError)) as caught:
        calls()
    if comm.rank == 1:
        assert caught.type is KeyboardInterrupt
    else:
        assert "rank 1 of" in str(caught.value)
        assert "KeyboardInterrupt" in str(caught.value)
    md.free(comm)
