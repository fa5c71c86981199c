"""Where an attempt of `mpidist launch` can run: hosts that answer and have not failed too often."""

from __future__ import annotations

import os
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
    """What to run, and how. `hosts`: host to ranks; `slurm`: they are those of an allocation."""

    program: tuple[str, ...]
    ranks: int
    folder: Path
    words: tuple[str, ...] = ()
    hosts: dict[str, int] | None = None
    slurm: bool = False
    policy: Policy = Policy()
    limits: Limits = Limits()


class AttemptPlace(NamedTuple):
    """Where an attempt runs: `hosts` to ranks, None where the launcher decides.

    `left` are the hosts of the allocation; `named`: some of them must not be used.
    """

    hosts: dict[str, int] | None
    left: tuple[str, ...] = ()
    named: bool = False


def print_line(text: str) -> None:
    """Print one line."""
    print(f"mpidist launch: {text}", file=sys.stderr, flush=True)


def usable(job: LaunchedJob) -> AttemptPlace:
    """Return where the next attempt can run."""
    if job.hosts is None or len(job.hosts) < 2:
        return AttemptPlace(job.hosts)
    left = list(job.hosts)
    if job.slurm:
        try:
            still = set(commands.slurm_left(os.environ))
            left = [host for host in left if host in still]
            away = commands.slurm_away(left) if left else set()
        except ConfigError as error:  # a controller that is busy: the hosts may well be there
            print_line(f"Slurm does not say which nodes are left: {error}")
            return AttemptPlace(job.hosts, tuple(job.hosts))
    else:
        environment = launch_environment()
        with ThreadPoolExecutor(16) as pool:
            answers = pool.map(
                lambda host: commands.answers(host, job.words, environment, PROBE), left
            )
            away = {host for host, well in zip(left, answers, strict=True) if not well}
    hosts = {host: job.hosts[host] for host in left if host not in away}
    if gone := [host for host in job.hosts if host not in hosts]:
        print_line(f"not there: {', '.join(gone)}")
    return AttemptPlace(hosts, tuple(left), named=bool(away) or not job.slurm)


def without_culprits(
    job: LaunchedJob, attempts: Sequence[Attempt], place: AttemptPlace
) -> AttemptPlace:
    """Leave out hosts that are there, and on which the job fails again and again."""
    if not place.hosts:
        return place
    known = attempts, job.policy, job.ranks
    out = left_out(*known, job.hosts or {}, list(place.hosts), time.time())
    if not out:
        return place
    print_line(
        f"left out, for ranks of this job failed there first, again and again: {', '.join(out)}"
    )
    hosts = {host: count for host, count in place.hosts.items() if host not in out}
    return place._replace(hosts=hosts, named=True)


def room(job: LaunchedJob, hosts: Mapping[str, int] | None) -> int:
    """Return how many ranks hosts have room for, given that all have for all ranks. Pure."""
    if not job.hosts or hosts is None:
        return job.ranks
    return job.ranks * sum(hosts.values()) // sum(job.hosts.values())
