"""The settings of the strategies `PeerAverage` and `Hogwild`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from ...errors import ConfigError, shown
from ...peers.peer_plan import check_graph, peer_plan
from ...registry import build, look_up
from ...servers.consistency import ASP, BSP, SSP, Consistency
from ..checks import expect, is_whole_number


@dataclass(frozen=True)
class PeerAverage:
    """Each rank trains a model of its own, and averages it with a few peers every few steps.

    All ranks begin with the same parameters. At each checkpoint and at the end, all ranks get the
    mean of all models; see docs/peers.md.

    Parameters
    ----------
    graph : str, sequence of sequences of int, or function
        Which ranks average their models: "all", "ring", "butterfly", "halton", or for each rank a
        sequence of the ranks to which it sends its model. A function ``graph(rank, ranks, round)``
        returns these ranks for one average, and the graph must connect all ranks.
    every : int
        The number of steps from one average to the next.
    consistency : BSP, SSP, ASP or int
        Under BSP, a rank waits for its peers' models of this average. Under ``SSP(n)``, or with the
        number n, models may be n averages late. Under ASP, a rank never waits, and uses the models
        that have arrived.
    """

    modules: ClassVar[tuple[str, ...]] = ("peer_exchange",)
    graph: str | Sequence[Sequence[int]] | Callable = "butterfly"
    every: int = 10
    consistency: Consistency | int = field(default_factory=BSP)
    reasons: ClassVar[dict[str, str]] = {
        "check_replicas": "the models of the ranks differ between two averages",
        "patience": "each rank has a loss of its own",
        "microbatches": "each rank has a model of its own",
        "elastic": ": the model of a dead rank is lost, and the others differ from it",
    }

    def __post_init__(self):
        check_graph(self.graph)
        many = is_whole_number(self.every) and self.every >= 1
        expect(many, "every", self.every, "a whole number of 1 step or more")
        mode = self.consistency
        if is_whole_number(mode) and mode >= 0:
            mode = SSP(int(mode))
            object.__setattr__(self, "consistency", mode)  # the dataclass is frozen
        known = type(mode) in (BSP, SSP, ASP)
        expect(known, "consistency", mode, "md.BSP(), md.SSP(n), md.ASP(), or a number of rounds")

    def workers(self, size: int) -> int:
        """Return how many of `size` ranks compute gradients: all.

        Raises ConfigError for a bad graph.
        """
        peer_plan(self.graph, size)
        return size

    def open(self, comm, model, optimizer, *, global_batch: int, seed: int):
        """Return the object that averages the models in one run. Collective over `comm`."""
        from .peer_exchange import Peers

        plan = peer_plan(self.graph, comm.size)
        mode = self.consistency
        bound = 0 if isinstance(mode, BSP | int) else mode.bound
        return Peers(comm, model, optimizer, plan, int(self.every), bound)


@dataclass(frozen=True)
class Hogwild:
    """The ranks of one node update one set of parameters in shared memory, without a lock.

    Each rank computes gradients of its own samples, and changes the shared parameters in place. No
    rank waits for another, and no message is sent in a step. If two ranks change the same number at
    the same time, one of the two changes may be lost; with sparse gradients this is rare. See
    docs/peers.md and Niu et al., "Hogwild!", NIPS 2011.
    """

    modules: ClassVar[tuple[str, ...]] = ("shared_parameters",)
    reasons: ClassVar[dict[str, str]] = {
        "check_replicas": "there is one set of parameters",
        "patience": "each rank has a loss of its own",
        "microbatches": "ranks update the parameters in any order",
        "elastic": ": a dead rank may have left half of an update",
    }

    def workers(self, size: int) -> int:
        """Return how many of `size` ranks compute gradients: all."""
        return size

    def open(self, comm, model, optimizer, *, global_batch: int, seed: int):
        """Return the object that trains one model in memory that all ranks share.

        Collective over `comm`.
        """
        from .shared_parameters import SharedParameters

        return SharedParameters(comm, model, optimizer)


#: The modes in which peers average.
_PEER_MODES = {"bsp": BSP, "ssp": SSP, "asp": ASP}


def peer_average(
    graph="butterfly", every=10, consistency: str = "bsp", staleness: int | None = None
) -> PeerAverage:
    """Make a `PeerAverage` from the settings of the table ``[strategy]`` of a job file."""
    mode = look_up(_PEER_MODES, consistency, "consistency")
    if staleness is not None and mode is not SSP:
        raise ConfigError(
            f"staleness={shown(staleness)} needs consistency='ssp', got {consistency!r}"
        )
    given = {} if staleness is None else {"staleness": staleness}
    return PeerAverage(graph, every, build(_PEER_MODES, consistency, given, "consistency"))
