"""The heartbeat records that ranks write and that their supervisor reads."""

import itertools
import json
import os
import socket
import subprocess
import time

import pytest
from test_supervisor import HOSTS, attempt

from mpidist.errors import ConfigError
from mpidist.launch import heartbeat, process_table
from mpidist.supervisor import attempts as supervise
from mpidist.supervisor import hosts as places
from mpidist.supervisor.history import next_attempt, note_event, read_history
from mpidist.supervisor.policy import UNSTARTED, Attempt, Policy, decide


def test_a_rank_tells_and_is_read(tmp_path, monkeypatch):
    assert heartbeat.read_heartbeats(tmp_path) == []
    one = heartbeat.Pulse(tmp_path, 3)
    assert heartbeat.read_heartbeats(tmp_path)[0][:5] == (3, 0, None, None, False)
    one.note(0)
    one.note(1)
    (tmp_path / "rank-4").write_bytes(b"torn")
    (told,) = heartbeat.read_heartbeats(tmp_path)
    assert (told.step, told.first, told.pid, told.host) == (1, 0, os.getpid(), os.uname().nodename)
    assert (told.heard, told.failed) == (False, False)
    monkeypatch.setattr(heartbeat, "_pulse", one)
    heartbeat.hear()
    heartbeat.fail()
    one.leave()
    (told,) = heartbeat.read_heartbeats(tmp_path)
    assert (told.left, told.heard, told.failed) == (True, True, True)
    assert (told.code, told.deaths, told.gave_up) == (-1, 0, 0)
    heartbeat.note_exit(3)
    heartbeat.note_deaths(2)
    assert heartbeat.give_up()
    (told,) = heartbeat.read_heartbeats(tmp_path)
    assert (told.code, told.deaths, told.gave_up) == (3, 2, 1)
    with pytest.raises(FileExistsError):
        heartbeat.Pulse(tmp_path, 3)


def test_without_a_launcher_nothing_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(heartbeat, "_pulse", None)
    heartbeat.join({})
    heartbeat.note_steps(3)
    heartbeat.note_exit(3)
    heartbeat.note_deaths(3)
    assert not heartbeat.give_up()
    assert heartbeat._pulse is None
    # A helper that a rank has started is not that rank.
    (tmp_path / "rank-0").write_bytes(b"")
    heartbeat.join({heartbeat.FOLDER: str(tmp_path)})
    assert heartbeat._pulse is None


def test_history_is_read_again(tmp_path):
    """A requeued job keeps its id and folder, and with them what it has spent."""
    attempts = [attempt(step=k, seconds=1.5) for k in range(3)]
    assert read_history(tmp_path) == []
    for one in attempts:
        note_event(tmp_path, "attempt", one._asdict())
        note_event(tmp_path, "decision", decide([one], Policy(), 4, 4)._asdict())
    assert read_history(tmp_path) == attempts
    # A launcher that was killed while it wrote: its half line counts for nothing, then and later.
    history = tmp_path / "history.jsonl"
    with history.open("a") as file:
        file.write('{"time": 1.0, "event": "atte')
    assert read_history(tmp_path) == attempts
    note_event(tmp_path, "attempt", attempts[0]._asdict())
    assert read_history(tmp_path) == [*attempts, attempts[0]]
    # Of a version that knew less.
    history.write_text(json.dumps({"event": "attempt", "ranks": 2, "code": 1, "ended": 0}) + "\n")
    assert read_history(tmp_path) == [Attempt(2, 1, 0)]
    for wrong in ("x", json.dumps({"event": "attempt"})):
        (tmp_path / "history.jsonl").write_text(wrong + "\n")
        with pytest.raises(ConfigError, match="not a history"):
            read_history(tmp_path)


def test_a_control_folder_of_the_users_keeps_what_is_not_ours(tmp_path):
    """``--control DIR`` may name a folder that holds everything else, too."""
    launcher = tmp_path / "launcher"
    launcher.write_text('#!/bin/sh\nshift 2\nexec "$@"\n')
    launcher.chmod(0o755)
    folder = tmp_path / "everything"
    (folder / "attempt-7").mkdir(parents=True)
    (folder / "results").touch()
    job = supervise.LaunchedJob(("true",), 1, folder, words=(str(launcher),))
    assert supervise.run(job) == 0
    assert sorted(path.name for path in folder.iterdir()) == ["attempt-7", "results"]
    job = job._replace(folder=tmp_path / "own")
    assert supervise.run(job) == 0
    assert not job.folder.exists()


