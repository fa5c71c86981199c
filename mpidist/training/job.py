"""A job file: TOML tables become the arguments of `md.train`. No function of this module needs MPI.

    global_batch = 64            # samples per step over all ranks
    epochs = 20                  # or steps
    microbatches = 16            # optional: the same bits on any number of ranks
    [data]      name = "digits"
    [model]     name = "lenet"            image_shape = [1, 8, 8]
    [optimizer] name = "momentum"         lr = 0.05
    [strategy]  name = "parameter_server" servers = 2   consistency = "ssp"   staleness = 4
    # or        name = "pipeline"         cuts = [4, 8]
    # or        name = "peer_average"     graph = "ring"   every = 8
    [elastic]   min_ranks = 2    # optional: go on with the living ranks after a death

The key ``name`` of a table selects, for example, a model, and the other keys are the settings of
this model.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..checkpoint.arguments import checked_path
from ..checkpoint.interval import SaveInterval
from ..data.sampler import SHUFFLES
from ..elasticity.elastic_settings import Elastic
from ..errors import ConfigError, nearest, shown
from ..registry import build
from . import checks

TABLES = ("data", "model", "optimizer", "strategy")


@dataclass
class Job:
    """The checked values of a job file. Paths are relative to the current folder.

    Attributes
    ----------
    data, model, optimizer, strategy
        Tables. The key `name` selects a data set, model, optimizer or strategy; the other keys are
        its settings.
    global_batch
        Samples per step over all ranks together.
    epochs, steps
        Length of the run: one of the two.
    seed
        Seed of the order of the data, and of the model unless the table of the model has a seed.
    shuffle
        Order of the records in an epoch. "permutation" and "bijection" are random orders; a
        bijection takes no memory. True means "permutation" for up to 4 Mi records, and "bijection"
        for more. "none" or false keeps the order of the data set.
    out
        The folder that the run writes to; by default `runs/` followed by the name of the model.
    checkpoint_every
        How often to save a checkpoint: a number of steps, a time such as "10m", or "auto"; by
        default once per epoch.
    keep
        How many checkpoints to keep.
    local
        A folder on each node, in memory or on a disk. Each checkpoint is written to this folder
        first, and then copied to the folder of the run.
    stop_after
        Save a checkpoint and stop after this number of steps, counted from the beginning of the
        run.
    microbatches
        Into how many pieces every global batch is cut. The results then have the same bits on any
        number of ranks.
    check_replicas
        Compare the parameters of all ranks each time this many steps are done.
    time_limit
        Save a checkpoint and stop after this number of seconds; with "auto", before the Slurm
        allocation ends.
    patience
        Compute the mean loss of each group of this many steps. Save a checkpoint and stop when such
        a mean is not below all earlier means.
    max_bad
        Fraction of the records that may be bad. Bad records are skipped, counted and listed.
    retry_bad
        Whether a resumed run reads those records again that the checkpoint lists as bad.
    loading
        A table of settings for reading ahead, and for sources that do not answer.
    elastic
        A table with the settings of `md.Elastic`, which may be empty. With this table, the run goes
        on with the living ranks after ranks have died.
    log_every
        Write a line to `metrics.jsonl` each time this many steps are done.
    watch_seconds
        After this number of seconds without progress, end the job and report the missing ranks; 0
        switches this off.
    device
        "cpu" or "gpu"; with "gpu" the arrays of the model are moved to the GPU of each rank.
    """

    data: dict = field(default_factory=dict)
    model: dict = field(default_factory=dict)
    optimizer: dict = field(default_factory=dict)
    strategy: dict = field(default_factory=lambda: {"name": "allreduce"})
    global_batch: int = 64
    epochs: int | None = None
    steps: int | None = None
    seed: int = 0
    shuffle: str | bool = True
    out: str = ""
    checkpoint_every: int | str | None = None
    keep: int = 3
    local: str = ""
    stop_after: int | None = None
    microbatches: int | None = None
    check_replicas: int | None = None
    time_limit: float | str | None = None
    patience: int | None = None
    max_bad: float = 0.001
    retry_bad: bool = False
    loading: dict = field(default_factory=dict)
    elastic: dict | None = None
    log_every: int = 10
    watch_seconds: float = 600.0
    device: str = "cpu"

    @property
    def folder(self) -> Path:
        """The folder that the run writes to."""
        return Path(self.out or f"runs/{self.model['name']}")


_WHOLE = (
    "global_batch", "epochs", "steps", "keep", "stop_after",
    "microbatches", "check_replicas", "patience", "log_every",
)  # fmt: skip


def read_job(path: str | Path, settings: Sequence[str] = ()) -> Job:
    """Read a job file, and then replace values by the ``key=value`` texts in `settings`.

    Raises ConfigError for a file that cannot be read, for text that is not TOML, for unknown keys,
    and for values of the wrong kind.
    """
    path = Path(path)
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        cure = "give the path of a TOML file, e.g. jobs/digits.toml"
        raise ConfigError(f"cannot read the job {path}: {error.strerror}; {cure}") from None
    except (ValueError, RecursionError) as error:
        # ValueError is raised for text that is not TOML or UTF-8, and for integers of more than
        # 4,300 digits, and RecursionError for arrays of many levels.
        kind = "UTF-8" if isinstance(error, UnicodeDecodeError) else "TOML"
        raise ConfigError(f"{path} is not {kind}: {error}") from None
    # The keys `name` are applied first. If the command line gives a table another name than the
    # file does, the table's other settings in the file belong to the old name and are dropped.
    for text in sorted(settings, key=lambda text: not text.partition("=")[0].endswith(".name")):
        _apply(values, text)
    given = {text.partition("=")[0].strip() for text in settings}
    for asked, other in (("steps", "epochs"), ("epochs", "steps")):
        # `steps` on the command line replaces `epochs` of the file, and the other way round.
        if asked in given and other not in given:
            values.pop(other, None)
    return check_job(values, str(path))


def _apply(values: dict, text: str) -> None:
    """Set the key ``a.b`` of nested tables from a text ``a.b=value``."""
    key, found, value = text.partition("=")
    if not found or not key.strip():
        raise ConfigError(f"--set {text!r}: expected KEY=VALUE, for instance --set model.seed=3")
    *tables, last = key.strip().split(".")
    for name in tables:
        values = values.setdefault(name, {})
        if not isinstance(values, dict):
            raise ConfigError(f"--set {text!r}: {name!r} is a value, not a table")
    try:
        new = tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        new = value
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"--set {shown(text, 60)}: {error}") from None
    if last == "name" and tables and values.get("name") != new:
        values.clear()
    values[last] = new


def check_job(values: Mapping, where: str = "job") -> Job:
    """Check the keys and the types of a job file's values; return them as a `Job`."""
    known = [f.name for f in fields(Job)]
    for key in values:
        if key not in known:
            names = f"{', '.join(known)}{nearest(key, known)}"
            raise ConfigError(f"{where}: unknown key {key!r}; expected one of {names}")
    strategy = values.get("strategy")
    if isinstance(strategy, dict):
        # A [strategy] table without a name belongs to the default strategy, as in
        # --set strategy.algorithm=ring.
        values = {**values, "strategy": {"name": "allreduce", **strategy}}
    job = Job(**values)
    for name in TABLES:
        table = getattr(job, name)
        if not isinstance(table, dict) or not isinstance(table.get("name"), str):
            raise ConfigError(f"{where}: [{name}] with a name is missing, got {table!r}")
    try:
        _check_values(job)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    return job


