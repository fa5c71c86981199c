"""Small reference models in the array namespace: NumPy, or CuPy once their arrays are.

A model of your own needs none of this; see docs/models.md for what one must look like.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ..registry import build
from .batch_norm import sync_batch_norm, sync_batch_norm_backward, sync_moments
from .lenet import lenet
from .logistic import logistic
from .mlp import mlp
from .network import Network
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
    """Make the model `name` as a job file describes it.

    Raises ConfigError for an unknown name or key (with the nearest one) and for a missing one.
    """
    return build(MODELS, name, settings, "model")


def __dir__():
    return sorted(__all__)