def test_a_launcher_that_starts_nothing_for_once(tmp_path, capfd):
    """To the program it is the first attempt; no --max-restarts are needed; one line says it."""
    launcher = tmp_path / "launcher"
    once = f"[ $1 = -n ] && mkdir {tmp_path}/once 2>/dev/null && echo 'no listener' >&2 && exit 1"
    launcher.write_text(f'#!/bin/sh\n{once}\nshift 2\nexec "$@"\n')
    launcher.chmod(0o755)
    told = ("sh", "-c", f"echo $MPIDIST_ATTEMPT > {tmp_path}/attempt")
    job = supervise.LaunchedJob(told, 1, tmp_path / "own", words=(str(launcher),), policy=Policy(0))
    assert supervise.run(job) == 0
    assert (tmp_path / "attempt").read_text() == "0\n"
    said = [line for line in capfd.readouterr().err.splitlines() if "started nothing" in line]
    assert len(said) == 1
    assert said[0].startswith("mpidist launch: attempt 0 on 1 ranks: ")
    launcher.write_text("#!/bin/sh\necho 'no listener' >&2\nexit 9\n")
    assert supervise.run(job) == 9
    said = capfd.readouterr().err
    assert said.count("no listener") == UNSTARTED
    assert " s); 3 times in a row" in said


def test_hosts_are_left_out_of_the_next_attempt(tmp_path, capsys):
    job = supervise.LaunchedJob(("true",), 4, tmp_path, hosts=HOSTS)
    attempts = [attempt(1, 20, culprit="b", ended=time.time())] * 2
    whole = places.AttemptPlace(HOSTS, tuple(HOSTS))
    assert places.without_culprits(job, attempts[:1], whole) is whole
    place = places.without_culprits(job, attempts, whole)
    assert (list(place.hosts), place.left, place.named) == (
        ["a", "c", "d"],
        ("a", "b", "c", "d"),
        True,
    )
    assert places.room(job, place.hosts) == 3
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "left out" in said
    assert said.endswith(": b\n")
    nowhere = places.AttemptPlace(None)
    assert places.without_culprits(job, attempts, nowhere) is nowhere
    yesterday = [one._replace(ended=one.ended - 86400) for one in attempts]
    assert places.without_culprits(job, yesterday, whole) is whole


def test_a_launcher_that_was_killed_keeps_nobody_out(tmp_path):
    """A job requeued after its node went down finds an attempt that is not in its history."""
    for number, launcher in enumerate(("elsewhere 1 1", f"{socket.gethostname()} 1 1")):
        (tmp_path / f"attempt-{number}").mkdir()
        (tmp_path / f"attempt-{number}" / "launcher").write_text(launcher)
    assert next_attempt(tmp_path, 0) == 2
    assert (tmp_path / "attempt-1" / heartbeat.OVER).exists(), "its ranks end, wherever they are"
    (tmp_path / "attempt-2").mkdir()
    (tmp_path / "attempt-2" / "launcher").write_text(heartbeat.launcher_id())
    with pytest.raises(ConfigError, match="in use by another mpidist launch"):
        next_attempt(tmp_path, 0)
    assert not (tmp_path / "attempt-2" / heartbeat.OVER).exists()


def test_a_launcher_that_waits_keeps_others_out(tmp_path):
    """It waits up to a minute before it begins the next attempt."""
    with subprocess.Popen(["sleep", "60"]) as other:
        attempt = tmp_path / "attempt-0"
        attempt.mkdir()
        name = f"{socket.gethostname()} {other.pid} {process_table.born(other.pid)}"
        (attempt / heartbeat.LAUNCHER_FILE).write_text(name)
        (attempt / heartbeat.OVER).touch()
        with pytest.raises(ConfigError, match="in use by another mpidist launch"):
            next_attempt(tmp_path, 1)
        other.kill()
    assert next_attempt(tmp_path, 1) == 1
    (attempt / heartbeat.LAUNCHER_FILE).write_text(heartbeat.launcher_id())
    assert next_attempt(tmp_path, 1) == 1, "a program may run one job after another there"


def test_room_on_hosts():
    """Twice as many ranks as the hosts have slots is twice as many on those that are left, too."""
    for wanted, names in itertools.product((2, 4, 8), (["a"], ["a", "b"])):
        job = supervise.LaunchedJob(("true",), wanted, folder=None, hosts={"a": 2, "b": 2})
        assert places.room(job, dict.fromkeys(names, 2)) == wanted * len(names) // 2
    assert places.room(supervise.LaunchedJob(("true",), 4, folder=None), None) == 4
