"""Show the messages of all ranks in an allreduce as text, or their work over time as a picture."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ..collectives.schedules.check import programs
from ..collectives.schedules.schedule import SEND
from ..errors import ConfigError
from .figure_file import check_figure_file, figure_and_patch, save_figure
from .network_model import Problem
from .simulate import Reduced, Sent, simulate
from .two_levels import builder, with_node_phases

#: The largest number of ranks that a picture over time shows clearly.
MOST_RANKS = 64
#: The largest number of messages for which a picture has arrows, because more arrows would hide the
#: bars.
MOST_ARROWS = 300
_SEND, _REDUCE, _ARROW = "#4878a8", "#e08a3c", "#404040"


def text(build: Callable, size: int, n: int, itemsize: int = 4) -> str:
    """Return the messages of an allreduce, one line per round, in the form ``0 -[0:2]-> 1``.

    The example means that rank 0 sends elements 0 and 1 to rank 1. ``build(size, rank, n,
    itemsize)`` returns the steps of one rank.
    """
    plans = programs(lambda p, r, m: build(p, r, m, itemsize), size, n)
    rounds: dict[int, list[str]] = {}
    for rank, steps in enumerate(plans):
        for step in steps:
            if step.kind == SEND:
                a, b = step.source
                rounds.setdefault(step.round, []).append(f"{rank} -[{a}:{b}]-> {step.peer}")
    width = len(str(max(rounds, default=0)))
    return "\n".join(f"round {r:{width}d}   " + "   ".join(rounds[r]) for r in sorted(rounds))


def check_picture(file: str | Path, size: int) -> None:
    """Raise ConfigError if the function `picture` cannot draw so many ranks or such a file."""
    if not 2 <= size <= MOST_RANKS:
        raise ConfigError(f"a picture shows 2 to {MOST_RANKS} ranks, given {size}")
    check_figure_file(file)


def picture(file: str | Path, name: str, problem: Problem) -> None:
    """Draw what each rank does over time in the simulated allreduce, one row per rank.

    A blue bar is a message on the network, and an orange bar is an addition.
    """
    size, ranks_per_node = problem.size, problem.ranks_per_node
    check_picture(file, size)
    trace: list = []
    cost = simulate(builder(name, ranks_per_node), with_node_phases(name, problem), trace)
    seconds = cost.seconds * problem.repeats
    unit, scale = ("ms", 1e3) if seconds >= 1e-3 else ("us", 1e6)
    figure_class, patch_class = figure_and_patch()
    figure = figure_class(figsize=(11, 1.6 + 0.42 * max(size, 4)), layout="constrained")
    axes = figure.add_subplot()
    sent = [event for event in trace if isinstance(event, Sent)]
    reduced = [event for event in trace if isinstance(event, Reduced)]
    arrows = len(sent) <= MOST_ARROWS
    for rank in range(size):
        bars = [(e.begin * scale, (e.left - e.begin) * scale) for e in sent if e.source == rank]
        sums = [(e.begin * scale, (e.end - e.begin) * scale) for e in reduced if e.rank == rank]
        # A thin white edge separates messages that follow each other without a pause.
        style = {"edgecolor": "white", "linewidth": 0.5 if arrows else 0}
        axes.broken_barh(bars, (rank - 0.36, 0.36), facecolor=_SEND, **style)
        axes.broken_barh(sums, (rank, 0.36), facecolor=_REDUCE, **style)
    arrow = {"arrowstyle": "-|>", "color": _ARROW, "linewidth": 0.8, "shrinkA": 0}
    for e in sent if arrows else ():
        begin, end = (e.begin * scale, e.source - 0.18), (e.end * scale, e.target)
        axes.annotate("", xy=end, xytext=begin, arrowprops=arrow)
    for rank in range(ranks_per_node, size, ranks_per_node) if ranks_per_node > 1 else ():
        axes.axhline(rank - 0.5, color="black", linewidth=0.6, linestyle=":")
    axes.set(xlim=(0, seconds * scale * 1.005), ylim=(size - 0.4, -0.6), yticks=range(size))
    axes.set(xlabel=f"simulated time, {unit}", ylabel="rank")
    title = f"{name}, {size} ranks on {size // ranks_per_node} nodes, {problem.nbytes:,} bytes"
    axes.set_title(f"{title}: {seconds * scale:.3g} {unit}", loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    patches = [patch_class(facecolor=color) for color in (_SEND, _REDUCE)]
    labels = ["a message leaves", "a sum is made"]
    figure.legend(patches, labels, loc="outside upper right", ncols=2, frameon=False)
    save_figure(figure, file)
