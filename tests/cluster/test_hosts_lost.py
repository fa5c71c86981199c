"""Elastic jobs on several hosts, of which one dies, is stopped or cannot be reached: side by side.

Nobody measures them. The times after a loss are in `test_elastic.py` and `test_node_lost.py`.
"""

import os
import re
import signal
import time
from contextlib import suppress
from functools import partial

import pytest
from elastic_jobs import (
    SHAPE,
    SOME,
    ended,
    launch_elastic,
    mpirun_ulfm,
    next_step,
    program,
    result,
    send,
    told_rightly,
)
from interpreters import job_environment
from nodes import ranks_on, rows
from onebox.link_away import link_away
from onebox.network import shaped_network
from onebox.network import unavailable as no_network
from onebox.slurm import slurm_cluster, unavailable
from until import wait_until

from mpidist.launch.launchers import find_launcher, launch_environment


def stopped(python, programs, folder):
    """n4 is stopped until the job has ended; returns what that says and when n4 was stopped."""
    if reason := unavailable():
        pytest.skip(f"no Slurm cluster: {reason}")
    with slurm_cluster(nodes=4) as cluster:
        words = f"-n 8 --heartbeat 3 --launcher mpirun -- {program(programs, folder)}"
        number = launch_elastic(cluster, python, folder, words)
        wait_until(lambda: len(rows(folder, 7)) > 20, 60, every=0.05)
        pids, begin = send(cluster, "n4", signal.SIGSTOP), time.time()
        try:
            output = ended(cluster, number)
        finally:
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)
        wait_until(lambda: not ranks_on(cluster, "n4"), 20, otherwise="ranks go on")
        return output, begin


def first_lost(python, programs, folder):
    """n1 is killed, and Slurm starts the job again."""
    if reason := unavailable():
        pytest.skip(f"no Slurm cluster: {reason}")
    with slurm_cluster(nodes=4) as cluster:
        words = f"-n 8 --launcher mpirun -- {program(programs, folder, 2000)}"
        number = launch_elastic(cluster, python, folder, words, shape=[*SHAPE, "--requeue"])
        wait_until(lambda: len(rows(folder, 7)) > 20, 60, every=0.05)
        send(cluster, "n1", signal.SIGKILL)
        for node in ("n2", "n3", "n4"):
            wait_until(lambda node=node: not ranks_on(cluster, node), 20, otherwise=node)
        # What slurmctld finds by itself after SlurmdTimeout.
        down = ["scontrol", "update", "nodename=n1", "state=down", "reason=test"]
        cluster.run(down).check()
        wait_until(lambda: cluster.job(number).restarts == 1, 60)
        cluster.run(["scancel", str(number)]).check()


def link_stays_away(python, programs, folder):
    """The link of the fourth host is down until the job has ended; returns that and its address."""
    if reason := no_network():
        pytest.skip(f"no shaped network: {reason}")
    mpirun = find_launcher(python)
    with shaped_network(hosts=4) as net:
        (folder / "hosts").write_text("".join(f"{net.address(k)}:1\n" for k in range(1, 5)))
        launcher = (
            f"{mpirun} --map-by ppr:1:node --bind-to none --mca mpi_yield_when_idle 1 "
            f"--prtemca plm_ssh_agent {net.agent} --prtemca prte_if_include eth0 "
            "--mca btl_tcp_if_include eth0 --mca pml ob1 --mca btl tcp,self"
        )
        words = ["--elastic", "-n", "4", "--launcher", launcher, "--stall-timeout", "3"]
        words += ["--hosts-from", f"cat {folder}/hosts", "--", python]
        env = {**launch_environment(mpi=mpirun), **job_environment(python)}
        job = net.box.start(
            [python, "-m", "mpidist", "launch", *words, *program(programs, folder).split()[1:]],
            env={**env, "TMPDIR": str(net.box.folder)}, cwd=folder,
        )  # fmt: skip
        try:
            wait_until(lambda: len(rows(folder, 3)) > 20, 60, every=0.05)
            net.box.run(["ip", "-n", "h4", "link", "set", "eth0", "down"]).check()
            return job.finish(90), net.address(4)
        finally:
            job.finish(0)


def node_lost(python, programs, folder):
    """All processes of n4 are killed; returns what the job says, and the ranks that are left."""
    if reason := unavailable():
        pytest.skip(f"no Slurm cluster: {reason}")
    with slurm_cluster(nodes=4) as cluster:
        number = mpirun_ulfm(cluster, python, programs, folder, 5000, 0.01)
        wait_until(lambda: len(rows(folder, 7)) > 20, every=0.05)
        assert (folder / "7.host").read_text() == "n4"
        send(cluster, "n4", signal.SIGKILL)
        output = wait_until(
            lambda: "mpirun ended" in cluster.job(number).output and cluster.job(number).output, 30
        )
        for node in ("n2", "n3"):
            wait_until(lambda node=node: not ranks_on(cluster, node), 20, otherwise=node)
        return output


