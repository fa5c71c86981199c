"""Decide which part of which tensor each server holds; uses no MPI.

    servers      0              1              2          2/3 of the bytes in one tensor W:
    small        b0 b3          b1             b2         largest first, to the emptiest server
    large        WWWWWWWWWW|WWWWWWWWWWWWW|WWWWWWWWVVVV    each server is filled to the mean

Small tensors are placed first. Then large tensors are placed; a large tensor is cut where a server
is full. So all servers hold nearly the same number of bytes or, if the user asks for unequal shares
of the model, bytes in proportion to these shares.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import inf, prod
from typing import Any, NamedTuple

import numpy as np

from ...tensors import dtype_of
from ..rows.open_rows import OpenRows
from .dealt_rows import Turns, first_rows, turns_of

#: A tensor larger than this fraction of a server's mean share is large, and may be cut.
LARGE = 1 / 32


class Piece(NamedTuple):
    """The part of one tensor that a server holds: elements ``start:stop`` of the flat tensor."""

    tensor: int
    start: int
    stop: int


class RowPolicy(NamedTuple):
    """How a table is updated and divided between servers, as the user asks in `ServerGroup.add`."""

    rows: str = "dense"
    spread: str = "ranges"
    # The arguments of `OpenRows`, if the table is open.
    open: Sequence | None = None


class Tensor(NamedTuple):
    """The name, shape and dtype of one tensor, and how it is divided and updated."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    # Whether the tensor is cut only between rows.
    by_rows: bool = True
    # Whether an update changes only the rows that a push names.
    lazy: bool = False
    # The turns in which servers get the rows; empty if each has consecutive rows.
    dealt: Turns = ()
    # The shape of an open table begins with 0, and its piece on server k is `Piece(tensor, k, k)`.
    open: OpenRows | None = None

    @property
    def size(self) -> int:
        """The number of elements of the tensor."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The number of bytes of the tensor."""
        return self.size * self.dtype.itemsize

    @property
    def width(self) -> int:
        """The number of elements of one row, which is what one index of the first axis selects."""
        return prod(self.shape[1:])


class ServerLayout(NamedTuple):
    """Which part of which tensor of a model each server holds.

    `pieces` has for each server its `Piece` objects, in the order of the tensors. `shares` has the
    fraction of the bytes that each server should hold.
    """

    tensors: tuple[Tensor, ...]
    pieces: tuple[tuple[Piece, ...], ...]
    shares: tuple[float, ...]

    def bytes_of(self, server: int) -> int:
        """Return how many bytes of parameters `server` holds."""
        held = self.pieces[server]
        return sum((stop - start) * self.tensors[i].dtype.itemsize for i, start, stop in held)

    def bytes_of_all(self) -> list[int]:
        """Return how many bytes of parameters each server holds."""
        return [self.bytes_of(server) for server in range(len(self.pieces))]

    @property
    def imbalance(self) -> float:
        """The largest ratio of the bytes that a server holds to the bytes that it should hold.

        A server should hold its share of all bytes. The ideal ratio is 1.0.
        """
        loads = self.bytes_of_all()
        total = sum(loads)
        if not total:
            return 1.0
        shares = zip(loads, self.shares, strict=True)
        return max(load / (share * total) for load, share in shares if share)

    def key(self, piece: Piece) -> str:
        """Return the name of `piece`: ``name@12`` is the part of a tensor from element 12 on."""
        tensor = self.tensors[piece.tensor]
        whole = piece.stop - piece.start == tensor.size
        # A whole tensor has its plain name.
        return tensor.name if whole else f"{tensor.name}@{piece.start}"


