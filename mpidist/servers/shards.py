"""The part of a model that one server holds: its parameters and the optimizer's state for them.

A random initial value depends only on the seed, the tensor's name and the position. So a model has
the same initial values on 1 server and on 7 servers, and no rank ever needs memory for the whole
model.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..arrays import work_dtype
from ..errors import ConfigError, nearest, shown
from ..registry import has_argument
from .layout.dealt_rows import dealt_to
from .layout.placement import ServerLayout, Tensor
from .layout.routing import ShardPart, views
from .rows.open_table import OpenTable
from .rows.row_sums import merge_rows
from .rows.saved_rows import fill_pieces
from .wire.bound_update import BoundGradients, gradients_again, kept_with, same_again

# Random initial values are drawn in tiles of this many elements. The generator of a tile starts
# from the seed, the tensor's name and the number of the tile.
_TILE = 1 << 16

#: The parts of one message with their data, as `routing.views` yields them.
Parts = Sequence[tuple[ShardPart, np.ndarray]]

#: A dict from the kind of initial values to (default scale, sampler of one tile).
KINDS = {
    "zeros": (0.0, None),
    "constant": (0.0, None),
    "normal": (0.05, lambda rng, n: rng.standard_normal(n)),
    "uniform": (0.05, lambda rng, n: rng.uniform(-1.0, 1.0, n)),
}


def parse_init(init) -> tuple[str, float]:
    """Return (kind, scale) for an `init` such as ``"normal"``, ``("normal", 0.1)`` or ``0.5``.

    "normal" has mean zero and standard deviation `scale`. "uniform" lies in [-scale, scale). Their
    default scale is 0.05.
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
    """Fill `out` with the initial values of tensor `name` from its element number `start` on."""
    kind, scale = init
    sampler = KINDS[kind][1]
    if sampler is None:
        out[...] = scale
        return
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=16).digest()
    key = np.frombuffer(digest, np.uint64)
    stop = start + out.size
    for tile in range(start // _TILE, -(-stop // _TILE)):
        # A tile is always drawn as a whole, even if `out` needs only a part of it. The normal
        # sampler draws a varying number of random bits per value, so it cannot begin in the middle
        # of a tile.
        rng = np.random.Generator(np.random.Philox(key=key, counter=[0, 0, tile, 0]))
        values = sampler(rng, _TILE) * scale
        low, high = max(start, tile * _TILE), min(stop, (tile + 1) * _TILE)
        out[low - start : high - start] = values[low - tile * _TILE : high - tile * _TILE]


def _initial_rows(out: np.ndarray, tensor: Tensor, server: int, init, seed: int) -> None:
    """Fill `out` with the initial values of the rows of `server`, if rows are dealt in turn."""
    width = max(1, tensor.width)
    mine, step = out.reshape(-1, width), max(1, _TILE // width) * len(tensor.dealt)
    some, done = np.empty((step, width), out.dtype), 0
    # Each block of `step` rows has whole periods of the turns in which servers get rows.
    for start in range(0, tensor.shape[0], step):
        rows = some[: tensor.shape[0] - start]
        initial(rows.reshape(-1), tensor.name, start * width, init, seed)
        taken = rows[dealt_to(server, len(rows), tensor.dealt)]
        mine[done : done + len(taken)] = taken
        done += len(taken)


class ServerShard:
    """The part of one model that one server holds: its parameters and optimizer state.

    Of each tensor, a server holds at most one piece, which is a range of the flattened tensor.
    `memory` maps the numbers of some tensors to arrays in which the shard keeps their parameters,
    so that other ranks of the host can read them.
    """

    def __init__(
        self, layout: ServerLayout, server: int, optimizer, inits: Mapping, seed: int,
        memory: Mapping[int, np.ndarray] | None = None,
    ):  # fmt: skip
        # The number of updates so far, and the clock of the newest pushes that were applied.
        self.server, self.version, self.clock = server, 0, 0
        # Key of each piece (`ServerLayout.key`) -> its 1-D array.
        self.parameters: dict[str, np.ndarray] = {}
        # Number of a tensor -> its open table.
        self.open: dict[int, OpenTable] = {}
        self._memory = dict(memory or {})
        self._place(layout)
        for tensor, start, stop in layout.pieces[server]:
            name, _, dtype, *_ = layout.tensors[tensor]
            if (array := self._memory.get(tensor)) is None:
                array = np.empty(stop - start, dtype)
            self.parameters[self._keys[tensor]] = array
            init = inits.get(name, ("zeros", 0.0))
            if layout.tensors[tensor].open is not None:
                self.open[tensor] = OpenTable(self, layout.tensors[tensor], init, seed)
            elif layout.tensors[tensor].dealt:
                _initial_rows(array, layout.tensors[tensor], server, init, seed)
            else:
                initial(array, name, start, init, seed)
        self.state = self.fresh_state(optimizer)
        self.use(optimizer)

    def fresh_state(self, optimizer) -> dict:
        """Return the state of `optimizer` before its first update."""
        return optimizer.init(self.parameters)

    def _place(self, layout: ServerLayout) -> None:
        self.layout = layout
        self._keys = {piece.tensor: layout.key(piece) for piece in layout.pieces[self.server]}
        self._starts = {piece.tensor: piece.start for piece in layout.pieces[self.server]}
        self._sums: dict[int, np.ndarray] = {}
        self._sum = BoundGradients({})

    def divide_anew(self, layout: ServerLayout) -> None:
        """Hold the parts of the model that `layout` says, instead of the present parts.

        The caller has already put the arrays of these parts into `parameters` and `state`.
        """
        self._place(layout)
        self._memory = {}  # see `use_memory`
        self.parameters = {key: self.parameters[key] for key in self._keys.values()}
        self.use(self.optimizer)

    def use_memory(self, memory: Mapping[int, np.ndarray]) -> None:
        """Move parameters into the arrays in `memory`, a dict of tensor number to array."""
        for tensor, array in memory.items():
            array[...] = self.parameters[self._keys[tensor]]
            self.parameters[self._keys[tensor]] = array
        self._memory = dict(memory)

    def use(self, optimizer) -> None:
        """Use `optimizer` from now on, with the present `state`, which must suit this optimizer."""
        self.optimizer = optimizer
        # If the optimizer has an argument for the weight of an update, the weight is a factor of
        # the learning rate. (Adam needs this, because the size of its step does not depend on the
        # length of the gradient.) For any other optimizer, the gradient is multiplied by the
        # weight, which has the same effect in plain gradient descent.
        self._weighs = has_argument(optimizer.update, "weight")
        # The tensors for which an update may leave out rows that no push names.
        kind, tensors = getattr(optimizer, "rows", ""), self.layout.tensors
        self._by_rows = {t for t in self._keys if kind == "exact" or (kind and tensors[t].lazy)}

    def key(self, part: ShardPart) -> str:
        """Return the key in `parameters` for the tensor to which `part` belongs."""
        return self._keys[part.piece.tensor]

    def rows_of(self, part: ShardPart, arrays: Mapping | None = None) -> np.ndarray:
        """Return this server's rows of the tensor to which `part` belongs, as a 2-D array."""
        array = (self.parameters if arrays is None else arrays)[self.key(part)]
        return array.reshape(-1, self.layout.tensors[part.piece.tensor].width)

    def values(self, part: ShardPart, arrays: Mapping | None = None) -> np.ndarray:
        """Return the values of `part` in `parameters`, or in `arrays` if it is given."""
        if part.rows is None:
            return (self.parameters if arrays is None else arrays)[self.key(part)]
        return self.rows_of(part, arrays)[part.local_rows(self.layout)]

    def read(self, parts: Sequence[ShardPart], buffer: np.ndarray, offset: int) -> None:
        """Copy the values of `parts` (tensors or rows) into a message.

        The first value begins at byte `offset` of the message's `buffer`.
        """
        for part, view in views(self.layout, parts, buffer, offset):
            array = self.parameters[self._keys[part.piece.tensor]]
            if (table := self.open.get(part.piece.tensor)) is not None:
                if part.rows is not None:
                    table.read(part.rows, view.reshape(-1, table.width))
            elif part.rows is None:
                view[...] = array
            else:
                width = self.layout.tensors[part.piece.tensor].width
                rows = part.local_rows(self.layout)
                np.take(array.reshape(-1, width), rows, axis=0, out=view.reshape(-1, width))

    def write(self, parts: Sequence[ShardPart], buffer: np.ndarray, offset: int) -> None:
        """Set the parameters listed in `parts` to values from a message.

        The first value begins at byte `offset` of the message's `buffer`.
        """
        for part, view in views(self.layout, parts, buffer, offset):
            self.parameters[self._keys[part.piece.tensor]][...] = view

    def apply(self, pushes: Sequence[tuple[float, Parts]], weight: float = 1.0) -> bool:
        """Update with the weighted mean of gradients; return false if all these weights are 0."""
        merged = self.merge(pushes, weight)
        if merged is not None:
            self.update(*merged)
        return merged is not None

    def merge(
        self, pushes: Sequence[tuple[float, Parts]], weight: float = 1.0
    ) -> tuple[dict[str, Any], float] | None:
        """Return (weighted mean of gradients, weight of the update); None if all pushes weigh 0.

        A gradient is an array, or a tuple (rows, values). The arrays are valid until the next call
        of `merge`. Each of `pushes` is (weight in the mean, [(part, gradient), ...]). The gradients
        in `pushes` may be changed in place.
        """
        # A tensor that a push does not list has gradient zero in this push.
        pushes, weight = self.weighed(pushes, weight)
        pushes = [push for push in pushes if push[0]]
        if not pushes:
            return None
        if len(pushes) == 1:
            share, parts = pushes[0]
            if share == 1 and (again := gradients_again(parts)) is not None:
                return again, weight
            if self._is_gradient(share, parts):
                # If one push covers the whole shard, its message is used as the gradient, without
                # a copy.
                found = {self._keys[p.piece.tensor]: scale(view, share) for p, view in parts}
                return kept_with(parts, found), weight
        self._sum = same_again(self._sum, self._summed(pushes))
        return self._sum, weight

    def weighed(self, pushes: Sequence, weight: float) -> tuple[Sequence, float]:
        """Return `pushes`, and the weight to pass to the optimizer.

        Each push has a share, by which its gradients are multiplied. If `weight` is 0, or if the
        optimizer takes no weight, the shares are multiplied by `weight`, and the optimizer's weight
        is 1.
        """
        if weight == 0 or not self._weighs:
            return [(share * weight, parts) for share, parts in pushes], 1.0
        return pushes, weight

    def update(self, gradients: Mapping[str, Any], weight: float) -> None:
        """Let the optimizer update the parameters that have gradients, and count the update."""
        if isinstance(gradients, BoundGradients) and gradients.apply(self, weight):
            self.version += 1
            return
        extra = {"weight": weight} if self._weighs else {}
        parameters = {key: self.parameters[key] for key in self.parameters if key in gradients}
        self.optimizer.update(gradients, self.state, parameters, **extra)
        self.parameters |= parameters  # the optimizer may have replaced arrays
        for tensor, array in self._memory.items():
            if self.parameters[self._keys[tensor]] is not array:
                array[...] = self.parameters[self._keys[tensor]]
                self.parameters[self._keys[tensor]] = array
        self.version += 1

    # -- updates piece by piece ------------------------------------------------------------

    def key_of(self, tensor: int) -> str:
        """Return the key in `parameters` of tensor number `tensor`."""
        return self._keys[tensor]

    def first(self, tensor: int) -> int:
        """Return the index in the flattened tensor `tensor` at which this server's piece starts."""
        return self._starts[tensor]

    def leaves(self) -> list[tuple[tuple[str, ...], Any]]:
        """Return the arrays of the optimizer's state, each with its path in the nested dicts."""
        return list(state_leaves(self.state))

    def update_part(
        self, gradients: Mapping, state: dict, parameters: dict[str, np.ndarray], weight: float
    ) -> None:
        """Let the optimizer update ranges of parameters and state; `version` does not change."""
        extra = {"weight": weight} if self._weighs else {}
        self.optimizer.update(gradients, state, parameters, **extra)

    def _is_gradient(self, share: float, parts) -> bool:
        """Whether a push has all that this server holds, and can be scaled in place precisely."""
        return len(parts) == len(self.parameters) and all(
            part.rows is None and (share == 1 or view.dtype == work_dtype(view.dtype))
            for part, view in parts
        )

    def _summed(self, pushes) -> dict[str, Any]:
        named: dict[int, list] = {tensor: [] for tensor in self._keys}
        for share, parts in pushes:
            for part, view in parts:
                named[part.piece.tensor].append((share, part, view))
        found: dict[str, Any] = {}
        for tensor, start, stop in self.layout.pieces[self.server]:
            key, pushed, kind = self._keys[tensor], named[tensor], self.layout.tensors[tensor]
            if tensor in self.open:
                if pushed:
                    found[key] = self._pushed_keys(self.open[tensor], pushed)
            # Otherwise the tensor is left out if no push names it.
            elif tensor not in self._by_rows or any(part.rows is None for _, part, _ in pushed):
                found[key] = self._dense(tensor, stop - start, pushed)
            elif pushed:
                rows = [
                    (share, part.local_rows(self.layout), view.reshape(-1, kind.width))
                    for share, part, view in pushed
                ]
                found[key] = merge_rows(rows, kind.dtype)
        return found

    def _pushed_keys(self, table: OpenTable, pushed) -> tuple[np.ndarray, np.ndarray]:
        """Return the sum of all pushes of an open table, as (rows of the parameter, values)."""
        parts = [(share, part.rows, v.reshape(-1, table.width)) for share, part, v in pushed]
        keys, total = merge_rows(parts, table.kind.dtype)
        return table.pushed(keys, total, [part.rows for _, part, _ in pushed], self.clock)

    def _dense(self, tensor: int, size: int, named) -> np.ndarray:
        """Return the sum of all pushes of one tensor, with zeros in rows that no push names."""
        kind = self.layout.tensors[tensor]
        # Half precision is added in single precision, and rounded once at the end.
        wide = np.promote_types(kind.dtype, np.float32)
        total = self._sums.setdefault(tensor, np.empty(size, wide))
        total.fill(0)
        for share, part, view in named:
            scaled = scale(view.astype(wide, copy=False), share)
            if part.rows is None:
                total += scaled
            else:
                rows = part.local_rows(self.layout)
                np.add.at(total.reshape(-1, kind.width), rows, scaled.reshape(-1, kind.width))
        return total.astype(kind.dtype, copy=False)

    def export(self) -> dict:
        """Return the dict of arrays and numbers that `ServerGroup.shards` describes."""
        tables = {table.name: table for table in self.open.values()}
        pieces = {
            self._keys[t]: (self.layout.tensors[t].name, self._saved_as(t, start))
            for t, start, _ in self.layout.pieces[self.server]
        }

        def entry(key: str, array: np.ndarray) -> tuple:
            name, where = pieces[key]
            if key in tables:
                return tables[key].saved(array)
            return name, where, array if np.ndim(where) == 0 else array.reshape(len(where), -1)

        optimizer: dict = {}
        scalars: dict = {}
        for path, leaf in state_leaves(self.state):
            if path[-1] in pieces and np.ndim(leaf) == 1:
                optimizer.setdefault("/".join(path[:-1]), []).append(entry(path[-1], leaf))
            else:
                scalars["/".join(path)] = leaf
        counts = [table.saved_counts(self.clock) for table in tables.values()]
        return {
            "parameters": [entry(key, array) for key, array in self.parameters.items()],
            "optimizer": optimizer,
            "scalars": scalars,
            "version": self.version,
            **({"counts": counts} if counts else {}),
        }

    def _saved_as(self, tensor: int, start: int):
        """Return the first element of a piece, or its rows if they are dealt to the servers."""
        dealt, shape = self.layout.tensors[tensor].dealt, self.layout.tensors[tensor].shape
        return dealt_to(self.server, shape[0], dealt) if dealt else start

    def load(self, saved: Mapping) -> None:
        """Set parameters, optimizer state and the number of updates from results of `export`.

        Raises ConfigError if `saved` lacks elements or scalars that this server holds.
        """
        for table in self.open.values():
            table.load(saved, self.clock)
        mine, keyed = self.export(), {table.name for table in self.open.values()}
        found = [triple for triple in mine["parameters"] if triple[0] not in keyed]
        fill_pieces(found, saved["parameters"], "parameters")
        for slot, triples in mine["optimizer"].items():
            triples = [triple for triple in triples if triple[0] not in keyed]
            fill_pieces(triples, saved["optimizer"].get(slot, ()), f"optimizer state {slot!r}")
        for name, leaf in mine["scalars"].items():
            if name not in saved["scalars"]:
                raise ConfigError(f"load_shards: no optimizer state {name!r} in what was given")
            np.copyto(leaf, saved["scalars"][name])
        self.version = int(saved["version"])


def state_copies(optimizer) -> float:
    """Return the bytes of optimizer state per byte of parameters, as measured on a small array."""
    probe = np.zeros(64, np.float32)
    arrays = [np.asarray(leaf) for _, leaf in state_leaves(optimizer.init({"x": probe}))]
    return sum(array.nbytes for array in arrays if array.ndim) / probe.nbytes


def updates_in_pieces(optimizer) -> bool:
    """Whether an optimizer's state has only scalars and arrays of the shape of a parameter."""
    probe = np.zeros(7, np.float32)
    leaves = list(state_leaves(optimizer.init({"x": probe})))
    return all(
        isinstance(leaf, np.ndarray)
        and (leaf.shape == probe.shape if path[-1] == "x" else not leaf.ndim)
        for path, leaf in leaves
    )


def scale(view: np.ndarray, weight: float) -> np.ndarray:
    """Multiply an array by a number in place, if the number is not 1; return the array."""
    return view if weight == 1 else np.multiply(view, weight, out=view)


def state_leaves(tree: Mapping, path: tuple[str, ...] = ()):
    """Yield each array or number in an optimizer's state, with its keys in the nested dicts."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from state_leaves(value, (*path, key))
        else:
            yield (*path, key), value
