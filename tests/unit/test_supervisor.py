"""`mpidist launch` without MPI: when it ends an attempt, and whether and how it starts another."""

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpidist.errors import ConfigError
from mpidist.supervisor import commands
from mpidist.supervisor.policy import HOPELESS, UNSTARTED, Attempt, Policy, decide, left_out

KILLED = 137


def attempt(code=KILLED, step=None, ended=0.0, ranks=4, **more):
    """Come to an end with all ranks begun, unless it says otherwise."""
    more = {"told": ranks, "left": ranks if code in (0, 75) else 0, "first": 0, **more}
    return Attempt(ranks, code, ended, step, **more)


def after(*attempts, wanted=4, room=4, **policy):
    action = decide(attempts, Policy(**policy), wanted, room)
    return action.what, action.ranks if action.what == "relaunch" else action.code


# ------------------------------------------------------------------------------- what comes next


def test_a_killed_rank_is_no_end():
    """R140: another attempt from the newest good step, at once, with as many ranks."""
    action = decide([attempt(step=20)], Policy(), 4, 4)
    assert (action.what, action.ranks, action.pause) == ("relaunch", 4, 0.0)


def test_the_exit_code_alone_is_no_proof():
    """Open MPI's is 0 after a kill under fault tolerance."""
    assert after(attempt(0, 9)) == ("end", 0)
    assert after(attempt(0, 9, left=3)) == ("relaunch", 4)
    assert "1 of 4 ranks did not end" in attempt(0, 9, left=3).text()
    assert after(attempt(0, 9, why="rank 1 gave no sign")) == ("relaunch", 4)
    survived = attempt(0, 9, survived=1)
    assert after(survived) == ("end", 0)
    assert survived.text() == "exit code 0 at step 9, 1 rank died on the way"
    # A program that tells nothing has only its exit code.
    assert after(attempt(0, told=0, left=0)) == ("end", 0)


@pytest.mark.parametrize("code", HOPELESS)
def test_bad_input_is_not_tried_again(code):
    assert after(attempt(code)) == ("end", code)


def test_the_same_failure_at_the_same_step_twice():
    """The third time would end alike; any difference is worth another attempt."""
    assert after(attempt(1, 20), attempt(1, 20)) == ("end", 1)
    assert after(attempt(1, 20), attempt(1, 21)) == ("relaunch", 4)
    assert after(attempt(1, 20), attempt(KILLED, 20)) == ("relaunch", 4)
    assert after(attempt(1, 20, ranks=3), attempt(1, 20)) == ("relaunch", 4)
    assert after(attempt(1), attempt(1)) == ("end", 1)
    # Nobody knows where a program stood that tells nothing: only the budget ends it.
    assert after(*[attempt(1, told=0, left=0)] * 2) == ("relaunch", 4)
    assert after(*[attempt(1, told=0, left=0)] * 4) == ("end", 1)


def test_failures_have_a_budget_per_hour():
    hour = [attempt(step=k, ended=1000.0 * k) for k in range(5)]
    assert after(*hour[:4]) == ("end", KILLED)
    assert after(*hour[:4], max_restarts=4) == ("relaunch", 4)
    assert after(hour[0], *hour[2:]) == ("relaunch", 4)  # the first was more than an hour ago
    assert after(attempt(step=1), max_restarts=0) == ("end", KILLED)
    assert after(attempt(-9, 1), max_restarts=0) == ("end", KILLED)
    assert after(attempt(0, 1, left=0), max_restarts=0) == ("end", 1), "never 0 without success"


def test_requeueing_is_no_failure():
    """R47: code 75 leaves by default, and where it is to go on it costs nothing of the budget."""
    assert after(attempt(75, 5)) == ("end", 75)
    assert after(attempt(75, 5), preempted="requeue") == ("requeue", 75)
    many = [attempt(75, step) for step in range(50)]
    assert after(*many, preempted="relaunch", max_restarts=0) == ("relaunch", 4)
    # A time limit that is too short for one step would go round for ever.
    assert after(attempt(75, 5), attempt(75, 5), preempted="relaunch") == ("end", 75)
    # So would a program that tells nothing and leaves at once, but for the budget.
    silent = [attempt(75, told=0, left=0, first=None)] * 4
    assert after(*silent[:3], preempted="relaunch") == ("relaunch", 4)
    assert after(*silent, preempted="relaunch") == ("end", 75)


