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


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Tests that share what a fixture of their module has made go to one worker of pytest-xdist.

    All others may go to any (``--dist loadgroup``), so that none has the longest file at the end.
    """
    for item in items:
        fixtures = item._fixtureinfo.name2fixturedefs.values()
        if any(each[-1].scope == "module" for each in fixtures):
            item.add_marker(pytest.mark.xdist_group(item.module.__name__))


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
