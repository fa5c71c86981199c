"""Will the shards fit: what each server needs against what its node has, before allocating."""

from __future__ import annotations

from ...errors import ConfigError
from ..consistency import Consistency

#: Pushes are received, and pulls answered, this many bytes at a time (or one), see `server`.
ROOM_BYTES = 64 << 20


def needed(shard: int, copies: float, workers: int, consistency: Consistency) -> int:
    """Bytes that a server allocates at most for its `shard` bytes of a model.

    Parameters and optimizer state, one sum of gradients, the pushes that the clocks hold (one
    per worker where they wait for each other), and the answers in flight.
    """
    pushes = workers if consistency.holds else max(1, min(workers, ROOM_BYTES // max(1, shard)))
    answers = max(shard, min(workers * shard, ROOM_BYTES))
    return round(shard * (2 + copies + pushes)) + answers


def check_capacity(model: str, servers: list[tuple[int, str, int, int | None]]) -> None:
    """Refuse a model that does not fit. With equal input it refuses on all ranks.

    Parameters
    ----------
    model : str
    servers : list of (rank, host, needed bytes, available bytes or None)

    Raises
    ------
    ConfigError
        Servers of one host need more than the host has.
    """
    for host in dict.fromkeys(host for _, host, _, _ in servers):
        here = [entry for entry in servers if entry[1] == host]
        need = sum(entry[2] for entry in here)
        # Servers of one node draw on the same memory; the most careful of them is believed.
        free = min((entry[3] for entry in here if entry[3] is not None), default=None)
        if free is not None and need > free:
            ranks = ", ".join(str(entry[0]) for entry in here)
            raise ConfigError(
                f"model {model!r} does not fit: server ranks {ranks} on {host} need "
                f"{bytes_text(need)} with optimizer state and buffers, {bytes_text(free)} are "
                "available; use more servers on other nodes, or a smaller model"
            )


def bytes_text(nbytes: float) -> str:
    """Write a byte count with its unit."""
    units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"]
    while nbytes >= 1024 and len(units) > 1:
        nbytes /= 1024
        del units[0]
    return f"{nbytes:.4g} {units[0]}"
