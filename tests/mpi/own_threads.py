"""Threads that each call mpidist on a communicator of their own."""

from concurrent.futures import ThreadPoolExecutor

import mpidist as md


def in_threads(comm, count, work):
    """Call ``work(mine, k)`` in `count` threads, each with a duplicate of `comm`; raise errors."""
    comms = [comm.Dup() for _ in range(count)]
    with ThreadPoolExecutor(count) as pool:
        calls = [pool.submit(work, mine, k) for k, mine in enumerate(comms)]
    for call in calls:
        call.result()
    for mine in comms:
        md.free(mine)
        mine.Free()
