"""Many files, few of them open: descriptors by key, and the one used longest ago makes room."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Hashable

#: Open files at a time where nothing else is said.
MOST = 32


class Descriptors:
    """Opens files when they are asked for, and keeps `most` of them open. Local; not locked.

    A number that was given is good until the next call: that may close its file.

    Parameters
    ----------
    opening : callable
        Returns the descriptor of the file of a key; what it raises goes up.
    closing : callable
    most : int
    """

    def __init__(
        self,
        opening: Callable[..., int],
        closing: Callable[[int], object] = os.close,
        most: int = MOST,
    ):
        self._opening, self._closing, self._most = opening, closing, most
        self._open: OrderedDict[Hashable, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._open)

    def __getitem__(self, key: Hashable) -> int:
        if key in self._open:
            self._open.move_to_end(key)
            return self._open[key]
        if len(self._open) >= self._most:
            self._closing(self._open.popitem(last=False)[1])
        self._open[key] = self._opening(key)
        return self._open[key]

    def close(self) -> None:
        """Close all; they are opened again when they are asked for."""
        while self._open:
            self._closing(self._open.popitem()[1])
