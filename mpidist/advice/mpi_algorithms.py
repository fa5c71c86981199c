"""The MPI library's own allreduce algorithms: force one, or select the best permanently.

In Open MPI, environment variables force one algorithm for all vector sizes. A rules file, which
Open MPI's component ``coll_tuned`` reads, gives an algorithm for each range of sizes. Open MPI
silently ignores a rules file that it cannot read or that has no rule for 0 bytes (seen with Open
MPI 5.0.11).
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from math import isqrt
from typing import NamedTuple

import numpy as np

#: A setting is advised if it was faster by this factor in each pass.
GAIN = 1.05
#: A setting that is used for all sizes is advised only if its ratio is at least this value at every
#: size.
LOSS = 0.95

_TUNED = "OMPI_MCA_coll_tuned_"
#: Each algorithm of coll_tuned: number, name, bytes of a segment, and the bytes of the smallest and
#: of the largest vector for which it is tried.
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
#: Algorithms that cut the vector into one part per rank. For a vector with fewer elements than
#: ranks, Open MPI runs a slower algorithm instead of these.
_CUTTING, _LARGEST_ELEMENT = (4, 5, 6), 16

_ALLREDUCE = 2  # the number of allreduce in a rules file

_MPICH = (
    "recursive_doubling", "recursive_multiplying", "reduce_scatter_allgather",
    "k_reduce_scatter_allgather", "recexch", "ring", "tree", "smp",
)  # fmt: skip


class Setting(NamedTuple):
    """Environment variables with which MPI's allreduce uses one algorithm.

    The setting is tried for vectors of `low` to `high` bytes; there is no upper limit if `high` is
    None. `rule` is (number of the algorithm, bytes of a segment), the entry for a rules file of
    Open MPI. A segment is the part of the vector that the algorithm sends at once.
    """

    name: str
    variables: dict[str, str]
    low: int = 0
    high: int | None = None
    rule: tuple[int, int] = (0, 0)


DEFAULT = Setting("default", {})


def base(nodes: int) -> Setting:
    """Return the setting with which Open MPI itself chooses the algorithm.

    A rules file (see `rules_file`) has this setting for some vector sizes.
    """
    return DEFAULT if nodes == 1 else Setting("coll_tuned's own choice", dynamic(nodes))


def open_mpi(ranks: int, nodes: int) -> list[Setting]:
    """Return the settings with which Open MPI's allreduce algorithms are timed."""
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
    """Return environment variables with which Open MPI accepts a choice of its algorithms."""
    variables = {f"{_TUNED}use_dynamic_rules": "1"}
    if nodes > 1:
        # On several nodes Open MPI prefers its component coll_han, which ignores these rules.
        variables["OMPI_MCA_coll_han_priority"] = "0"
    return variables


def with_rules(path: str, nodes: int) -> dict[str, str]:
    """Return the environment variables that make Open MPI read the rules file `path`."""
    return {**dynamic(nodes), f"{_TUNED}dynamic_rules_filename": path}


def mpich() -> list[Setting]:
    """Return the settings with which MPICH's allreduce algorithms are timed."""
    found = [
        Setting(
            name.replace("_", " "),
            {
                "MPIR_CVAR_ALLREDUCE_INTRA_ALGORITHM": name,
                # Inside a node MPICH would otherwise prefer the algorithm of its device layer.
                "MPIR_CVAR_ALLREDUCE_POSIX_INTRA_ALGORITHM": "mpir",
            },
        )
        for name in _MPICH
    ]
    shared = {"MPIR_CVAR_ALLREDUCE_POSIX_INTRA_ALGORITHM": "release_gather"}
    return [*found, Setting("release gather", shared)]


#: Measured times: name of a setting -> one mapping per pass -> bytes -> microseconds.
Passes = Mapping[str, Sequence[Mapping[int, float]]]


def ratios(passes: Passes, name: str, nbytes: int, over: Setting = DEFAULT) -> list[float]:
    """Return how many times faster MPI's allreduce is with the setting `name` than with `over`.

    The result has one number for each pass (repetition) of the measurement.
    """
    pairs = zip(passes[over.name], passes.get(name, ()), strict=False)
    return [before[nbytes] / own[nbytes] for before, own in pairs if nbytes in own]


def best_for(
    passes: Passes, settings: Sequence[Setting], nbytes: int, over: Setting = DEFAULT
) -> Setting:
    """Return the setting with which MPI's allreduce of `nbytes` bytes was fastest.

    This setting must be faster than the setting `over` by the factor `GAIN` (1.05) or more in every
    pass (repetition) of the measurement. If there is none, the result is `over`, by default MPI's
    own choice.
    """
    best, gain = over, GAIN
    for setting in settings:
        found = ratios(passes, setting.name, nbytes, over)
        if found and min(found) >= GAIN and np.median(found) > gain:
            best, gain = setting, float(np.median(found))
    return best


def best_for_all(passes: Passes, settings: Sequence[Setting], sizes: Sequence[int]) -> Setting:
    """Return the one setting with which MPI's allreduce gains most, as a mean over all `sizes`.

    This setting must be faster than the default setting by the factor `GAIN` (1.05) or more in
    every pass (repetition) of the measurement. If there is none, the result is the default setting.
    """
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
    """Return the text of a rules file, which tells Open MPI the algorithm for each vector size.

    `chosen` maps vector sizes in bytes to settings. Below the smallest measured size, and for
    communicators of more than `ranks` ranks, MPI keeps its own choice.
    """
    own = base(nodes)
    lines: list[tuple[int, Setting]] = [(0, own)]
    sizes = sorted(chosen)
    for before, nbytes in zip([sizes[0], *sizes], sizes, strict=False):
        if chosen[nbytes] != lines[-1][1]:
            lines.append((isqrt(before * nbytes), chosen[nbytes]))
    text = [
        f"# {source}",
        "1 # one collective",
        f"{_ALLREDUCE} # allreduce",
        "2 # rules for two sizes of communicators follow",
        f"{ranks} # valid from this number of ranks on",
        f"{len(lines)} # rules: bytes, algorithm, fan-out, bytes of a segment",
        *(f"{start} {s.rule[0]} 0 {s.rule[1]} # {s.name}" for start, s in lines),
        f"{ranks + 1} # valid from this number of ranks on",
        "1 # rule",
        f"0 0 0 0 # {own.name}",
    ]
    return "\n".join(text) + "\n"


def shell(variables: Mapping[str, str], source: str) -> str:
    """Return the text of a shell script that sets the environment variables `variables`."""
    lines = [f"export {name}={shlex.quote(value)}" for name, value in variables.items()]
    return "\n".join([f"# {source}", *lines]) + "\n"
