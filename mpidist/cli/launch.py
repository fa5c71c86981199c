"""``mpidist launch -n N -- PROGRAM``: run an MPI program and restart it after a failure."""

from __future__ import annotations

import argparse
import os
import shutil
import uuid
from functools import partial
from pathlib import Path

from ..errors import ConfigError, shown


def add_parser(commands) -> None:
    """Add the command ``mpidist launch`` to the sub-parsers `commands` of ``mpidist``."""
    usage = "mpidist launch -n N [options] -- PROGRAM [ARGUMENT ...]"
    about = "run an MPI program until it is done, and start it again after a failure"
    add = commands.add_parser("launch", help=about, usage=usage).add_argument
    add("-n", type=int, required=True, metavar="N", help="number of ranks")
    add("--max-restarts", type=int, default=3, metavar="R", help="restarts per hour after failures")
    add("--min-ranks", type=int, metavar="M", help="least number of ranks for an attempt")
    add("--launcher", default="", metavar="WORDS",
        help="command that starts ranks, e.g. 'mpirun --with-ft ulfm' or 'srun --mpi=pmix'; "
        "default: the mpiexec of this Python")  # fmt: skip
    add("--elastic", action="store_true",
        help="if a rank dies, the others continue (the program must use md.elastic)")  # fmt: skip
    add("--hosts", metavar="A:2,B:2", help="hosts and their ranks; default: the hosts of Slurm")
    add("--hosts-from", metavar="COMMAND",
        help="command that prints the hosts of the next attempt, as A:2 on each line")  # fmt: skip
    add("--notice", default="", metavar="FILE|COMMAND",
        help="save and leave when FILE appears or COMMAND exits with 0")  # fmt: skip
    add("--preempted", choices=("leave", "relaunch", "requeue"), default="leave",
        help="what to do after an attempt that saved and exited: exit with code 75, start another "
        "attempt, or call scontrol requeue")  # fmt: skip
    add("--max-preemptions", type=int, metavar="P",
        help="how many attempts may save and exit before the end; default: no limit")  # fmt: skip
    seconds = partial(add, type=float, metavar="S")
    seconds("--heartbeat", default=60.0, help="end an attempt if a rank has no heartbeat this long")
    seconds("--launcher-timeout",
        help="end a launcher that starts no rank, or does not end after its ranks, within this "
        "time; default: 30, and for srun no limit at its start")  # fmt: skip
    seconds("--start-timeout", help="end an attempt if not all ranks begin within this time")
    seconds("--stall-timeout", help="end an attempt if no step is completed in this time")
    seconds("--grace", default=300.0, help="time to save and exit after SIGUSR1 or SIGTERM")
    add("--control", type=Path, metavar="DIR", help="shared folder for heartbeats and the history")
    add("program", nargs="+", metavar="-- PROGRAM", help="the program that every rank runs")


def run(args: argparse.Namespace) -> int:
    """Run the program until it is done; return the exit code.

    The exit code is 0 if the program is done, and 75 if it has saved a checkpoint and must be
    continued later.
    """
    from ..elasticity.ulfm_trial import check_survival
    from ..launch.launchers import command_words
    from ..supervisor import attempts, commands, requests
    from ..supervisor.liveness import Limits
    from ..supervisor.policy import Policy

    if args.n < 1:
        raise ConfigError(f"mpidist launch: -n {args.n}; expected at least one rank")
    for name in ("max_restarts", "max_preemptions"):
        if (getattr(args, name) or 0) < 0:
            raise ConfigError(
                f"mpidist launch: --{name.replace('_', '-')} {getattr(args, name)}; expected a "
                "whole number, at least 0"
            )
    if args.min_ranks is not None and not 1 <= args.min_ranks <= args.n:
        raise ConfigError(f"--min-ranks {args.min_ranks}; expected 1 to {args.n}, the ranks")
    for name in ("heartbeat", "launcher_timeout", "start_timeout", "stall_timeout", "grace"):
        value = getattr(args, name)
        if value is not None and not value > 0:  # NaN neither
            option = name.replace("_", "-")
            raise ConfigError(f"mpidist launch: --{option} {value:g}; expected seconds, above 0")
    in_slurm = "SLURM_JOB_ID" in os.environ
    if args.preempted == "requeue" and not in_slurm:
        raise ConfigError("--preempted requeue: this is no Slurm job; use leave or relaunch")
    if args.hosts and args.hosts_from:
        raise ConfigError("mpidist launch: give --hosts or --hosts-from, and not both")
    named = bool(args.hosts or args.hosts_from)
    hosts = None if named else commands.slurm_hosts(os.environ)
    if args.hosts:
        hosts = commands.parse_hosts(args.hosts)
    requests.notice_words(args.notice)  # raises ConfigError before anything is started
    limits = Limits(
        args.heartbeat, args.start_timeout, args.stall_timeout, args.grace, args.launcher_timeout
    )
    # A requeued job keeps its id, and so also the history of its failures and preemptions.
    name = os.environ["SLURM_JOB_ID"] if in_slurm else uuid.uuid4().hex[:12]
    job = attempts.LaunchedJob(
        program=tuple(args.program),
        ranks=args.n,
        folder=args.control or Path(f".mpidist-launch-{name}"),
        words=tuple(command_words("--launcher", args.launcher)),
        hosts=hosts,
        slurm=in_slurm and not named,
        policy=Policy(args.max_restarts, args.min_ranks, args.preempted, args.max_preemptions),
        limits=limits,
        elastic=args.elastic,
        notice=args.notice,
        hosts_from=tuple(command_words("--hosts-from", args.hosts_from or "")),
    )
    if job.words and shutil.which(job.words[0]) is None:
        raise ConfigError(f"mpidist launch: --launcher {shown(args.launcher)}: no such program")
    if hosts is None and not named and not job.words and shutil.which(job.program[0]) is None:
        # Other hosts might have the program.
        raise ConfigError(
            f"mpidist launch: no program {shown(job.program[0])} that can be run; give its path, "
            "and an interpreter before the path of a script"
        )
    if job.elastic:
        words = commands.surviving(commands.command(min(args.n, 2), job.words))
        if args.n > 1:
            check_survival(words, commands.printed_version(words[0]))
    try:
        return attempts.run(job)
    except OSError as error:
        raise ConfigError(f"mpidist launch: {error}; give a folder with --control DIR") from None