def place_tensors(
    specs: Mapping[str, tuple[Sequence[int], Any]],
    servers: int | Sequence[float],
    policies: Mapping[str, RowPolicy] | None = None,
) -> ServerLayout:
    """Return a `ServerLayout` that gives each server nearly its share of the bytes.

    The result depends on names, shapes, dtypes and `servers`, not on the order of `specs`, which
    maps the name of each tensor to (shape, dtype). `servers` is a number of servers with equal
    shares, or the share of each server. A server with share 0 holds nothing.
    """
    shares = [1.0] * servers if isinstance(servers, int) else list(servers)
    whole = sum(shares)
    shares = [share / whole for share in shares]
    holding = sum(share > 0 for share in shares)
    chosen = {name: RowPolicy() for name in sorted(specs)} | dict(policies or {})
    dealt = any(_is_dealt(chosen[name], shape) for name, (shape, _) in specs.items())
    turns = turns_of(shares) if dealt else ()
    plain = [
        Tensor(
            name,
            tuple(0 if n is None else int(n) for n in specs[name][0]),
            dtype_of(specs[name][1]),
            lazy=chosen[name].rows != "dense",
            dealt=turns if _is_dealt(chosen[name], specs[name][0]) else (),
            open=_open(chosen[name]),
        )
        for name in sorted(specs)
    ]
    total = sum(t.nbytes for t in plain)
    mean = total / holding
    tensors = tuple(t._replace(by_rows=_cut_by_rows(t, holding, mean)) for t in plain)
    loads = [0.0] * len(shares)
    pieces: list[list[Piece]] = [[] for _ in shares]
    for i, tensor in enumerate(tensors):
        if tensor.open is not None:
            for server, held in enumerate(pieces):
                held.append(Piece(i, server, server))
        elif tensor.dealt:
            starts = [row * tensor.width for row in first_rows(tensor.shape[0], tensor.dealt)]
            for server, (start, stop) in enumerate(pairwise(starts)):
                loads[server] += (stop - start) * tensor.dtype.itemsize
                pieces[server] += [Piece(i, start, stop)] if start < stop else []
    others = [(i, t) for i, t in enumerate(tensors) if not (t.dealt or t.open)]
    small = [(i, t) for i, t in others if t.nbytes <= LARGE * mean and t.size]
    for i, tensor in sorted(small, key=lambda each: -each[1].nbytes):
        filled = [
            (load + tensor.nbytes) / share if share else inf
            for load, share in zip(loads, shares, strict=True)
        ]
        server = filled.index(min(filled))
        pieces[server].append(Piece(i, 0, tensor.size))
        loads[server] += tensor.nbytes
    large = [(i, t) for i, t in others if t.nbytes > LARGE * mean]
    last = max(server for server, share in enumerate(shares) if share)
    _fill_up(large, loads, [share * total for share in shares], last, pieces)
    return ServerLayout(tensors, tuple(tuple(sorted(p)) for p in pieces), tuple(shares))


def _is_dealt(policy: RowPolicy, shape: Sequence) -> bool:
    return policy.spread == "rows" and len(shape) > 0 and policy.open is None


def _open(policy: RowPolicy) -> OpenRows | None:
    return None if policy.open is None else OpenRows(*policy.open)


# If a tensor is cut only between rows, a pull of rows asks only the servers that have these rows.
def _cut_by_rows(tensor: Tensor, servers: int, mean: float) -> bool:
    """Whether to cut a tensor only between rows; false if rows are too big to balance servers."""
    if tensor.dealt or tensor.open is not None:
        return True
    small_rows = tensor.width * tensor.dtype.itemsize <= LARGE * mean
    return len(tensor.shape) < 2 or (tensor.shape[0] > servers and small_rows)


def _fill_up(
    large, loads: list[float], goals: list[float], last: int, pieces: list[list[Piece]]
) -> None:
    """Fill one server after another with the large tensors; cut a tensor where a server is full."""
    server = 0
    for i, tensor in large:
        start, unit = 0, tensor.width if tensor.by_rows else 1
        while start < tensor.size:
            left = tensor.size - start
            room = (goals[server] - loads[server]) / tensor.dtype.itemsize
            take = left if server == last else min(left, round(room / unit) * unit)
            if take > 0:
                pieces[server].append(Piece(i, start, start + take))
                loads[server] += take * tensor.dtype.itemsize
                start += take
            if start < tensor.size:
                server += 1
