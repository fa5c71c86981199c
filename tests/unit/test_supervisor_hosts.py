"""`mpidist launch` tests its hosts after a failure, and leaves out those that do not answer."""

import os
import signal
import socket
import time

import pytest

from mpidist.errors import ConfigError
from mpidist.launch.process_table import is_running
from mpidist.supervisor import (
    attempts,
    commands,
    host_tests,
    hosts,
    memory_folder,
    one_attempt,
)
from mpidist.supervisor.host_tests import refuses, silent_hosts
from mpidist.supervisor.hosts import AttemptPlace, LaunchedJob, doubted, usable
from mpidist.supervisor.policy import Attempt

ALL = {"n1": 2, "n2": 2, "n3": 2, "n4": 2}


def silent(hosts, command, **options):
    """Return the silent hosts, if `command` with the name of a host as $0 is the test."""
    return silent_hosts(hosts, lambda host: ["sh", "-c", command, host], os.environ, **options)


def test_a_host_that_hangs_is_found_by_the_others(tmp_path, monkeypatch):
    """The time that it has follows from theirs; what was started for it ends."""
    monkeypatch.setattr(host_tests, "PROBE", 1e6)
    monkeypatch.setattr(host_tests, "LEAST", 1.5)
    hang = f"[ $0 = n4 ] || exit 0; setsid sleep 500 & echo $! $$ >>{tmp_path}/pids; wait"
    assert silent(ALL, hang) == ["n4"]
    pids = (tmp_path / "pids").read_text().split()
    assert len(pids) == 4  # of two starts
    end = time.monotonic() + 10
    while any(is_running(pid) for pid in pids) and time.monotonic() < end:
        time.sleep(0.05)
    assert not any(is_running(pid) for pid in pids)


def test_a_launcher_that_hangs_once_is_started_again(tmp_path, monkeypatch):
    """As one start in fifteen of Open MPI 5.0.11 did, of a program that ends at once."""
    monkeypatch.setattr(host_tests, "LEAST", 2.0)
    assert silent(ALL, f"[ $0 = n4 ] && mkdir {tmp_path}/begun && sleep 500; true") == []


def test_slow_hosts_are_not_silent(monkeypatch):
    """On busy hosts all are slow: none is left out that is as slow as the others."""
    monkeypatch.setattr(host_tests, "LEAST", 0.1)
    assert silent(ALL, "[ $0 = n4 ] && sleep 2; sleep 0.5") == []


def test_on_a_host_whose_daemon_is_dead_nothing_is_started():
    """So nothing is waited for."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        door = "127.0.0.1", server.getsockname()[1]
        assert silent(["n1", "n2"], "true", doors={"n1": door, "n2": door}) == []
        assert not refuses(*door)
    begun = []

    def words(host):
        begun.append(host)
        return ["true"]

    assert silent_hosts(["n1", "n2"], words, os.environ, {"n1": door}) == ["n1"]
    assert begun == ["n2"]
    assert not refuses("no.such.host.invalid", door[1])


def test_a_failure_is_no_answer():
    assert silent(ALL, "[ $0 != n2 ]") == ["n2"]
    missing = silent_hosts(["a", "b"], lambda host: ["/no/such/launcher"], os.environ)
    assert missing == ["a", "b"]


def test_a_test_gets_the_signals_that_mpidist_launch_blocks():
    """Open MPI's launcher waits for SIGCHLD, and ends by SIGTERM."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, one_attempt.HEARD)
    try:
        blocked = "exit $((0x$(sed -n 's/^SigBlk:\t//p' /proc/self/status) != 0))"
        assert silent(ALL, blocked) == []
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


# ------------------------------------------------------------------------------- which are used


class Cluster:
    """A cluster in place of Slurm's commands: which nodes are lost, away, and silent."""

    def __init__(self, monkeypatch):
        self.lost, self.away, self.silent, self.tests = set(), set(), set(), []
        self.silent_to_launcher = set()
        monkeypatch.setattr(
            commands, "slurm_left", lambda env: [h for h in ALL if h not in self.lost]
        )
        monkeypatch.setattr(commands, "slurm_away", lambda hosts: self.away & set(hosts))
        monkeypatch.setattr(commands, "slurm_doors", self.doors)
        monkeypatch.setattr(commands, "kind_of", lambda words: "openmpi")
        monkeypatch.setattr(hosts, "silent_hosts", self.test)

    def doors(self, hosts):
        raise ConfigError("it does not say")

    def test(self, hosts, words, environment, doors):
        first = words(hosts[0])
        self.tests.append((list(hosts), first, environment))
        found = self.silent if first[0] == "srun" else self.silent | self.silent_to_launcher
        return [host for host in hosts if host in found]


@pytest.fixture
def cluster(monkeypatch):
    return Cluster(monkeypatch)


def job(tmp_path, **changes):
    return LaunchedJob(("x",), 8, tmp_path, ("mpirun",), ALL, slurm=True)._replace(**changes)


EVERYWHERE = AttemptPlace(ALL, tuple(ALL))


