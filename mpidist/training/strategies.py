"""Strategies: how the ranks combine their gradients.

A strategy contains only settings. The method `open` of a strategy makes an exchange, which is the
object that combines the gradients. To add a strategy, write a dataclass here, a line in
`STRATEGIES`, and an exchange: an object with ``workers, begin, compute, reduce, update, state,
check, save_point, finish, evaluate, digest, close, abandon`` (and ``stragglers`` and a few
attributes: see ``allreduce_exchange.py``). A strategy may have a method `check_run`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from ..collectives.schedules.algorithms import chosen
from ..errors import ConfigError, shown
from ..gradients.gradient_buckets import bucket_bytes
from ..models.split_model import check_layers_of_split, check_split_settings, split_ways
from ..pipeline.pipeline_schedules import SCHEDULES
from ..pipeline.stage_plan import check_layers, plan_stages
from ..registry import build, look_up
from ..servers.balance.rebalance import Rebalance, rebalance_policy
from ..servers.consistency import ASP, BSP, SSP, Consistency
from ..servers.layout.roles import AUTO, choose_ranks, has_shares, listed_shares, ranks_asked
from ..servers.model_facts import check_device_name, check_nonfinite
from ..servers.modes.backup_workers import BackupWorkers
from ..servers.modes.dynamic_bound import DSSP
from ..servers.modes.mode_policy import ModePolicy, mode_policy
from ..servers.modes.stale_gradients import KeepStale, Stale, stale_policy
from .checks import expect, has_methods, is_whole_number
from .exchanges.peer_strategies import Hogwild, peer_average


@dataclass(frozen=True)
class AllReduce:
    """Every rank trains a replica of the whole model; `md.allreduce` averages the gradients.

    All ranks have the same parameters and apply the same update to them, so the replicas stay equal
    to the last bit (synchronous SGD).

    Parameters
    ----------
    algorithm, reproducible
        As in `md.allreduce`.
    bucket_bytes : int or "auto"
        Size of the buckets in which gradients are sent between nodes.
    overlap : bool
        Whether gradients are exchanged between nodes while the backward pass still runs.
    progress : "hooks" or "thread"
        How exchanges that have begun make progress: in each call of ``ready`` by the model
        ("hooks"), or in a thread ("thread").
    accumulate : int
        The number of parts into which a rank cuts its batch, to save memory. A rank adds up the
        gradients of all parts and then exchanges the sum once.
    """

    algorithm: str = "auto"
    reproducible: bool = False
    bucket_bytes: int | str = "auto"
    overlap: bool = True
    progress: str = "hooks"
    accumulate: int = 1
    takes_microbatches: ClassVar[bool] = True
    has_replicas: ClassVar[bool] = True
    survives: ClassVar[bool] = True

    def __post_init__(self):
        chosen(self.algorithm, self.reproducible)
        expect(isinstance(self.overlap, bool), "overlap", self.overlap, "true or false")
        known = isinstance(self.progress, str) and self.progress in ("hooks", "thread")
        expect(known, "progress", self.progress, "'hooks' or 'thread'")
        several = is_whole_number(self.accumulate) and self.accumulate >= 1
        expect(several, "accumulate", self.accumulate, "1 part or more")
        bucket_bytes(self.bucket_bytes, 0)

    def workers(self, size: int) -> int:
        """Return how many of `size` ranks are workers."""
        return size

    def open(
        self, comm, model, optimizer, *, microbatches: int | None = None, optimizer_state=None,
        **settings,
    ):  # fmt: skip
        """Return the object that exchanges the gradients in one run. Collective over `comm`.

        With `optimizer_state`, all ranks hold equal parameters and states already, and go on.
        """
        from .exchanges.allreduce_exchange import Replicas
        from .exchanges.microbatch_exchange import PieceReplicas

        if microbatches:
            return PieceReplicas(
                comm, model, optimizer, self.algorithm, microbatches, optimizer_state
            )
        algorithm = chosen(self.algorithm, self.reproducible)
        names = ("bucket_bytes", "overlap", "progress", "accumulate")
        given = {name: getattr(self, name) for name in names}
        return Replicas(comm, model, optimizer, algorithm, optimizer_state=optimizer_state, **given)


@dataclass(frozen=True)
class ParameterServer:
    """Servers hold the parameters and update them; workers push gradients and pull parameters.

    Parameters
    ----------
    servers : int, sequence of int, mapping of int to float, or "auto"
        The number of servers, which are the last ranks; or the list of the ranks that are servers;
        or the share of the model that each server rank holds, such as ``{0: 1, 1: 1, 2: 4}``. With
        "auto" all ranks serve, with shares that balance the traffic of the hosts.
    consistency : BSP, SSP, DSSP, ASP or BackupWorkers
        How many steps one worker may be ahead of another.
    placement : str or sequence of int
        "dedicated": a rank is either a server or a worker. "colocated": a server is a worker as
        well. A list has the server ranks that only serve; the other servers are workers as well.
    nonfinite : "raise" or "drop"
        What happens to a push with a NaN or an infinity, see `ServerGroup.add`.
    stale : KeepStale, DropStale, ScaleStale or DelayCompensated
        What servers do with old gradients under ASP, SSP and DSSP; also as a mapping with ``name``
        and settings, such as ``{"name": "drop", "beyond": 16}``.
    replicas : 0 or 1
        With 1, each server also keeps a copy of the partitions of another server, so that an
        elastic run goes on without a lost step if a server dies. Needs `elastic`, at least 2
        servers, and twice the memory on servers; see docs/elastic.md.
    push_every, pull_every : int
        Downpour SGD, under ASP, SSP(1) or more, and DSSP: a worker adds up its gradients and pushes
        them every `push_every` steps, and pulls every `pull_every` steps. Between two pulls it
        updates its own copy of the parameters.
    changes : mapping or function, optional
        The mode from some steps on, such as ``{1000: md.ASP()}``, or a function of the step that
        returns the mode, or None for the mode so far. It is called in each step, on each worker,
        and must return the same on all of them. BSP, SSP, DSSP and ASP may follow each other.
    rebalance : "auto", int, Rebalance, or mapping, optional
        Measure every so many steps how busy the servers are, and give slow servers smaller shares,
        see `ServerGroup.rebalance`. "auto" looks every 100 steps. None: shares stay as they are.
    server_device : "cpu" or "gpu"
        Where servers update the model, see `ServerGroup.add`.
    """

    servers: int | Sequence[int] | Mapping[int, float] | str = 1
    consistency: Consistency = field(default_factory=BSP)
    placement: str | Sequence[int] = "dedicated"
    nonfinite: str = "raise"
    stale: Stale = field(default_factory=KeepStale)
    replicas: int = 0
    push_every: int = 1
    pull_every: int = 1
    changes: Mapping[int, Consistency] | ModePolicy | None = None
    rebalance: Rebalance | str | int | Mapping | None = None
    server_device: str = "cpu"
    survives: ClassVar[bool] = True

    def __post_init__(self):
        object.__setattr__(self, "changes", mode_policy(self.changes, self.consistency))
        if self.changes is not None and self.is_rare:
            raise ConfigError("changes: push_every and pull_every need one mode; give one of them")
        object.__setattr__(self, "rebalance", rebalance_policy(self.rebalance))  # as `stale` below
        if self.rebalance is not None and isinstance(self.consistency, BackupWorkers):
            raise ConfigError(
                f"rebalance needs workers that make all steps, got {self.consistency}, whose late "
                "workers pass over some; leave rebalance out"
            )
        for name in ("push_every", "pull_every"):
            value = getattr(self, name)
            several = is_whole_number(value) and value >= 1
            expect(several, name, value, "every how many steps, 1 or more")
            if value > 1 and getattr(self.consistency, "holds", False):
                raise ConfigError(
                    f"{name}={value} needs consistency ASP, SSP(1) or more, or DSSP, got "
                    f"{self.consistency}: its workers exchange in each step"
                )
        check_nonfinite(self.nonfinite)
        check_device_name(self.server_device)
        object.__setattr__(self, "stale", stale_policy(self.stale))  # the dataclass is frozen
        known = is_whole_number(self.replicas) and self.replicas in (0, 1)
        expect(known, "replicas", self.replicas, "0 or 1: how many copies of each partition")

    @property
    def is_rare(self) -> bool:
        """Whether workers push or pull only in some steps."""
        return self.push_every > 1 or self.pull_every > 1

    @property
    def keeps_copies(self) -> bool:
        """Whether servers keep copies of each other's partitions."""
        return bool(self.replicas)

    @property
    def has_shares(self) -> bool:
        """Whether servers have shares, or only some of them work."""
        return has_shares(self.servers, self.placement)

    def workers(self, size: int) -> int:
        """Return how many of `size` ranks are workers; raise ConfigError if there is no worker."""
        servers, workers = choose_ranks(size, ranks_asked(self.servers), self.placement)
        check_copies(self.replicas, len(servers))
        return len(workers)

    def open(self, comm, model, optimizer, *, global_batch: int, seed: int, kept=None):
        """Return the object that exchanges the gradients in one run. Collective over `comm`.

        An elastic run gives what the ranks have `kept` (see `server_exchange.Kept`).
        """
        from .exchanges.server_exchange import Served

        return Served(comm, model, optimizer, self, kept, global_batch=global_batch, seed=seed)


