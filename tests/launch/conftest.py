"""Fixtures for these tests: many cases in one launch, and several launches at the same time."""

from concurrent.futures import ThreadPoolExecutor
from functools import cache

import pytest
from again import played_again
from many import play_many

from mpidist.launch.launchers import launch

#: The launch of a short program waits for its launcher half of the time.
AT_ONCE = 3
#: Tests that take 10 s and more begin first, so that none goes on alone when the others have ended.
LONG = ("comparison", "checkpoint_restart", "launch_requests", "readme_restarts")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
    """Put the longest tests first; files with fixtures for all of their tests come before them."""
    items.sort(key=lambda item: item.path.stem.removeprefix("test_") not in LONG)


def pytest_terminal_summary(terminalreporter):
    """Tell which tests looked at another run because the first was not as usual (`again`)."""
    if played_again:
        terminalreporter.section(f"best of three: {played_again.total()} runs played again")
        for test, times in played_again.most_common():
            terminalreporter.line(f"{times} x {test}")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Let the tests of a file go to one worker if they share what a fixture of their file made.

    Those of the other files may go to any, so that none has the longest file at the end.
    """
    from xdist.scheduler import LoadScopeScheduling

    class Spread(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            file = nodeid.partition("::")[0]
            return file if shares(config.rootpath / file) else nodeid

    return Spread(config, log)


@cache
def shares(file):
    """Whether a file has fixtures for all of its tests."""
    return 'scope="module"' in file.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def chosen(request):
    """Return ``chosen(test, name)``: the values of a parameter with which a test will be played.

    So that a fixture plays for all tests of its module no more than what was chosen with ``-m``.
    """

    def values(test, name):
        return [
            item.callspec.params[name]
            for item in request.session.items
            if item.module is request.module and item.originalname == test
        ]

    return values


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