def test_preemptions_have_a_budget_of_their_own():
    """R106: failures do not spend it, and it does not spend theirs."""
    left = [attempt(75, step) for step in range(3)]
    spent = {"max_preemptions": 2}
    for how, what in (("relaunch", ("relaunch", 4)), ("requeue", ("requeue", 75))):
        assert after(*left[:2], preempted=how, **spent) == what
        assert after(*left, preempted=how, **spent) == ("end", 75)
        failed = [attempt(KILLED, step) for step in (7, 8)]
        assert after(*failed, *left[:2], preempted=how, max_restarts=2, **spent) == what
    asked = [attempt(75, step, asked=True) for step in range(3)]
    assert after(*asked[:2], preempted="requeue", **spent) == ("requeue", 75)
    assert "--max-preemptions is 2" in decide(asked, Policy(3, None, "requeue", 2), 4, 4).reason
    assert after(*left, attempt(KILLED, 9), preempted="relaunch", **spent) == ("relaunch", 4)


def test_asked_to_stop():
    """Killed after it was asked: as good as saved and left, for the newest save is there."""
    for code in (75, KILLED, -9, 1):
        assert after(attempt(code, 5, asked=True)) == ("end", 75)
        assert after(attempt(code, 5, asked=True), preempted="requeue") == ("requeue", 75)
    assert after(attempt(0, 5, asked=True)) == ("end", 0)
    assert after(attempt(2, asked=True)) == ("end", 2)


def test_fewer_hosts_fewer_ranks():
    assert after(attempt(step=5), room=3) == ("relaunch", 3)
    assert after(attempt(step=5, ranks=3), room=4) == ("relaunch", 4), "a host that comes back"
    assert after(attempt(step=5), room=3, min_ranks=4) == ("end", KILLED)
    assert after(attempt(step=5), room=0) == ("end", KILLED)


#: Open MPI's "PMIx server's listener thread failed to start", for instance.
NOTHING = attempt(1, told=0, left=0, first=None, begun=False)


def test_a_launcher_that_starts_nothing():
    """The job was not even tried: that costs nothing, and is no second failure of the same kind."""
    assert after(NOTHING, max_restarts=0) == ("relaunch", 4)
    assert "the launcher has started nothing" in NOTHING.text()
    failed = attempt(1, 20)
    assert after(failed, NOTHING) == ("relaunch", 4)
    assert after(failed, NOTHING, failed) == ("end", 1), "the same twice, whatever was between"
    others = [attempt(KILLED, step) for step in (5, 6, 7)]
    assert after(*others, NOTHING, NOTHING) == ("relaunch", 4)
    assert after(*others, NOTHING, NOTHING, attempt(KILLED, 8)) == ("end", KILLED)
    # So often in a row is no accident; with somebody who wants it, fewer ranks were tried before.
    assert after(*[NOTHING] * (UNSTARTED - 1)) == ("relaunch", 4)
    assert after(*[NOTHING] * UNSTARTED) == ("end", 1)
    assert "3 times in a row" in decide([NOTHING] * UNSTARTED, Policy(), 4, 4).reason
    held_up = NOTHING._replace(why="the launcher has started nothing within 30 s")
    assert after(held_up, max_restarts=0) == ("relaunch", 4)
    assert held_up.text() == "the launcher has started nothing within 30 s, exit code 1"
    # What the user has ended, or what told something, is another matter.
    assert not NOTHING._replace(asked=True).unstarted
    assert not NOTHING._replace(told=1).unstarted
    assert not NOTHING._replace(code=0).unstarted


#: Four hosts with a rank each.
HOSTS = dict.fromkeys("abcd", 1)


def blamed(*hosts, there="abcd", wanted=4, **policy):
    attempts = [attempt(1, step, culprit=host) for step, host in enumerate(hosts)]
    return left_out(attempts, Policy(**policy), wanted, HOSTS, list(there), now=0.0)


