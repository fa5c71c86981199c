"""What makes unit tests cheap: no wait for the disk, and only what others leave of the cores."""

import contextlib
import os
from pathlib import Path

import pytest


def pytest_configure(config):
    """A worker that shall be nice is nice to the jobs of other sessions, too.

    Linux may group processes by session and divide the cores among the groups first (autogroup):
    niceness counts only within a group. The cluster's jobs have sessions of their own. But a
    quarter of the share of one of them is left, for tests here have deadlines, too.
    """
    if hasattr(config, "workerinput") and os.nice(0) > 0:
        with contextlib.suppress(OSError):
            os.setsid()
            Path("/proc/self/autogroup").write_text("6")


@pytest.fixture(autouse=True, scope="session")
def no_wait_for_the_disk():
    """Files need not outlive the machine here: what a killed process has written is there."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield
