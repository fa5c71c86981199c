"""The function `until`, with which all tests wait for something that another process does."""

import time


def wait_until(test, seconds=60.0, *, otherwise="", job=None, every=0.01):
    """Look every `every` seconds until `test()` holds, and return what it gave.

    `otherwise`: what a failure shows, or a function that returns it. `job`: a process (with
    ``poll``) without which nothing would happen any more; that it has ended is told at once.

    Raises AssertionError after `seconds`.
    """
    deadline = time.monotonic() + seconds
    while True:
        # Before the look: what is there when the job has ended may be what is waited for.
        ended = job is not None and job.poll() is not None
        late = time.monotonic() > deadline
        if result := test():
            return result
        if ended or late:
            said = otherwise() if callable(otherwise) else otherwise
            why = "the job has ended" if ended else f"not within {seconds:g} s"
            raise AssertionError(f"{why}: {said}" if said else why)
        time.sleep(every)


def holds_within(test, seconds=10.0, every=0.01):
    """Whether `test()` holds at some look within `seconds`; for what is judged afterwards."""
    try:
        wait_until(test, seconds, every=every)
    except AssertionError:
        return False
    return True
