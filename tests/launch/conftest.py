"""What the tests here share: several launches at once."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from mpidist.launch.launchers import launch

#: The launch of a short program waits for its launcher half of the time.
AT_ONCE = 3


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
