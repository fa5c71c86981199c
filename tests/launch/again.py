"""What is usual, and not promised: other work on the machine may hold up any process for seconds.

Which of several ranks speaks first, or who is slow, is up to the machine then. A test of that looks
at up to three runs; what is promised belongs outside, where each run must keep it. How often
another run was needed stands at the end of pytest's report.
"""

import os
from collections import Counter

#: By test, how many runs were played because the one before was not as usual.
played_again: Counter[str] = Counter()


def best_of_three(check, play, first=None):
    """Return ``check(play())``; where that fails an assertion, of another one, up to three.

    `first`: what has been played already. Any other exception is a mistake of the test or of what
    it tests, and is raised at once.
    """
    result = play() if first is None else first
    for _ in range(2):
        try:
            return check(result)
        except AssertionError:
            played_again[os.environ.get("PYTEST_CURRENT_TEST", "?").rpartition(" (")[0]] += 1
        result = play()
    return check(result)
