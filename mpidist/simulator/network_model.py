"""The network model of the simulator: how long messages, additions and allreduce calls take.

The model is LogGP (Alexandrov, Ionescu, Schauser, Scheiman, SPAA 1995) with some more parameters:

    call         per collective call, before its first step              time of Python
    overhead     per message, at the sender and again at the receiver    time of Python and MPI
    latency      from the time a last byte leaves a node to its arrival  time of wire and kernel
    gap          per byte on a node's link, each way (full duplex); the ranks of a node share it
    burst, peak  an idle link sends `burst` bytes at `peak` per byte     see below
    crossing     if two ranks send each other long messages at the same time: the fraction of the
                 time of one message for which the other message waits
    node_*       latency and gap between two ranks of one node
    reduction    per byte reduced

`burst` describes links whose rate is limited by a token bucket: after a pause, `burst` bytes pass
at the faster rate `peak`. For other links, `burst` is 0.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import NamedTuple

from ..errors import ConfigError, nearest


class NetworkModel(NamedTuple):
    """The parameters of a network, which the docstring of this module explains.

    Times are in seconds or seconds per byte.
    """

    latency: float = 2e-6
    gap: float = 1e-9
    reduction: float = 2e-10
    overhead: float = 0.0
    call: float = 0.0
    burst: float = 0.0
    peak: float = 0.0
    crossing: float = 0.0
    #: Whether messages into a node are limited by `gap`, like messages out of a node. False if only
    #: senders are limited.
    incoming: bool = True
    node_latency: float = 1e-6
    node_gap: float = 2e-10


#: Parameters of a typical cluster with a network of 10 Gbit/s.
DEFAULT = NetworkModel()


class Problem(NamedTuple):
    """The problem to simulate: an allreduce of `n` elements over `size` ranks on a network.

    Each node has `ranks_per_node` successive ranks, which share its link. The simulation runs the
    allreduce `repeats` times, one run after the other, and returns the mean time of one run.
    """

    size: int
    n: int
    itemsize: int = 4
    network: NetworkModel = DEFAULT
    ranks_per_node: int = 1
    repeats: int = 1

    @property
    def nbytes(self) -> int:
        """The size of the vector that is reduced, in bytes."""
        return self.n * self.itemsize

    @property
    def even(self) -> bool:
        """Whether all nodes have the same number of ranks."""
        return self.size % self.ranks_per_node == 0

    def node(self, rank):
        """Return the number of the node of a rank; for an array of ranks, an array of nodes."""
        return rank // self.ranks_per_node


def save(path, network: NetworkModel, **facts) -> None:
    """Write the parameters of `network`, and `facts` about their origin, to a JSON file."""
    text = json.dumps({"parameters": network._asdict(), **facts}, indent=1)
    Path(path).write_text(text + "\n", encoding="utf-8")


def load(path) -> NetworkModel:
    """Read the parameters from a file that `save` wrote; raise ConfigError for other files."""
    try:
        values = json.loads(Path(path).read_text(encoding="utf-8"))["parameters"]
        items = dict(values).items()
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path}: no parameters of a network ({error}); `mpidist simulate fit` writes them"
        ) from None
    for name, value in items:
        if name not in NetworkModel._fields:
            known = ", ".join(NetworkModel._fields)
            hint = nearest(name, NetworkModel._fields)
            raise ConfigError(f"{path}: unknown parameter {name!r}: expected {known}{hint}")
        if not isinstance(value, int | float) or not 0 <= value < math.inf:
            raise ConfigError(f"{path}: {name} is {value!r}, expected a number of at least 0")
    return NetworkModel(**values)


class Cost(NamedTuple):
    """The seconds of an allreduce, and counts, each of which is the maximum over all ranks.

    A rank sends `messages` messages and `bytes` bytes, and adds up `reduced` bytes.
    """

    seconds: float
    rounds: int
    messages: int
    bytes: int
    reduced: int
