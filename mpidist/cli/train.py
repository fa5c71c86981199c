"""``mpidist train JOB.toml``: run a training job, under mpirun or srun, or on one rank."""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import signal
import sys
import time
import uuid
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack, closing, suppress
from functools import partial
from pathlib import Path
from typing import Any

from .. import events
from ..errors import ConfigError, MpidistError, StorageError, described
from ..launch import binding, claims, heartbeat, start_checks, start_report
from ..launch.environment import attempt_folder, has_ulfm, memory_folder
from ..launch.fault_points import fault_point
from ..supervisor import commands
from ..training import start_records
from .start import start_ranks

#: Seconds between progress lines if stderr is not a terminal, as under mpirun.
_LINE_EVERY = 2.0
#: Keys of a job file that are arguments of `md.train`.
_SAME_IN_TRAIN = (
    "global_batch", "epochs", "steps", "seed", "shuffle", "checkpoint_every", "stop_after",
    "microbatches", "check_replicas", "time_limit", "patience", "max_bad", "retry_bad",
)  # fmt: skip


def add_parser(commands) -> None:
    """Add the command ``mpidist train`` to the sub-parsers `commands` of ``mpidist``."""
    parser = commands.add_parser("train", help="train the model of a TOML job file")
    parser.add_argument("job", metavar="JOB.toml", help="the job file")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", dest="settings",
        help="change a key of the job file, e.g. --set optimizer.lr=0.1 --set out=runs/a",
    )  # fmt: skip
    add = parser.add_mutually_exclusive_group().add_argument
    add("--resume", action="store_true", help="resume; fail if there is no checkpoint")
    add("--no-resume", action="store_true", help="begin anew; fail if there is a checkpoint")
    add("--fresh", action="store_true", help="begin anew; ignore the old checkpoints from now on")


def run(args: argparse.Namespace) -> int:
    """Train, and return the exit code. Collective over all ranks of the launch."""
    # A signal that asks for a stop while the run starts stays pending until `md.guard` handles it.
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    heartbeat.join()
    fault_point("start")
    try:
        from ..data.readers import remote
        from ..training.job import build_run, read_job

        job = read_job(args.job, args.settings)
        claim = claims.claimed_size(os.environ)
        far = remote.is_remote(job.data)
        parts = None if far else build_run(job, claim.size if claim else None)
        path = job.folder / "checkpoints"
        fresh = args.fresh and beginning(os.environ)
        # With `local` in the job file, checkpoints may exist only on the nodes. The store finds
        # them.
        if args.resume and not job.local and not any(path.glob("step-*")):
            raise ConfigError(f"--resume: no checkpoint in {path}; leave --resume out to begin")
    except MpidistError as error:
        error.awaited = True
        raise
    except (ImportError, OSError) as error:  # perhaps on this host only
        told = MpidistError(described(error))
        told.awaited = True
        raise told from error
    comm = start_ranks(os.environ)
    try:
        if parts is None:  # only MPI can tell which rank of each node must fetch the data
            job.data = remote.brought_here(comm, job.data)
            parts = build_run(job, comm.size)
        return _train(comm, job, parts, args, path, fresh)
    except MpidistError as error:
        if comm.size == 1:
            raise
        # The exception hook decides which rank prints the error, and ends the job. The hook prints
        # an error of mpidist in one line, without a traceback.
        error.everywhere = True
        sys.excepthook(type(error), error, error.__traceback__)
    return 0


def beginning(environ: Mapping[str, str]) -> bool | str:
    """Return a name of this job, which is the same in all its attempts (starts of the program).

    The result is True instead of a name if the job has one attempt only. Raises ConfigError if a
    first attempt cannot be distinguished from a later one.
    """
    requeued = environ.get("SLURM_RESTART_COUNT", "0") != "0"
    launcher = environ.get(heartbeat.LAUNCHER)
    if launcher and not requeued:
        return launcher
    step = environ.get("SLURM_STEP_ID", "")
    # Slurm numbers the steps of a requeued job from 0 again. Steps that a shell starts have larger
    # numbers.
    if not launcher and "SLURM_JOB_ID" in environ and step.isdecimal() and int(step) < 1 << 31:
        return f"{environ['SLURM_JOB_ID']}.{step}"
    if requeued:
        raise ConfigError(
            "--fresh: this job was requeued, and would ignore its own checkpoints; start it with "
            "srun, or leave --fresh out"
        )
    return True


