"""What is asked of a running `mpidist launch` from outside: hosts, notices, more ranks."""

import os
import signal
import sys
import time

import pytest
from until import wait_until

from mpidist.cli.main import main
from mpidist.errors import ConfigError
from mpidist.launch import heartbeat
from mpidist.launch.process_table import is_running
from mpidist.supervisor import one_attempt, requests
from mpidist.supervisor.history import remove_control_folder
from mpidist.supervisor.hosts import LaunchedJob, grown, room, with_todays_hosts
from mpidist.supervisor.policy import Attempt, Policy, decide
from mpidist.supervisor.requests import JobRequest, Requests


def control_of(folder, launcher=None):
    """Make a control folder with two attempts, as a launcher makes it."""
    for k in range(2):
        (folder / f"attempt-{k}").mkdir()
    text = heartbeat.launcher_id() if launcher is None else launcher
    (folder / "attempt-1" / heartbeat.LAUNCHER_FILE).write_text(text)
    return folder


def test_more_ranks(tmp_path, capsys):
    """By the command, twice; each request is taken once."""
    control = control_of(tmp_path)
    asked = Requests(control)
    assert asked.look() is None
    assert main(["grow", str(control), "-n", "2"]) == 0
    assert "asked for 2 more" in capsys.readouterr().out
    (control / "grow-other").write_text("1")
    (control / "grow-torn").write_text("x")
    assert asked.look() == JobRequest("asked for 3 more ranks", 3)
    assert asked.look() is None
    assert not list(control.glob("*grow*"))


def test_a_request_while_the_next_attempt_begins(tmp_path):
    """Its folder does not say yet by which launcher."""
    control = control_of(tmp_path)
    (control / "attempt-2").mkdir()
    assert main(["grow", str(control), "-n", "2"]) == 0
    (control / "attempt-2" / heartbeat.LAUNCHER_FILE).touch()
    assert main(["grow", str(control), "-n", "2"]) == 0


def test_a_request_that_nobody_has_taken(tmp_path):
    """It came when the job was about to end: the next job in this folder does not get it."""
    control = control_of(tmp_path)
    (control / "attempt-0" / heartbeat.LAUNCHER_FILE).touch()
    (control / "grow-late").write_text("2")
    (control / ".grow-torn").touch()
    assert Requests(control).look() is None
    (control / "grow-late").write_text("2")
    (control / ".grow-torn").touch()
    remove_control_folder(control)
    assert not control.exists()


def test_a_request_that_cannot_be_read_loses_no_other(tmp_path):
    asked = Requests(tmp_path)
    (tmp_path / "grow-1").write_text("2")
    (tmp_path / "grow-2").mkdir()
    (tmp_path / "grow-3").write_text("3")
    assert asked.look() == JobRequest("asked for 5 more ranks", 5)


