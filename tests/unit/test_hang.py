"""When records of ranks count as a hang, and how it is reported; uses no processes and no clock."""

import pytest

from mpidist.fault_tolerance.hang import Hang, Seen, hang_report, judge


def rank(number, state="moving", still=0.0, silent=0.0, left=False, where="a.py:1 in f"):
    seen = Seen(number)
    record = {
        "beat": 1, "left": left, "state": state, "still": still, "host": f"n{number // 2}",
        "pid": 100 + number, "born": "1", "where": where, "event": "", "hang": None,
    }  # fmt: skip
    seen.update(record, 100.0 - silent)
    return seen


@pytest.mark.parametrize(
    ("ranks", "verdict"),
    [
        ([rank(0), rank(1)], None),
        # One computes, the others may wait for ever.
        ([rank(0, "moving"), rank(1, "blocked", 99), rank(2, "waiting", 99)], None),
        ([rank(0, "blocked", 99), rank(1, "blocked", 4)], None),
        # All loop in one line and nobody waits: that is work.
        ([rank(0, "looping", 99), rank(1, "looping", 99)], None),
        # One process alone waits for nobody: a long native call.
        ([rank(0, "blocked", 99)], None),
        ([rank(0), rank(1, silent=11)], Hang([1], [])),
        ([rank(0, "blocked", 11), rank(1, "blocked", 11)], Hang([], [])),
        ([rank(0, "blocked", 11), rank(1, "looping", 12)], Hang([], [1])),
        ([rank(0, "waiting", 11), rank(1, left=True)], Hang([], [1])),
        ([rank(0, "waiting", 11), rank(1, left=True), rank(2)], None),
        # A rank that has left owes nobody a sign.
        ([rank(0), rank(1, left=True, silent=99)], None),
        # Stopped a moment after its last move: still for longer than it has been silent.
        ([rank(0, "blocked", 11), rank(1, "blocked", 1, silent=9.5)], Hang([1], [])),
        ([rank(0, "blocked", 11, where="x"), rank(1, "blocked", 11, where="y"),
          rank(2, "blocked", 11, where="x")], Hang([], [1])),
    ],
)  # fmt: skip
def test_judge(ranks, verdict):
    """R56: a hang is found, a slow rank is not one."""
    assert judge(ranks, 10.0, 100.0) == verdict


def test_who_was_away_knows_nothing():
    seen = rank(1, "blocked", still=50, silent=60)
    seen.forget(100.0)
    assert seen.silent(100.0) == 0
    assert judge([rank(0), seen], 10.0, 105.0) is None


def test_a_new_record_is_a_sign_and_an_old_one_is_not():
    seen = rank(0, silent=30)
    seen.update(dict(seen.record), 100.0)
    assert seen.silent(100.0) == 30
    seen.update({**seen.record, "beat": 2}, 100.0)
    assert seen.silent(100.0) == 0
    seen.update(None, 105.0)
    assert seen.silent(105.0) == 5


def test_the_first_line_names_rank_host_and_condition():
    """R97: rank, host and what is known of it, then one line per rank."""
    ranks = [rank(0, "blocked", 12), rank(1, "blocked", 12), rank(2, silent=11), rank(3, left=True)]
    lines = hang_report(
        ranks, Hang([2], []), 10, 100.0, lambda peer: f"pid {peer.pid}"
    ).splitlines()
    assert lines[0] == (
        "mpidist: watch: nothing moved for 10 s; absent: rank 2 on n1 (pid 102); "
        "the job ends with exit code 70"
    )
    assert lines[1:] == [
        "  rank 0 on n0 blocked for 12 s at a.py:1 in f",
        "  rank 1 on n0 blocked for 12 s at a.py:1 in f",
        "  rank 2 on n1 gave no sign for 11 s; last seen at a.py:1 in f",
        "  rank 3 on n1 has left",
    ]


def test_many_absent_ranks_are_counted():
    ranks = [rank(number, silent=11) for number in range(20)]
    line = hang_report(ranks, Hang(list(range(20)), []), 10, 100.0, lambda peer: "?").splitlines()[
        0
    ]
    assert "rank 7 on n3 (?) and 12 more;" in line
