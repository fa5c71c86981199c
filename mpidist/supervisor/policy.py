"""Decide what `mpidist launch` does after an attempt, from the results of all attempts.

    attempt 0   4 ranks   exit 137 at step 812     -> again, with 4 ranks
    attempt 1   4 ranks   exit 137 at step 951     -> again
    attempt 2   4 ranks   exit 137 at step 951     -> stop: the same failure at the same step

137 is the exit code after SIGKILL. The number of failures per hour is limited. An attempt that ends
with exit code 75 has saved its state to be continued later, and is not a failure if its ranks have
written heartbeats.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise, takewhile
from typing import NamedTuple

#: Exit codes after which a new attempt would fail again: bad input, EX_USAGE, EX_CONFIG.
HOPELESS = (2, 64, 78)
#: The exit code for "saved, not finished" (EX_TEMPFAIL).
REQUEUE = 75
#: The number of seconds for which a failure counts in the limit of failures.
WINDOW = 3600.0
#: The longest pause before another attempt.
LONGEST_PAUSE = 60.0
#: The job ends if a launcher has started no process in this many attempts in a row.
UNSTARTED = 3
#: A host is left out if its ranks were the first to fail this many times.
AGAIN = 2


class Attempt(NamedTuple):
    """The result of one attempt, that is, of one start of the program on all ranks.

    - `code`: the exit code of the launcher.
    - `ended`: the time of the end.
    - `first`, `step`: the step at which the attempt began, and its last step; None if no rank has
      recorded a step.
    - `told`: how many ranks have written heartbeats.
    - `left`: how many ranks have exited by themselves.
    - `asked`: whether a signal has asked the attempt to stop.
    - `why`: the reason for which `mpidist launch` has ended the attempt; "" if it ended by itself.
    - `begun`: whether the launcher has started the program on some host.
    - `culprit`: the host whose ranks were the first to fail; "" if unknown.
    - `memory`: a text about the rank that the kernel has killed for lack of memory; "" if none.
    - `survived`: how many ranks have died, if the other ranks have finished the attempt without
      them. The dead ranks are then counted in `left`.
    - `more`: how many more ranks the next attempt has, if the user has asked for more.
    """

    ranks: int
    code: int
    ended: float
    step: int | None = None
    first: int | None = None
    told: int = 0
    left: int = 0
    asked: bool = False
    why: str = ""
    seconds: float = 0.0
    begun: bool = True
    culprit: str = ""
    memory: str = ""
    survived: int = 0
    more: int = 0

    @property
    def finished(self) -> bool:
        """Whether the program ran to its end; the exit code alone does not prove this."""
        return self.code == 0 and not self.why and self.left == self.told

    @property
    def preempted(self) -> bool:
        """Whether the program has saved its state and exited by itself, to be continued later."""
        return self.code == REQUEUE and not (self.why or self.more)

    @property
    def failed(self) -> bool:
        """Whether the attempt (start of the program) counts as a failure."""
        return not (self.finished or self.preempted or self.more)

    @property
    def unstarted(self) -> bool:
        """Whether the launcher has ended, or was ended, before it started any process."""
        return self.failed and not (self.begun or self.told or self.asked)

    @property
    def advanced(self) -> bool:
        """Whether the attempt (start of the program) has completed a step."""
        return self.step is not None and self.first is not None and self.step > self.first

    def text(self) -> str:
        """Return the result of this start of the program in a few words, for a printed line."""
        end = f"exit code {self.code}" if self.code >= 0 else f"signal {-self.code}"
        if self.unstarted and not self.why:
            return f"the launcher has started nothing (see its messages above), {end}"
        if self.code == 0 and self.left < self.told:
            end += f", but {self.told - self.left} of {self.told} ranks did not end by themselves"
        where = "" if self.step is None else f" at step {self.step}"
        if self.survived:
            where += f", {self.survived} rank{'s' * (self.survived > 1)} died on the way"
        where += f", first on {self.culprit}" if self.culprit else ""
        where += f"; {self.memory}" if self.memory else ""
        return f"{self.why}, {end}{where}" if self.why else f"{end}{where}"


class Policy(NamedTuple):
    """The user's options for `mpidist launch`.

    `preempted` says what follows an attempt (start of the program) that has saved and exited to be
    continued later: "leave" ends `mpidist launch` with exit code 75, "relaunch" starts the next
    attempt, and "requeue" makes Slurm start the job again. `max_preemptions` is the largest number
    of these attempts; None for any number.
    """

    max_restarts: int = 3
    min_ranks: int | None = None
    preempted: str = "leave"
    max_preemptions: int | None = None


class Action(NamedTuple):
    """The next action of `mpidist launch`: `what` is "relaunch", "requeue" or "end".

    A relaunch starts `ranks` ranks after `pause` seconds. For "requeue" and "end", `code` is the
    exit code of `mpidist launch`.
    """

    what: str
    code: int
    reason: str
    ranks: int = 0
    pause: float = 0.0


def decide(attempts: Sequence[Attempt], policy: Policy, wanted: int, room: int) -> Action:
    """Return what `mpidist launch` does after the newest attempt (start of the program).

    Parameters
    ----------
    attempts : sequence of Attempt
        All attempts so far, the newest last.
    policy : Policy
    wanted : int
        The number of ranks that the user wants.
    room : int
        How many ranks the remaining hosts can run.
    """
    last = attempts[-1]
    code = last.code if last.code > 0 else 128 - last.code if last.code < 0 else 1
    if last.finished:
        return Action("end", 0, "finished")
    if code in HOPELESS:
        return Action("end", code, f"exit code {code} means bad input: a restart would not help")
    if last.more and not last.asked:
        return Action("relaunch", 0, "as asked", min(room, wanted))
    times, most = sum(a.asked or a.preempted for a in attempts), policy.max_preemptions
    if (last.asked or last.preempted) and most is not None and times > most:
        reason = f"stopped {times} times, and --max-preemptions is {most}"
        return Action("end", REQUEUE, f"{reason}; the same command resumes from there")
    if last.asked or (last.preempted and policy.preempted != "relaunch"):
        what = "requeue" if policy.preempted == "requeue" else "end"
        return Action(what, REQUEUE, "stopped as asked; the same command resumes from there")
    ranks, least = min(room, _cap(attempts, policy, wanted)), policy.min_ranks or 1
    tried = [a for a in attempts if not a.unstarted]
    if last.unstarted:
        if len(attempts) >= UNSTARTED and all(a.unstarted for a in attempts[-UNSTARTED:]):
            return Action("end", code, f"{UNSTARTED} times in a row")
    elif ranks >= last.ranks and _same_twice(tried):
        where = "before its first step" if last.step is None else f"at step {last.step}"
        return Action("end", code, f"the same failure twice {where}")
    # If a program writes no heartbeats, each attempt counts, because its progress is unknown.
    spent = [a for a in tried if a.failed or not a.told]
    failures = [a for a in spent if last.ended - a.ended < WINDOW]
    if len(failures) > policy.max_restarts:
        count = f"{len(failures)} failures within an hour"
        return Action("end", code, f"{count}, and --max-restarts is {policy.max_restarts}")
    if ranks < least:
        return Action("end", code, f"there is room for {ranks} ranks, expected {least} or more")
    return Action("relaunch", 0, "from the newest good step", ranks, _pause(attempts))


def left_out(
    attempts: Sequence[Attempt],
    policy: Policy,
    wanted: int,
    hosts: Mapping[str, int],
    there: Sequence[str],
    now: float,
) -> list[str]:
    """Return the hosts that answer, but that the next start of the program must not use.

    A host is left out if its ranks were the first to fail several times within the last hour,
    unless the remaining hosts could then run too few ranks.

    Parameters
    ----------
    attempts : sequence of Attempt
        All attempts so far, the newest last.
    policy : Policy
    wanted : int
        The number of ranks that the user wants.
    hosts : mapping
        All hosts and their numbers of ranks.
    there : sequence of str
        The hosts that answer.
    """
    out: list[str] = []
    failed = [a for a in attempts if a.failed and not a.asked and now - a.ended < WINDOW]
    blamed = Counter(a.culprit for a in failed)
    for host, times in blamed.most_common():
        others = sum(hosts[name] for name in there if name not in (*out, host))
        room = wanted * others // sum(hosts.values())
        if host in there and times >= AGAIN and room >= (policy.min_ranks or 1):
            out.append(host)
    return out


def _same_twice(attempts: Sequence[Attempt]) -> bool:
    """Return whether the two newest attempts have the same exit code, last step and ranks.

    The result is false for a program that writes no heartbeats, because its step is unknown.
    """
    if len(attempts) < 2 or not attempts[-1].told:
        return False
    before, last = ((a.code, bool(a.why), a.step, a.ranks, bool(a.told)) for a in attempts[-2:])
    return before == last


def _cap(attempts: Sequence[Attempt], policy: Policy, wanted: int) -> int:
    """Return how many ranks to start: `wanted`, or fewer if ranks were missing twice in a row.

    Without the option --min-ranks, the result is `wanted`.
    """
    cap = wanted
    if policy.min_ranks is None:
        return cap
    for before, last in pairwise(attempts):
        if before.ranks == last.ranks and last.ranks not in (before.told, last.told):
            cap = min(cap, max(policy.min_ranks, last.told or last.ranks // 2))
    return cap


def _pause(attempts: Sequence[Attempt]) -> float:
    """Return the pause in seconds before the next attempt (start of the program).

    The pause is 0, but grows from 1 to `LONGEST_PAUSE` while two or more attempts in a row complete
    no step.
    """
    idle = len(list(takewhile(lambda attempt: not attempt.advanced, reversed(attempts))))
    return 0.0 if idle < 2 else min(LONGEST_PAUSE, 2.0 ** (idle - 2))
