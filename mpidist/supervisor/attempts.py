"""Run a program under an MPI launcher until it is done, and again after each failure.

An attempt is one start of the program on all ranks. After the launcher (such as mpiexec) has ended,
`mpidist launch` kills all processes of the attempt that still run on this host. Ranks on other
hosts notice the file ``over`` in the shared folder DIR, and end themselves
(`mpidist.launch.heartbeat`).

    DIR/history.jsonl      one line for each attempt and decision
    DIR/memory             the name of the folder in /dev/shm for copies of the state
    DIR/selection-*.json   the choices of `algorithm="auto"`, for later attempts
    DIR/attempt-0/rank-3   the heartbeat of rank 3
    DIR/attempt-0/launcher the process that has started the attempt
    DIR/attempt-0/begun    exists once the program has begun on some host
    DIR/attempt-0/over     exists once all processes of the attempt must end
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress

from ..launch import heartbeat
from .growth import Growth
from .history import (
    free_number,
    next_attempt,
    note_event,
    read_history,
    remove_control_folder,
)
from .hosts import (
    LaunchedJob,
    all_hosts,
    doubted,
    grown,
    print_line,
    room,
    usable,
    with_todays_hosts,
    without_culprits,
)
from .memory_folder import make_memory_folder, remove_memory_folder
from .one_attempt import ASK, HEARD, RunningAttempt, SharedFacts
from .policy import Action, Attempt, decide
from .requests import Requests


def run(job: LaunchedJob) -> int:
    """Start `job`, and start it again after failures, until it is done; return the exit code."""
    job.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    attempts = read_history(job.folder)
    number = next_attempt(job.folder, len(attempts))
    job = with_todays_hosts(job)
    place = without_culprits(job, attempts, all_hosts(job))
    ranks = min(job.ranks, room(job, place.hosts))
    # The signals are blocked, and `watch` waits for them, because a signal handler could run
    # between any two lines of this function.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, HEARD)
    memory, action = make_memory_folder(job.folder), None
    shared = SharedFacts(attempts, memory, Requests(job.folder, job.notice))
    one: RunningAttempt | None = None
    try:
        known_as = number - sum(attempt.unstarted for attempt in attempts)
        one = RunningAttempt(job, number, known_as, ranks, place, shared)
        while True:
            attempts.append(doubted(job, one.watch(), place))
            note_event(job.folder, "attempt", attempts[-1]._asdict())
            growth = one.growth
            if growth is not None and growth.gone:
                job = one.grown_job
            elif not attempts[-1].finished:
                job = with_todays_hosts(grown(job, attempts[-1].more))
                if job.hosts_from or (attempts[-1].failed and not attempts[-1].asked):
                    there = usable(job, place, attempts[-1].unstarted)
                    place = without_culprits(job, attempts, there)
            action = decide(attempts, job.policy, job.ranks, room(job, place.hosts))
            if growth is not None and not attempts[-1].asked:
                action = _with_ready_ranks(growth, action)
            out = place.left_out(job)
            note_event(job.folder, "decision", {**action._asdict(), "left_out": out})
            _tell(one.known_as, attempts, action, len(place.hosts or ()) if out else 0)
            if action.what == "relaunch" and _asked_within(action.pause):
                if growth is not None and growth.gone:
                    growth.new.pending = signal.SIGTERM
                else:
                    attempts[-1] = attempts[-1]._replace(asked=True)
                    action = decide(attempts, job.policy, job.ranks, action.ranks)
                    note_event(job.folder, "decision", action._asdict())
                    print_line(f"asked to stop before the next attempt; {action.reason}")
            if growth is not None and not (growth.gone and action.what == "relaunch"):
                growth.new.end()
            if action.what != "relaunch":
                return _finish(job, action)
            if growth is not None and growth.gone:
                job, one = one.grown_job, growth.new
                place = one.place
            else:
                known_as = one.known_as + (not attempts[-1].unstarted)
                number = free_number(job.folder, one.number)
                one = RunningAttempt(job, number, known_as, action.ranks, place, shared)
    except BaseException:  # for example an OSError: no rank may go on without `mpidist launch`
        for each in (one, one and one.growth and one.growth.new):
            if each and each.process.poll() is None:
                with suppress(Exception):  # the other one must be ended, too
                    each.end()
        raise
    finally:
        shared.requests.close()
        remove_memory_folder(job, memory, action is not None and action.code == 0, place.hosts)
        # A signal that came at the end of this function asks for a stop, but the job has already
        # stopped. The signal must not end this process before the exit code is returned.
        while signal.sigtimedwait(HEARD, 0):
            pass
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _with_ready_ranks(growth: Growth, action: Action) -> Action:
    """Return an action that continues with additional ranks if these are ready, else `action`."""
    if not growth.gone and action.what == "relaunch" and not action.pause:
        # The old ranks have ended before they were asked for their state, so the new ranks restore
        # the newest step in the store.
        growth.take_over(heartbeat.IN_STORE)
    if not growth.gone:
        return action
    return Action("relaunch", 0, "which were ready", growth.new.ranks)


def _finish(job: LaunchedJob, action: Action) -> int:
    if action.what == "requeue":
        done = subprocess.run(["scontrol", "requeue", os.environ["SLURM_JOB_ID"]], check=False)
        if done.returncode:
            print_line("scontrol requeue failed; exit code 75 means that the job is not finished")
    if action.code == 0:
        remove_control_folder(job.folder)
    else:
        print_line(f"the records of this job are in {job.folder}")
    return action.code


def _asked_within(seconds: float) -> bool:
    """Wait before the next start; return whether a signal asks for a stop meanwhile."""
    return signal.sigtimedwait((*ASK, signal.SIGINT, signal.SIGHUP), seconds) is not None


# ------------------------------------------------------------------------------------ messages


def _tell(known_as: int, attempts: Sequence[Attempt], action: Action, fewer_hosts: int) -> None:
    last = attempts[-1]
    if last.finished and len(attempts) == 1 and not last.survived:
        return
    what, then = f"attempt {known_as} on {last.ranks} ranks: {last.text()}", action.reason
    if action.what == "relaunch":
        pause = f" in {action.pause:g} s" if action.pause else ""
        where = f" on {fewer_hosts} host{'s' * (fewer_hosts > 1)}" if fewer_hosts else ""
        then = f"again{pause} with {action.ranks} ranks{where}, {action.reason}"
    print_line(f"{what} ({last.seconds:g} s); {then}")
