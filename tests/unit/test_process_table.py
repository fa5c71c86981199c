"""What /proc says of processes and of their groups."""

import os
import signal

from until import wait_until

from mpidist.launch.process_table import group_is_running, is_running


def test_a_zombie_does_not_keep_its_group():
    """It stays in the group until its parent has read its exit code, and nobody waits for it."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.setpgid(0, 0)
        os.write(writing, b"x")
        signal.pause()
    try:
        os.read(reading, 1)
        assert group_is_running(pid)
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not is_running(pid), 60)
        os.killpg(pid, 0)  # the group is still there
        assert not group_is_running(pid)
    finally:
        os.waitpid(pid, 0)
        os.close(reading)
        os.close(writing)
