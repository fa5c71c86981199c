"""The launcher's half of a hand-over to more ranks: who has the run, whatever happens when."""

import resource
import signal
import time
from types import SimpleNamespace

import pytest

from mpidist.errors import ConfigError
from mpidist.launch import heartbeat
from mpidist.launch.heartbeat import Sign
from mpidist.supervisor import attempts, memory_folder, one_attempt
from mpidist.supervisor.attempts import _with_ready_ranks
from mpidist.supervisor.growth import Growth, place_of_state
from mpidist.supervisor.history import free_number
from mpidist.supervisor.hosts import LaunchedJob
from mpidist.supervisor.policy import Action
from mpidist.supervisor.requests import Requests


def sign(rank, host="a"):
    return Sign(rank, 1, 5, 0, False, 10 + rank, host)


class Waiting:
    """An attempt that gets ready, as `RunningAttempt` shows itself."""

    def __init__(self, folder):
        folder.mkdir()
        self.folder, self.ranks = folder, 2
        self.signs, self.why, self.ended = [sign(0), sign(1)], "", False

    def fault(self, now):
        return self.why

    def end(self):
        self.ended = True


@pytest.fixture
def growth(tmp_path):
    (tmp_path / "attempt-0").mkdir()
    (tmp_path / "attempt-0" / heartbeat.CAN).touch()
    return Growth(tmp_path / "attempt-0", Waiting(tmp_path / "attempt-1"), 2)


def ready(growth):
    (growth.new.folder / heartbeat.READY).touch()
    assert growth.look([sign(0)], 0.0) == ""
    assert growth.asked


def test_where_the_state_is():
    """In memory if all ranks are on one host, else in the store."""
    assert place_of_state([sign(0)], [sign(0), sign(1)]) == heartbeat.IN_MEMORY
    assert place_of_state([sign(0)], [sign(0), sign(1, "b")]) == heartbeat.IN_STORE
    assert place_of_state([sign(0), sign(1, "b")], [sign(0)]) == heartbeat.IN_STORE


def test_a_hand_over(growth):
    """Asked when the new ranks are ready; decided once, as soon as the state is there."""
    assert growth.look([sign(0)], 0.0) == ""
    assert not growth.asked
    ready(growth)
    assert (growth.folder / heartbeat.ASKED).read_text() == heartbeat.IN_MEMORY
    began = time.monotonic()
    assert growth.listen({signal.SIGCHLD}, 0.05) is None
    assert time.monotonic() - began >= 0.05
    assert heartbeat.decision(growth.folder) == ""
    (growth.folder / heartbeat.HANDED).write_text(heartbeat.IN_MEMORY)
    assert growth.listen({signal.SIGCHLD}, 60.0) is None
    assert growth.gone
    assert heartbeat.decision(growth.folder) == heartbeat.IN_MEMORY
    # From now on the new ranks have the run, and nobody can take it away.
    assert not heartbeat.make_decision(growth.folder, heartbeat.KEPT)
    assert not growth.call_off()
    assert not growth.new.ended
    growth.new.why = "dead"
    assert growth.look([], 0.0) == ""


def test_new_ranks_that_are_not_all_seen(growth):
    """Those of another host may be seen later than the file of rank 0, which says all are ready."""
    growth.new.signs.pop()
    ready(growth)
    assert (growth.folder / heartbeat.ASKED).read_text() == heartbeat.IN_STORE


def test_old_ranks_that_have_left_their_loop(growth):
    """They are not asked, because the signal would end what the program does after `md.train`."""
    (growth.folder / heartbeat.CAN).unlink()
    (growth.new.folder / heartbeat.READY).touch()
    assert growth.look([sign(0)], 0.0) == ""
    assert not growth.asked
    (growth.folder / heartbeat.CAN).touch()  # the program trains once more
    ready(growth)


@pytest.mark.parametrize("asked", [False, True])
def test_new_ranks_that_fail(growth, asked):
    """The old ranks keep the run, also if they wait for the decision."""
    if asked:
        ready(growth)
    growth.new.why = "one of its ranks has ended"
    assert growth.look([sign(0)], 0.0) == growth.new.why
    (growth.folder / heartbeat.HANDED).write_text(heartbeat.IN_MEMORY)
    growth.listen({signal.SIGCHLD}, 0.01)
    assert not growth.gone
    assert growth.call_off()
    assert growth.new.ended
    assert heartbeat.decision(growth.folder) == (heartbeat.KEPT if asked else "")


