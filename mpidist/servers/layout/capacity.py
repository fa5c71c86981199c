"""Before servers allocate memory for a model, compare what they need with what their hosts have."""

from __future__ import annotations

from collections.abc import Sequence

from ...errors import ConfigError
from ..consistency import Consistency

#: A server receives at most this many bytes of pushes at a time, and sends at most this many bytes
#: of answers at a time; a single larger message is allowed (see `server`).
ROOM_BYTES = 64 << 20


def needed(
    shard: int,
    copies: float,
    workers: int,
    consistency: Consistency,
    pulled: bool = False,
    ahead: int | None = None,
) -> int:
    """Return how many bytes a server needs for a model if it holds `shard` bytes of parameters.

    The number counts parameters, optimizer state (`copies` times the parameters), gradients, and
    answers. With `pulled`, it includes a copy of the parameters for each worker. `ahead` is None if
    servers receive each push as a whole. If pushes arrive in pieces, `ahead` is the largest number
    of bytes of one worker that are on the way at the same time.
    """
    copies += workers * pulled
    if ahead is not None and ahead < shard:
        return round(shard * (1 + copies)) + 2 * workers * ahead
    pushes = workers if consistency.holds else max(1, min(workers, ROOM_BYTES // max(1, shard)))
    answers = max(shard, min(workers * shard, ROOM_BYTES))
    return round(shard * (2 + copies + pushes)) + answers


def check_capacity(
    models: Sequence[str], servers: Sequence[tuple[int, str, int, int | None]]
) -> None:
    """Raise ConfigError if models together do not fit into the memory of the servers' hosts."""
    # `servers` has (rank, host, needed bytes, available bytes or None) of each server.
    for host in dict.fromkeys(host for _, host, _, _ in servers):
        here = [entry for entry in servers if entry[1] == host]
        need = sum(entry[2] for entry in here)
        # The servers of one host share its memory. They may report different amounts of free
        # memory, and the smallest amount is used.
        free = min((entry[3] for entry in here if entry[3] is not None), default=None)
        if free is not None and need > free:
            ranks = ", ".join(str(entry[0]) for entry in here)
            what = f"model {models[0]!r} does"
            if len(models) > 1:
                what = f"models {models[0]!r} and {len(models) - 1} more do"
            raise ConfigError(
                f"{what} not fit: server ranks {ranks} on {host} need "
                f"{bytes_text(need)} with optimizer state and buffers, {bytes_text(free)} are "
                "available; use more servers on other nodes, or a smaller model"
            )


def bytes_text(nbytes: float) -> str:
    """Return a number of bytes as text with its unit, such as ``3.1 GiB``."""
    units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"]
    while nbytes >= 1024 and len(units) > 1:
        nbytes /= 1024
        del units[0]
    return f"{nbytes:.4g} {units[0]}"
