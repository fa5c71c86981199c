"""Clusters come and go: nothing of them is left, however the test that used them ended."""

import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from mpidist.testing import shaped_network, slurm_cluster
from mpidist.testing.network import unavailable as no_network
from mpidist.testing.slurm import unavailable as no_slurm

needs_slurm = pytest.mark.skipif(no_slurm() is not None, reason=f"no Slurm cluster: {no_slurm()}")
needs_network = pytest.mark.skipif(
    no_network() is not None, reason=f"no shaped network: {no_network()}"
)


def traces():
    """Folders, mounts and processes of boxes on this machine, and all of /dev/shm."""
    folders = {p.name for p in Path(tempfile.gettempdir()).glob("onebox-*")}
    mounts = {line for line in Path("/proc/mounts").read_text().splitlines() if "onebox-" in line}
    names = set()
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
        if "onebox-" in line or "slurmd -D" in line:
            names.add((entry.name, line))
    return folders, mounts, names


def gone(before, patience=30):
    """Wait until no trace is left that was not there before."""
    deadline = time.monotonic() + patience
    while any(now - then for now, then in zip(traces(), before, strict=True)):
        if time.monotonic() > deadline:
            return [now - then for now, then in zip(traces(), before, strict=True)]
        time.sleep(0.1)
    return []


@pytest.mark.slurm
@needs_slurm
def test_two_clusters_one_after_the_other(tmp_path):
    before = traces()
    for _ in range(2):
        with slurm_cluster(nodes=1, directory=tmp_path) as cluster:
            script = tmp_path / "left.sbatch"
            # A job that leaves a process in the background and is still running at the end.
            script.write_text("#!/bin/bash\nsetsid sleep 500 &\nsleep 500\n")
            job = cluster.submit(script)
            while cluster.job(job).state != "RUNNING":
                time.sleep(0.1)
        assert gone(before) == []


@pytest.mark.slurm
@needs_slurm
@pytest.mark.parametrize("raised", [KeyboardInterrupt, AssertionError])
def test_cluster_is_gone_after_an_exception(raised):
    before = traces()
    with pytest.raises(raised), slurm_cluster(nodes=1):
        raise raised
    assert gone(before) == []


@pytest.mark.slurm
@needs_slurm
@needs_network
def test_all_is_gone_after_kill_9():
    before = traces()
    code = """
import os
from mpidist.testing import shaped_network, slurm_cluster
with slurm_cluster(nodes=1) as cluster, shaped_network(hosts=2) as net:
    cluster.run(["sinfo"]).check()
    os.kill(os.getpid(), 9)
"""
    done = subprocess.run([sys.executable, "-c", code], timeout=120)
    assert done.returncode == -9
    assert gone(before) == []


@pytest.mark.network
@needs_network
def test_network_is_gone_afterwards():
    def devices():
        return set(Path("/sys/class/net").iterdir())

    before, links = traces(), devices()
    with shaped_network(hosts=2, rate="100mbit") as net:
        net.box.start(["sleep", "500"])
        assert devices() == links, "the machine's own network must not change"
    assert gone(before) == []
    assert devices() == links
