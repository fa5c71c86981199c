"""What is usual, and not promised: other work on the machine may hold up any process for seconds.

Which of several ranks speaks first, or who is slow, is up to the machine then. A test of that looks
at up to three runs; what is promised belongs outside, where each run must keep it.
"""


def best_of_three(check, play, first=None):
    """Return ``check(play())``; where that fails, of another one, up to three.

    `first`: what has been played already.
    """
    result = play() if first is None else first
    for _ in range(2):
        try:
            return check(result)
        except Exception:
            result = play()
    return check(result)