def _check_values(job: Job) -> None:
    """Raise ConfigError if a value of a job file is invalid."""
    checks.check_whole(**{name: getattr(job, name) for name in _WHOLE})
    checks.check_watch(job.watch_seconds)
    checks.check_time_limit(job.time_limit)
    checks.check_share(job.max_bad)
    checks.check_reading(None, None, job.retry_bad)
    if isinstance(job.seed, bool) or not isinstance(job.seed, int) or job.seed < 0:
        raise ConfigError(f"seed={job.seed!r}; expected 0 or more, a whole number")
    if job.checkpoint_every is not None:
        SaveInterval(job.checkpoint_every)
    if (job.epochs is None) == (job.steps is None):
        raise ConfigError(f"epochs={job.epochs}, steps={job.steps}; give one of the two")
    if job.device not in ("cpu", "gpu"):
        raise ConfigError(f"device={job.device!r}; expected 'cpu' or 'gpu'")
    if job.shuffle not in (True, False, *SHUFFLES):
        names = ", ".join(map(repr, SHUFFLES))
        raise ConfigError(f"shuffle={job.shuffle!r}; expected {names}, true or false")
    if not isinstance(job.loading, dict):
        raise ConfigError(f"loading={job.loading!r}; expected a table, [loading]")
    if job.elastic is not None:
        if not isinstance(job.elastic, dict):
            raise ConfigError(f"elastic={job.elastic!r}; expected a table, [elastic]")
        elastic_of(job)
    for name, value in (("out", job.out), ("local", job.local)):
        if not isinstance(value, str):
            raise ConfigError(f"{name}={value!r}; expected the path of a folder, in quotes")
        if value:
            checked_path(name, value)


