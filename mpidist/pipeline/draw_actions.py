"""Show what the ranks of a pipeline do over time, as text or as a picture."""

from __future__ import annotations

from pathlib import Path

from ..errors import ConfigError
from ..simulator.figure_file import check_figure_file, figure_and_patch, save_figure
from .action_trace import LABELS
from .pipeline_schedules import B, F, I, W
from .simulate_actions import SimulatedRun

#: The largest number of columns of a text, and of ranks of a picture.
MOST_COLUMNS, MOST_RANKS = 400, 64
_COLORS = {F: "#4878a8", B: "#e08a3c", I: "#d9a441", W: "#8c6bb1"}


def draw_actions(run: SimulatedRun, unit: float | None = None) -> str:
    """Return one line per rank; each column shows what the rank computes in `unit` seconds.

    `run` is the result of `simulate_actions`. ``F3`` is the forward pass of microbatch 3. If a rank
    has several chunks (groups of consecutive layers), ``F3b`` is the forward pass through its
    second chunk. ``..`` is idle time. By default, a column is as long as the shortest computation.

    Raises
    ------
    ConfigError
        The text would have more than `MOST_COLUMNS` (400) columns.
    """
    if not run.spans:
        return ""
    lengths = [span.end - span.begin for span in run.spans if span.end > span.begin]
    unit = unit or min(lengths, default=1.0)
    if run.seconds / unit > MOST_COLUMNS:
        many = f"{run.seconds / unit:.0f}"
        raise ConfigError(f"a text of {many} columns; expected at most {MOST_COLUMNS}")
    columns = round(run.seconds / unit)
    ranks = 1 + max(span.rank for span in run.spans)
    labels = {span.action: _label(span.action, ranks, _chunks(run) > ranks) for span in run.spans}
    width = max(map(len, labels.values()))
    rows = [["." * width] * columns for _ in range(ranks)]
    for rank, action, begin, end in run.spans:
        for column in range(round(begin / unit), round(end / unit)):
            rows[rank][column] = labels[action].ljust(width)
    wide = len(str(ranks - 1))
    return "\n".join(f"rank {k:{wide}d}  {' '.join(row)}".rstrip() for k, row in enumerate(rows))


def check_drawing(file: str | Path, ranks: int) -> None:
    """Raise ConfigError if `save_drawing` cannot draw `ranks` ranks into `file`."""
    check_figure_file(file)
    if ranks > MOST_RANKS:
        raise ConfigError(f"a picture of {ranks} ranks; expected at most {MOST_RANKS}")


def save_drawing(run: SimulatedRun, file: str | Path, title: str = "") -> None:
    """Draw a simulated run into a file: a row for each rank, a bar for each computation.

    `run` is the result of `simulate_actions`, and `title` stands above the drawing.
    """
    ranks = 1 + max((span.rank for span in run.spans), default=0)
    check_drawing(file, ranks)
    figure_class, patch_class = figure_and_patch()
    figure = figure_class(figsize=(12, 1.6 + 0.42 * max(ranks, 3)), layout="constrained")
    axes = figure.add_subplot()
    scale, unit = (1e3, "ms") if run.seconds < 1 else (1.0, "s")
    several = _chunks(run) > ranks
    for rank, action, begin, end in run.spans:
        # The bars of a later chunk of a rank have a paler colour.
        pale = 1 - 0.5 * (action.chunk // ranks) / max(1, _chunks(run) // ranks)
        axes.broken_barh(
            [(begin * scale, (end - begin) * scale)], (rank - 0.4, 0.8), alpha=pale,
            facecolor=_COLORS[action.kind], edgecolor="white", linewidth=0.5,
        )  # fmt: skip
        label = _label(action, ranks, several)[1:]
        if (end - begin) * 110 > len(label) * run.seconds:
            middle = (begin + end) / 2 * scale
            axes.text(middle, rank, label, ha="center", va="center", color="white", fontsize=7)
    axes.set(
        xlim=(0, run.seconds * scale * 1.005 or 1.0), ylim=(ranks - 0.4, -0.6), yticks=range(ranks)
    )
    axes.set(xlabel=f"simulated time, {unit}", ylabel="rank")
    axes.set_title(title, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    kinds = [kind for kind in _COLORS if any(span.action.kind == kind for span in run.spans)]
    patches = [patch_class(facecolor=_COLORS[kind]) for kind in kinds]
    names = [LABELS[kind] for kind in kinds]
    figure.legend(patches, names, loc="outside upper right", ncols=len(names), frameon=False)
    save_figure(figure, file)


def _chunks(run: SimulatedRun) -> int:
    return 1 + max((span.action.chunk for span in run.spans), default=0)


def _label(action, ranks: int, several: bool) -> str:
    chunk = chr(ord("a") + action.chunk // ranks) if several else ""
    return f"{action.kind}{action.microbatch}{chunk}"
