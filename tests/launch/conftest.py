"""What the tests here share: several launches at once."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from mpidist.testing.launch import launch

#: The launch of a short program waits for its launcher half of the time.
AT_ONCE = 3


@pytest.fixture(scope="session")
def launches():
    """Return ``launches({key: (ranks, words)}, **options)``: by key, what came of it and when.

    For programs that may be slow: three run at a time.
    """

    def one(ranks, words, options):
        result = launch(ranks, words, **{"timeout": 120, **options})
        return result, time.time()

    def run(wanted, **options):
        with ThreadPoolExecutor(AT_ONCE) as pool:
            jobs = {key: pool.submit(one, *each, options) for key, each in wanted.items()}
        return {key: job.result() for key, job in jobs.items()}

    return run