def _train(comm, job, parts, args, store_path: Path, fresh: bool | str) -> int:
    from ..checkpoint import early_lock
    from ..checkpoint.memory_copies import open_with_copies
    from ..checkpoint.store import CheckpointStore
    from ..checkpoint.tiered import TieredStore
    from ..fault_tolerance import hand_over
    from ..fault_tolerance.guard import Stopped
    from ..fault_tolerance.signals import say_last
    from ..fault_tolerance.watch import watch
    from ..runtime.topology import Topology
    from ..training.job import elastic_of
    from ..training.train import train

    crowded = binding.check_binding(comm, os.environ)
    if comm.rank == 0:
        try:
            job.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"cannot make the folder {job.folder}: {error.strerror}; choose another one with "
                "--set out=DIR"
            ) from None
    elastic = elastic_of(job)
    # An attempt of `mpidist launch` is refused not here, but at its first save, because ranks of a
    # launcher that was killed may end a while after it.
    if attempt_folder() is None:
        why = early_lock.why_refused(comm, str(store_path))
        if why:
            raise ConfigError(
                f"{why}; wait for that job or stop it, or choose another folder with --set out=DIR"
            )
    with Topology(comm) as topology:
        nbytes = _model_bytes(parts)
        facts = (f"data {job.data['name']}", f"model {job.model['name']} {nbytes / 1e6:.2f} MB")
        line = start_report.startup_line(comm, topology, os.environ, *facts)
        if job.device == "gpu":
            _to_device(parts.model, topology.local_rank)
        host = topology.hosts[topology.node]
        per_host = Counter(topology.hosts[node] for node in topology.node_of)
    if fresh is True and elastic:  # the store is opened again after each death
        fresh = comm.bcast(uuid.uuid4().hex)

    def begin() -> None:
        if comm.rank == 0:
            print(line, flush=True)
            _keep_start(job, args, per_host)
        log = job.folder / "events" / f"rank-{comm.rank}.jsonl"
        try:
            events.open_log(log, rank=comm.rank, host=host)
        except OSError as error:  # a run without this log is still a good run
            _note(f"cannot write the events of rank {comm.rank} to {log}: {error.strerror}")

    if hand_over.is_waiting():
        hand_over.at_turn.append(begin)
    else:
        begin()
    resume = True if args.resume else False if args.no_resume else "auto"
    copies = elastic and elastic.every and getattr(parts.strategy, "has_replicas", False)
    memory = memory_folder() if copies and not job.local else None
    make: Any = partial(TieredStore, local=job.local) if job.local else CheckpointStore
    if memory is not None:
        make = partial(open_with_copies, folder=memory)
    with ExitStack() as stack:
        stack.callback(events.close_log)
        if job.watch_seconds and not elastic:
            stack.enter_context(watch(comm, seconds=job.watch_seconds, dumps=job.folder / "hang"))
        reporter = stack.enter_context(closing(Reporter(job, comm.rank == 0)))
        store = partial(make, path=store_path, keep=job.keep, fresh=fresh)
        try:
            summary = train(
                comm, parts.model, parts.train, optimizer=parts.optimizer,
                strategy=parts.strategy, test_data=parts.test, loading=parts.loading,
                checkpoint=store, resume=resume, callbacks=[reporter],
                on_resize=reporter.resized, elastic=elastic,
                quarantine=job.folder / "quarantine.jsonl",
                # The watch of this command, which has a folder for dumps, does not notice that a
                # rank has died.
                watch_seconds=job.watch_seconds if elastic else 0,
                **{name: getattr(job, name) for name in _SAME_IN_TRAIN},
            )  # fmt: skip
        except Stopped:
            if reporter.speaks and events.VERBOSITY and not hand_over.handed:
                say_last(f"mpidist: go on with: {_again(args, comm.size, crowded)}")
            raise
    if not reporter.speaks:
        return 0
    # A run that `stop_after` has ended would do nothing more if it were started with it again.
    args.settings = [each for each in args.settings if summary.finished or not _stops(each)]
    return _report(job, summary, _again(args, comm.size, crowded))


