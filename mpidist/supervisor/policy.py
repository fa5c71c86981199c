"""What `mpidist launch` does next: a pure function of what has happened so far.

    attempt 0   4 ranks   exit 137 at step 812     -> again, with 4 ranks
    attempt 1   4 ranks   exit 137 at step 951     -> again
    attempt 2   4 ranks   exit 137 at step 951     -> stop: the same failure at the same step

Failures have a budget per hour. A run that left to be requeued (exit code 75) is no failure and
costs nothing of it, as long as it gets further each time, and tells so; it has a budget of its own.
Nor does a launcher that has started nothing: the job was not even tried.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

#: Exit codes after which another attempt would end the same: bad input, EX_USAGE, EX_CONFIG.
HOPELESS = (2, 64, 78)
#: "Saved, not finished" (EX_TEMPFAIL).
REQUEUE = 75
#: The budget of failures is one for each of these seconds.
WINDOW = 3600.0
#: The longest pause before another attempt.
LONGEST_PAUSE = 60.0
#: A launcher may start nothing so often in a row.
UNSTARTED = 3
#: A host whose ranks were the first to fail so often is left out.
AGAIN = 2


class Attempt(NamedTuple):
    """What came of one launch.

    `step` is how far it got and `first` where it began, None where no rank told; `told` ranks
    told anything, and `left` of them ended by themselves. `why`: what the supervisor ended it for.
    `begun`: the launcher has started the program somewhere. `culprit`: the host whose ranks were
    the first to fail, "" where nobody knows. `memory`: whom the kernel killed for want of it.
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

    @property
    def finished(self) -> bool:
        """Whether the program came to its end: the exit code alone proves nothing."""
        return self.code == 0 and not self.why and self.left == self.told

    @property
    def preempted(self) -> bool:
        """Whether it saved and left by itself, to be requeued."""
        return self.code == REQUEUE and not self.why

    @property
    def failed(self) -> bool:
        """Whether it counts among the failures."""
        return not (self.finished or self.preempted)

    @property
    def unstarted(self) -> bool:
        """Whether the launcher had started nothing when it gave up, or was given up."""
        return self.failed and not (self.begun or self.told or self.asked)

    @property
    def whole(self) -> bool:
        """Whether all ranks began."""
        return self.told == self.ranks

    @property
    def advanced(self) -> bool:
        """Whether a step was completed."""
        return self.step is not None and self.first is not None and self.step > self.first

    def text(self) -> str:
        """In a few words."""
        end = f"exit code {self.code}" if self.code >= 0 else f"signal {-self.code}"
        if self.unstarted and not self.why:
            return f"the launcher has started nothing (its words are above), {end}"
        if self.code == 0 and self.left < self.told:
            end += f", but {self.told - self.left} of {self.told} ranks did not end by themselves"
        where = "" if self.step is None else f" at step {self.step}"
        where += f", first on {self.culprit}" if self.culprit else ""
        where += f"; {self.memory}" if self.memory else ""
        return f"{self.why}, {end}{where}" if self.why else f"{end}{where}"


class Policy(NamedTuple):
    """What the user wants. `preempted`: "leave" with 75, "relaunch", or "requeue" under Slurm.

    `max_preemptions`: how often that in all, None for as often as it takes.
    """

    max_restarts: int = 3
    min_ranks: int | None = None
    preempted: str = "leave"
    max_preemptions: int | None = None


class Action(NamedTuple):
    """What to do: "relaunch" with so many `ranks` after `pause` seconds, "requeue", or "end"."""

    what: str
    code: int
    reason: str
    ranks: int = 0
    pause: float = 0.0


