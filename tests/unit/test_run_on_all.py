"""`run_on_all` with an `exchange` function, and with errors whose texts are unusual (issue 9)."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from mpidist.errors import BadRecord, ConfigError, MpidistError, StorageError, shown
from mpidist.runtime.agreement.run_on_all import failure_of, run_on_all


class Ranks:
    """Three ranks that are threads, with a channel that knows JSON only."""

    size = 3

    def __init__(self):
        self.barrier = threading.Barrier(self.size, timeout=10)
        self.said = [None] * self.size
        self.rounds = 0

    def run(self, job):
        """Return what came of ``job(comm, exchange)`` on each rank: a result or an exception."""

        class Comm:
            size = self.size

            def __init__(self, rank):
                self.rank = rank

        def one(rank):
            def exchange(fact):
                self.said[rank] = json.dumps(fact)
                self.barrier.wait()
                everyone = [json.loads(text) for text in self.said]
                self.rounds += rank == 0
                self.barrier.wait()
                return everyone

            try:
                return job(Comm(rank), exchange)
            except BaseException as error:
                return error

        with ThreadPoolExecutor(self.size) as pool:
            return list(pool.map(one, range(self.size)))


def test_what_rank_0_decides_reaches_all():
    ranks = Ranks()
    found = ranks.run(
        lambda comm, exchange: run_on_all(
            comm, "sum", lambda: (comm.rank, "x"), lambda all: [sum(n for n, _ in all)], False,
            exchange,
        )
    )  # fmt: skip
    assert found == [[3]] * 3
    found = ranks.run(
        lambda comm, exchange: run_on_all(
            comm, "own", lambda: comm.rank, lambda all: [n * n for n in all], True, exchange
        )
    )
    assert found == [0, 1, 4]


def test_without_decide_every_rank_keeps_its_own_in_one_round():
    ranks = Ranks()
    found = ranks.run(lambda c, e: run_on_all(c, "own", lambda: {c.rank}, exchange=e))
    assert found == [{0}, {1}, {2}]
    assert ranks.rounds == 1


def fails_on(rank, error):
    def job(comm, exchange):
        def local():
            if comm.rank == rank:
                raise error

        return run_on_all(comm, "set-up", local, exchange=exchange)

    return job


def test_an_error_of_mpidist_keeps_its_class_on_all():
    own = ConfigError("keep=0; expected 1")
    found = Ranks().run(fails_on(1, own))
    assert [type(error) for error in found] == [ConfigError] * 3
    for error in found:
        assert str(error).startswith("set-up: rank 1 of 3 (")
        assert str(error).endswith("): keep=0; expected 1")
        assert error.everywhere
    assert [error.secondary for error in found] == [True, False, True]
    assert found[1].__cause__ is own


@pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt(), MemoryError()])
def test_other_errors_go_on_as_themselves_where_they_were_raised(error):
    found = Ranks().run(fails_on(2, error))
    assert found[2] is error
    for other in found[:2]:
        assert type(other) is MpidistError
        assert "rank 2 of 3" in str(other)
        assert type(error).__name__ in str(other)
        assert other.everywhere
        assert other.secondary


def test_what_decide_raises_is_raised_on_all():
    def decide(_):
        raise ConfigError("ranks 1 and 2 differ")

    found = Ranks().run(lambda c, e: run_on_all(c, "x", lambda: 1, decide, exchange=e))
    assert [str(error) for error in found] == ["ranks 1 and 2 differ"] * 3
    assert not any(error.secondary for error in found)

    own = OSError("disk")

    def broken(_):
        raise own

    found = Ranks().run(lambda c, e: run_on_all(c, "x", lambda: 1, broken, exchange=e))
    assert found[0] is own
    assert all("rank 0 of 3" in str(error) and "OSError: disk" in str(error) for error in found[1:])


def test_what_cannot_be_pickled_fails_on_all():
    def job(comm, exchange):
        return run_on_all(
            comm, "x", lambda: (lambda: 1) if comm.rank else 1, len, exchange=exchange
        )

    found = Ranks().run(job)
    assert type(found[0]) is MpidistError
    assert "rank 1 of 3" in str(found[0])
    found = Ranks().run(lambda c, e: run_on_all(c, "x", int, lambda _: lambda: 1, exchange=e))
    assert all(isinstance(error, Exception) for error in found)
    assert "rank 0 of 3" in str(found[1])
    found = Ranks().run(lambda c, e: run_on_all(c, "x", int, lambda _: [1], True, exchange=e))
    assert "1 answers for 3 ranks" in str(found[2])


def test_the_rank_that_knows_the_cause_is_the_one_that_is_named():
    def job(comm, exchange):
        def local():
            error = ConfigError("cause" if comm.rank == 2 else "hearsay")
            error.secondary = comm.rank != 2
            raise error

        return run_on_all(comm, "x", local, exchange=exchange)

    found = Ranks().run(job)
    assert all("rank 2 of 3" in str(e) and "(and 2 more ranks)" in str(e) for e in found)
    assert [error.secondary for error in found] == [True, True, False]


def test_all_ranks_alike_are_one_line():
    found = Ranks().run(
        lambda c, e: run_on_all(
            c, "x", lambda: (_ for _ in ()).throw(ConfigError("no")), exchange=e
        )
    )
    assert [str(error) for error in found] == ["x: all 3 ranks: no"] * 3
    assert not any(error.secondary for error in found)


def test_other_errors_become_the_class_that_fault_says():
    def job(comm, exchange):
        def local():
            if comm.rank == 1:
                raise OSError(28, "No space left")

        return run_on_all(comm, "save", local, exchange=exchange, fault=lambda _: StorageError)

    found = Ranks().run(job)
    assert [type(error) for error in found] == [StorageError] * 3
    assert all("rank 1 of 3" in str(e) and "OSError: [Errno 28] No space" in str(e) for e in found)
    stays = Ranks().run(
        lambda c, e: run_on_all(
            c, "x", fails_now(KeyboardInterrupt), exchange=e, fault=lambda _: StorageError
        )
    )
    assert {type(error) for error in stays} == {KeyboardInterrupt}


def fails_now(kind):
    def local():
        raise kind()

    return local


def test_an_own_error_is_raised_where_the_channel_is_broken():
    class Comm:
        rank, size = 0, 2

    def exchange(_):
        raise RuntimeError("nobody there")

    with pytest.raises(KeyError, match="mine"):
        run_on_all(Comm, "x", lambda: {}["mine"], exchange=exchange)


class Silent(Exception):
    def __str__(self):
        raise KeyboardInterrupt

    __repr__ = __str__


def test_texts_that_cannot_be_had():
    assert failure_of(Silent()).text == "Silent: (its text raises KeyboardInterrupt)"
    assert failure_of(ConfigError("two\nlines")).text == "two lines"
    assert len(failure_of(ConfigError("x" * 10**6)).text) < 5000
    assert failure_of(ConfigError("\udcff")).text == "\\udcff"
    assert failure_of(KeyError()).text == "KeyError"
    assert shown(10**5000) == "int object (its repr raises ValueError)"
    assert shown(Silent()) == "Silent object (its repr raises KeyboardInterrupt)"
    assert shown("x" * 1000) == "'" + "x" * 199 + "..."


def test_errors_of_other_forms_and_places_are_rebuilt():
    class Local(StorageError):
        """A class that no other process knows."""

    for error, kind in [(Local("a"), StorageError), (BadRecord(3, "a"), BadRecord)]:
        found = Ranks().run(fails_on(0, error))
        assert [type(one) for one in found] == [kind] * 3
        assert all("rank 0 of 3" in str(one) for one in found)
    assert found[0].index == 3  # the rank that failed has the facts as well
