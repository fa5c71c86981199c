"""Choose the hosts for an attempt of `mpidist launch`."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

from ..errors import ConfigError
from ..launch.launchers import launch_environment
from ..launch.processes import run
from . import commands
from .host_tests import PROBE, silent_hosts
from .liveness import Limits
from .policy import Attempt, Policy, left_out


class LaunchedJob(NamedTuple):
    """A program, and the options with which `mpidist launch` runs it.

    `words` are the words of the user's launcher command. `hosts` has the number of ranks on each
    host, and `slurm` says whether the hosts belong to a Slurm allocation. `elastic` says whether
    the living ranks go on when a rank dies. `notice` is a file that appears, or a command that
    exits with 0, when the hosts will be taken away. `hosts_from` is a command that prints the hosts
    for the next start of the program.
    """

    program: tuple[str, ...]
    ranks: int
    folder: Path
    words: tuple[str, ...] = ()
    hosts: dict[str, int] | None = None
    slurm: bool = False
    policy: Policy = Policy()
    limits: Limits = Limits()
    elastic: bool = False
    notice: str = ""
    hosts_from: tuple[str, ...] = ()


class AttemptPlace(NamedTuple):
    """The hosts on which one attempt (start of the program) runs.

    `hosts` has the number of ranks on each host, or is None if the launcher chooses the hosts.
    `left` are the hosts that the Slurm allocation still has. `named` says whether the command line
    of the launcher contains the names of the hosts.
    """

    hosts: dict[str, int] | None
    left: tuple[str, ...] = ()
    named: bool = False

    def left_out(self, job: LaunchedJob) -> list[str]:
        """Return the hosts of `job` that this start of the program does not use."""
        return [host for host in job.hosts or () if host not in (self.hosts or {})]


def print_line(text: str) -> None:
    """Print one line of `mpidist launch` on stderr."""
    print(f"mpidist launch: {text}", file=sys.stderr, flush=True)


def grown(job: LaunchedJob, more: int) -> LaunchedJob:
    """Return `job` with `more` additional ranks, or with fewer if its hosts cannot run so many."""
    wanted = job.ranks + more
    ranks = min(wanted, max(job.ranks, sum(job.hosts.values()))) if job.hosts else wanted
    if ranks < wanted:
        print_line(f"the hosts have room for only {ranks} of {wanted} ranks")
    return job._replace(ranks=ranks)


def with_todays_hosts(job: LaunchedJob) -> LaunchedJob:
    """Return `job` with the hosts that its command `hosts_from` prints now, if it has one.

    The command is run before each attempt (start of the program). If it fails before a later
    attempt, the hosts do not change; before the first attempt the function raises ConfigError.
    """
    if not job.hosts_from:
        return job
    text = " ".join(job.hosts_from)
    try:
        done = run(job.hosts_from, timeout=PROBE)
        if done.returncode:
            raise ConfigError(f"it exits with code {done.returncode}: {done.stderr.strip()[-200:]}")
        hosts = commands.parse_hosts(",".join(done.stdout.split()))
    except (ConfigError, OSError) as error:
        line = f"--hosts-from {text!r}: expected one HOST:RANKS on each line; {error}"
        if job.hosts is None:
            raise ConfigError(" ".join(line.split())) from None
        print_line(" ".join(f"{line}; the previous hosts are used".split()))
        return job
    if hosts != job.hosts and job.hosts is not None:
        print_line(f"hosts: {', '.join(f'{host}:{count}' for host, count in hosts.items())}")
    return job._replace(hosts=hosts)


def all_hosts(job: LaunchedJob) -> AttemptPlace:
    """Return all hosts of the job, without a test whether they answer."""
    return AttemptPlace(job.hosts, tuple(job.hosts or ()), named=not job.slurm)


def usable(job: LaunchedJob, before: AttemptPlace, unstarted: bool = False) -> AttemptPlace:
    """Return the hosts that can start a program, for the next attempt.

    Parameters
    ----------
    job : LaunchedJob
    before : AttemptPlace
        The hosts of the previous attempt.
    unstarted : bool
        Whether the launcher has started no process in the previous attempt. If so, the launcher is
        also tested: it must start a short program on each host.
    """
    if job.hosts is None or len(job.hosts) < 2:
        return all_hosts(job)
    left, away = list(job.hosts), set[str]()
    if job.slurm:
        try:
            still = set(commands.slurm_left(os.environ))
            left = [host for host in left if host in still]
            away = commands.slurm_away(left) if left else set()
        except ConfigError as error:  # Slurm may only be busy, so all hosts are tested
            print_line(f"Slurm does not say which nodes are left: {error}")
            left = list(job.hosts)
    gone = [host for host in job.hosts if host not in left or host in away]
    if gone:
        print_line(f"not there: {', '.join(gone)}")
    there = [host for host in left if host not in away]
    silent = _silent(job, there, left, unstarted)
    if silent:
        verb = "does not answer and is" if len(silent) == 1 else "do not answer and are"
        print_line(f"{', '.join(silent)} {verb} left out")
    hosts = {host: job.hosts[host] for host in there if host not in silent}
    if back := [host for host in hosts if host not in (before.hosts or job.hosts)]:
        print_line(f"used again: {', '.join(back)}")
    return AttemptPlace(hosts, tuple(left), named=len(hosts) < len(left) or not job.slurm)


def _silent(job: LaunchedJob, hosts: list[str], left: list[str], unstarted: bool) -> list[str]:
    """Return those of `hosts` that cannot start a program."""
    silent: list[str] = []
    for by_slurm in (True, False) if job.slurm and unstarted else (job.slurm,):
        words = partial(commands.host_test, words=job.words, by_slurm=by_slurm)
        asked = [host for host in hosts if host not in silent]
        silent += run_on_hosts(job, asked, words, left)
    if len(silent) < len(hosts):
        return silent
    # No host answers, but the host of `mpidist launch` surely runs. So the test itself fails.
    if hosts:
        print_line("no host answers, so all hosts are used")
    return []


def run_on_hosts(
    job: LaunchedJob,
    hosts: list[str],
    words: Callable[[str], Sequence[str]],
    left: list[str] | None = None,
) -> list[str]:
    """Run a command on all hosts at the same time; return the hosts where it fails or takes long.

    ``words(host)`` returns the command.
    """
    environment = {**launch_environment(), **commands.BESIDE_OTHERS}
    doors = None
    if job.slurm and hosts:
        at_first = list(job.hosts or ())
        environment |= commands.slurm_environ(os.environ, at_first, left or at_first, job.ranks)
        with suppress(ConfigError):
            doors = commands.slurm_doors(hosts)
    return silent_hosts(hosts, words, environment, doors)


def doubted(job: LaunchedJob, attempt: Attempt, place: AttemptPlace) -> Attempt:
    """Return the result `attempt`, changed to a failure if a host does not answer.

    If a host is lost, Open MPI's launcher ends with exit code 0, so this code does not prove that
    the program has finished. If no heartbeats prove it either, this function tests the hosts.
    """
    hosts = list(place.hosts or ())
    if not attempt.finished or attempt.told or len(hosts) < 2:
        return attempt
    if silent := _silent(job, hosts, list(place.left) or hosts, False):
        why = f"no answer of {', '.join(silent)}, so the exit code of the launcher proves nothing"
        return attempt._replace(why=why)
    return attempt


def without_culprits(
    job: LaunchedJob, attempts: Sequence[Attempt], place: AttemptPlace
) -> AttemptPlace:
    """Return the hosts of `place` without those whose ranks were often the first to fail."""
    if not place.hosts:
        return place
    known = attempts, job.policy, job.ranks
    out = left_out(*known, job.hosts or {}, list(place.hosts), time.time())
    if not out:
        return place
    why = "because ranks of this job were the first to fail there, again and again"
    print_line(f"left out, {why}: {', '.join(out)}")
    hosts = {host: count for host, count in place.hosts.items() if host not in out}
    return place._replace(hosts=hosts, named=True)


def room(job: LaunchedJob, hosts: Mapping[str, int] | None) -> int:
    """Return how many ranks can run on `hosts`, which are some of the job's hosts (None: all)."""
    if not job.hosts or hosts is None:
        return job.ranks
    if job.hosts_from:
        return min(job.ranks, sum(hosts.values()))
    return job.ranks * sum(hosts.values()) // sum(job.hosts.values())