def _model_bytes(parts) -> int:
    """Return the size of the model in bytes; for a pipeline, without making all parameters."""
    if getattr(parts.strategy, "in_parts", False):
        shapes = (shape for layer in parts.model.layers for shape in layer.shapes().values())
        return 4 * sum(math.prod(shape) for shape in shapes)
    return sum(array.nbytes for array in parts.model.parameters.values())


def _to_device(model, local_rank: int) -> None:
    """Move the model's arrays to the GPU whose number is `local_rank` modulo the number of GPUs."""
    from ..arrays import to_device

    for arrays in (model.parameters, getattr(model, "state", {})):
        for name, array in arrays.items():
            arrays[name] = to_device(array, local_rank)


def _keep_start(job, args, per_host: Mapping[str, int]) -> None:
    """Write the command, software versions and hosts of this start into the folder of the run."""
    versions = start_checks.versions_fingerprint()
    del versions["host"]
    facts = {
        "command": shlex.join(sys.argv), "working_directory": str(Path.cwd()),
        "versions": versions, "hosts": per_host, "slurm_job_id": os.environ.get("SLURM_JOB_ID"),
    }  # fmt: skip
    try:
        start_records.keep(job.folder, Path(args.job), facts)
    except OSError as error:  # a run without this record is still a good run
        _note(f"cannot record this start in {job.folder}: {error}")


def _note(text: str) -> None:
    print(f"mpidist: {text}", file=sys.stderr, flush=True)


def _again(args, ranks: int, crowded: bool) -> str:
    """Return the shell command that starts this run again, or resumes it."""
    from mpi4py import MPI

    claim = claims.claimed_size(os.environ)
    library = claims.mpi_name(MPI.Get_library_version())
    words = commands.again(ranks, claim.launcher if claim else "", library, crowded)
    if has_ulfm() and words:
        words[1:1] = commands.SURVIVE
    words += [commands.callable_as("mpidist"), "train", args.job]
    return shlex.join(words + [word for each in args.settings for word in ("--set", each)])


def _stops(setting: str) -> bool:
    """Return whether the argument `setting` of ``--set`` sets `stop_after`."""
    return setting.partition("=")[0].strip() == "stop_after"


def _report(job, summary, again: str) -> int:
    """Write and print the summary; return the exit code.

    If the summary cannot be written, the error is printed and not raised.
    """
    if summary.resumed_at == summary.steps and _is_told(job, summary):
        return 0  # the run was finished before, and a line at its start has said so
    facts = summary.as_dict()
    text = json.dumps(facts, indent=2)
    partial, whole = job.folder / "summary.json.part", job.folder / "summary.json"
    try:
        partial.write_text(text + "\n", encoding="utf-8")
        partial.replace(whole)
    except OSError as error:
        _note(
            f"error: the state of the run is saved, but {whole} cannot be written: "
            f"{error.strerror}; the same command writes it"
        )
        return StorageError.exit_code
    done = "done" if summary.finished else f"stopped as planned after {summary.steps} steps"
    said = [f"{summary.epochs} epoch{'' if summary.epochs == 1 else 's'}"]
    if facts["train_loss"] is not None:
        said.insert(0, f"train loss {summary.train_loss:.4f}")
        said.append(f"{summary.samples_per_second:.0f} samples/s")
    if summary.test_accuracy is not None:
        said.insert(0, f"test accuracy {summary.test_accuracy:.4f}")
    ranks = "1 rank" if summary.ranks == 1 else f"{summary.ranks} ranks"
    if summary.deaths:
        ranks += f"; {summary.deaths} died"
    print(f"{done}: {', '.join(said)}, {summary.wall_seconds:.1f} s on {ranks}")
    if summary.skipped_records:
        print(
            f"bad records were skipped {summary.skipped_records} times; they are listed in "
            f"{job.folder / 'quarantine.jsonl'}"
        )
    if summary.ordered_sum_overhead is not None:
        price = summary.ordered_sum_overhead
        print(
            f"microbatches={price['microbatches']}: the same bits on any number of ranks; one "
            f"exchange takes {price['ordered_us']:.0f} us in the fixed order and "
            f"{price['plain_us']:.0f} us without, {price['ratio']:.2f} times as long"
        )
    if summary.pipeline is not None:
        found = summary.pipeline
        simulated = found["bubble_simulated"]
        beside = "" if simulated is None else f", {simulated:.1%} if messages took no time"
        parts = f"pipeline cut at {found['cuts']}" if found["cuts"] else "one stage"
        if found.get("split_ranks", 1) > 1:
            parts += f", {', '.join(found['split'])} split over {found['split_ranks']} ranks"
        print(f"{parts}: ranks were idle {found['bubble']:.1%}{beside}")
    print(f"results in {job.folder}; to repeat or resume the run: {again}", flush=True)
    return 0