def test_a_host_that_fails_again_and_again():
    """It answers, and yet its ranks are the first to fail: the next attempt goes without it."""
    assert blamed() == blamed("a") == blamed("a", "b", "", "") == []
    assert blamed("a", "a") == ["a"]
    assert blamed("a", "b", "a", "b", "b") == ["b", "a"], "the worst first"
    assert blamed("a", "a", there="bcd") == [], "it is not there at all"
    # The others must have room for the least that the user wants.
    assert blamed("a", "a", "b", "b", "b", min_ranks=3) == ["b"]
    assert blamed("a", "a", min_ranks=4) == []
    assert blamed(*"aabbccdd", there="abcd") == ["a", "b", "c"]
    assert blamed("a", "a", there="a") == []
    assert blamed("a", "a", wanted=8, min_ranks=6) == ["a"]
    # An hour later it may come back; and nobody is blamed for a run that saved and left.
    old = [attempt(1, k, culprit="a", ended=1000.0 * k) for k in range(2)]
    assert left_out(old, Policy(), 4, HOSTS, "abcd", now=1001.0) == ["a"]
    assert left_out(old, Policy(), 4, HOSTS, "abcd", now=4000.0) == []
    left = [attempt(75, k, culprit="a") for k in range(3)]
    asked = [attempt(KILLED, k, culprit="a", asked=True) for k in range(3)]
    assert left_out([*left, *asked], Policy(), 4, HOSTS, "abcd", now=0.0) == []
    # Without that host it is not the same failure that comes a third time.
    twice = [attempt(1, 20, culprit="a")] * 2
    assert "first on a" in twice[0].text()
    assert after(*twice, room=3) == ("relaunch", 3)
    assert after(*twice) == ("end", 1)
    three = attempt(1, 20, ranks=3, culprit="b")
    assert after(*twice, three, three, room=3, max_restarts=9) == ("end", 1)


def test_ranks_that_never_come():
    """R50: with --min-ranks the job begins with those present."""
    three = attempt(1, told=3)
    assert after(three, min_ranks=2) == ("relaunch", 4), "once may be chance"
    assert after(three, three, min_ranks=2) == ("relaunch", 3)
    none = attempt(1, told=0)
    assert after(none, none, min_ranks=2) == ("relaunch", 2)
    assert after(none, none, min_ranks=3) == ("relaunch", 3)
    assert after(three, three) == ("end", 1)
    # It stays there: the fourth rank would not come the next time either.
    assert after(three, three, attempt(step=9, ranks=3), min_ranks=2) == ("relaunch", 3)


def test_pauses_grow_while_nothing_gets_further():
    def pause(count):
        idle = [attempt(KILLED + k, told=0, ended=1e5 * k) for k in range(count)]
        return decide(idle, Policy(), 4, 4).pause

    assert [pause(count) for count in (1, 2, 3, 4, 5)] == [0, 1, 2, 4, 8]
    assert pause(30) == 60
    moved = attempt(step=3)
    assert decide([attempt(told=0), attempt(told=0), moved], Policy(), 4, 4).pause == 0


ATTEMPTS = st.builds(
    attempt,
    code=st.sampled_from([0, 1, 2, 9, 70, 75, 137, 255, -9, -15]),
    step=st.one_of(st.none(), st.integers(0, 3)),
    ended=st.floats(0, 1e4),
    ranks=st.integers(1, 4),
    left=st.integers(0, 4),
    asked=st.booleans(),
    why=st.sampled_from(["", "rank 1 is dead"]),
    begun=st.booleans(),
    told=st.integers(0, 1),
)


@given(
    st.lists(ATTEMPTS, min_size=1, max_size=8), st.integers(0, 6),
    st.one_of(st.none(), st.integers(1, 4)),
    st.sampled_from(["leave", "relaunch", "requeue"]), st.integers(0, 8),
)  # fmt: skip
def test_any_history(attempts, restarts, least, preempted, room):
    """Whatever has happened: a bound on ranks and restarts, and 0 only where all is done."""
    policy = Policy(restarts, least, preempted)
    action = decide(attempts, policy, 4, room)
    last = attempts[-1]
    assert (action.what == "end" and action.code == 0) == last.finished
    if action.what == "relaunch":
        assert (least or 1) <= action.ranks <= min(4, room)
        assert 0 <= action.pause <= 60
        assert not last.asked
        tried = [a for a in attempts if a.failed and not a.unstarted]
        assert len([a for a in tried if last.ended - a.ended < 3600]) <= restarts
        assert not all(a.unstarted for a in attempts[-3:]) or len(attempts) < 3
        assert last.code not in HOPELESS
    if action.what == "requeue":
        assert (preempted, action.code) == ("requeue", 75)


