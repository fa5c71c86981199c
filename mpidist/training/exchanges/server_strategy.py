"""The settings of the strategy `ParameterServer`."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from ...errors import ConfigError, shown
from ...registry import build, look_up
from ...servers.balance.rebalance import Rebalance, rebalance_policy
from ...servers.consistency import ASP, BSP, SSP, Consistency
from ...servers.layout.roles import AUTO, choose_ranks, listed_shares, ranks_asked
from ...servers.model_facts import check_checksums, check_device_name, check_nonfinite
from ...servers.modes.backup_workers import BackupWorkers
from ...servers.modes.dynamic_bound import DSSP
from ...servers.modes.mode_policy import ModePolicy, mode_policy
from ...servers.modes.stale_gradients import KeepStale, Stale, stale_policy
from ..checks import expect, is_whole_number


@dataclass(frozen=True)
class ParameterServer:
    """Servers hold the parameters and update them; workers push gradients and pull parameters.

    Parameters
    ----------
    servers : int, sequence of int, mapping of int to float, or "auto"
        The number of servers, which are then the last ranks; or the list of the ranks that are
        servers; or, by rank, the relative size of each server's part of the model: ``{0: 1, 1: 1,
        2: 4}``, for example. With "auto" all ranks are servers, and the sizes of their parts of the
        model are chosen so that the traffic of the hosts is balanced.
    consistency : BSP, SSP, DSSP, ASP or BackupWorkers
        The consistency mode, which says how many steps one worker may be ahead of another.
    placement : str or sequence of int
        "dedicated": a rank is either a server or a worker. "colocated": each server is also a
        worker. A list has those server ranks that are not workers; the other servers are also
        workers.
    nonfinite : "raise" or "drop"
        What happens to gradients with a NaN or an infinity, see `ServerGroup.add`.
    stale : KeepStale, DropStale, ScaleStale, DelayCompensated or MomentumCorrected
        What servers do with old gradients under ASP, SSP and DSSP. A mapping with ``name`` and the
        settings of one of these is also allowed: ``{"name": "drop", "beyond": 16}`` drops gradients
        that are more than 16 updates old.
    replicas : 0 or 1
        With 1, each server also keeps a copy of another server's part of the model, so that an
        elastic run goes on without a lost step if a server dies. This needs `elastic` of
        `md.train`, at least 2 servers, and twice the memory on each server; see docs/elastic.md.
    push_every, pull_every : int
        Settings of Downpour SGD, for ASP, DSSP, and SSP with a staleness of at least 1. A worker
        adds up its gradients and pushes the sum every `push_every` steps, and pulls every
        `pull_every` steps. Between two pulls it updates its own copy of the parameters.
    changes : mapping or function, optional
        Changes of the consistency mode, between BSP, SSP, DSSP and ASP: a mapping such as ``{1000:
        md.ASP()}`` (ASP from step 1000 on), or a function of the step that returns a mode, or None
        to keep the present mode. The function must return the same mode on all workers.
    rebalance : "auto", int, Rebalance, or mapping, optional
        After each `rebalance` steps ("auto": 100), slow servers get smaller parts of the model; see
        `ServerGroup.rebalance`. By default, the parts of the servers do not change.
    server_device : "cpu" or "gpu"
        Whether servers update the model on their CPU or GPU, see `ServerGroup.add`.
    checksums : bool
        Whether receivers check a CRC-32 of each message, see `ServerGroup`.
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
    checksums: bool = False
    survives: ClassVar[bool] = True
    modules: ClassVar[tuple[str, ...]] = ("server_exchange",)

    def __post_init__(self):
        object.__setattr__(self, "changes", mode_policy(self.changes, self.consistency))
        if self.changes is not None and self.is_rare:
            raise ConfigError("changes: push_every and pull_every need one mode; give one of them")
        # The dataclass is frozen, so attributes are set in this way.
        object.__setattr__(self, "rebalance", rebalance_policy(self.rebalance))
        if self.rebalance is not None and isinstance(self.consistency, BackupWorkers):
            raise ConfigError(
                f"rebalance needs workers that make all steps, and under {self.consistency} late "
                "workers skip some steps; leave rebalance out"
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
        check_checksums(self.checksums)
        object.__setattr__(self, "stale", stale_policy(self.stale))
        known = is_whole_number(self.replicas) and self.replicas in (0, 1)
        expect(known, "replicas", self.replicas, "0 or 1: how many copies of each partition")

    @property
    def is_rare(self) -> bool:
        """Whether workers send gradients or fetch parameters only in some steps (Downpour SGD)."""
        return self.push_every > 1 or self.pull_every > 1

    @property
    def keeps_copies(self) -> bool:
        """Whether each server keeps a copy of another server's part of the model."""
        return bool(self.replicas)

    def workers(self, size: int) -> int:
        """Return how many of `size` ranks compute gradients; raise ConfigError if none does."""
        return len(self.worker_ranks(size))

    def worker_ranks(self, size: int) -> list[int]:
        """Return which of `size` ranks compute gradients; raise ConfigError if none does."""
        servers, workers = choose_ranks(size, ranks_asked(self.servers), self.placement)
        check_copies(self.replicas, len(servers))
        return workers

    def open(self, comm, model, optimizer, *, global_batch: int, seed: int, kept=None):
        """Return the object that exchanges the gradients in one run. Collective over `comm`.

        In elastic runs, `kept` is what this rank has kept since before another rank's death.
        """
        from .server_exchange import Served

        return Served(comm, model, optimizer, self, kept, global_batch=global_batch, seed=seed)


def check_copies(replicas: int, servers: int) -> None:
    """Raise ConfigError if there are too few servers to keep copies of each other's parts."""
    if replicas >= servers:
        raise ConfigError(
            f"replicas={replicas} needs at least {replicas + 1} servers, got servers={servers}: a "
            "copy must be on another server; use more servers, or leave replicas out"
        )


CONSISTENCIES = {"bsp": BSP, "asp": ASP, "ssp": SSP, "dssp": DSSP, "backup_workers": BackupWorkers}


def server_strategy(
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
    checksums=False,
) -> ParameterServer:
    """Make a `ParameterServer` from the settings of the table ``[strategy]`` of a job file."""
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
    # The number of ranks may still be unknown. The check with two ranks is enough to refuse 0
    # servers or a bad placement.
    if isinstance(placement, str):
        some = min(asked, 1) if isinstance(asked, int) else AUTO if asked == AUTO else 1
        choose_ranks(2, some, placement)
    strategy = ParameterServer(
        servers, mode, placement, nonfinite, stale_policy(stale), replicas, push_every, pull_every,
        _changes(changes), rebalance, server_device, checksums,
    )  # fmt: skip
    check_copies(replicas, asked if isinstance(asked, int) else len(ranks))
    return strategy


def _changes(changes) -> dict | None:
    """Return {step: mode} for the argument `changes` of a job file, a list of [step, mode name]."""
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
        raise ConfigError(f"changes={shown(changes)}: a step is in the list twice")
    return modes