def _is_told(job, summary) -> bool:
    """Return whether ``summary.json`` has the same checksum of parameters as `summary`."""
    try:
        told = json.loads((job.folder / "summary.json").read_text(encoding="utf-8"))
        return told["parameters_sha256"] == summary.parameters_sha256
    except (OSError, ValueError, KeyError, TypeError):
        return False


class Reporter:
    """Callback that writes metrics.jsonl, and shows a progress bar or progress lines."""

    def __init__(self, job, speaks: bool):
        self.every = job.log_every
        self.bar: Any = None
        self._next_line = time.monotonic() + _LINE_EVERY
        self._path = job.folder / "metrics.jsonl"
        self._file: Any = None
        self.speaks = False
        if speaks:
            self._begin()

    def _begin(self) -> None:
        self.speaks = True
        try:
            self._file = self._path.open("a", encoding="utf-8", buffering=1)
        except OSError as error:
            _note(f"cannot write {self._path}: {error.strerror}")

    def resized(self, _old: int, _new: int, run) -> None:
        """Begin to write and print if this rank has become the first one after ranks have died."""
        if run.comm.rank or self.speaks:
            return
        self._begin()
        if run.report is not None and run.report.step > _last_step(self._path):
            self(run.report)  # the first rank has died before it has written this step

    def __call__(self, step) -> None:
        """Write and show the measurements of one step."""
        if not self.speaks:
            return
        logged = step.step % self.every == 0 or step.step == step.last
        if logged and self._file is not None:
            # Numbers get six significant digits, because losses may be small and steps short.
            facts = {key: float(f"{v:.6g}") if isinstance(v, float) else v
                     for key, v in step._asdict().items()}  # fmt: skip
            with suppress(OSError):  # a full disk does not end the run
                self._file.write(json.dumps({"time": round(time.time(), 3), **facts}) + "\n")
        if sys.stderr.isatty():
            self._draw(step)
        elif time.monotonic() >= self._next_line:
            self._next_line = time.monotonic() + _LINE_EVERY
            print(_bar(step), file=sys.stderr, flush=True)

    def _draw(self, step) -> None:
        try:
            from tqdm import tqdm
        except ImportError:
            print(f"\r{_bar(step)}", end="", file=sys.stderr, flush=True)
            return
        if self.bar is None:
            self.bar = tqdm(total=step.last, initial=step.step - 1, unit="step", leave=True)
        self.bar.set_postfix_str(f"loss {step.loss:.4f}", refresh=False)
        self.bar.update(1)

    def close(self) -> None:
        """Close the progress bar and the file."""
        if self.bar is not None:
            self.bar.close()
        if self._file is not None:
            with suppress(OSError):
                self._file.close()


def _last_step(path: Path) -> int:
    """Return the step of the last complete line of metrics.jsonl; -1 if there is none."""
    with suppress(OSError, UnicodeError):
        for line in reversed(path.read_text(encoding="utf-8").splitlines()):
            with suppress(ValueError, KeyError, TypeError):
                return json.loads(line)["step"]
    return -1


def _bar(step) -> str:
    filled = round(30 * step.step / step.last)
    bar = "#" * filled + "." * (30 - filled)
    return f"[{bar}] step {step.step}/{step.last} epoch {step.epoch} loss {step.loss:.4f}"
