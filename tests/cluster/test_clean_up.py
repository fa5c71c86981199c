"""A one-box cluster leaves nothing behind, however the test that used it has ended."""

import os
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

import pytest
from onebox.network import shaped_network
from onebox.network import unavailable as no_network
from onebox.slurm import slurm_cluster
from onebox.slurm import unavailable as no_slurm
from python_path import python_path
from until import holds_within, wait_until

needs_slurm = pytest.mark.skipif(no_slurm() is not None, reason=f"no Slurm cluster: {no_slurm()}")
needs_network = pytest.mark.skipif(
    no_network() is not None, reason=f"no shaped network: {no_network()}"
)


@pytest.fixture
def own(monkeypatch):
    """A folder for all boxes of this test: others on this machine come and go as they like."""
    # Not below pytest's folders: the path of a socket must be short.
    with tempfile.TemporaryDirectory(prefix="own-") as folder:
        monkeypatch.setenv("TMPDIR", folder)
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)


def traces(own):
    """Folders, mounts and processes of the boxes made in the folder `own`."""
    found = [path.name for path in own.glob("onebox-*")]
    made = f"{own}/onebox-"
    found += [line for line in Path("/proc/mounts").read_text().splitlines() if made in line]
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            # Whatever runs in a box, jobs too, has its folder in the environment.
            told = (entry / "cmdline").read_bytes(), (entry / "environ").read_bytes()
        except OSError:
            continue
        if any(made.encode() in text for text in told):
            found.append(f"{entry.name}: {told[0].replace(bytes(1), b' ').decode()}")
    return found


def gone(own, patience=60):
    """Wait until nothing is left; return what is."""
    holds_within(lambda: not traces(own), patience, every=0.1)
    return traces(own)


@pytest.mark.slurm
@needs_slurm
def test_two_clusters_one_after_the_other(tmp_path, own):
    for _ in range(2):
        with slurm_cluster(nodes=1, directory=tmp_path) as cluster:
            script = tmp_path / "left.sbatch"
            # A job that leaves a process in the background and is still running at the end.
            script.write_text("#!/bin/bash\nsetsid sleep 500 &\nsleep 500\n")
            job = cluster.submit(script)
            wait_until(
                lambda: sum("sleep 500" in each for each in traces(own)) >= 2,
                otherwise=partial(cluster.job, job), every=0.1,
            )  # fmt: skip
        assert gone(own) == []


@pytest.mark.slurm
@needs_slurm
@pytest.mark.parametrize("raised", [KeyboardInterrupt, AssertionError])
def test_cluster_is_gone_after_an_exception(raised, own):
    with pytest.raises(raised, match="slurmd -D -N n1"), slurm_cluster(nodes=1):
        raise raised(traces(own))
    assert gone(own) == []


@pytest.mark.slurm
@needs_slurm
@needs_network
def test_all_is_gone_after_kill_9(own):
    code = """
import os
from onebox.network import shaped_network
from onebox.slurm import slurm_cluster
with slurm_cluster(nodes=1) as cluster, shaped_network(hosts=2) as net:
    cluster.run(["sinfo"]).check()
    os.kill(os.getpid(), 9)
"""
    environ = {**os.environ, "PYTHONPATH": python_path()}
    done = subprocess.run([sys.executable, "-c", code], timeout=120, env=environ)
    assert done.returncode == -9
    assert gone(own) == []


@pytest.mark.network
@needs_network
def test_network_is_gone_afterwards(own):
    def devices():
        return set(Path("/sys/class/net").iterdir())

    links = devices()
    with shaped_network(hosts=2, rate="100mbit") as net:
        net.box.start(["sleep", "500"])
        assert devices() == links, "the machine's own network must not change"
    assert gone(own) == []
    assert devices() == links
