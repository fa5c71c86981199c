"""Strategies: how the ranks combine their gradients.

A strategy contains only settings. The method `open` of a strategy makes an exchange, which is the
object that combines the gradients. To add a strategy, write a dataclass here, a line in
`STRATEGIES`, and an exchange: an object with ``workers, begin, compute, reduce, update, state,
check, save_point, finish, close, abandon`` (and ``stragglers`` and a few attributes: see
``allreduce_exchange.py``).
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
from .checks import expect, has_methods, is_whole_number


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
    servers : int or sequence of int
        The number of servers, which are the last ranks; or the list of the ranks that are servers.
    consistency : BSP, ASP or SSP
        How many steps one worker may be ahead of another.
    placement : str
        "dedicated": a rank is either a server or a worker. "colocated": a server is a worker as
        well.
    """

    servers: int | Sequence[int] = 1
    consistency: Consistency = field(default_factory=BSP)
    placement: str = "dedicated"
    survives: ClassVar[bool] = True

    def workers(self, size: int) -> int:
        """Return how many of `size` ranks are workers; raise ConfigError if there is no worker."""
        return len(choose_ranks(size, self.servers, self.placement)[1])

    def open(self, comm, model, optimizer, *, global_batch: int, seed: int, kept=None):
        """Return the object that exchanges the gradients in one run. Collective over `comm`.

        An elastic run gives what the ranks have `kept` (see `server_exchange.Kept`).
        """
        from .exchanges.server_exchange import Served

        return Served(comm, model, optimizer, self, kept, global_batch=global_batch, seed=seed)


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
    # The number of ranks may be unknown yet. Two are enough to refuse 0 servers or a bad placement.
    choose_ranks(2, min(servers, 1) if isinstance(servers, int) else 1, placement)
    return ParameterServer(servers, mode, placement)


STRATEGIES: dict[str, Callable] = {"allreduce": AllReduce, "parameter_server": _parameter_server}


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
        known = f"md.AllReduce(...), md.ParameterServer(...), or one of {names}"
        raise ConfigError(f"strategy is {kind}; expected {known}")
    return given
