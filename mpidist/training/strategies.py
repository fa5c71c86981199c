"""Strategies: how the ranks combine their gradients.

A strategy contains only settings. Its method `open` makes an exchange, which is the object that
combines the gradients. To add a strategy, write a dataclass in ``exchanges``, a line in
`STRATEGIES`, and an exchange with the methods of ``allreduce_exchange.Replicas``. If a strategy has
a method `check_run`, `md.train` calls it to refuse a run that is not possible.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import ClassVar

from ..collectives.schedules.algorithms import chosen
from ..errors import ConfigError, shown
from ..gradients.gradient_buckets import bucket_bytes
from ..registry import build, look_up
from .checks import expect, has_methods, is_whole_number


@dataclass(frozen=True)
class AllReduce:
    """Every rank trains a copy of the whole model; `md.allreduce` averages the gradients.

    All ranks apply the same updates, so their copies stay equal to the last bit (synchronous SGD).

    Parameters
    ----------
    algorithm : str
        The algorithm by which `md.allreduce` adds the gradients, such as "auto" (the fastest) or
        "ring".
    reproducible : bool
        Whether the sums have the same bits with any algorithm, any MPI library and any distribution
        of the ranks over nodes.
    bucket_bytes : int or "auto"
        Size of the parts (buckets) in which gradients are sent between nodes.
    overlap : bool
        Whether gradients are exchanged between nodes while the backward pass still runs.
    progress : "hooks" or "thread"
        How exchanges that have begun make progress: in each call of ``ready``, by which the model
        says that a gradient is final ("hooks"), or in a thread ("thread").
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
    modules: ClassVar[tuple[str, ...]] = ("allreduce_exchange", "microbatch_exchange")

    def __post_init__(self):
        chosen(self.algorithm, self.reproducible)
        expect(isinstance(self.overlap, bool), "overlap", self.overlap, "true or false")
        known = isinstance(self.progress, str) and self.progress in ("hooks", "thread")
        expect(known, "progress", self.progress, "'hooks' or 'thread'")
        several = is_whole_number(self.accumulate) and self.accumulate >= 1
        expect(several, "accumulate", self.accumulate, "1 part or more")
        bucket_bytes(self.bucket_bytes, 0)

    def workers(self, size: int) -> int:
        """Return how many of `size` ranks compute gradients: all."""
        return size

    def open(
        self, comm, model, optimizer, *, microbatches: int | None = None, optimizer_state=None,
        **settings,
    ):  # fmt: skip
        """Return the object that exchanges the gradients in one run. Collective over `comm`.

        If the caller gives an `optimizer_state`, with which the run continues, this state and the
        parameters must be equal on all ranks.
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


#: The name of a strategy in a job file -> the module and the name of the class or function that
#: makes it. The modules of other strategies are not imported: those of parameter servers alone
#: would add 15 ms to every start.
STRATEGIES = {
    "allreduce": ("strategies", "AllReduce"),
    "parameter_server": ("exchanges.server_strategy", "server_strategy"),
    "pipeline": ("exchanges.pipelines.pipeline_strategy", "Pipeline"),
    "peer_average": ("exchanges.peer_strategies", "peer_average"),
    "hogwild": ("exchanges.peer_strategies", "Hogwild"),
}


def maker(name: str):
    """Return the class or function that makes the strategy `name`."""
    module, kind = look_up(STRATEGIES, name, "strategy")
    return getattr(import_module(f"{__package__}.{module}"), kind)


def from_settings(name: str, settings: Mapping):
    """Make the strategy that a job file describes; raise ConfigError for bad settings."""
    return build({name: maker(name)}, name, settings, "strategy")


def as_strategy(given):
    """Return the strategy for an argument, which is None, a name, or a strategy.

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
