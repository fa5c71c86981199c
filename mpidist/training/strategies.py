"""Strategies: how the ranks combine their gradients. Plain descriptions; `open` makes them work.

A new strategy is one dataclass here, with one line in `STRATEGIES`, and one exchange: an object
with ``workers, begin, compute, reduce, update, state, check, save_point, finish, close, abandon``
(and ``stragglers`` and a few facts: see ``allreduce_exchange.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from ..collectives.schedules.algorithms import chosen
from ..errors import ConfigError, shown
from ..gradients.gradient_buckets import bucket_bytes
from ..registry import build, look_up
from ..servers.consistency import ASP, BSP, SSP, Consistency
from ..servers.layout.placement import choose_ranks, ranks_asked
from .checks import is_whole_number


@dataclass(frozen=True)
class AllReduce:
    """Every rank holds the whole model and works; gradients are averaged by `md.allreduce`.

    All ranks apply the same update to the same bits, so replicas stay equal (synchronous SGD).

    Parameters
    ----------
    algorithm, reproducible
        Those of `md.allreduce`.
    bucket_bytes : int or "auto"
        Gradients that travel together between nodes.
    overlap : bool
        Exchange gradients between nodes while backward still runs.
    progress : "hooks" or "thread"
        Whether every ``ready`` of the model pushes on what is under way, or a thread does.
    accumulate : int
        Parts into which a rank cuts its batch, to save memory: their gradients are added up before
        one exchange.
    """

    algorithm: str = "auto"
    reproducible: bool = False
    bucket_bytes: int | str = "auto"
    overlap: bool = True
    progress: str = "hooks"
    accumulate: int = 1
    takes_microbatches: ClassVar[bool] = True
    has_replicas: ClassVar[bool] = True

    def __post_init__(self):
        chosen(self.algorithm, self.reproducible)
        if not isinstance(self.overlap, bool):
            raise ConfigError(f"overlap={shown(self.overlap)}: expected true or false")
        if not isinstance(self.progress, str) or self.progress not in ("hooks", "thread"):
            raise ConfigError(f"progress={shown(self.progress)}: expected 'hooks' or 'thread'")
        if not is_whole_number(self.accumulate) or self.accumulate < 1:
            raise ConfigError(f"accumulate={shown(self.accumulate)}: expected 1 part or more")
        bucket_bytes(self.bucket_bytes, 0)

    def workers(self, size: int) -> int:
        """Return how many of `size` ranks work."""
        return size

    def open(self, comm, model, optimizer, *, microbatches: int | None = None, **settings):
        """Return the exchange for one run. Collective over `comm`."""
        from .exchanges.allreduce_exchange import Replicas
        from .exchanges.microbatch_exchange import PieceReplicas

        if microbatches:
            return PieceReplicas(comm, model, optimizer, self.algorithm, microbatches)
        algorithm = chosen(self.algorithm, self.reproducible)
        buckets = {
            name: getattr(self, name)
            for name in ("bucket_bytes", "overlap", "progress", "accumulate")
        }
        return Replicas(comm, model, optimizer, algorithm, **buckets)


@dataclass(frozen=True)
class ParameterServer:
    """Servers hold the parameters and apply the updates; workers push and pull.

    Parameters
    ----------
    servers : int or sequence of int
        How many ranks serve (the last ones), or which.
    consistency : BSP, ASP or SSP
        How far workers may run apart.
    placement : str
        "dedicated" (servers only serve) or "colocated" (servers work as well).
    """

    servers: int | Sequence[int] = 1
    consistency: Consistency = field(default_factory=BSP)
    placement: str = "dedicated"

    def workers(self, size: int) -> int:
        """Return how many of `size` ranks work; ConfigError where none is left."""
        return len(choose_ranks(size, self.servers, self.placement)[1])

    def open(self, comm, model, optimizer, *, global_batch: int, seed: int):
        """Return the exchange for one run. Collective over `comm`."""
        from .exchanges.server_exchange import Served

        return Served(comm, model, optimizer, self, global_batch, seed)


CONSISTENCIES = {"bsp": BSP, "asp": ASP, "ssp": SSP}


def _parameter_server(
    servers=1, consistency: str = "bsp", staleness: int | None = None, placement="dedicated"
) -> ParameterServer:
    settings = {} if staleness is None else {"staleness": staleness}
    if settings and consistency != "ssp":
        raise ConfigError(f"staleness={staleness} needs consistency='ssp', got {consistency!r}")
    mode = build(CONSISTENCIES, consistency, settings, "consistency")
    asked = ranks_asked(servers)
    ranks = asked if isinstance(asked, list) else [asked]
    if min(ranks, default=-1) < 0 or len(ranks) != len(set(ranks)):
        raise ConfigError(f"servers={shown(servers)}: expected how many, or distinct ranks")
    # The number of ranks may not be known yet: two are enough to hear of 0 servers or a placement.
    choose_ranks(2, min(servers, 1) if isinstance(servers, int) else 1, placement)
    return ParameterServer(servers, mode, placement)


STRATEGIES: dict[str, Callable] = {"allreduce": AllReduce, "parameter_server": _parameter_server}


def from_settings(name: str, settings: Mapping):
    """Make a strategy as a job file describes it; ConfigError for what it cannot be."""
    look_up(STRATEGIES, name, "strategy")
    return build(STRATEGIES, name, settings, "strategy")


def as_strategy(given):
    """Return what `md.train` was given as a strategy: None, a name of `STRATEGIES`, or one.

    Raises ConfigError for what is none.
    """
    if given is None:
        return AllReduce()
    if isinstance(given, str):
        return from_settings(given, {})
    if isinstance(given, type) or not all(
        callable(getattr(given, name, None)) for name in ("open", "workers")
    ):
        kind = f"the class {given.__name__}" if isinstance(given, type) else shown(given, 60)
        names = ", ".join(map(repr, STRATEGIES))
        raise ConfigError(
            f"strategy is {kind}; expected md.AllReduce(...), md.ParameterServer(...), or one of "
            f"{names}"
        )
    return given
