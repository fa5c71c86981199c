"""Clip gradients by their global norm, which is the norm over the parts of all servers.

    server 0   mean gradient of clock 7 | squares ->  | wait | scale, update -> answers
    server 1   ............. mean gradient of clock 7 | squares -> | scale, update -> answers

In the modes BSP and BackupWorkers, the workers' gradients of a step are averaged and make one
update, and the average is clipped. Each server computes the sum of the squares of its part of the
average, in float64. It sends the sum to all other servers, and makes the update when it has the
sums of all servers. All servers multiply their gradients by the same factor, to the last bit. In
the other modes a worker clips each push before it sends it.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

from ...errors import ConfigError, shown
from ..consistency import Action, Apply
from ..protocol import SQUARES

_PIECE = 1 << 16


def check_clip_norm(name: str, clip_norm: Any, elastic: bool) -> None:
    """Raise ConfigError if a given `clip_norm` is no number above 0, or the run is elastic."""
    if clip_norm is None:
        return
    number = isinstance(clip_norm, int | float | np.number) and not isinstance(clip_norm, bool)
    if not number or not 0 < clip_norm < math.inf:
        raise ConfigError(f"model {name!r}: clip_norm is {shown(clip_norm)}, expected a number > 0")
    if elastic:
        raise ConfigError(
            f"model {name!r}: clip_norm={clip_norm}: in an elastic run the part of a dead server "
            "would be missing in the norm; leave clip_norm out"
        )


def squares(arrays: Iterable[np.ndarray]) -> float:
    """Return the sum of the squares of all elements of all `arrays`, in float64."""
    flat = (array.reshape(-1) for array in arrays)
    pieces = (one[at : at + _PIECE] for one in flat for at in range(0, one.size, _PIECE))
    return float(sum(np.square(piece, dtype=np.float64).sum() for piece in pieces))


def factor(total: float, clip_norm: float) -> float:
    """Return the factor that reduces gradients to the norm `clip_norm`; 1 if their norm is smaller.

    `total` is the sum of the squares of all gradients; if it is not finite, the factor is 1.
    """
    norm = math.sqrt(total) if math.isfinite(total) else 0.0
    return clip_norm / norm if norm > clip_norm else 1.0


def clipped_push(pushes: dict[str, tuple], clip_norm: float | None) -> dict[str, tuple]:
    """Return the gradients of a push, scaled to a norm of at most `clip_norm` if it is given."""
    if clip_norm is None:
        return pushes
    scale = factor(squares(flat for _, flat in pushes.values()), clip_norm)
    if scale == 1.0:
        return pushes
    return {n: (rows, flat * flat.dtype.type(scale)) for n, (rows, flat) in pushes.items()}


class GlobalNorms:
    """Clips the gradients of one server's models with `clip_norm`, by the norm over all servers."""

    def __init__(self, server: Any):
        self._server = server
        self._due: dict[int, deque[Action]] = defaultdict(deque)
        self._merged: dict[tuple[int, int], Any] = {}  # (model, clock) -> the mean gradient
        self._sums: dict[tuple[int, int], dict[int, float]] = defaultdict(dict)  # .. -> rank -> sum

    @property
    def pending(self) -> bool:
        """Whether updates wait because this server does not know the norm of all gradients yet.

        Other servers send the sums of the squares of their parts of the gradients.
        """
        return any(self._due.values())

    def released(self, number: int, actions: Sequence[Action]) -> list[Action]:
        """Take the next actions of a model; return those that need not wait for other servers.

        `actions` are updates and answers to workers, of model number `number`. If the gradients of
        an update must be clipped, this server sends the sum of their squares to the other servers.
        The update waits for the sums of the other servers, and later actions wait for the update.
        """
        model, link = self._server.models[number], self._server.link
        for action in actions:
            self._due[number].append(action)
            if not (isinstance(action, Apply) and self._is_clipped(model, action)):
                continue
            key = number, action.clock
            merged = self._merged[key] = model.merge(action)
            mine = 0.0 if merged is None else squares(map(_values, merged[0].values()))
            self._sums[key][link.comm.rank] = mine
            for rank in self._ranks():
                if rank != link.comm.rank:
                    words = link.pool.take(24)
                    words.view(np.int64)[:2] = key
                    words.view(np.float64)[2] = mine
                    link.send(words, 24, rank, SQUARES)
        return self._allowed(number)

    def listen(self) -> list[tuple[int, list[Action]]]:
        """Receive sums of squares from other servers; return the actions that waited only for them.

        The result is a list of pairs (number of a model, its actions). An action is an update or an
        answer to a worker.
        """
        if not self.pending:
            return []
        link, status, heard = self._server.link, MPI.Status(), set()
        while self.pending and link.comm.Iprobe(MPI.ANY_SOURCE, link.tag + SQUARES, status):
            words = np.empty(24, np.uint8)
            link.comm.Recv([words, MPI.BYTE], status.source, link.tag + SQUARES)
            number, clock = words.view(np.int64)[:2].tolist()
            self._sums[number, clock][status.source] = float(words.view(np.float64)[2])
            heard.add(number)
        return [(number, self._allowed(number)) for number in sorted(heard)]

    def _ranks(self) -> list[int]:
        return self._server.decisions.ranks

    @staticmethod
    def _is_clipped(model: Any, action: Apply) -> bool:
        return model.gate.mode_at(action.clock).merges

    def _allowed(self, number: int) -> list[Action]:
        model, due, ranks = self._server.models[number], self._due[number], self._ranks()
        allowed: list[Action] = []
        while due:
            action = due[0]
            if isinstance(action, Apply) and self._is_clipped(model, action):
                key = number, action.clock
                if len(self._sums[key]) < len(ranks):
                    break
                sums, merged = self._sums.pop(key), self._merged.pop(key)
                scale = factor(sum(sums[rank] for rank in ranks), model.clip_norm)
                if merged is not None and scale != 1.0:
                    for gradient in merged[0].values():
                        values = _values(gradient)
                        np.multiply(values, values.dtype.type(scale), out=values)
                model.merged.append(merged)
            allowed.append(due.popleft())
        return allowed


def _values(gradient: Any) -> np.ndarray:
    """Return the values of a gradient, which may be a tuple (rows, values)."""
    return gradient[1] if isinstance(gradient, tuple) else gradient
