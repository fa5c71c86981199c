"""A faster update for gradients that stay in the same memory: their arrays are looked up once.

In a small model, looking up the arrays of an update takes longer than its arithmetic. So a
`BoundGradients` object keeps a function, made by the optimizer, that already knows all arrays. A
user's optimizer has no such function, so each of its updates looks up the arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import is_
from typing import Any

from ..layout.routing import WholeParts


class BoundGradients(dict):
    """Gradients whose memory later pushes use again, and a function that applies them fast."""

    __slots__ = ("_again", "_arrays", "_optimizer", "_state")

    def __init__(self, gradients: Mapping[str, Any]):
        super().__init__(gradients)
        self._optimizer: Any = None  # the optimizer of the bound update, after the first use
        self._state: Any = None
        self._arrays: list = []
        self._again: Callable | None = None

    def apply(self, shard: Any, weight: float) -> bool:
        """Update `shard` by the function that the optimizer has made for these gradients.

        Returns whether there is such a function. If there is none, `shard` stays as it is.
        """
        # Without such a function, the caller makes the update.
        if self._optimizer is not shard.optimizer or self._state is not shard.state:
            # The update is bound only in the next call, because many gradients are used only once.
            self._optimizer, self._state = shard.optimizer, shard.state
            self._again, self._arrays = None, []
            return False
        if not self._arrays:
            self._bind(shard)
        if self._again is None or not all(map(is_, self._arrays, shard.parameters.values())):
            return False
        self._again(weight)
        return True

    def _bind(self, shard: Any) -> None:
        self._arrays = list(shard.parameters.values())
        update = shard.optimizer.update
        bind = getattr(update, "bind", None)
        # `functools.wraps` copies the attribute `bind` to functions that do more than `update`.
        own = getattr(bind, "of", None) is update
        if bind is not None and own and self.keys() == shard.parameters.keys():
            self._again = bind(self, shard.state, shard.parameters)


def gradients_again(parts: Any) -> BoundGradients | None:
    """Return the gradients that `kept_with` has stored in `parts` (arrays of a push), or None."""
    return parts.gradients if type(parts) is WholeParts else None


def kept_with(parts: Any, gradients: dict[str, Any]) -> dict[str, Any]:
    """Return `gradients`, as `BoundGradients` if later pushes use the same memory again.

    `parts` lists the arrays of a push. Its attribute ``gradients`` stores the `BoundGradients`.
    """
    if type(parts) is not WholeParts:
        return gradients
    if parts.gradients is None:
        parts.gradients = BoundGradients(gradients)
    return parts.gradients


def same_again(before: BoundGradients, gradients: dict[str, Any]) -> BoundGradients:
    """Return `before` if it has the same arrays as `gradients`; otherwise new `BoundGradients`.

    `before` has the gradients of an earlier update.
    """
    same = before.keys() == gradients.keys()
    if same and all(map(is_, before.values(), gradients.values())):
        return before
    return BoundGradients(gradients)
