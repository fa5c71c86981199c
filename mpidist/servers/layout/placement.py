"""Which ranks serve, and which of them holds which part of which tensor: pure arithmetic.

    servers      0              1              2          2/3 of the bytes in one tensor W:
    small        b0 b3          b1             b2         packed, largest first, emptiest server
    large        WWWWWWWWWW|WWWWWWWWWWWWW|WWWWWWWWVVVV    poured: each server is filled to the mean

Small tensors are packed first; large ones are then cut where a server is full, so that the bytes
come out even whatever the shapes are. A tensor has at most one piece on a server, a flat range.
Where the rows of a tensor are small against a server's share, cuts are between rows, and a pull
of rows asks only the servers that have them.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np

from ...errors import ConfigError, shown
from ...tensors import dtype_of

#: A tensor above this part of a server's mean share is large: it may be cut.
LARGE = 1 / 32

#: Whether server ranks also work.
PLACEMENTS = ("dedicated", "colocated")


class Piece(NamedTuple):
    """Elements ``start:stop`` of the flattened tensor number `tensor`."""

    tensor: int
    start: int
    stop: int


class Tensor(NamedTuple):
    """Name, shape and dtype of one tensor, and whether its cuts are between rows."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    by_rows: bool = True

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Number of bytes."""
        return self.size * self.dtype.itemsize

    @property
    def width(self) -> int:
        """Elements of one row: of one index of the first axis."""
        return prod(self.shape[1:])


class ServerLayout(NamedTuple):
    """The tensors of a model and the pieces that each server holds, in tensor order."""

    tensors: tuple[Tensor, ...]
    pieces: tuple[tuple[Piece, ...], ...]

    def bytes_of(self, server: int) -> int:
        """Bytes of parameters that `server` holds."""
        return sum(
            (stop - start) * self.tensors[tensor].dtype.itemsize
            for tensor, start, stop in self.pieces[server]
        )

    @property
    def imbalance(self) -> float:
        """Bytes of the fullest server over the mean; 1.0 is perfect."""
        loads = [self.bytes_of(server) for server in range(len(self.pieces))]
        return max(loads) * len(loads) / sum(loads) if sum(loads) else 1.0

    def key(self, piece: Piece) -> str:
        """The piece's name on its server: the tensor's, with ``@start`` where it is cut."""
        tensor = self.tensors[piece.tensor]
        whole = piece.stop - piece.start == tensor.size
        return tensor.name if whole else f"{tensor.name}@{piece.start}"


def place_tensors(specs: Mapping[str, tuple[Sequence[int], Any]], servers: int) -> ServerLayout:
    """Cut the tensors of a model into byte-balanced parts, one per server.

    The result depends on names, shapes, dtypes and `servers` only, not on their order.

    Parameters
    ----------
    specs : mapping
        Name to (shape, dtype).
    servers : int
        Number of servers, at least 1.
    """
    plain = [
        Tensor(name, tuple(map(int, specs[name][0])), dtype_of(specs[name][1]))
        for name in sorted(specs)
    ]
    mean = sum(t.nbytes for t in plain) / servers
    tensors = tuple(t._replace(by_rows=_cut_by_rows(t, servers, mean)) for t in plain)
    loads = [0.0] * servers
    pieces: list[list[Piece]] = [[] for _ in range(servers)]
    small = [i for i, t in enumerate(tensors) if t.nbytes <= LARGE * mean and t.size]
    for i in sorted(small, key=lambda i: (-tensors[i].nbytes, i)):
        server = min(range(servers), key=lambda s: (loads[s], s))
        pieces[server].append(Piece(i, 0, tensors[i].size))
        loads[server] += tensors[i].nbytes
    large = [(i, t) for i, t in enumerate(tensors) if t.nbytes > LARGE * mean]
    _pour(large, loads, mean, pieces)
    return ServerLayout(tensors, tuple(tuple(sorted(p)) for p in pieces))


def _cut_by_rows(tensor: Tensor, servers: int, mean: float) -> bool:
    """Cut between rows only where that costs no balance: few huge rows are cut anywhere."""
    if len(tensor.shape) < 2:
        return True
    return tensor.shape[0] > servers and tensor.width * tensor.dtype.itemsize <= LARGE * mean


def _pour(large, loads: list[float], mean: float, pieces: list[list[Piece]]) -> None:
    """Fill servers one after another with the large tensors, cut where each becomes full."""
    server, last = 0, len(loads) - 1
    for i, tensor in large:
        start = 0
        unit = tensor.width if tensor.by_rows else 1
        while start < tensor.size:
            left = tensor.size - start
            room = (mean - loads[server]) / tensor.dtype.itemsize
            take = left if server == last else min(left, round(room / unit) * unit)
            if take > 0:
                pieces[server].append(Piece(i, start, start + take))
                loads[server] += take * tensor.dtype.itemsize
                start += take
            if start < tensor.size:
                server += 1


def ranks_asked(servers) -> int | list[int]:
    """Return `servers` as a plain number, or a list of them.

    Raises
    ------
    ConfigError
        It is neither a whole number nor a sequence of them.
    """
    try:
        if isinstance(servers, bool | str):
            raise TypeError
        if hasattr(servers, "__index__") and not getattr(servers, "shape", ()):
            return operator.index(servers)
        return [operator.index(rank) for rank in servers]
    except TypeError:
        raise ConfigError(
            f"servers={shown(servers)}; expected how many, or a list of ranks"
        ) from None


def choose_ranks(size: int, servers, placement: str) -> tuple[list[int], list[int]]:
    """Return (server ranks, worker ranks) of `size` ranks.

    Raises
    ------
    ConfigError
        Unknown placement, ranks that do not exist, nobody left to work.
    """
    if not isinstance(placement, str) or placement not in PLACEMENTS:
        raise ConfigError(f"placement {shown(placement)} is not one of {', '.join(PLACEMENTS)}")
    if isinstance(servers, int):
        if servers < 1:
            raise ConfigError(f"servers={servers}; expected at least 1")
        chosen = list(range(size - servers, size))
    else:
        chosen = [int(rank) for rank in servers]
        if not chosen or len(set(chosen)) != len(chosen) or not all(0 <= r < size for r in chosen):
            raise ConfigError(f"servers={list(servers)}: expected distinct ranks in 0..{size - 1}")
    most = size - 1 if placement == "dedicated" else size
    if len(chosen) > most:
        left = "leave 0 workers" if placement == "dedicated" else f"do not fit {size} ranks"
        cure = f"use at most {most}" if most else "start at least 2 ranks"
        raise ConfigError(f"{len(chosen)} servers {left}; {cure}")
    dedicated = set(chosen) if placement == "dedicated" else set()
    return chosen, [rank for rank in range(size) if rank not in dedicated]
