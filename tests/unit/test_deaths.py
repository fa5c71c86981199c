"""The launcher sees which ranks of its host end, in their order, and ignores other processes."""

import os
import signal
import socket
import subprocess
import sys
import time

import pytest
from until import holds_within

from mpidist.launch.heartbeat import Sign
from mpidist.launch.process_table import born
from mpidist.supervisor.deaths import Deaths


@pytest.fixture
def processes():
    started = [subprocess.Popen([sys.executable, "-c", "input()"], stdin=-1) for _ in range(3)]
    yield started
    for process in started:
        process.kill()
        process.communicate()


def sign(rank, pid, **more):
    known = {"host": socket.gethostname(), "born": int(born(pid) or 0), **more}
    return Sign(rank, 0, None, None, False, pid, **known)


def test_in_their_order_and_at_once(processes):
    """R140: whoever waits for a signal is woken within 50 ms; files are closed again."""
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
    deaths, waited = Deaths(), []
    try:
        deaths.watch([sign(k, process.pid) for k, process in enumerate(processes)])
        for k in (1, 2, 0):
            while signal.sigtimedwait([signal.SIGCHLD], 0):
                pass
            start = time.monotonic()
            processes[k].kill()
            while processes[k].pid not in deaths.order and time.monotonic() < start + 10:
                signal.sigtimedwait([signal.SIGCHLD], 10)
            waited.append(time.monotonic() - start)
            processes[k].wait()
        assert deaths.order == [processes[k].pid for k in (1, 2, 0)]
        assert min(waited) < 0.05
    finally:
        deaths.close()
        deaths.close()
        while signal.sigtimedwait([signal.SIGCHLD], 0):
            pass
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208


def test_who_is_no_rank_of_this_host_is_left_alone(processes):
    """Another host's number, one that has come again, one of a container, one that is gone."""
    mine, far, other = processes
    deaths = Deaths()
    deaths.watch([
        sign(0, mine.pid), sign(1, far.pid, host="far"), sign(2, other.pid, born=1),
        sign(3, 1 << 22),
    ])  # fmt: skip
    deaths.kill()
    assert holds_within(lambda: deaths.order == [mine.pid])
    deaths.kill()
    time.sleep(0.05)
    assert [process.poll() for process in (far, other)] == [None, None]
    assert mine.wait() == -signal.SIGKILL
    deaths.close()