def elastic_of(job: Job) -> Elastic | None:
    """Return the argument `elastic` of `md.train` that a job file describes, or None."""
    if job.elastic is None:
        return None
    return build({"elastic": Elastic}, "elastic", job.elastic, "table")


class Parts(NamedTuple):
    """The data, model, optimizer, strategy and options for reading that a job file describes."""

    train: Any
    test: Any
    model: Any
    optimizer: Any
    strategy: Any
    loading: Any


def model_of(job: Job):
    """Make the model that the table ``[model]`` of a job file describes."""
    from .. import models

    return models.from_settings(*_split({"seed": job.seed, **job.model}))


def build_run(job: Job, ranks: int | None) -> Parts:
    """Make the data, model, optimizer and strategy of a job."""
    from .. import data, optim
    from ..models.network import check_input_shape
    from . import strategies

    strategy = strategies.from_settings(*_split(job.strategy))
    checks.check_elastic(elastic_of(job), strategy, None)
    checks.check_microbatches(job.microbatches, job.global_batch, strategy)
    checks.check_replicated(strategy, check_replicas=job.check_replicas)
    if ranks is not None and job.microbatches is None and not hasattr(strategy, "check_run"):
        checks.check_batch(job.global_batch, strategy.workers(ranks))
    model = model_of(job)
    train, test = data.from_settings(*_split(job.data))
    # One sample shows whether model and data fit, before any rank waits for another.
    sample = _first_good(train)[:-1]
    if not getattr(strategy, "in_parts", False):
        model.predict(*sample)
    elif hasattr(model, "sample_shape"):
        check_input_shape(model, sample[0])
    name, settings = _split(job.optimizer)
    rate = settings.get("lr")
    if isinstance(rate, dict) and rate.get("schedule") == "cosine":
        # A learning-rate schedule without a number of steps lasts until the end of the run.
        sampler = data.Sampler(len(train), job.global_batch)
        settings["lr"] = {"steps": checks.last_step(job.epochs, job.steps, sampler), **rate}
    optimizer = optim.from_settings(name, settings)
    if hasattr(strategy, "check_run"):
        strategy.check_run(ranks, model, optimizer, job.microbatches)
    loading = build({"loading": data.Loading}, "loading", job.loading, "data setting")
    return Parts(train, test, model, optimizer, strategy, loading)


def _first_good(source) -> tuple:
    """Return the first good record as a batch; bad records before it are left out."""
    from ..data import BadRecordFilter

    reader = BadRecordFilter(source)
    for index in range(min(len(source), 16)):
        taken = reader.take(np.array([index]))
        if len(taken.kept):
            return taken.batch
    raise ConfigError(f"no record can be read; the last attempt failed with: {taken.bad[0]}")


def _split(table: Mapping) -> tuple[str, dict]:
    """Return the value of a table's key `name`, and a dict of its other keys."""
    rest = dict(table)
    return rest.pop("name"), rest
