"""A job file: TOML tables into the objects that `md.train` takes. Everything here is before MPI.

    global_batch = 64            # samples per step over all ranks
    epochs = 20                  # or steps
    microbatches = 16            # optional: the same bits on any number of ranks
    [data]      name = "digits"
    [model]     name = "lenet"            image_shape = [1, 8, 8]
    [optimizer] name = "momentum"         lr = 0.05
    [strategy]  name = "parameter_server" servers = 2   consistency = "ssp"   staleness = 4

A table's ``name`` picks from its table of choices; its other keys are that choice's settings.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np

from ..checkpoint.arguments import path_of
from ..checkpoint.interval import SaveInterval
from ..data.sampler import SHUFFLES
from ..errors import ConfigError, nearest
from . import checks

TABLES = ("data", "model", "optimizer", "strategy")


@dataclass
class Job:
    """A validated job file. Paths in it are relative to the current folder.

    Attributes
    ----------
    data, model, optimizer, strategy
        A table: its `name` picks one, its other keys are settings of that one.
    global_batch
        Samples per step over all ranks together.
    epochs, steps
        How long the run is: one of the two.
    seed
        Of the order of the data, and of the model where its table has none.
    shuffle
        How an epoch is ordered: "permutation", "bijection", "none", true or false.
    out
        The folder of the run; without it `runs/` and the name of the model.
    checkpoint_every
        Steps, a time such as "10m", or "auto"; without it once per epoch.
    keep
        How many checkpoints to keep.
    local
        A folder on each node, in memory or on a disk of its own: each step goes there first.
    stop_after
        Stop with a checkpoint after so many steps in all.
    microbatches
        Cut every global batch into so many pieces: the same bits on any number of ranks.
    check_replicas
        Compare the parameters of all ranks every so many steps.
    time_limit
        Stop with a checkpoint after so many seconds; "auto": before a Slurm allocation ends.
    patience
        Stop with a checkpoint when the mean loss of so many steps is not below all before.
    max_bad
        Share of the records that may be bad: they are skipped, counted and listed.
    retry_bad
        A resumed run looks again at the records that were bad.
    loading
        A table: reading ahead, and what to do when a source does not answer.
    log_every
        Write one of so many steps into `metrics.jsonl`.
    watch_seconds
        End the job when nothing moves for so long, and say who is missing; 0 is off.
    device
        "cpu", or "gpu": the arrays of the model are put on the GPU of each rank.
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
    log_every: int = 10
    watch_seconds: float = 600.0
    device: str = "cpu"

    @property
    def folder(self) -> Path:
        """Where the run writes."""
        return Path(self.out or f"runs/{self.model['name']}")


_WHOLE = (
    "global_batch", "epochs", "steps", "keep", "stop_after",
    "microbatches", "check_replicas", "patience", "log_every",
)  # fmt: skip


def read_job(path: str | Path, settings: Sequence[str] = ()) -> Job:
    """Read a job file and apply ``key=value`` settings on top.

    Raises ConfigError: missing file, TOML that does not parse, unknown keys (with the nearest),
    values of the wrong kind.
    """
    path = Path(path)
    if not path.is_file():
        raise ConfigError(
            f"no job file {path}; give the path of a TOML file, e.g. jobs/digits.toml"
        )
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not TOML: {error}") from None
    # Names first: another choice than the file's begins without the file's settings for it.
    for text in sorted(settings, key=lambda text: not text.partition("=")[0].endswith(".name")):
        _apply(values, text)
    given = {text.partition("=")[0].strip() for text in settings}
    for asked, other in (("steps", "epochs"), ("epochs", "steps")):
        # Asking for steps on the command line replaces the epochs of the file, and vice versa.
        if asked in given and other not in given:
            values.pop(other, None)
    return check_job(values, str(path))


def _apply(values: dict, text: str) -> None:
    """Put one ``a.b=value`` into nested tables; the value is TOML, or else a plain string."""
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
    if last == "name" and tables and values.get("name") != new:
        values.clear()
    values[last] = new


def check_job(values: Mapping, where: str = "job") -> Job:
    """Check keys and kinds and return the `Job`."""
    known = [f.name for f in fields(Job)]
    for key in values:
        if key not in known:
            raise ConfigError(
                f"{where}: unknown key {key!r}; expected one of {', '.join(known)}"
                + nearest(key, known)
            )
    strategy = values.get("strategy")
    if isinstance(strategy, dict):
        # --set strategy.algorithm=ring is enough said: a table without a name is the default's.
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
    """Refuse values that `md.train` would refuse as well, and those that a file alone has."""
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
    for name in ("out", "local"):
        value = getattr(job, name)
        if not isinstance(value, str):
            raise ConfigError(f"{name}={value!r}; expected the path of a folder, in quotes")
        if value:
            path_of(name, value)


@dataclass
class Parts:
    """The objects that a job describes."""

    train: Any
    test: Any
    model: Any
    optimizer: Any
    strategy: Any
    loading: Any


def build_run(job: Job, ranks: int | None) -> Parts:
    """Make data, model, optimizer and strategy; check them against `ranks`, if known."""
    from .. import data, models, optim, registry
    from . import strategies

    strategy = strategies.from_settings(*_split(job.strategy))
    checks.check_microbatches(job.microbatches, job.global_batch, strategy)
    checks.check_replicated(strategy, check_replicas=job.check_replicas)
    if ranks is not None and job.microbatches is None:
        checks.check_batch(job.global_batch, strategy.workers(ranks))
    model = models.from_settings(*_split({"seed": job.seed, **job.model}))
    train, test = data.from_settings(*_split(job.data))
    # One sample tells whether the two fit each other, before any rank waits for another.
    model.predict(*_first_good(train)[:-1])
    name, settings = _split(job.optimizer)
    rate = settings.get("lr")
    if isinstance(rate, dict) and rate.get("schedule") == "cosine":
        # A schedule without an end lasts as long as the run.
        sampler = data.Sampler(len(train), job.global_batch)
        settings["lr"] = {"steps": checks.last_step(job.epochs, job.steps, sampler), **rate}
    optimizer = optim.from_settings(name, settings)
    loading = registry.build({"loading": data.Loading}, "loading", job.loading, "data setting")
    return Parts(train, test, model, optimizer, strategy, loading)


def _first_good(source) -> tuple:
    """Return a batch of one: the first records may be bad, and the run would skip them."""
    from ..data import BadRecordFilter

    careful = BadRecordFilter(source)
    for index in range(min(len(source), 16)):
        taken = careful.take(np.array([index]))
        if len(taken.kept):
            return taken.batch
    raise ConfigError(f"no record can be read; the last one tried: {taken.bad[0]}")


def _split(table: Mapping) -> tuple[str, dict]:
    rest = dict(table)
    return rest.pop("name"), rest
