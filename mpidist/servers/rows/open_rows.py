"""`OpenRows`: tables whose rows have 64-bit keys and are made when they are first pushed."""

from __future__ import annotations

from dataclasses import dataclass

from ...errors import ConfigError
from ...registry import checked_whole


@dataclass(frozen=True)
class OpenRows:
    """The rows of a table have any 64-bit keys, and are made by the first pushes of their keys.

    Give it to `ServerGroup.add` as the policy of a table, ``rows={"e": md.OpenRows()}``, or as
    ``rows={"e": "open"}`` with the defaults. The table's model is ``((None, 16), "f4", "normal")``.
    Pushes and pulls name keys where they name rows of other tables: int64 or uint64, of which equal
    bits mean equal keys. A hash of the key decides which server has it.

    A pull of a key without a row gets the key's initial values, which follow from the seed, the
    table's name and the key; a pull makes no row. Rare keys are kept out as by
    `CounterFilter` in TensorFlow's DeepRec and `CountFilterEntry` in PaddlePaddle.

    Parameters
    ----------
    max_rows : int, optional
        The most rows of all servers together. Each server has its share of this number, and raises
        an error on all ranks where a push needs more. By default only memory limits the rows.
    min_count : int
        The push that makes a key's row: gradients of the first ``min_count - 1`` pushes that name
        the key are counted but not applied. Equal keys of one push count once.

    Raises
    ------
    ConfigError
        `max_rows` or `min_count` is not a whole number of 1 or more.
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
