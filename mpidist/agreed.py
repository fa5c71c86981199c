"""`check_same`: what must be equal on all ranks is compared, and what differs is named.

The facts of a rank become one number. One allreduce tells whether the largest of all ranks is the
smallest as well; only where it is not are the facts themselves sent, to rank 0, which names the
first that differs and the ranks of each value.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
from mpi4py import MPI

from .context import of
from .errors import MismatchError
from .mismatch import Signature, rank_list
from .run_on_all import run_on_all

#: What a rank says of something: (what it is, its value), for example ``("tensor 0", "'w' (3,)")``.
Facts = Sequence[tuple[str, str]]


def check_same(comm, doing: str, facts: Facts) -> int:
    """Raise MismatchError on all ranks unless all give the same facts, in the same order.

    Collective over `comm`. Returns a number of 63 bits that stands for the facts.
    """
    context = of(comm)
    key = digest(facts)
    if comm.size == 1:
        return key
    context.begin(Signature(doing, "", "", extra="settings"))
    keys = np.array([key, -key], np.int64)
    context.wait(context.control.Iallreduce(MPI.IN_PLACE, keys, MPI.MAX).Test)
    if keys[0] != -keys[1]:
        run_on_all(comm, doing, lambda: list(facts), lambda everyone: _refuse(doing, everyone))
    return key


def digest(facts: Facts) -> int:
    """Return a number of 63 bits that stands for `facts`, the same in every process. Pure."""
    text = "\x1e".join(f"{what}\x1f{value}" for what, value in facts)
    data = hashlib.blake2b(text.encode(errors="backslashreplace"), digest_size=8).digest()
    return int.from_bytes(data, "little") >> 1


def difference(everyone: Sequence[Facts]) -> str:
    """Say what the first fact is that differs, and which ranks have which value. Pure.

    The smallest group is named first: it is most often the one that is wrong.
    """
    for k in range(max(map(len, everyone))):
        here = [facts[k] if k < len(facts) else None for facts in everyone]
        if len(set(here)) > 1:
            break
    groups: dict = {}
    for rank, fact in enumerate(here):
        groups.setdefault(fact, []).append(rank)
    label = next(fact[0] for fact in groups if fact is not None)
    parts = []
    for fact, ranks in sorted(groups.items(), key=lambda group: (len(group[1]), group[1])):
        verb = "has" if len(ranks) == 1 else "have"
        value = f"no {label}" if fact is None else " ".join(fact)
        parts.append(f"{rank_list(ranks)} {verb} {value}")
    return ", ".join(parts)


def _refuse(doing: str, everyone: Sequence[Facts]) -> None:
    text = difference(everyone)
    raise MismatchError(f"{doing}: {text}; all ranks must give the same, in the same order")