# ---------------------------------------------------------------------- when an attempt must end


def test_hosts_are_named_to_each_launcher(tmp_path):
    def script(name, text):
        path = tmp_path / name
        path.write_text(f"#!/bin/sh\necho '{text}'\n")
        path.chmod(0o755)
        return str(path)

    hosts = {"a": 2, "b": 1}
    ompi = script("mpirun", "mpirun (Open MPI) 5.0.11")
    assert commands.command(3, [ompi], hosts, True) == [ompi, "--host", "a:2,b:1", "-n", "3"]
    assert commands.command(3, [ompi], hosts) == [ompi, "-n", "3"]
    mpich = script("mpiexec", "HYDRA build details: Version: 5.0.2")
    assert commands.command(3, [mpich], hosts, True) == [mpich, "-hosts", "a:2,b:1", "-n", "3"]
    srun = ["srun", "--mpi=pmix"]
    assert commands.command(3, srun, hosts, True) == [
        *srun,
        "--nodelist=a,b",
        "--nodes=2",
        "-n",
        "3",
    ]
    other = script("runjob", "runjob 1")
    assert commands.command(3, [other]) == [other, "-n", "3"]
    with pytest.raises(ConfigError, match="leave --hosts out"):
        commands.command(3, [other], hosts, True)


def test_hosts_by_the_names_that_they_give_themselves():
    assert commands.named_like("n1", ["n1", "n2"]) == "n1"
    assert commands.named_like("n1.cluster", ["n2", "n1"]) == "n1"
    assert commands.named_like("n1", ["n1.cluster", "n10.cluster"]) == "n1.cluster"
    assert commands.named_like("n3", ["n1", "n2"]) == commands.named_like("", ["n1", "n2"]) == ""
    assert commands.named_like("n1", ["n1"]) == commands.named_like("n1", ()) == ""


def test_hosts_of_the_user_and_of_slurm(tmp_path, monkeypatch):
    assert commands.parse_hosts("a:2,b,c:10") == {"a": 2, "b": 1, "c": 10}
    for wrong in ("", "a:", "a:x", "a:0", "a:²", "a,a", ":2"):
        with pytest.raises(ConfigError, match="--hosts"):
            commands.parse_hosts(wrong)
    assert commands.expand_counts("2(x3),1") == [2, 2, 2, 1]
    for name, said in (
        ("scontrol", "n1\nn2\nn3"),
        ("sinfo", "n1 allocated\nn2 down*\nn3 mixed*\nn4 drained"),
    ):
        (tmp_path / name).write_text(f"#!/bin/sh\nprintf '{said}\\n'\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    environ = {"SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "n[1-3]", "SLURM_TASKS_PER_NODE": "2(x3)"}
    assert commands.slurm_hosts(environ) == {"n1": 2, "n2": 2, "n3": 2}
    assert commands.slurm_hosts({}) is None
    (tmp_path / "squeue").symlink_to("scontrol")
    assert commands.slurm_left(environ) == ["n1", "n2", "n3"]
    assert commands.slurm_away(["n1", "n2", "n3", "n4"]) == {"n2", "n3", "n4"}


def test_slurm_variables_of_the_nodes_that_are_left():
    """srun and mpirun believe them: a node that left the allocation must not be in them."""
    environ = {
        "SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "n[1-3]", "SLURM_JOB_NUM_NODES": "3",
        "SLURM_TASKS_PER_NODE": "2(x2),1", "SLURM_NTASKS": "5", "SLURM_JOB_CPUS_PER_NODE": "4(x3)",
    }  # fmt: skip
    names = ["n1", "n2", "n3"]
    assert commands.slurm_environ(environ, names, names, 5) == {}
    assert commands.slurm_environ(environ, names, ["n1", "n3"], 3) == {
        "SLURM_JOB_NODELIST": "n1,n3", "SLURM_JOB_NUM_NODES": "2", "SLURM_TASKS_PER_NODE": "2,1",
        "SLURM_NTASKS": "3", "SLURM_JOB_CPUS_PER_NODE": "4,4",
    }  # fmt: skip


# ---------------------------------------------------------------------------------- what ranks tell
