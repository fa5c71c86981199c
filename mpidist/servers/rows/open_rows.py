"""`OpenRows`: tables whose rows have 64-bit keys and are made when they are first pushed."""

from __future__ import annotations

from dataclasses import dataclass

from ...errors import ConfigError
from ...registry import checked_whole


@dataclass(frozen=True)
class OpenRows:
    """The policy of an open table: its rows have any 64-bit keys, and pushes make the rows.

    Pass it to `ServerGroup.add` as the policy of a table, ``rows={"e": md.OpenRows()}``, or pass
    ``rows={"e": "open"}`` for the defaults. In the argument `model`, such a table is for example
    ``((None, 16), "f4", "normal")``. Pushes and pulls have keys instead of row numbers. Keys are
    int64 or uint64, and two keys with the same bits are equal.

    A pull makes no row. If a key has no row, the pull returns the initial values of the key, which
    depend on the seed, the table's name and the key. With `min_count`, rare keys get no row, as
    with `CounterFilter` in TensorFlow's DeepRec and `CountFilterEntry` in PaddlePaddle.

    Parameters
    ----------
    max_rows : int, optional
        The largest number of rows on all servers together. Each server may have its share of this
        number; if a push needs more rows, the server raises an error on all ranks. By default only
        the memory limits the number of rows.
    min_count : int
        A key gets a row when it is pushed for the `min_count`-th time. Earlier pushes of the key
        are counted, but their gradients are not applied. Equal keys in one push count once.

    Raises
    ------
    ConfigError
        `max_rows` or `min_count` is not a whole number of at least 1.
    """

    max_rows: int | None = None
    min_count: int = 1

    def __post_init__(self):
        for name in ("max_rows", "min_count"):
            value = getattr(self, name)
            if name == "min_count" or value is not None:
                whole = checked_whole(f"OpenRows: {name}", value, 1)
                if whole >= 1 << 31:
                    raise ConfigError(f"OpenRows: {name} is {whole}; give less than 2**31")
                object.__setattr__(self, name, whole)  # the dataclass is frozen
