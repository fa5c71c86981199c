"""``mpidist advise servers JOB.toml``: advise allreduce, servers or neither; needs no MPI."""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict
from pathlib import Path

from ..errors import ConfigError
from .simulate import add_network, network_of


def add_parser(commands) -> None:
    """Add the command ``mpidist advise`` to the sub-parsers `commands` of ``mpidist``."""
    parser = commands.add_parser("advise", help="which strategy suits a model; needs no MPI")
    what = parser.add_subparsers(dest="what", required=True, metavar="{servers}")
    about = "allreduce, servers (how many), or neither, with the numbers that decide"
    one = what.add_parser("servers", help=about, description=about)
    add = one.add_argument
    add("job", metavar="JOB.toml", help="job file: its model, data, optimizer and global_batch")
    add("--set", action="append", default=[], dest="settings", metavar="KEY=VALUE",
        help="replace a value of the job file, e.g. global_batch=256")  # fmt: skip
    add("--ranks", type=int, default=8, help="number of ranks, each on its own node (8)")
    add("--compute", type=float, metavar="SECONDS",
        help="seconds of a global batch on one rank (default: measured now)")  # fmt: skip
    add("--memory", type=float, metavar="BYTES", help="bytes that a rank may use (any)")
    add("--slowest", type=float, default=1.0, metavar="FACTOR",
        help="in each step another rank takes this many times as long (1)")  # fmt: skip
    add("--bound", type=float, default=0.5, help="warn above this share of communication (0.5)")
    add("--json", metavar="FILE", help="write the choices to FILE as well")
    add_network(one)
    parser.set_defaults(command="advise")


def run(args: argparse.Namespace) -> int:
    """Print the advice, and the numbers on which it depends; return the exit code."""
    from ..advice.server_advice import StepFacts, advised_choice, choices, server_advice_lines
    from ..training.job import build_run, read_job

    for name in ("ranks", "compute", "memory", "bound", "alpha", "bandwidth", "reduction"):
        value = getattr(args, name)
        if value is not None and not 0 < value < float("inf"):
            raise ConfigError(f"--{name} {value}: expected more than 0")
    if not 1 <= args.slowest < float("inf"):
        raise ConfigError(f"--slowest {args.slowest:g}: expected 1 or more")
    network = network_of(args)
    job = read_job(args.job, args.settings)
    parts = build_run(job, None)
    parameters = parts.model.parameters
    state = parts.optimizer.init(parameters)
    measured = args.compute is None
    facts = StepFacts(
        parameters=sum(array.nbytes for array in parameters.values()),
        state=state_bytes(state),
        compute=compute_seconds(parts, job.global_batch) if measured else args.compute,
        ranks=args.ranks,
        network=network,
        memory=None if args.memory is None else int(args.memory),
        slowest=args.slowest,
    )
    origin = ", measured" if measured else ""
    print(
        f"# {args.job}: {facts.parameters / 1e6:.3f} MB of parameters, {facts.state / 1e6:.3f} MB "
        f"of optimizer state; a batch of {job.global_batch} takes one rank "
        f"{facts.compute * 1e3:.3f} ms{origin}\n# {facts.ranks} ranks, latency "
        f"{network.latency * 1e6:.3g} us, {1e-9 / network.gap:.3g} GB/s"
    )
    found = choices(facts)
    for line in server_advice_lines(facts, found, args.bound):
        print(line)
    if args.json:
        advised, why = advised_choice(facts, found)
        rows = [
            {**asdict(each), "seconds": each.seconds, "share": each.share,
             "advised": each is advised, "why": why} for each in found
        ]  # fmt: skip
        try:
            Path(args.json).write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--json {args.json}: {error.strerror}") from None
    return 0


def compute_seconds(parts, global_batch: int, repeats: int = 5) -> float:
    """Return the seconds to compute a global batch on this machine: the best of `repeats` runs."""
    import numpy as np

    from ..data import BadRecordFilter

    wanted = np.arange(min(global_batch, len(parts.train)))
    batch = BadRecordFilter(parts.train).take(wanted).batch
    gradients = {name: np.empty_like(array) for name, array in parts.model.parameters.items()}
    seconds = []
    for _ in range(repeats + 1):  # the first one warms up
        start = time.perf_counter()
        parts.model.loss_and_gradients(batch, gradients)
        seconds.append(time.perf_counter() - start)
    return min(seconds[1:]) * global_batch / len(batch[0])


def state_bytes(state) -> int:
    """Return the bytes of all arrays in nested dicts."""
    if isinstance(state, dict):
        return sum(map(state_bytes, state.values()))
    return getattr(state, "nbytes", 0)
