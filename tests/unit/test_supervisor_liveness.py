"""The supervisor ends an attempt because of dead, silent or late ranks."""

from mpidist.launch.heartbeat import Sign
from mpidist.supervisor.liveness import ALONE, DEAD, LAUNCHER, START, Launcher, Limits, Vigil


def sign(rank, beat=0, step=None, left=False, pid=1, host="here"):
    return Sign(rank, beat, step, 0, left, pid, host)


LIMITS = Limits(heartbeat=10)


def vigil(limits=LIMITS, ranks=2, **options):
    return Vigil(ranks, limits, 0.0, host="here", **options)


def test_a_rank_without_a_beat():
    one = vigil()
    for now in range(10):
        assert one.look([sign(0, now), sign(1, 3)], float(now)) == ""
    assert one.look([sign(0, 11), sign(1, 3)], 11.0) == "rank 1 on here gave no sign for 10 s"
    assert one.look([sign(0, 12), sign(1, 3, left=True)], 12.0) == ""


def test_a_supervisor_that_was_stopped_itself_accuses_nobody():
    """SIGSTOP and SIGCONT to a whole job, as batch systems do it."""
    one = vigil()
    assert one.look([sign(0), sign(1)], 1.0) == ""
    assert one.look([sign(0), sign(1)], 1000.0) == ""
    assert one.look([sign(0, 1), sign(1, 1)], 1001.0) == ""


def test_a_dead_rank():
    """The launcher has a moment to end the job; one that tolerates it is not disturbed."""
    signs = [sign(0), sign(1, pid=7)]
    slow = Limits(heartbeat=60)
    one, tolerant = vigil(slow), vigil(slow, dead_ends=False)
    for now in (1.0, 1.0 + DEAD):
        assert one.look(signs, now, {7}) == tolerant.look(signs, now, {7}) == ""
    assert (one.dead, tolerant.dead) == ([signs[1]], [])
    assert one.look(signs, 1.1 + DEAD, {7}) == "rank 1 on here is dead"
    assert tolerant.look(signs, 1.1 + DEAD, {7}) == ""
    elsewhere = vigil()
    for now in range(5):
        assert elsewhere.look([sign(0, now), sign(1, now, pid=7, host="there")], now, {7}) == ""
    gone = vigil()
    assert gone.look([sign(0), sign(1, pid=7, left=True)], 1.0, {7}) == ""
    assert gone.dead == []


def test_a_launcher_that_is_held_up():
    """Issue 10: it starts nothing, is stopped, or does not end after its ranks."""
    nothing, stopped = Launcher(begun=False), Launcher(stopped=True)
    limits = Limits(heartbeat=1e6)
    one, queue, quick = vigil(limits), vigil(queues=True), vigil(limits._replace(launcher=5.0))
    for now in (0.0, LAUNCHER):
        assert one.look([], now, (), nothing) == ""
    said = one.look([], LAUNCHER + 0.1, (), nothing)
    assert said == "the launcher has started nothing within 30 s"
    assert quick.look([], 0.0, (), nothing) == quick.look([], 5.0, (), nothing) == ""
    assert quick.look([], 5.1, (), nothing) == "the launcher has started nothing within 5 s"
    for now in range(0, 1000, 4):
        assert queue.look([], now, (), nothing) == "", "it waits for its turn"
    # Whose file is seen before that of the start has begun as well.
    one = vigil(limits)
    for now in range(0, 100, 4):
        assert one.look([sign(0), sign(1)], now, (), nothing) == ""
    one = vigil(limits)
    for now in (0.0, 4.0, 8.0, 10.0):
        assert one.look([sign(0), sign(1)], now, (), stopped) == ""
    assert one.look([sign(0), sign(1)], 10.1, (), stopped).startswith("the launcher is stopped")
    # Stopped, it ends nothing: a rank that is dead is not left to it.
    one = vigil()
    assert one.look([sign(0), sign(1, pid=7)], 0.0, {7}, stopped) == ""
    assert one.look([sign(0), sign(1, pid=7)], 0.5, {7}, stopped) == "rank 1 on here is dead"


def test_a_file_that_cannot_be_read_is_no_missing_rank():
    """Shared file systems answer ESTALE or nothing for a while; then its silence counts."""
    one = vigil(Limits(heartbeat=10, start=3))
    assert one.look([sign(0), sign(1)], 1.0) == ""
    for now in range(4, 11):
        assert one.look([sign(0, now)], float(now)) == ""
    assert [told.rank for told in one.signs] == [0, 1]
    assert one.look([sign(0, 12)], 12.0) == "rank 1 on here gave no sign for 10 s"


def test_who_failed_first():
    """By its own word, by its silence, or by the others' word that they were asked to end."""

    def culprit(*signs):
        one = vigil()
        one.note(signs)
        return one.culprit()

    a, b = sign(0, host="a"), sign(1, host="b")
    assert culprit(a, b._replace(failed=True)) == "b"
    assert culprit(a._replace(heard=True), b) == "b", "killed: it has heard nothing"
    assert culprit(a._replace(heard=True), b._replace(left=True)) == ""
    assert culprit(a._replace(heard=True, failed=True), b) == "a"
    assert culprit(a, b) == "", "all were killed: nobody knows in which order"
    assert culprit(a._replace(failed=True), b._replace(failed=True)) == ""
    silent = vigil()
    silent.look([a, b], 0.0)
    for now in range(1, 13):
        silent.look([a._replace(beat=now), b], float(now))
    assert silent.culprit() == "b"


