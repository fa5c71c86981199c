"""What a message, a sum and a call cost: the parameters of the simulator, and their file.

LogGP (Alexandrov, Ionescu, Schauser, Scheiman, SPAA 1995) with what this package adds to it:

    call         per collective call, before its first step              Python
    overhead     per message, at the sender and again at the receiver    Python and MPI
    latency      from the last byte leaving a node to it being there     wire and kernel
    gap          per byte on a node's link, each way (full duplex); the ranks of a node share it
    burst, peak  so many bytes an idle link takes at `peak` per byte     token buckets
    crossing     share of a long message's time that one crossing it, between the same two
                 ranks, has to wait: on one connection the answer that a long message needs
                 queues behind the data that goes the same way
    node_*       latency and gap between two ranks of one node
    reduction    per byte reduced

`burst` is for shaped links, real or virtual: what they let through at once after a pause, and so
also what a pause inside an algorithm gains. Ordinary links have none.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import NamedTuple

from ..errors import ConfigError, nearest


class NetworkModel(NamedTuple):
    """Seconds, seconds per byte, bytes (`burst`), a share (`crossing`)."""

    latency: float = 2e-6
    gap: float = 1e-9
    reduction: float = 2e-10
    overhead: float = 0.0
    call: float = 0.0
    burst: float = 0.0
    peak: float = 0.0
    crossing: float = 0.0
    #: Whether the link is as slow into the node as out of it; a shaped sender limits one way only.
    incoming: bool = True
    node_latency: float = 1e-6
    node_gap: float = 2e-10


#: A cluster's 10 Gbit/s network, roughly.
DEFAULT = NetworkModel()


class Problem(NamedTuple):
    """What is simulated: an allreduce of `n` elements on `size` ranks of a network.

    Ranks r with equal ``r // ranks_per_node`` share a node and its link. `repeats` calls come one
    after the other; the cost is that of one, as in a measurement that does the same.
    """

    size: int
    n: int
    itemsize: int = 4
    network: NetworkModel = DEFAULT
    ranks_per_node: int = 1
    repeats: int = 1

    @property
    def nbytes(self) -> int:
        """Bytes of the vector."""
        return self.n * self.itemsize

    @property
    def even(self) -> bool:
        """Whether all nodes have the same number of ranks."""
        return self.size % self.ranks_per_node == 0

    def node(self, rank):
        """Return the node of a rank, or of an array of ranks."""
        return rank // self.ranks_per_node


def save(path, network: NetworkModel, **facts) -> None:
    """Write parameters as JSON, with where they come from."""
    text = json.dumps({"parameters": network._asdict(), **facts}, indent=1)
    Path(path).write_text(text + "\n", encoding="utf-8")


def load(path) -> NetworkModel:
    """Read parameters that `save` wrote. ConfigError says what is wrong with the file."""
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
    """When the last rank is done, and what the busiest rank does."""

    seconds: float
    rounds: int
    messages: int
    bytes: int
    reduced: int
