"""The MPI library's own allreduce algorithms: how to force one, and how to keep the best.

Open MPI: variables force one algorithm for all sizes; a rules file of ``coll_tuned`` names one for
each range of sizes. A file that it cannot read, or in which a communicator size has no rule for 0
bytes, is ignored without a word (seen with 5.0.11, which reads the files of all versions), so what
is advised is always run. MPICH: variables only, one algorithm for all sizes.

Pure: nothing is read, run or written here.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from math import isqrt
from typing import NamedTuple

import numpy as np

#: A setting is advised where it was faster by this factor in each pass.
GAIN = 1.05
#: One that holds for all sizes may not cost any of them more than this.
LOSS = 0.95

_TUNED = "OMPI_MCA_coll_tuned_"
#: coll_tuned's number, name, segment in bytes, smallest and largest vector worth trying.
_OPEN_MPI = (
    (1, "linear", 0, 0, 64 << 10),
    (2, "reduce + broadcast", 0, 0, None),
    (3, "recursive doubling", 0, 0, None),
    (4, "ring", 0, 0, None),
    (5, "segmented ring, 64 KiB", 64 << 10, 256 << 10, None),
    (5, "segmented ring, 1 MiB", 1 << 20, 4 << 20, None),
    (6, "Rabenseifner", 0, 0, None),
    (7, "allgather + reduce", 0, 0, 64 << 10),
)
#: Algorithms that cut the vector: shorter than an element per rank they become another, slower one.
_CUTTING, _LARGEST_ELEMENT = (4, 5, 6), 16

_ALLREDUCE = 2  # its number in a rules file

_MPICH = (
    "recursive_doubling", "recursive_multiplying", "reduce_scatter_allgather",
    "k_reduce_scatter_allgather", "recexch", "ring", "tree", "smp",
)  # fmt: skip


class Setting(NamedTuple):
    """One way to run MPI's allreduce. `high` None: any size; `rule`: number and segment."""

    name: str
    variables: dict[str, str]
    low: int = 0
    high: int | None = None
    rule: tuple[int, int] = (0, 0)


DEFAULT = Setting("default", {})


def base(nodes: int) -> Setting:
    """Return what runs where a rules file leaves the choice to Open MPI.

    On one node that is its default. Between nodes it is not, for rules count only where coll_han is
    out of the way: what stays is coll_tuned's own choice.
    """
    return DEFAULT if nodes == 1 else Setting("coll_tuned's own choice", dynamic(nodes))


def open_mpi(ranks: int, nodes: int) -> list[Setting]:
    """Return what to try with Open MPI."""
    found = [base(nodes)] if nodes > 1 else []
    for number, name, segment, low, high in _OPEN_MPI:
        variables = {
            **dynamic(nodes),
            f"{_TUNED}allreduce_algorithm": str(number),
            f"{_TUNED}allreduce_algorithm_segmentsize": str(segment),
        }
        least = ranks * _LARGEST_ELEMENT if number in _CUTTING else 0
        found.append(Setting(name, variables, max(low, least), high, (number, segment)))
    return found


def dynamic(nodes: int) -> dict[str, str]:
    """Return the variables that let rules and forced algorithms count at all."""
    variables = {f"{_TUNED}use_dynamic_rules": "1"}
    if nodes > 1:
        # Between nodes coll_han goes first, and it does not know these rules.
        variables["OMPI_MCA_coll_han_priority"] = "0"
    return variables


def with_rules(path: str, nodes: int) -> dict[str, str]:
    """Return the variables that make Open MPI read a rules file."""
    return {**dynamic(nodes), f"{_TUNED}dynamic_rules_filename": path}


def mpich() -> list[Setting]:
    """Return what to try with MPICH."""
    found = [
        Setting(
            name.replace("_", " "),
            {
                "MPIR_CVAR_ALLREDUCE_INTRA_ALGORITHM": name,
                # The device's own algorithm inside a node would go before it.
                "MPIR_CVAR_ALLREDUCE_POSIX_INTRA_ALGORITHM": "mpir",
            },
        )
        for name in _MPICH
    ]
    shared = {"MPIR_CVAR_ALLREDUCE_POSIX_INTRA_ALGORITHM": "release_gather"}
    return [*found, Setting("release gather", shared)]


#: What was measured: setting -> a pass each -> bytes -> microseconds.
Passes = Mapping[str, Sequence[Mapping[int, float]]]


def ratios(passes: Passes, name: str, nbytes: int, over: Setting = DEFAULT) -> list[float]:
    """Return the time of `over` over that of setting `name`, pass by pass."""
    pairs = zip(passes[over.name], passes.get(name, ()), strict=False)
    return [before[nbytes] / own[nbytes] for before, own in pairs if nbytes in own]


def best_for(
    passes: Passes, settings: Sequence[Setting], nbytes: int, over: Setting = DEFAULT
) -> Setting:
    """Return the setting for vectors of `nbytes`: `over`, unless each pass gained."""
    best, gain = over, GAIN
    for setting in settings:
        found = ratios(passes, setting.name, nbytes, over)
        if found and min(found) >= GAIN and np.median(found) > gain:
            best, gain = setting, float(np.median(found))
    return best


def best_for_all(passes: Passes, settings: Sequence[Setting], sizes: Sequence[int]) -> Setting:
    """Return the setting that gains most over all sizes and loses at none."""
    best, gain = DEFAULT, GAIN
    for setting in settings:
        each = [ratios(passes, setting.name, nbytes) for nbytes in sizes]
        if not all(each) or min(np.median(one) for one in each) < LOSS:
            continue
        means = [geometric_mean(one) for one in zip(*each, strict=True)]
        if min(means) >= GAIN and np.median(means) > gain:
            best, gain = setting, float(np.median(means))
    return best


def geometric_mean(values: Sequence[float]) -> float:
    """Return the n-th root of the product of n values."""
    return float(np.exp(np.mean(np.log(values))))


def rules_file(chosen: Mapping[int, Setting], ranks: int, nodes: int, source: str) -> str:
    """Return a rules file of coll_tuned: bytes -> setting for `ranks` ranks, else MPI's own.

    A rule holds from its size on, so between two measured sizes it changes at their geometric
    mean. Algorithm 0 leaves the choice to MPI; so it does below the smallest size, and for
    communicators of other sizes: a rule for n ranks holds for all larger ones, until the next.
    """
    own = base(nodes)
    lines: list[tuple[int, Setting]] = [(0, own)]
    sizes = sorted(chosen)
    for before, nbytes in zip([None, *sizes], sizes, strict=False):
        if chosen[nbytes] != lines[-1][1]:
            start = nbytes if before is None else isqrt(before * nbytes)
            lines.append((start, chosen[nbytes]))
    text = [
        f"# {source}",
        "1 # one collective",
        f"{_ALLREDUCE} # allreduce",
        "2 # two sizes of communicators",
        f"{ranks} # from so many ranks on",
        f"{len(lines)} # rules: bytes, algorithm, fan-out, bytes of a segment",
        *(f"{start} {s.rule[0]} 0 {s.rule[1]} # {s.name}" for start, s in lines),
        f"{ranks + 1} # from so many ranks on",
        "1 # rule",
        f"0 0 0 0 # {own.name}",
    ]
    return "\n".join(text) + "\n"


def shell(variables: Mapping[str, str], source: str) -> str:
    """Return a file for the shell that sets the variables."""
    lines = [f"export {name}={shlex.quote(value)}" for name, value in variables.items()]
    return "\n".join([f"# {source}", *lines]) + "\n"