def test_ranks_that_do_not_begin():
    limits = Limits(heartbeat=1e6)
    late = "only 1 of 2 ranks began within"
    for queue in (0.0, 2 * START):  # srun may wait before it starts the first rank
        one = vigil(limits)
        assert one.look([], queue) == ""
        assert one.look([sign(0)], queue) == ""
        assert one.look([sign(0)], queue + START) == ""
        assert one.look([sign(0)], queue + START + 1).startswith(late)
    assert vigil(limits).look([], START + 1) == "", "it may be a program that tells nothing"
    soon = limits._replace(start=5.0)
    assert vigil(soon).look([], 6.0) == "only 0 of 2 ranks began within 5 s"
    for begun in ([], [sign(0)]):  # srun has waited in its queue for 100 s
        one = vigil(soon, queues=True)
        assert one.look([], 100.0, (), Launcher(begun=False)) == ""
        assert one.look(begun, 100.5) == one.look(begun, 104.9) == ""
        assert one.look(begun, 106.0) == f"only {len(begun)} of 2 ranks began within 5 s"


def test_time_in_which_the_launcher_was_stopped_does_not_count_for_the_start():
    one = vigil(Limits(heartbeat=1e6, start=600.0))
    assert one.look([sign(0)], 1.0) == ""
    late = 1e6  # the looks are usually less than a second apart
    assert one.look([sign(0)], late) == one.look([sign(0)], late + 600.0) == ""
    assert one.look([sign(0)], late + 600.1).startswith("only 1 of 2 ranks")


def test_no_step_and_no_end():
    one = vigil(Limits(heartbeat=1e6, stall=30.0))
    assert one.look([sign(0, step=4), sign(1, step=4)], 1.0) == ""
    assert one.look([sign(0, step=4), sign(1, step=4)], 30.0) == ""
    assert one.look([sign(0, step=5), sign(1, step=4)], 32.0) == ""
    assert one.look([sign(0, step=5), sign(1, step=5)], 63.0) == "no step after 5 for 30 s"
    left = [sign(0, step=5, left=True), sign(1, step=5, left=True)]
    assert one.look(left, 64.0) == ""
    assert "all ranks have left" in one.look(left, 64.1 + LAUNCHER)


# ------------------------------------------------------------------------------- how it is started


# ----------------------------------------------------------- ranks that go on when others have died


def surviving(ranks=3, heartbeat=10.0):
    return vigil(Limits(heartbeat=heartbeat), ranks, dead_ends=False)


def signs_of(*more):
    return [sign(rank)._replace(pid=rank, **each) for rank, each in enumerate(more)]


def test_the_living_go_on():
    """A dead rank is silent and ends nothing, once the others have survived it."""
    one = surviving()
    for now in range(100):
        told = signs_of({"beat": now, "deaths": 1}, {}, {"beat": now, "deaths": 1})
        assert one.look(told, float(now), {1}) == ""
    assert (one.dead, one.stuck, one.over) == ([], [], False)
    # Of a rank on another host only the others know that it has died.
    one = surviving()
    for now in range(100):
        told = signs_of({"beat": now, "deaths": 1}, {"host": "there"}, {"beat": now, "deaths": 1})
        assert one.look(told, float(now)) == ""


def test_a_death_that_nobody_survives():
    """The program does not use elasticity, or its ranks wait for ever."""
    one = surviving()
    for now in range(11):
        told = signs_of({"beat": now}, {}, {"beat": now})
        assert one.look(told, float(now), {1}) == ""
    told = signs_of({"beat": 11}, {}, {"beat": 11})
    said = "rank 1 on here died, and the others did not go on without it"
    assert one.look(told, 11.0, {1}) == said


def test_a_silent_rank_of_this_host_is_killed():
    one = surviving()
    for now in range(12):
        told = signs_of({"beat": now}, {}, {"beat": now})
        assert one.look(told, float(now)) == ""
    assert [each.rank for each in one.stuck] == [1]
    one = surviving()
    for now in range(11):
        assert one.look(signs_of({"beat": now}, {"host": "there"}, {"beat": now}), now) == ""
    told = signs_of({"beat": 11}, {"host": "there"}, {"beat": 11})
    assert one.look(told, 11.0) == "rank 1 on there gave no sign for 10 s"
    # Not if no other rank could go on.
    one = surviving()
    for now in range(11):
        assert one.look(signs_of({}, {}, {}), float(now)) == ""
    assert one.look(signs_of({}, {}, {}), 11.0).endswith("gave no sign for 10 s")


def test_nobody_is_left():
    gave_up = signs_of({}, {"gave_up": 1}, {})
    assert surviving().look(gave_up, 0.0) == "rank 1 on here could not go on after a death"
    assert surviving().look(signs_of({}, {}, {}), 0.0, {0, 1, 2}) == "all ranks have died"
    one = surviving()
    assert one.look(signs_of({}, {}), 0.0, {0, 1}) == "", "the third has not begun yet"
    assert one.look(signs_of({}, {}), 0.0, {0, 1}, begun={2: 9}) == ""
    assert one.look([], 1.0, {9}, begun={2: 9}) == ""
    said = "rank 2 ended before it had joined the others"
    assert one.look([], 1.1 + ALONE, {9}, begun={2: 9}) == said


def test_the_living_have_ended():
    """Their launcher may go on for ever: it is ended, and that is no failure."""
    one, done = surviving(), signs_of({"code": 0}, {}, {"code": 0})
    assert one.look(done, 0.0, {1}) == ""
    assert one.look(done, ALONE, {1}) == ""
    assert not one.over
    assert one.look(done, 0.1 + ALONE, {1}) == ""
    assert one.over


def test_a_rank_that_ends_alone():
    one, alone = surviving(), signs_of({}, {"failed": True}, {})
    assert one.look(alone, 0.0, {1}) == one.look(alone, ALONE, {1}) == ""
    assert one.look(alone, 0.1 + ALONE, {1}) == "rank 1 on here ended, and the others go on"
    assert one.culprit() == "here"
