"""Find out whether an optimizer gives the same result if a model is updated piece by piece.

A user's optimizer may count its updates in an attribute, or add arrays to its state in the first
update. Updates in pieces would then have other results than updates of the whole model.
"""

from __future__ import annotations

import copy

import numpy as np

from ..layout.placement import place_tensors
from ..shards import ServerShard, updates_in_pieces
from .server_stream import ShardPieces

_SIZES = {"x": 7, "y": 2}
_UPDATES = 3


def has_the_same_bits(optimizer) -> bool:
    """Return whether updates in pieces give the same bits as updates of the whole model.

    The optimizer updates copies of a small model in both ways, on this rank only.
    """
    if not updates_in_pieces(optimizer):
        return False
    try:
        whole, parts = (_trial(copy.deepcopy(optimizer), limit) for limit in (None, 40))
    except Exception:  # the optimizer cannot be copied, or will raise in training as well
        return False
    return whole == parts


def _trial(optimizer, limit: int | None) -> list[tuple]:
    """Return the parameters and the state after some updates."""
    layout = place_tensors({name: ((size,), "f8") for name, size in _SIZES.items()}, 1)
    shard = ServerShard(layout, 0, optimizer, dict.fromkeys(_SIZES, ("constant", 0.5)), 0)
    rng = np.random.default_rng(0)
    for _ in range(_UPDATES):
        gradients = {name: rng.standard_normal(size) for name, size in _SIZES.items()}
        if limit is None:
            shard.update(gradients, 1.0)
            continue
        cut = ShardPieces(shard, limit)
        cut.begin()
        for number, piece in enumerate(cut.pieces):
            spans = {layout.tensors[span.tensor].name: span for span in piece.spans}
            cut.update(
                number, {name: gradients[name][s.start : s.stop] for name, s in spans.items()}
            )
        cut.end()
    leaves = [*shard.parameters.items(), *shard.leaves()]
    return [(path, np.asarray(leaf).tobytes()) for path, leaf in leaves]
