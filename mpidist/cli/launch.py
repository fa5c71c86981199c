"""``mpidist launch -n N -- PROGRAM``: an MPI program that comes back by itself; needs no MPI."""

from __future__ import annotations

import argparse
import os
import shlex
import uuid
from pathlib import Path

from ..errors import ConfigError


def add_parser(commands) -> None:
    """Add this command to the argument parser."""
    parser = commands.add_parser(
        "launch", help="run an MPI program until it is done, whatever dies meanwhile",
        usage="mpidist launch -n N [options] -- PROGRAM [ARGUMENT ...]",
    )  # fmt: skip
    add = parser.add_argument
    add("-n", type=int, required=True, metavar="N", help="ranks")
    add("--max-restarts", type=int, default=3, metavar="R", help="after failures, within an hour")
    add("--min-ranks", type=int, metavar="M",
        help="the least to go on with, and to begin with where not all come")  # fmt: skip
    add("--launcher", default="", metavar="WORDS",
        help="e.g. 'mpirun --with-ft ulfm' or 'srun --mpi=pmix'; default: the mpiexec of this "
        "Python")  # fmt: skip
    add("--hosts", metavar="A:2,B:2", help="hosts and their ranks; Slurm's are known")
    add("--preempted", choices=("leave", "relaunch", "requeue"), default="leave",
        help="what follows a run that saved and left: exit code 75, another attempt, or "
        "scontrol requeue")  # fmt: skip
    add("--max-preemptions", type=int, metavar="P",
        help="how often in all it comes back from that; default: as often as it takes")  # fmt: skip
    add("--heartbeat", type=float, default=60.0, metavar="S",
        help="end the attempt when a rank gives no sign for so long")  # fmt: skip
    add("--launcher-timeout", type=float, metavar="S",
        help="for a launcher that starts nothing, or does not end after its ranks; default: 30, "
        "and for srun no limit at its start")  # fmt: skip
    add("--start-timeout", type=float, metavar="S", help="until all ranks have begun")
    add("--stall-timeout", type=float, metavar="S", help="without a completed step")
    add("--grace", type=float, default=300.0, metavar="S",
        help="to save and leave, after SIGUSR1 or SIGTERM")  # fmt: skip
    add("--control", type=Path, metavar="DIR",
        help="a folder that all hosts see, for signs of life and the history")  # fmt: skip
    add("program", nargs="+", metavar="-- PROGRAM", help="what every rank runs")


def run(args: argparse.Namespace) -> int:
    """Supervise. Returns the program's exit code, 0 or 75 as it ends."""
    from ..supervisor import attempts, commands
    from ..supervisor.liveness import Limits
    from ..supervisor.policy import Policy

    if args.n < 1 or min(args.max_restarts, args.max_preemptions or 0) < 0:
        raise ConfigError(
            f"mpidist launch: -n {args.n}, --max-restarts {args.max_restarts}, --max-preemptions "
            f"{args.max_preemptions}; expected at least one rank and no negative number"
        )
    if args.min_ranks is not None and not 1 <= args.min_ranks <= args.n:
        raise ConfigError(f"--min-ranks {args.min_ranks}; expected 1 to {args.n}, the ranks")
    in_slurm = "SLURM_JOB_ID" in os.environ
    if args.preempted == "requeue" and not in_slurm:
        raise ConfigError("--preempted requeue: this is no Slurm job; use leave or relaunch")
    hosts = commands.parse_hosts(args.hosts) if args.hosts else None
    if hosts is None:
        hosts = commands.slurm_hosts(os.environ)
    # A requeued job keeps its id, and so its history: what it has spent of its budget.
    name = os.environ["SLURM_JOB_ID"] if in_slurm else uuid.uuid4().hex[:12]
    job = attempts.LaunchedJob(
        program=tuple(args.program),
        ranks=args.n,
        folder=args.control or Path(f".mpidist-launch-{name}"),
        words=tuple(shlex.split(args.launcher)),
        hosts=hosts,
        slurm=in_slurm and not args.hosts,
        policy=Policy(args.max_restarts, args.min_ranks, args.preempted, args.max_preemptions),
        limits=Limits(
            args.heartbeat,
            args.start_timeout,
            args.stall_timeout,
            args.grace,
            args.launcher_timeout,
        ),
    )
    try:
        return attempts.run(job)
    except OSError as error:
        raise ConfigError(f"mpidist launch: {error}; give a folder with --control DIR") from None