def apart(python, programs, folder):
    """One host is alone until the others have done their last step; returns the job's end."""
    if reason := no_network():
        pytest.skip(f"no shaped network: {reason}")

    def gone_on():
        noted = [path for path in (folder / rank for rank in "013") if path.exists()]
        return [path.read_text().endswith(" 39\n") for path in noted] == [True] * 3

    with shaped_network(hosts=4) as net:
        for host in range(1, 5):  # it gives up after 4 s in place of 15 minutes
            words = ["sysctl", "-w", "net.ipv4.tcp_retries2=3"]
            net.box.run(["ip", "netns", "exec", f"h{host}", *words]).check()
        job = [programs / "network_away.py", "apart", folder, "40"], ["--with-ft", "ulfm"]
        return link_away(net, python, {folder: job}, 40.0, until=gone_on)[folder].done


def two_on_each_host(python, programs, folder):
    """The link of a host is away for twice as long as a rank may be late."""
    if reason := no_network():
        pytest.skip(f"no shaped network: {reason}")
    with shaped_network(hosts=4) as net:
        job = [programs / "network_away.py", "deadline", folder, "30"], ["--with-ft", "ulfm"]
        return link_away(net, python, {folder: job}, 8.0, ranks_per_host=2)[folder]


@pytest.fixture(scope="module")
def scenes(openmpi, programs):
    named = {
        "stopped": stopped, "link stays away": link_stays_away, "apart": apart,
        "two on each host": two_on_each_host, "node lost": node_lost, "first lost": first_lost,
    }  # fmt: skip
    return {name: partial(scene, openmpi, programs) for name, scene in named.items()}


@pytest.mark.slurm
@pytest.mark.parametrize("scene", ["stopped"], indirect=True)
def test_a_node_is_stopped(scene):
    """It may wake at any time later: its ranks then find that their attempt is over."""
    (output, begin), folder = scene
    assert re.findall(r"rank \d of 6 has (\w{64})", output) == [result(SOME)] * 6, output
    # The one whose last sign is older may be seen to be late before the other.
    late = "(rank 6 on n4|rank 7 on n4|rank 6 on n4, rank 7 on n4)"
    assert re.search(rf"attempt 0 is ended: {late} gave no sign for 3 s", output), output
    assert "n4 does not answer and is left out" in output
    print(f"\nfrom the stop of a node to the next step: {next_step(folder, 6, begin):.2f} s")


@pytest.mark.slurm
@pytest.mark.parametrize("scene", ["first lost"], indirect=True)
def test_the_first_node_is_lost(scene):
    """With it `mpidist launch`: no rank stays on the others, and Slurm starts the job again."""


@pytest.mark.network
@pytest.mark.parametrize("scene", ["link stays away"], indirect=True)
def test_a_link_stays_away(scene):
    """Without shared files over the network nobody sees it, but that no step is done."""
    (done, address), _ = scene
    found = re.findall(r"rank \d of 3 has (\w{64})", done.check().stdout)
    assert found == [result(SOME)] * 3, done.stderr
    assert re.search(r"attempt 0 is ended: no step after \d+ for 3 s", done.stderr)
    assert f"{address} does not answer and is left out" in done.stderr


@pytest.mark.slurm
@pytest.mark.parametrize("scene", ["node lost"], indirect=True)
def test_the_job_ends_without_a_node(scene):
    """Open MPI 5.0.11 cannot go on without one of its daemons: the job is over, nothing hangs.

    Its exit code is then 0, so that alone does not say that the program has come to its end.
    """
    output, _ = scene
    assert "PRTE has lost communication with a remote daemon" in output
    assert "mpirun ended with 0" in output


@pytest.mark.network
@pytest.mark.parametrize("scene", ["apart"], indirect=True)
def test_a_network_falls_apart(scene):
    """TCP gives up, and each side takes the other one for dead: only the larger one may go on.

    The smaller side ends itself. It says so on its own host: the launcher may have given that host
    up before. The link is back only after the larger side has done its last step, for Open MPI may
    then tell its ranks whom the smaller side took for dead, and end them.
    """
    done, folder = scene
    hashes = dict(re.findall(r"rank (\d) has (\w{64})", done.stdout))
    assert sorted(hashes) == ["0", "1", "3"], done
    assert len({*hashes.values()}) == 1
    alone = (folder / "2.stderr").read_text()
    ours, theirs = "3 ranks have died or cannot be reached", "reported dead by someone else"
    assert ours in alone or theirs in alone, alone
    assert "rank 2 of 4 on h3 died at step" in (folder / "0.stderr").read_text()


@pytest.mark.network
@pytest.mark.parametrize("scene", ["two on each host"], indirect=True)
def test_ranks_without_a_network_are_not_evicted(scene):
    """R45: two ranks wait on each host, twice as long as a rank may be late (4 s)."""
    found, _ = scene
    hashes = re.findall(r"rank (\d) has (\w{64})", found.done.check().stdout)
    assert len(hashes) == 8
    assert len({bits for _, bits in hashes}) == 1
    assert "evicted" not in found.done.stderr
    assert "died" not in found.done.stderr
    assert told_rightly(found)
