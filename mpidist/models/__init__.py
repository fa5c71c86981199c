"""Small reference models for NumPy arrays, or for CuPy arrays if the parameters are on a GPU.

A model of your own needs nothing from this package; docs/models.md says which methods it must have.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ..registry import build
from .batch_norm import sync_batch_norm, sync_batch_norm_backward, sync_moments
from .lenet import lenet
from .logistic import logistic
from .mlp import mlp
from .network import Network
from .split_dense import SplitDense
from .tagger import Tagger, gap, hit_at_one, tagger

MODELS: dict[str, Callable[..., Network | Tagger]] = {
    "logistic": logistic,
    "mlp": mlp,
    "lenet": lenet,
    "tagger": tagger,
}

__all__ = [
    "MODELS",
    "Network",
    "SplitDense",
    "Tagger",
    "from_settings",
    "gap",
    "hit_at_one",
    "lenet",
    "logistic",
    "mlp",
    "sync_batch_norm",
    "sync_batch_norm_backward",
    "sync_moments",
    "tagger",
]


def from_settings(name: str, settings: Mapping) -> Network | Tagger:
    """Make the model called `name` from the settings in a job file.

    Raises ConfigError for an unknown name or key (the message suggests the nearest known one), or
    for a missing key.
    """
    return build(MODELS, name, settings, "model")


def __dir__():
    return sorted(__all__)
