"""Decide which ranks serve, and which part of which tensor each server holds; uses no MPI.

    servers      0              1              2          2/3 of the bytes in one tensor W:
    small        b0 b3          b1             b2         largest first, to the emptiest server
    large        WWWWWWWWWW|WWWWWWWWWWWWW|WWWWWWWWVVVV    each server in turn is filled to the mean

Small tensors are placed first. Large tensors are placed after the small ones and cut where a server
is full, so that all servers hold nearly the same number of bytes for any shapes. A tensor has at
most one piece on a server, and the piece is a contiguous range of the flattened tensor. If the rows
of a tensor are small compared with the bytes of a server, the tensor is cut only between rows, and
a pull of rows asks only the servers that have the rows.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np

from ...errors import ConfigError, shown
from ...tensors import dtype_of

#: A tensor larger than this fraction of a server's mean share is large, and may be cut.
LARGE = 1 / 32

#: A dict from the name of a placement to whether server ranks also work.
PLACEMENTS = ("dedicated", "colocated")


class Piece(NamedTuple):
    """Elements ``start:stop`` of the flattened tensor with the number `tensor`."""

    tensor: int
    start: int
    stop: int


class Tensor(NamedTuple):
    """The name, shape and dtype of one tensor, and whether the tensor is cut only between rows."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    by_rows: bool = True

    @property
    def size(self) -> int:
        """The number of elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The number of bytes."""
        return self.size * self.dtype.itemsize

    @property
    def width(self) -> int:
        """The number of elements of one row; a row has one index of the first axis."""
        return prod(self.shape[1:])


class ServerLayout(NamedTuple):
    """The tensors of a model and the pieces that each server holds, in tensor order."""

    tensors: tuple[Tensor, ...]
    pieces: tuple[tuple[Piece, ...], ...]

    def bytes_of(self, server: int) -> int:
        """Return how many bytes of parameters `server` holds."""
        held = self.pieces[server]
        return sum((stop - start) * self.tensors[i].dtype.itemsize for i, start, stop in held)

    @property
    def imbalance(self) -> float:
        """The bytes of the fullest server divided by the servers' mean; 1.0 is perfect balance."""
        loads = [self.bytes_of(server) for server in range(len(self.pieces))]
        return max(loads) * len(loads) / sum(loads) if sum(loads) else 1.0

    def key(self, piece: Piece) -> str:
        """Return the name of a piece: the tensor's name, with ``@start`` if the tensor is cut."""
        tensor = self.tensors[piece.tensor]
        whole = piece.stop - piece.start == tensor.size
        return tensor.name if whole else f"{tensor.name}@{piece.start}"


def place_tensors(specs: Mapping[str, tuple[Sequence[int], Any]], servers: int) -> ServerLayout:
    """Return a placement that gives each server nearly the same number of bytes.

    The result depends on names, shapes, dtypes and `servers`, not on the order of `specs`.

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
    small = [(i, t) for i, t in enumerate(tensors) if t.nbytes <= LARGE * mean and t.size]
    for i, tensor in sorted(small, key=lambda each: -each[1].nbytes):
        server = loads.index(min(loads))
        pieces[server].append(Piece(i, 0, tensor.size))
        loads[server] += tensor.nbytes
    large = [(i, t) for i, t in enumerate(tensors) if t.nbytes > LARGE * mean]
    _fill_up(large, loads, mean, pieces)
    return ServerLayout(tensors, tuple(tuple(sorted(p)) for p in pieces))


def _cut_by_rows(tensor: Tensor, servers: int, mean: float) -> bool:
    """Whether to cut a tensor only between rows; false if rows are too big to balance servers."""
    small_rows = tensor.width * tensor.dtype.itemsize <= LARGE * mean
    return len(tensor.shape) < 2 or (tensor.shape[0] > servers and small_rows)


def _fill_up(large, loads: list[float], mean: float, pieces: list[list[Piece]]) -> None:
    """Fill one server after another with the large tensors; cut a tensor where a server is full."""
    server, last = 0, len(loads) - 1
    for i, tensor in large:
        start, unit = 0, tensor.width if tensor.by_rows else 1
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
    """Return the argument `servers` as a whole number, or as a list of ranks.

    Raises
    ------
    ConfigError
        `servers` is neither a whole number nor a sequence of whole numbers.
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
    """Return which of `size` ranks are servers and which are workers, as two lists.

    Raises
    ------
    ConfigError
        The placement is unknown, a rank does not exist, or no worker is left.
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