def test_a_decision_is_whole_or_none(tmp_path):
    """A full disk, as if, and a maker that is killed before it has written, leave no empty file."""
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limit[1]))
    try:
        assert heartbeat.make_decision(tmp_path, heartbeat.KEPT)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert heartbeat.decision(tmp_path) == heartbeat.KEPT
    assert not heartbeat.make_decision(tmp_path, heartbeat.IN_MEMORY)
    # A network file system may repeat a request that was carried out.
    assert heartbeat.make_decision(tmp_path, heartbeat.KEPT)


def test_a_folder_that_cannot_be_written(growth, monkeypatch):
    """The new ranks are ended in any case; old ranks that wait decide for themselves."""
    ready(growth)

    def refuse(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(heartbeat, "make_decision", refuse)
    assert growth.call_off()
    assert growth.new.ended


def test_old_ranks_that_kept_the_run(growth):
    """They have waited too long: the launcher comes too late, and the new ranks do not go on."""
    ready(growth)
    assert heartbeat.make_decision(growth.folder, heartbeat.KEPT)
    assert not growth.take_over(heartbeat.IN_MEMORY)
    assert not growth.gone


def test_what_follows_an_attempt_with_ready_ranks(growth):
    """They go on if the old ranks have died; if the job ends or waits, they do not."""
    again = Action("relaunch", 0, "from the newest good step", 1)
    for action in (Action("end", 0, "finished"), again._replace(pause=1.0)):
        assert _with_ready_ranks(growth, action) == action
        assert not growth.gone
    growth.new.why = "dead"
    assert _with_ready_ranks(growth, again) == again
    growth.new.why = ""
    assert _with_ready_ranks(growth, again) == Action("relaunch", 0, "which were ready", 2)
    assert heartbeat.decision(growth.folder) == heartbeat.IN_STORE
    # Whatever becomes of ranks that have handed their run over, the new ones have it.
    assert _with_ready_ranks(growth, Action("end", 2, "bad input")).ranks == 2


def test_numbers_of_attempts_that_were_given_up(tmp_path):
    """Nobody uses one again."""
    for k in (0, 1, 2):
        (tmp_path / f"attempt-{k}").mkdir()
    assert free_number(tmp_path, 0) == 3
    assert free_number(tmp_path, 2) == 3


def test_a_request_for_more_can_wait(tmp_path):
    """While ranks get ready, only a notice is heard; the next request follows later."""
    notice = tmp_path / "notice"
    requests = Requests(tmp_path, str(notice))
    (tmp_path / "grow-a").write_text("2")
    assert requests.look(growth=False) is None
    notice.touch()
    assert requests.look(growth=False).more == 0
    assert requests.look().more == 2


def test_ranks_are_asked_by_one_signal(tmp_path, capsys):
    """A stop that follows a hand-over would end ranks that have left their loop already."""
    sent = []
    one = object.__new__(one_attempt.RunningAttempt)
    one.__dict__.update(
        job=LaunchedJob(("x",), 1, tmp_path),
        process=SimpleNamespace(send_signal=sent.append),
        _signalled=False,
    )
    for why in ("3 ranks are ready", "SIGTERM"):
        assert one._ask(why, 1.0) == 1.0 + one.job.limits.grace
    assert sent == [signal.SIGUSR1]
    assert capsys.readouterr().err.count("asked to save and exit") == 2


LAUNCHER = """#!/bin/sh
case "$*" in *--version*) echo "mpirun (Open MPI) 5.0.11"; exit;; esac
while [ "$1" != -n ]; do shift; done
shift 2
while [ "$1" = -x ]; do shift 2; done
exec "$@"
"""

#: It can hand its run over, is asked for more ranks, and goes on until a line says what follows.
PROGRAM = """
cd "$MPIDIST_ATTEMPT_FOLDER"
touch can-hand-over; echo 1 >../grow-1
while [ -e ../grow-1 ]; do sleep 0.05; done
sleep 1
"""


@pytest.mark.parametrize("error", [OSError(11, "no process"), ConfigError("no launcher")])
def test_an_attempt_that_cannot_begin(tmp_path, monkeypatch, capfd, error):
    """A line says so, and the ranks go on."""
    monkeypatch.setattr(memory_folder, "MEMORY", tmp_path)
    launcher, begin = tmp_path / "mpirun", one_attempt.RunningAttempt.__init__
    launcher.write_text(LAUNCHER)
    launcher.chmod(0o755)

    def refuse(self, job, number, *more, before=None):
        if before is not None:
            raise error
        begin(self, job, number, *more)

    monkeypatch.setattr(one_attempt.RunningAttempt, "__init__", refuse)
    program = ("sh", "-c", PROGRAM)
    job = LaunchedJob(program, 1, tmp_path / "control", (str(launcher),))
    assert attempts.run(job) == 0
    said = capfd.readouterr().err
    assert f"but no attempt begins: {error}; 1 ranks go on" in said