def test_a_silent_host_is_left_out_and_used_again(cluster, tmp_path, capsys):
    """Slurm still believes in it: only the test finds it, and each attempt has its own."""
    given = job(tmp_path)
    assert usable(given, EVERYWHERE) == AttemptPlace(ALL, tuple(ALL), named=False)
    assert capsys.readouterr().err == ""
    cluster.silent = {"n4"}
    place = usable(given, EVERYWHERE)
    assert (list(place.hosts), place.left, place.named) == (["n1", "n2", "n3"], tuple(ALL), True)
    assert place.left_out(given) == ["n4"]
    assert hosts.room(given, place.hosts) == 6
    assert capsys.readouterr().err == "mpidist launch: n4 does not answer and is left out\n"
    cluster.silent = {"n2", "n3"}
    assert list(usable(given, place).hosts) == ["n1", "n4"]
    said = capsys.readouterr().err
    assert said.splitlines() == [
        "mpidist launch: n2, n3 do not answer and are left out", "mpidist launch: used again: n4",
    ]  # fmt: skip


@pytest.mark.parametrize("slurm", [True, False])
def test_the_only_host_is_named_again(cluster, tmp_path, slurm):
    """It need not be the host of `mpidist launch`; and Slurm's variables stay as they are."""
    only = {"n1": 4}
    given = job(tmp_path, hosts=only, slurm=slurm)
    place = usable(given, AttemptPlace(only, ("n1",), named=not slurm))
    words = commands.command(4, given.words, place.hosts, restricted=place.named)
    assert words == (["mpirun", "-n", "4"] if slurm else ["mpirun", "--host", "n1:4", "-n", "4"])
    environ = {"SLURM_JOB_NODELIST": "n1", "SLURM_NNODES": "1"}
    assert commands.slurm_environ(environ, list(only), place.left, 4) == {}
    assert not cluster.tests


def test_nodes_that_slurm_has_lost_are_not_tested(cluster, tmp_path, capsys):
    cluster.lost, cluster.away, cluster.silent = {"n1"}, {"n3"}, {"n4"}
    place = usable(job(tmp_path), EVERYWHERE)
    assert (list(place.hosts), place.left) == (["n2"], ("n2", "n3", "n4"))
    assert cluster.tests[0][0] == ["n2", "n4"]
    assert "not there: n1, n3\n" in capsys.readouterr().err
    # The step must not wait for the cores that the step of the ended attempt may still have.
    assert cluster.tests[0][2]["SLURM_OVERLAP"] == "1"


def test_a_start_that_has_started_nothing(cluster, tmp_path):
    """The launcher itself tests the hosts, since Slurm can start programs there."""
    cluster.silent, cluster.silent_to_launcher = {"n2"}, {"n3"}
    assert list(usable(job(tmp_path), EVERYWHERE).hosts) == ["n1", "n3", "n4"]
    assert list(usable(job(tmp_path), EVERYWHERE, unstarted=True).hosts) == ["n1", "n4"]
    by_srun, by_launcher = (each[:2] for each in cluster.tests[1:])
    assert by_srun[1][0] == "srun"
    assert by_launcher[0] == ["n1", "n3", "n4"]
    assert by_launcher[1][0] == "mpirun"
    assert by_launcher[1][-1] == "true"


def test_if_no_host_answers_the_test_is_at_fault(cluster, tmp_path, capsys):
    """Such as an srun that does not know an option: all hosts are used, as without a test."""
    cluster.silent = set(ALL)
    assert usable(job(tmp_path), EVERYWHERE).hosts == ALL
    assert "no host answers, so all hosts are used" in capsys.readouterr().err


def test_an_exit_code_of_0_with_a_lost_host_is_no_end(cluster, tmp_path):
    """Open MPI's launcher ends with 0 if a host is lost; heartbeats prove more."""
    done = Attempt(8, 0, 0.0)
    assert doubted(job(tmp_path), done, EVERYWHERE) == done
    cluster.silent = {"n4"}
    assert not doubted(job(tmp_path), done, EVERYWHERE).finished
    assert "no answer of n4" in doubted(job(tmp_path), done, EVERYWHERE).text()
    proven = done._replace(told=8, left=8)
    assert doubted(job(tmp_path), proven, EVERYWHERE) == proven
    alone = AttemptPlace({"n1": 8}, ("n1",))
    assert doubted(job(tmp_path, hosts={"n1": 8}), done, alone) == done


# ------------------------------------------------------------------------- attempts, with scripts

LAUNCHER = """#!/bin/sh
case "$*" in
*--version*) echo "mpirun (Open MPI) 5.0.11"; exit;;
*--host\\ n4:1\\ *) [ -e "$0-dead" ] && exec sleep 500;;
esac
while [ "$1" != -n ]; do echo "$1" >>"$0-words"; shift; done
shift 2
while [ "$1" = -x ]; do shift 2; done
exec "$@"
"""


def test_a_job_goes_on_without_a_lost_host(tmp_path, monkeypatch, capfd):
    """Its copies are removed everywhere, also where the last attempt did not run."""
    monkeypatch.setattr(memory_folder, "MEMORY", tmp_path)
    launcher = tmp_path / "mpirun"
    launcher.write_text(LAUNCHER)
    launcher.chmod(0o755)
    lose_n4 = f'touch "{launcher}-dead"; [ $MPIDIST_ATTEMPT = 1 ]'
    given = job(
        tmp_path / "own", program=("sh", "-c", lose_n4), words=(str(launcher),), slurm=False
    )
    assert attempts.run(given) == 0
    said = capfd.readouterr().err.splitlines()
    assert said[0] == "mpidist launch: n4 does not answer and is left out"
    assert "again with 6 ranks on 3 hosts, from the newest good step" in said[1]
    words = (tmp_path / "mpirun-words").read_text()
    assert words.count("n1:2,n2:2,n3:2\n") == 1
    # The test after the failure, the one of an exit code of 0, and the end of the copies.
    assert words.split().count("n3:1") == 3
