"""The hosts for an attempt of `mpidist launch`: those that answer and do not fail too often."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from ..errors import ConfigError
from ..launch.launchers import launch_environment
from . import commands
from .liveness import Limits
from .policy import Attempt, Policy, left_out

#: Seconds within which a host must be able to start a program.
PROBE = 20.0


class LaunchedJob(NamedTuple):
    """A program, and how `mpidist launch` runs it.

    `words`: the user's launcher command. `hosts`: the number of ranks on each host. `slurm`:
    whether the hosts are those of a Slurm allocation. `elastic`: whether the ranks go on when one
    of them dies. `notice`: a file or a command that says when the hosts will be taken away.
    `hosts_from`: a command that prints the hosts of the next attempt.
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
    """The hosts of an attempt.

    `hosts`: the number of ranks on each host, or None if the launcher chooses the hosts. `left`:
    the hosts that the Slurm allocation still has. `named`: whether the command line of the launcher
    contains the names of the hosts.
    """

    hosts: dict[str, int] | None
    left: tuple[str, ...] = ()
    named: bool = False


def print_line(text: str) -> None:
    """Print one line of `mpidist launch` on stderr."""
    print(f"mpidist launch: {text}", file=sys.stderr, flush=True)


def grown(job: LaunchedJob, more: int) -> LaunchedJob:
    """Return `job` with `more` ranks, but with no more than its hosts have room for."""
    wanted = job.ranks + more
    ranks = min(wanted, max(job.ranks, sum(job.hosts.values()))) if job.hosts else wanted
    if ranks < wanted:
        print_line(f"the hosts have room for {ranks} ranks, and not for {wanted}")
    return job._replace(ranks=ranks)


def with_todays_hosts(job: LaunchedJob) -> LaunchedJob:
    """Return `job` with the hosts that its command prints now, if it has one.

    If the command fails in a later attempt, the hosts stay what they are.

    Raises
    ------
    ConfigError
        The command fails before the first attempt.
    """
    if not job.hosts_from:
        return job
    text = " ".join(job.hosts_from)
    try:
        done = subprocess.run(job.hosts_from, capture_output=True, text=True, timeout=PROBE)
        if done.returncode:
            raise ConfigError(f"it exits with code {done.returncode}: {done.stderr.strip()[-200:]}")
        hosts = commands.parse_hosts(",".join(done.stdout.split()))
    except (ConfigError, OSError, subprocess.SubprocessError) as error:
        line = f"--hosts-from {text!r}: expected one HOST:RANKS on each line; {error}"
        if job.hosts is None:
            raise ConfigError(" ".join(line.split())) from None
        print_line(" ".join(f"{line}; the hosts of before are used".split()))
        return job
    if hosts != job.hosts and job.hosts is not None:
        print_line(f"hosts: {', '.join(f'{host}:{count}' for host, count in hosts.items())}")
    return job._replace(hosts=hosts)


def usable(job: LaunchedJob) -> AttemptPlace:
    """Return the hosts on which the next attempt can run."""
    if job.hosts is None or len(job.hosts) < 2:
        return AttemptPlace(job.hosts)
    left = list(job.hosts)
    if job.slurm:
        try:
            still = set(commands.slurm_left(os.environ))
            left = [host for host in left if host in still]
            away = commands.slurm_away(left) if left else set()
        except ConfigError as error:  # Slurm may only be busy, so all hosts are tried
            print_line(f"Slurm does not say which nodes are left: {error}")
            return AttemptPlace(job.hosts, tuple(job.hosts))
    else:
        environment = launch_environment()

        def is_away(host: str) -> bool:
            return not commands.answers(host, job.words, environment, PROBE)

        with ThreadPoolExecutor(16) as pool:
            away = set(itertools.compress(left, pool.map(is_away, left)))
    hosts = {host: job.hosts[host] for host in left if host not in away}
    if gone := [host for host in job.hosts if host not in hosts]:
        print_line(f"not there: {', '.join(gone)}")
    return AttemptPlace(hosts, tuple(left), named=bool(away) or not job.slurm)


def without_culprits(
    job: LaunchedJob, attempts: Sequence[Attempt], place: AttemptPlace
) -> AttemptPlace:
    """Return the hosts of `place` without those on which the job fails again and again."""
    if not place.hosts:
        return place
    known = attempts, job.policy, job.ranks
    out = left_out(*known, job.hosts or {}, list(place.hosts), time.time())
    if not out:
        return place
    why = "for ranks of this job failed there first, again and again"
    print_line(f"left out, {why}: {', '.join(out)}")
    hosts = {host: count for host, count in place.hosts.items() if host not in out}
    return place._replace(hosts=hosts, named=True)


def room(job: LaunchedJob, hosts: Mapping[str, int] | None) -> int:
    """Return how many ranks can run on `hosts`, which are some of the job's hosts. Pure."""
    if not job.hosts or hosts is None:
        return job.ranks
    if job.hosts_from:
        return min(job.ranks, sum(hosts.values()))
    return job.ranks * sum(hosts.values()) // sum(job.hosts.values())
