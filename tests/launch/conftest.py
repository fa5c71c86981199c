"""Fixtures for these tests: many cases in one launch, and several launches at the same time."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from again import played_again
from many import play_many

from mpidist.launch.launchers import launch

#: The launch of a short program waits for its launcher half of the time.
AT_ONCE = 3


def pytest_terminal_summary(terminalreporter):
    """Tell which tests looked at another run because the first was not as usual (`again`)."""
    if played_again:
        terminalreporter.section(f"best of three: {played_again.total()} runs played again")
        for test, times in played_again.most_common():
            terminalreporter.line(f"{times} x {test}")


@pytest.fixture(scope="session")
def many(tmp_path_factory):
    """Return ``many(ranks, {name: words}, **options)``: `many.play_many` in a folder of its own."""

    def run(ranks, cases, **options):
        return play_many(ranks, cases, tmp_path_factory.mktemp("many"), **options)

    return run


@pytest.fixture(scope="session")
def launches():
    """Return ``launches({key: (ranks, words)}, **options)``: by key, what came of it.

    For programs that may be slow: three run at a time.
    """

    def one(ranks, words, options):
        return launch(ranks, words, **{"timeout": 120, **options})

    def run(wanted, **options):
        with ThreadPoolExecutor(AT_ONCE) as pool:
            jobs = {key: pool.submit(one, *each, options) for key, each in wanted.items()}
        return {key: job.result() for key, job in jobs.items()}

    return run
