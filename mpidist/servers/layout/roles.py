"""Decide which ranks serve, which ranks work, and the share of each server; uses no MPI.

servers=2                  the last two ranks, with equal shares
servers=[0, 8]             these ranks, with equal shares
servers={0: 1, 1: 1, 2: 4} these ranks, with these shares of the bytes
servers="auto"             all ranks, with the shares that BytePS uses (`balanced_shares`)
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Hashable, Mapping, Sequence

from ...errors import ConfigError, shown

#: The placements that have a name; a list of the ranks that only serve is a placement, too.
PLACEMENTS = ("dedicated", "colocated")

#: The word for shares that follow from the hosts of the ranks.
AUTO = "auto"


def ranks_asked(servers) -> int | list[int] | dict[int, float] | str:
    """Return the argument `servers`: a number, a list of ranks, {rank: share}, or "auto".

    Raises ConfigError if `servers` is none of these, or if a share is not a finite number of at
    least 0.
    """
    if isinstance(servers, Mapping):
        return _shares_asked(servers)
    if isinstance(servers, str) and servers == AUTO:
        return AUTO
    try:
        if isinstance(servers, bool | str):
            raise TypeError
        if hasattr(servers, "__index__") and not getattr(servers, "shape", ()):
            return operator.index(servers)
        return [operator.index(rank) for rank in servers]
    except TypeError:
        raise ConfigError(
            f"servers={shown(servers)}; expected how many, a list of ranks, a dict of rank to "
            "share, or 'auto'"
        ) from None


def _shares_asked(servers: Mapping) -> dict[int, float]:
    """Return shares in the order of the ranks, which is the same on all ranks of a job."""
    found: dict[int, float] = {}
    for rank, share in servers.items():
        try:
            if isinstance(rank, bool) or isinstance(share, bool | str):
                raise TypeError
            number, size = operator.index(rank), float(share)
        except (TypeError, ValueError, OverflowError):
            raise ConfigError(
                f"servers: {shown(rank)} has share {shown(share)}; expected a rank and a number, "
                "such as {0: 1, 1: 1, 2: 4}"
            ) from None
        if not 0 <= size < math.inf:
            raise ConfigError(
                f"servers: rank {number} has share {size:g}; expected a finite number, 0 or more"
            )
        found[number] = size
    total = sum(found.values())
    if not 0 < total < math.inf:
        raise ConfigError(
            f"servers={shown(dict(servers))}: the shares sum to {total:g}; give at least one rank "
            "a share above 0"
        )
    # A share that is rounded to 0 is left out, because its server would hold nothing.
    return {rank: found[rank] for rank in sorted(found) if found[rank] / total > 0}


def choose_ranks(size: int, servers, placement) -> tuple[list[int], list[int]]:
    """Return which of `size` ranks are servers and which are workers, as two lists.

    Raises ConfigError if the placement is unknown, a rank does not exist, or no worker is left.
    """
    named = isinstance(placement, str)
    if named and placement not in PLACEMENTS:
        raise ConfigError(
            f"placement {shown(placement)} is not one of {', '.join(PLACEMENTS)}, and no list of "
            "the ranks that only serve"
        )
    alone = named and placement == "dedicated"
    only_serve = [] if named else _ranks_listed(placement)
    if isinstance(servers, int):
        if servers < 1:
            raise ConfigError(f"servers={servers}; expected at least 1")
        chosen = list(range(size - servers, size))
    elif servers == AUTO:
        if alone:
            raise ConfigError(
                "servers='auto' makes every rank a server, and with placement='dedicated' no rank "
                "trains; give placement='colocated', or the list of the ranks that only serve"
            )
        chosen = list(range(size))
    else:
        chosen = [int(rank) for rank in servers]
        if not chosen or len(set(chosen)) != len(chosen) or not all(0 <= r < size for r in chosen):
            given = dict(servers) if isinstance(servers, Mapping) else list(servers)
            raise ConfigError(f"servers={given}: expected distinct ranks in 0..{size - 1}")
    if strange := [rank for rank in only_serve if rank not in chosen]:
        raise ConfigError(
            f"placement={only_serve}: rank {strange[0]} only serves but is not one of the servers "
            f"{chosen}; give it a share in servers=, or leave it out of placement="
        )
    dedicated = set(chosen if alone else only_serve)
    most = size - 1 if alone else size
    if len(chosen) > most:
        count = f"{len(chosen)} servers"
        left = "leave 0 workers" if alone else f"do not fit {size} ranks"
        if len(chosen) == 1:  # in a job of one rank
            count, left = "1 server", "leaves 0 workers"
        cure = f"use at most {most}" if most else "start at least 2 ranks"
        raise ConfigError(f"{count} {left}; {cure}")
    if len(dedicated) == size:
        raise ConfigError(
            f"placement={only_serve}: all {size} ranks only serve, and no rank trains; leave out "
            "at least one rank"
        )
    return chosen, [rank for rank in range(size) if rank not in dedicated]


def ranks_and_shares(
    size: int,
    servers,
    placement,
    hosts: Callable[[], Sequence[Hashable]],
    workers: Sequence[int] | None = None,
) -> tuple[list[int], list[int], list[float]]:
    """Return the ranks of the servers and of the workers, and the share of each server.

    The share of a server, divided by the sum of all shares, is the fraction of each model that the
    server holds. ``hosts()`` returns the host of each rank; it is called only if `servers` is
    "auto". Raises ConfigError as `choose_ranks` does.
    """
    if servers == AUTO:
        # The shares of "auto" balance the traffic of these workers.
        if workers is None:
            _, workers = choose_ranks(size, servers, placement)
        servers = balanced_shares(hosts(), workers)
    serving, working = choose_ranks(size, servers, placement)
    parts = [servers[rank] if isinstance(servers, dict) else 1.0 for rank in serving]
    return serving, working, parts


def _ranks_listed(placement) -> list[int]:
    try:
        if isinstance(placement, Mapping | bytes) or any(isinstance(r, bool) for r in placement):
            raise TypeError
        return sorted({operator.index(rank) for rank in placement})
    except TypeError:
        raise ConfigError(
            f"placement is {shown(placement)}; expected one of {', '.join(PLACEMENTS)}, or a list "
            "of the ranks that only serve"
        ) from None


def balanced_shares(hosts: Sequence[Hashable], workers: Sequence[int]) -> dict[int, float]:
    """Return the share of a model that each server gets, so that no host sends more than needed.

    The result is a dict of rank to share. A share divided by the sum of all shares is the fraction
    of the model that the rank holds. If n hosts have workers and k hosts only serve, BytePS (Jiang
    et al., OSDI 2020) gives each of the k hosts the share ``2 (n - 1)``, and each of the n hosts
    the share ``n - k``. If n is at most k, only the k hosts serve, with equal shares. The ranks of
    a host divide the share of the host equally. `hosts` has the host of each rank.
    """
    working = {hosts[rank] for rank in workers}
    n, k = len(working), len(set(hosts) - working)
    of_worker, of_spare = (n - k, 2 * (n - 1)) if n > k else (0, 1)
    shares = {}
    for rank, host in enumerate(hosts):
        part = of_worker if host in working else of_spare
        if part:
            shares[rank] = part / hosts.count(host)
    return shares


def listed_shares(shares, servers) -> dict:
    """Return {server rank: its share of a model} for a list of [rank, share] from a job file."""
    if servers != 1:
        raise ConfigError(f"shares and servers={shown(servers)}: give one of the two")
    try:
        pairs = [(rank, share) for rank, share in shares]
        found = dict(pairs)
    except (TypeError, ValueError):
        raise ConfigError(
            f"shares={shown(shares)}; expected a list of [rank, share], such as [[0, 1], [1, 4]]"
        ) from None
    if len(found) < len(pairs):
        raise ConfigError(f"shares={shown(shares)}: a rank is in the list twice; give each once")
    return found
