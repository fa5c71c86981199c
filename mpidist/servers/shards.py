"""The part of a model that one server holds: values, optimizer state, updates, export.

Values are made here, from a counter-based generator in fixed tiles, so they depend on name, seed
and position alone: the same model comes out of 1 server and of 7, and no rank ever holds it all.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Mapping, Sequence

import numpy as np

from ..arrays import work_dtype
from ..errors import ConfigError, nearest, shown
from ..partition import overlaps
from .layout.placement import ServerLayout
from .layout.routing import ShardPart, views

_TILE = 1 << 16

#: Parts of one message with their data, as `routing.views` yields them.
Parts = Sequence[tuple[ShardPart, np.ndarray]]

#: kind -> (default scale, sampler of one tile)
KINDS = {
    "zeros": (0.0, None),
    "constant": (0.0, None),
    "normal": (0.05, lambda rng, n: rng.standard_normal(n)),
    "uniform": (0.05, lambda rng, n: rng.uniform(-1.0, 1.0, n)),
}


def parse_init(init) -> tuple[str, float]:
    """Bring ``"normal"``, ``("normal", 0.1)``, ``0.5`` or ``"zeros"`` into (kind, scale).

    "normal" has mean zero and standard deviation `scale`, "uniform" lies in [-scale, scale);
    both have 0.05 where no scale is given.
    """
    if isinstance(init, (int, float)) and not isinstance(init, bool):
        return "constant", float(init)
    try:
        kind, *scale = (init,) if isinstance(init, str) else tuple(init)
        number = float(scale[0]) if scale else None
        known = kind in KINDS
    except (TypeError, ValueError):
        raise ConfigError(
            f"init is {shown(init)}; expected a kind, a number, or (kind, scale)"
        ) from None
    if not known:
        names, close = ", ".join(KINDS), nearest(kind, KINDS)
        raise ConfigError(f"init {shown(kind)} is not one of {names} or a number{close}")
    return kind, KINDS[kind][0] if number is None else number


def initial(out: np.ndarray, name: str, start: int, init: tuple[str, float], seed: int) -> None:
    """Fill `out` with elements `start` ... of tensor `name`."""
    kind, scale = init
    sampler = KINDS[kind][1]
    if sampler is None:
        out[...] = scale
        return
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=16).digest()
    key = np.frombuffer(digest, np.uint64)
    stop = start + out.size
    for tile in range(start // _TILE, -(-stop // _TILE)):
        # The whole tile is drawn, whatever part of it is ours: the normal sampler takes a number
        # of draws that depends on the values, so it cannot be entered in the middle.
        rng = np.random.Generator(np.random.Philox(key=key, counter=[0, 0, tile, 0]))
        values = sampler(rng, _TILE) * scale
        low, high = max(start, tile * _TILE), min(stop, (tile + 1) * _TILE)
        out[low - start : high - start] = values[low - tile * _TILE : high - tile * _TILE]


class ServerShard:
    """Pieces of one model on one server.

    Attributes
    ----------
    parameters : dict
        Key of each piece (the tensor's name, with ``@start`` where it is cut) to its 1-D array.
    state : dict
        The optimizer's state over `parameters`.
    version : int
        Updates applied so far.
    """

    def __init__(self, layout: ServerLayout, server: int, optimizer, inits: Mapping, seed: int):
        self.layout, self.server, self.optimizer = layout, server, optimizer
        self.version = 0
        self._arrays: dict[int, np.ndarray] = {}
        self._keys = {piece.tensor: layout.key(piece) for piece in layout.pieces[server]}
        self._sums: dict[int, np.ndarray] = {}
        for tensor, start, stop in layout.pieces[server]:
            array = np.empty(stop - start, layout.tensors[tensor].dtype)
            name = layout.tensors[tensor].name
            initial(array, name, start, inits.get(name, ("zeros", 0.0)), seed)
            self._arrays[tensor] = array
        self.parameters = {self._keys[t]: array for t, array in self._arrays.items()}
        self.state = optimizer.init(self.parameters)
        # An optimizer may know what the weight of an update is (of the learning rate, not of the
        # gradient: Adam does not care how long a gradient is). One that does not gets a scaled
        # gradient, which for plain descent is the same.
        self._weighs = "weight" in inspect.signature(optimizer.update).parameters

    def read(self, parts: Sequence[ShardPart], buffer: np.ndarray, offset: int) -> None:
        """Copy the values of `parts` into a message: between two updates, never within one."""
        for part, view in views(self.layout, parts, buffer, offset):
            array = self._arrays[part.piece.tensor]
            if part.rows is None:
                view[...] = array
            else:
                width = self.layout.tensors[part.piece.tensor].width
                rows = part.local_rows(self.layout)
                np.take(array.reshape(-1, width), rows, axis=0, out=view.reshape(-1, width))

    def write(self, parts: Sequence[ShardPart], buffer: np.ndarray, offset: int) -> None:
        """Set the values of whole pieces from a message."""
        for part, view in views(self.layout, parts, buffer, offset):
            self._arrays[part.piece.tensor][...] = view

    def apply(self, pushes: Sequence[tuple[float, Parts]], weight: float = 1.0) -> bool:
        """Make one update of the weighted mean of gradients; false if there is nothing in it.

        Parameters
        ----------
        pushes : sequence of (share, [(part, gradient), ...])
            Added in this order, each times its share. What a push does not name has gradient zero
            there. The gradients are scaled in place.
        weight : float
            Weight of the update itself: of its learning rate where the optimizer takes one.
        """
        pushes = [push for push in pushes if push[0]]
        if not pushes or not weight:
            return False
        if not self._weighs:
            pushes, weight = [(share * weight, parts) for share, parts in pushes], 1.0
        if len(pushes) == 1 and self._is_gradient(*pushes[0]):
            # One full push: its own buffer is the gradient, nothing is copied.
            share, parts = pushes[0]
            gradients = {self._keys[p.piece.tensor]: _scaled(view, share) for p, view in parts}
        else:
            gradients = self._summed(pushes)
        extra = {"weight": weight} if self._weighs else {}
        self.optimizer.update(gradients, self.state, self.parameters, **extra)
        self.version += 1
        return True

    def _is_gradient(self, share: float, parts) -> bool:
        """Whether one push is the gradient where it lies. Half precision is scaled in single."""
        if len(parts) != len(self._arrays):
            return False
        return all(
            part.rows is None and (share == 1 or view.dtype == work_dtype(view.dtype))
            for part, view in parts
        )

    def _summed(self, pushes) -> dict[str, np.ndarray]:
        for tensor, array in self._arrays.items():
            # Half precision adds up in single and is rounded once.
            dtype = np.promote_types(array.dtype, np.float32)
            self._sums.setdefault(tensor, np.empty(array.size, dtype)).fill(0)
        for share, parts in pushes:
            for part, view in parts:
                total = self._sums[part.piece.tensor]
                scaled = _scaled(view.astype(total.dtype, copy=False), share)
                if part.rows is None:
                    total += scaled
                else:
                    width = self.layout.tensors[part.piece.tensor].width
                    rows = part.local_rows(self.layout)
                    np.add.at(total.reshape(-1, width), rows, scaled.reshape(-1, width))
        return {
            self._keys[t]: total.astype(self._arrays[t].dtype, copy=False)
            for t, total in self._sums.items()
        }

    def export(self) -> dict:
        """Parameters and optimizer state as pieces of named tensors; the arrays are live."""
        pieces = {
            self._keys[t]: (self.layout.tensors[t].name, start)
            for t, start, _ in self.layout.pieces[self.server]
        }
        optimizer: dict = {}
        scalars: dict = {}
        for path, leaf in _leaves(self.state):
            if path[-1] in pieces and np.ndim(leaf) == 1:
                optimizer.setdefault("/".join(path[:-1]), []).append((*pieces[path[-1]], leaf))
            else:
                scalars["/".join(path)] = leaf
        parameters = [(*pieces[key], array) for key, array in self.parameters.items()]
        return {
            "parameters": parameters,
            "optimizer": optimizer,
            "scalars": scalars,
            "version": self.version,
        }

    def load(self, saved: Mapping) -> None:
        """Set everything from the pieces in `saved`, whichever servers cut them.

        Raises
        ------
        ConfigError
            `saved` lacks a range or a scalar that this shard holds.
        """
        mine = self.export()
        _fill(mine["parameters"], saved["parameters"], "parameters")
        for slot, triples in mine["optimizer"].items():
            _fill(triples, saved["optimizer"].get(slot, ()), f"optimizer state {slot!r}")
        for name, leaf in mine["scalars"].items():
            if name not in saved["scalars"]:
                raise ConfigError(f"load_shards: no optimizer state {name!r} in what was given")
            np.copyto(leaf, saved["scalars"][name])
        self.version = int(saved["version"])


def state_copies(optimizer) -> float:
    """Bytes of optimizer state per byte of parameters, found by trying it on a tiny one."""
    probe = np.zeros(64, np.float32)
    state = optimizer.init({"x": probe})
    return (
        sum(np.asarray(leaf).nbytes for _, leaf in _leaves(state) if np.ndim(leaf)) / probe.nbytes
    )


def _scaled(view: np.ndarray, weight: float) -> np.ndarray:
    return view if weight == 1 else np.multiply(view, weight, out=view)


def _leaves(tree: Mapping, path: tuple[str, ...] = ()):
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, (*path, key))
        else:
            yield (*path, key), value


def _fill(targets, sources, what: str) -> None:
    """Copy the overlaps of 1-D pieces (tensor, start, array) into `targets`."""
    for tensor, start, array in targets:
        missing = array.size
        for name, begin, source in sources:
            if name == tensor:
                mine, theirs = (start, start + array.size), (begin, begin + source.size)
                for *_, low, high in overlaps(mine, theirs):
                    array[low - start : high - start] = source[low - begin : high - begin]
                    missing -= high - low
        if missing:
            raise ConfigError(
                f"load_shards: {what} of {tensor!r}: {missing} of {array.size} elements from "
                f"{start} on are in none of the pieces given"
            )