def check_copies(replicas: int, servers: int) -> None:
    """Raise ConfigError if there are too few servers to keep the copies."""
    if replicas >= servers:
        raise ConfigError(
            f"replicas={replicas} needs at least {replicas + 1} servers, got servers={servers}: a "
            "copy on the server itself would die with it; use more servers, or leave replicas out"
        )


@dataclass(frozen=True)
class Pipeline:
    """Each rank has some layers of the model; `microbatches` of `md.train` pass through the ranks.

    The model is a chain of layers, such as `mpidist.models.Network`. The parameters have the bits
    of `AllReduce` with the same number of microbatches.

    Parameters
    ----------
    stages : int, optional
        The number of parts in a row; by default as many as `cuts` or `replicas` say, or the ranks.
    cuts : sequence of int or "auto"
        How many layers are before each cut: ``[4, 8]`` cuts 12 layers into 1-4, 5-8 and 9-12. With
        "auto", rank 0 measures the layers, and the slowest stage is made as fast as possible.
    replicas : sequence of int, optional
        The number of ranks of each stage, such as ``[3, 1]``; by default the ranks divided by the
        stages.
    schedule : str
        "1f1b", "gpipe", "zero_bubble" or "interleaved", see docs/pipelines.md. With "pipedream",
        each microbatch is an update, so the bits depend on the number of stages.
    chunks : int
        The number of parts of each stage, for "interleaved".
    flush : int, optional
        For "pipedream": after each `flush` microbatches, all stages finish them before the next one
        enters. They do so before each checkpoint in any case. A multiple of all replicas.
    split : mapping of str to str, optional
        Dense layers that several ranks share, by name, such as ``{"dense2": "columns"}``: each rank
        has some "columns" or "rows" of the weights, see `md.models.SplitDense`.
    split_ranks : int, optional
        The number of ranks that share these layers. There are so many pipelines beside each other,
        so the job has as many ranks as the stages and replicas say, times `split_ranks`. By default
        all ranks of a stage, or of each of its `replicas`.
    """

    stages: int | None = None
    cuts: Sequence[int] | str = "auto"
    replicas: Sequence[int] | None = None
    schedule: str = "1f1b"
    chunks: int = 1
    flush: int | None = None
    split: Mapping[str, str] | None = None
    split_ranks: int | None = None
    in_parts: ClassVar[bool] = True  # no rank makes the parameters of the whole model
    takes_microbatches: ClassVar[bool] = True
    has_replicas: ClassVar[bool] = True
    reads_last_run: ClassVar[bool] = True  # `open` takes the store

    def __post_init__(self):
        look_up(SCHEDULES, self.schedule, "schedule")
        whole = self.stages is None or (is_whole_number(self.stages) and self.stages >= 1)
        expect(whole, "stages", self.stages, "a whole number of 1 or more")
        many = is_whole_number(self.chunks) and self.chunks >= 1
        expect(many, "chunks", self.chunks, "a whole number of 1 or more")
        emptied = self.flush is None or (is_whole_number(self.flush) and self.flush >= 1)
        expect(emptied, "flush", self.flush, "a whole number of 1 or more")
        check_split_settings(self.split, self.split_ranks)
        for name in ("cuts", "replicas"):
            value = getattr(self, name)
            listed = isinstance(value, Sequence) and not isinstance(value, str)
            absent = value == "auto" if name == "cuts" else value is None
            example = "[4, 8], or 'auto'" if name == "cuts" else "[3, 1]"
            expect(listed or absent, name, value, f"a list of whole numbers, such as {example}")
        told = {"stages": self.stages}
        if self.replicas is not None:
            told["replicas"] = len(self.replicas)
        if self.cuts != "auto":
            told["cuts"] = (len(self.cuts) + 1) / self.chunks
        numbers = {number for number in told.values() if number is not None}
        if len(numbers) > 1:
            each = ", ".join(f"{name}={getattr(self, name)}" for name in told)
            raise ConfigError(f"{each}: these give different numbers of stages; let them agree")

    def workers(self, size: int) -> int:
        """Return how many of `size` ranks are workers."""
        return size

    def _ways(self, size: int) -> int:
        """Return how many of `size` ranks share a layer that is split; 1 without a split."""
        if self.split is None:
            return 1
        stages = self.stages or (0 if self.cuts == "auto" else self._parts(1) // self.chunks)
        others = stages if self.replicas is None else sum(self.replicas)
        return split_ways(size, others, self.split_ranks)

    def _parts(self, size: int) -> int:
        """Return the number of parts of the model on `size` ranks."""
        if self.cuts != "auto":
            return len(self.cuts) + 1
        several = len(self.replicas) if self.replicas is not None else size
        return (self.stages or several) * self.chunks

    def check_run(self, size: int | None, model, optimizer, microbatches: int | None) -> None:
        """Raise ConfigError if a run on `size` ranks is not possible; None if it is not known."""
        layers, cuts = len(check_layers(model)), self.cuts
        if size is None:
            several = sum(self.replicas) if self.replicas is not None else None
            size = several or self.stages or self._parts(1) // self.chunks
            size *= self.split_ranks or 1
        ways = self._ways(size)
        size //= ways
        parts = self._parts(size)
        if parts > layers:
            raise ConfigError(
                f"{parts} parts for the {layers} layers of the model: give fewer stages or chunks"
            )
        if cuts == "auto":
            cuts = list(range(1, parts))
            if not hasattr(model, "sample_shape"):
                raise ConfigError(
                    f"cuts='auto' measures the layers, and {type(model).__name__} has no "
                    "sample_shape; give the cuts"
                )
        self._grid(layers, cuts, size, microbatches)
        if self.split is not None:
            check_layers_of_split(model, optimizer, self.split, ways)
        if "clip_norm" in (getattr(optimizer, "settings", None) or {}):
            raise ConfigError(
                "clip_norm is a norm over all layers, and each stage has only some; leave it out, "
                "or use md.AllReduce()"
            )

    def _grid(self, layers: int, cuts, size: int, microbatches: int | None):
        return plan_stages(
            layers, cuts=cuts, ranks=size, microbatches=microbatches, replicas=self.replicas,
            schedule=self.schedule, chunks=self.chunks, flush=self.flush,
        )  # fmt: skip

    def open(
        self, comm, model, optimizer, *, global_batch: int, seed: int, microbatches=None,
        store=None, resume=False,
    ):  # fmt: skip
        """Return the object that trains the stages in one run. Collective over `comm`."""
        from .exchanges.pipeline_exchange import CutChoice, Stages
        from .exchanges.pipelines.pipeline_choice import choose_cuts, last_run
        from .exchanges.pipelines.pipeline_order import order_of_ranks

        samples = -(-global_batch // microbatches)
        last = last_run(comm, store, resume) if isinstance(self.cuts, str) else None
        if self.split is not None:
            return self._open_split(comm, model, optimizer, samples, microbatches, last)
        if isinstance(self.cuts, str):
            choice = choose_cuts(comm, model, self._parts(comm.size), samples, last)
        else:
            choice = CutChoice(list(self.cuts))
        grid = self._grid(len(model.layers), choice.cuts, comm.size, microbatches)
        order = order_of_ranks(comm, model, grid, choice, samples)
        return Stages(comm, model, optimizer, grid, choice, order)

    def _open_split(self, comm, model, optimizer, samples: int, microbatches: int, last):
        from .exchanges.split_exchange import SplitStages

        ways = self._ways(comm.size)
        ranks, layers = comm.size // ways, len(model.layers)
        return SplitStages(
            comm, model, optimizer, split=self.split or {}, ways=ways, samples=samples,
            plan=lambda cuts: self._grid(layers, cuts, ranks, microbatches),
            cuts=None if self.cuts == "auto" else self.cuts, parts=self._parts(ranks), last=last,
        )  # fmt: skip


CONSISTENCIES = {"bsp": BSP, "asp": ASP, "ssp": SSP, "dssp": DSSP, "backup_workers": BackupWorkers}


def _parameter_server(
    servers=1,
    consistency: str = "bsp",
    staleness: int | None = None,
    low: int | None = None,
    high: int | None = None,
    rule: str | None = None,
    count: int | None = None,
    placement="dedicated",
    nonfinite="raise",
    stale=None,
    replicas=0,
    shares=None,
    push_every=1,
    pull_every=1,
    changes=None,
    rebalance=None,
    server_device="cpu",
) -> ParameterServer:
    given = {"staleness": staleness, "low": low, "high": high, "rule": rule, "count": count}
    settings = {name: value for name, value in given.items() if value is not None}
    accepted = inspect.signature(look_up(CONSISTENCIES, consistency, "consistency")).parameters
    if wrong := [name for name in settings if name not in accepted]:
        users = [mode for mode, kind in CONSISTENCIES.items()
                 if wrong[0] in inspect.signature(kind).parameters]  # fmt: skip
        needed = " or ".join(map(repr, users))
        setting = f"{wrong[0]}={shown(settings[wrong[0]])}"
        raise ConfigError(f"{setting} needs consistency={needed}, got {consistency!r}")
    mode = build(CONSISTENCIES, consistency, settings, "consistency")
    if shares is not None:
        servers = listed_shares(shares, servers)
    asked = ranks_asked(servers)
    ranks = [asked] if isinstance(asked, int) else [*range(2)] if asked == AUTO else [*asked]
    if min(ranks, default=-1) < 0 or len(ranks) != len(set(ranks)):
        raise ConfigError(f"servers={shown(servers)}: expected how many, or distinct ranks")
    # The number of ranks may be unknown yet. Two are enough to refuse 0 servers or a bad placement.
    if isinstance(placement, str):
        some = min(asked, 1) if isinstance(asked, int) else AUTO if asked == AUTO else 1
        choose_ranks(2, some, placement)
    strategy = ParameterServer(
        servers, mode, placement, nonfinite, stale_policy(stale), replicas, push_every, pull_every,
        _changes(changes), rebalance, server_device,
    )  # fmt: skip
    check_copies(replicas, asked if isinstance(asked, int) else len(ranks))
    return strategy


def _changes(changes) -> dict | None:
    """Return the pairs of step and mode that a job file writes with names of modes."""
    if changes is None:
        return None
    try:
        pairs = [(step, {"name": m} if isinstance(m, str) else dict(m)) for step, m in changes]
    except (TypeError, ValueError):
        raise ConfigError(
            f"changes={shown(changes)}; expected a list of [step, mode], such as "
            '[[1000, "asp"], [2000, { name = "ssp", staleness = 3 }]]'
        ) from None
    modes = {
        step: build(CONSISTENCIES, mode.pop("name", None), mode, "consistency")
        for step, mode in pairs
    }
    if len(modes) < len(pairs):
        raise ConfigError(f"changes={shown(changes)}: a step stands there twice")
    return modes


STRATEGIES: dict[str, Callable] = {
    "allreduce": AllReduce,
    "parameter_server": _parameter_server,
    "pipeline": Pipeline,
    "peer_average": peer_average,
    "hogwild": Hogwild,
}


def from_settings(name: str, settings: Mapping):
    """Make the strategy that a job file describes; raise ConfigError for bad settings."""
    look_up(STRATEGIES, name, "strategy")
    return build(STRATEGIES, name, settings, "strategy")


def as_strategy(given):
    """Return the strategy for an argument, which is None, a name in `STRATEGIES`, or a strategy.

    Raises ConfigError for any other argument.
    """
    if given is None:
        return AllReduce()
    if isinstance(given, str):
        return from_settings(given, {})
    if not has_methods(given, "open", "workers"):
        kind = f"the class {given.__name__}" if isinstance(given, type) else shown(given, 60)
        names = ", ".join(map(repr, STRATEGIES))
        known = f"an object such as md.AllReduce() or md.ParameterServer(), or {names}"
        raise ConfigError(f"strategy is {kind}; expected {known}")
    return given