@pytest.mark.parametrize(
    ("more", "launcher", "words"),
    [
        ("0", None, "-n 0; expected one more rank, or several"),
        ("1", "gone", "does not run any more"),
        ("1", "", "does not run any more"),
        ("1", "none", "is not the control folder of a running mpidist launch"),
    ],
)
def test_a_request_that_is_refused(tmp_path, capsys, more, launcher, words):
    if launcher != "none":
        text = f"{os.uname().nodename} 999999999 1" if launcher == "gone" else launcher
        control_of(tmp_path, text)
    assert main(["grow", str(tmp_path), "-n", more]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("mpidist: error: mpidist grow: ")
    assert words in line


def test_a_notice_is_heard_once(tmp_path):
    """Until it has gone and comes again: the next attempt is not ended by the same one."""
    file = tmp_path / "notice"
    asked = Requests(tmp_path, str(file))
    assert asked.look() is None
    for _ in range(2):
        file.touch()
        assert asked.look() == JobRequest(f"notice by {file}")
        assert asked.look() is None
        file.unlink()
        assert asked.look() is None
    asked.close()


def test_a_notice_by_a_command(tmp_path, monkeypatch):
    monkeypatch.setattr(requests, "EVERY", 0.01)
    file = tmp_path / "notice"
    command = f"{sys.executable} -S -c 'import os; os.stat(\"{file}\")'"
    asked, found = Requests(tmp_path, command), []
    assert asked.look() is None
    file.touch()
    wait_until(lambda: found.append(asked.look()) or found[-1], 60)
    assert found[-1] == JobRequest(f"notice by {command}")
    asked.close()


@pytest.mark.parametrize("program", ["timeout 0.2 sh", "sh"])
def test_a_notice_leaves_no_process(tmp_path, monkeypatch, program):
    """Whether the command ends what it has started, or is ended together with it."""
    monkeypatch.setattr(requests, "EVERY", 0.01)
    monkeypatch.setattr(requests, "LONGEST", 0.5 if program == "sh" else 60.0)
    file = tmp_path / "pids"
    before = signal.pthread_sigmask(signal.SIG_BLOCK, one_attempt.HEARD)
    try:
        asked = Requests(tmp_path, f"{program} -c 'sleep 500 & echo $! >>{file}; wait'")
        wait_until(lambda: file.exists() and file.read_text().count("\n") > 2, 60)
        began = time.monotonic()
        asked.close()
        assert time.monotonic() - began < 60  # the `sleep` is not waited for
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    pids = file.read_text().split()
    wait_until(lambda: not any(map(is_running, pids)), 60, otherwise=lambda: pids)


def test_hosts_by_a_command(tmp_path, capsys):
    """They come and go; what is no list of hosts ends the first start, and no later one."""
    file = tmp_path / "hosts"
    file.write_text("a:2\nb:2\n")
    job = LaunchedJob(("true",), 4, tmp_path, hosts_from=("cat", str(file)))
    job = with_todays_hosts(job)
    assert job.hosts == {"a": 2, "b": 2}
    assert room(job, job.hosts) == 4
    file.write_text("b:2\nc\n")
    job = with_todays_hosts(job)
    assert job.hosts == {"b": 2, "c": 1}
    assert room(job, job.hosts) == 3
    assert "hosts: b:2, c:1" in capsys.readouterr().err
    for text in ("", "a:x", "a:2\na:1"):
        file.write_text(text)
        assert with_todays_hosts(job) == job
        (line,) = capsys.readouterr().err.splitlines()
        assert line.endswith("the previous hosts are used")
        assert "expected one HOST:RANKS on each line" in line
        with pytest.raises(ConfigError, match="expected one HOST:RANKS on each line"):
            with_todays_hosts(job._replace(hosts=None))
    file.unlink()
    with pytest.raises(ConfigError, match=r"it exits with code 1: .*No such file"):
        with_todays_hosts(job._replace(hosts=None))
    with pytest.raises(ConfigError, match="No such file"):
        with_todays_hosts(job._replace(hosts=None, hosts_from=("no-such-command",)))


def test_what_follows_a_request_for_more(tmp_path, capsys):
    """Another attempt, which is neither a failure nor a preemption."""
    attempt = Attempt(2, 75, 0.0, step=5, first=0, told=2, left=2, more=2)
    assert not attempt.failed
    policy = Policy(max_restarts=0, max_preemptions=0)
    assert decide([attempt], policy, 4, 4)[0::3] == ("relaunch", 4)
    assert decide([attempt], policy, 4, 3)[0::3] == ("relaunch", 3)
    # The program knows no such signal and was ended by it.
    assert decide([attempt._replace(code=138, left=0)], policy, 4, 4).what == "relaunch"
    # It had come to its end, or was stopped, before.
    assert decide([attempt._replace(code=0)], policy, 4, 4)[:2] == ("end", 0)
    assert decide([attempt._replace(asked=True)], policy, 4, 4)[:2] == ("end", 75)
    job = LaunchedJob(("true",), 3, tmp_path, hosts={"a": 2, "b": 2})
    assert grown(job, 1).ranks == 4
    assert capsys.readouterr().err == ""
    assert grown(job, 2).ranks == 4
    assert "the hosts have room for only 4 of 5 ranks" in capsys.readouterr().err
    assert grown(job._replace(hosts=None), 2).ranks == 5