def decide(attempts: Sequence[Attempt], policy: Policy, wanted: int, room: int) -> Action:
    """Return what to do after the newest of the attempts. Pure.

    Parameters
    ----------
    attempts : sequence of Attempt
        All so far, the newest last.
    policy : Policy
    wanted : int
        The number of ranks that was asked for.
    room : int
        How many ranks the hosts that are left have room for.
    """
    last = attempts[-1]
    code = last.code if last.code > 0 else 128 - last.code if last.code < 0 else 1
    if last.finished:
        return Action("end", 0, "finished")
    if code in HOPELESS:
        return Action("end", code, f"exit code {code} means bad input: again would end the same")
    times, most = sum(a.asked or a.preempted for a in attempts), policy.max_preemptions
    if (last.asked or last.preempted) and most is not None and times > most:
        reason = f"stopped {times} times, and --max-preemptions is {most}"
        return Action("end", REQUEUE, f"{reason}; the same command goes on from there")
    if last.asked or (last.preempted and policy.preempted != "relaunch"):
        what = "requeue" if policy.preempted == "requeue" else "end"
        return Action(what, REQUEUE, "stopped as asked; the same command goes on from there")
    ranks, least = min(room, _cap(attempts, policy, wanted)), policy.min_ranks or 1
    tried = [a for a in attempts if not a.unstarted]
    if last.unstarted:
        if len(attempts) >= UNSTARTED and all(a.unstarted for a in attempts[-UNSTARTED:]):
            return Action("end", code, f"{UNSTARTED} times in a row")
    elif ranks >= last.ranks and _same_twice(tried):
        where = "before its first step" if last.step is None else f"at step {last.step}"
        return Action("end", code, f"the same failure twice {where}")
    # Nobody knows whether a program that tells nothing gets further: each of its attempts counts.
    spent = [a for a in tried if a.failed or not a.told]
    failures = [a for a in spent if last.ended - a.ended < WINDOW]
    if len(failures) > policy.max_restarts:
        count = f"{len(failures)} failures within an hour"
        return Action("end", code, f"{count}, and --max-restarts is {policy.max_restarts}")
    if ranks < least:
        return Action("end", code, f"there is room for {ranks} ranks, and {least} are the least")
    return Action("relaunch", 0, "from the newest good step", ranks, _pause(attempts))


def left_out(
    attempts: Sequence[Attempt],
    policy: Policy,
    wanted: int,
    hosts: Mapping[str, int],
    there: Sequence[str],
    now: float,
) -> list[str]:
    """Return the hosts to be left out of the next attempt, though they are there. Pure.

    Their ranks were the first to fail, again and again within the last hour. The worst come first,
    as long as there is room on the others.

    Parameters
    ----------
    attempts, policy, wanted
        As of `decide`.
    hosts : mapping
        All hosts to the ranks of each, which have room for all that are `wanted`.
    there : sequence of str
        Those of them that are there.
    now : float
        The time: the newest attempt may be of yesterday, before a requeue.
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
    """Whether the two newest ended alike at one place, and with as many ranks.

    Of a program that tells no steps nobody knows the place; only the budget ends it.
    """
    if len(attempts) < 2 or not attempts[-1].told:
        return False
    before, last = ((a.code, bool(a.why), a.step, a.ranks, bool(a.told)) for a in attempts[-2:])
    return before == last


def _cap(attempts: Sequence[Attempt], policy: Policy, wanted: int) -> int:
    """Return how many ranks can begin at all: fewer where twice not all of them came (R50).

    Only a user who has named the least wants to begin with fewer.
    """
    cap = wanted
    if policy.min_ranks is None:
        return cap
    for before, last in pairwise(attempts):
        if before.ranks == last.ranks and not before.whole and not last.whole:
            cap = min(cap, max(policy.min_ranks, last.told or last.ranks // 2))
    return cap


def _pause(attempts: Sequence[Attempt]) -> float:
    """Seconds before the next attempt: none at first, doubling while none gets further."""
    idle = 0
    for attempt in reversed(attempts):
        if attempt.advanced:
            break
        idle += 1
    return 0.0 if idle < 2 else min(LONGEST_PAUSE, 2.0 ** (idle - 2))
