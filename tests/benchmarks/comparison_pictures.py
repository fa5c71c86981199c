"""Pictures and tables of what `comparison` has found."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from .comparison import AGES, BATCH, WORKERS

#: Losses of batches that are averaged to one, and points of a curve.
WINDOW, POINTS = 60, 80
COLOURS = ("#222222", "#d62728", "#1f77b4", "#2ca02c", "#ff7f0e", "#9467bd", "#17becf", "#8c564b")
DASHES = ("-", "-", "--", "-.", ":", "-", "--", "-.")
TITLES = {
    "equal": "3 equal workers",
    "slow": "worker 0 is 3 times slower",
    "pauses": "every 50th step of a worker takes 20 times as long",
}


def smooth(row: dict) -> np.ndarray:
    """The curve of one run: rows (seconds, samples of all workers, mean of the last losses)."""
    seconds, losses = np.array(row["losses"]).T
    total = np.concatenate([[0.0], np.cumsum(losses)])
    ends = np.arange(1, len(losses) + 1)
    begins = np.maximum(0, ends - WINDOW)
    means = (total[ends] - total[begins]) / (ends - begins)
    return np.column_stack([seconds, ends * BATCH / WORKERS, means])


def mean_curve(rows: list[dict], axis: int) -> tuple[np.ndarray, np.ndarray]:
    """The mean loss of several runs over seconds (axis 0) or samples (axis 1)."""
    curves = [smooth(row)[WINDOW // 2 :] for row in rows]
    begin, end = max(each[0, axis] for each in curves), min(each[-1, axis] for each in curves)
    at = np.linspace(begin, end, POINTS)
    return at, np.mean([np.interp(at, each[:, axis], each[:, 2]) for each in curves], axis=0)


def by_mode(rows: list[dict]) -> dict[str, list[dict]]:
    """The rows of each mode, in the order of the file."""
    return {name: [r for r in rows if r["mode"] == name] for name in {r["mode"]: 0 for r in rows}}


def draw_losses(file: Path, rows: list[dict], title: str) -> None:
    """Two panels: the loss over time, and over the samples of all workers."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    labels = ("simulated time, s", "samples of all workers")
    for axis, panel in enumerate(figure.subplots(1, 2, sharey=True)):
        for k, (name, each) in enumerate(by_mode(rows).items()):
            style = {"color": COLOURS[k % 8], "linestyle": DASHES[k % 8], "linewidth": 1.6}
            panel.plot(*mean_curve(each, axis), label=name, **style)
        panel.set(yscale="log", xlabel=labels[axis])
        plain(panel)
    figure.axes[0].set_ylabel("training loss")
    figure.axes[1].legend(frameon=False)
    figure.suptitle(f"LeNet on digits: {title}")
    save(figure, file)


def draw_ages(file: Path, rows: list[dict]) -> None:
    """The final loss over the age of the gradients."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    panel = figure.subplots()
    for k, rule in enumerate({row["rule"]: 0 for row in rows}):
        x, y = np.array([(row["age"], row["loss"]) for row in rows if row["rule"] == rule]).T
        # A loss far above that of a guess is drawn at the top.
        panel.plot(x, np.minimum(y, 3.0), DASHES[k], marker="o", color=COLOURS[k], label=rule)
    panel.axhline(np.log(10), color="#888888", linewidth=0.8, linestyle=":")
    panel.set_xscale("symlog", base=2, linthresh=1)
    panel.set_xlim(-0.2, 1.2 * max(AGES))
    panel.set(yscale="log", xlabel="age of each gradient, in updates")
    panel.set_ylabel("final training loss (dotted: a guess)")
    numbers = sorted({row["age"] for row in rows})
    panel.set_xticks(numbers, list(map(str, numbers)))
    plain(panel)
    panel.legend(frameon=False)
    save(figure, file)


def plain(panel) -> None:
    """A panel without a frame, with a weak grid."""
    panel.spines[["top", "right"]].set_visible(False)
    panel.grid(alpha=0.3)


def save(figure, file: Path) -> None:
    """Write a picture; the same figures give the same file."""
    import matplotlib

    with matplotlib.rc_context({"svg.hashsalt": "mpidist", "svg.fonttype": "none"}):
        figure.savefig(file, metadata={"Date": None})
    lines = file.read_text(encoding="utf-8").splitlines()  # some of which end with a blank
    file.write_text("\n".join(line.rstrip() for line in lines) + "\n", encoding="utf-8")
    print(f"drawn: {file}")


def table(names: list[str], rows: list[list[str]]) -> None:
    """Print a table as the docs have it."""
    print("| " + " | ".join(names) + " |\n|" + " --- |" * len(names))
    for row in rows:
        print("| " + " | ".join(row) + " |")
    print()


def median(rows: list[dict], key: str) -> float:
    """The median of one figure over the seeds."""
    return float(np.median([row[key] for row in rows]))


def print_speeds(rows: list[dict]) -> None:
    """The modes when a worker of any mode has first made all its steps, and at their end."""
    modes = by_mode(rows)
    early = min(median(each, "first_end") for each in modes.values())
    lines = []
    for name, each in modes.items():
        curves = [smooth(row) for row in each]
        then = [[np.interp(early, c[:, 0], c[:, k]) for k in (1, 2)] for c in curves]
        samples, loss = np.median(then, axis=0)
        lines.append([
            name, f"{samples:,.0f}", f"{loss:.3f}", f"{median(each, 'seconds'):.1f}",
            f"{median(each, 'loss'):.3f}", f"{median(each, 'accuracy'):.3f}",
        ])  # fmt: skip
    heads = [f"samples after {early:.1f} s", "loss at this time",
             "seconds until the end of the run", "loss at the end"]  # fmt: skip
    table(["mode", *heads, "test accuracy"], lines)


def print_accuracy(rows: list[dict]) -> None:
    """The accuracy of each seed, and the median."""
    lines = []
    for name, each in by_mode(rows).items():
        seeds = " ".join(f"{row['accuracy']:.4f}" for row in each)
        lines.append([name, seeds, f"{median(each, 'accuracy'):.4f}"])
    table(["mode", "seeds", "median"], lines)


def print_ages(rows: list[dict]) -> None:
    """The final loss of each rule at each age."""
    numbers = sorted({row["age"] for row in rows})
    lines = []
    for rule in {row["rule"]: 0 for row in rows}:
        found = {row["age"]: row["loss"] for row in rows if row["rule"] == rule}
        lines.append([rule, *(f"{found[age]:.3f}" if found[age] < 1e3 else "inf" for age in found)])
    table(["optimizer, learning rate", *map(str, numbers)], lines)


def draw(results: Path, pictures: Path) -> None:
    """Draw a picture for each part that has results, and print its table."""
    for file in sorted(results.glob("*.json")):
        rows = json.loads(file.read_text(encoding="utf-8"))
        print(f"{file.stem}:")
        if file.stem in TITLES:
            draw_losses(pictures / f"comparison_{file.stem}.svg", rows, TITLES[file.stem])
            print_speeds(rows)
        elif file.stem == "ages":
            draw_ages(pictures / "comparison_ages.svg", rows)
            print_ages(rows)
        else:
            print_accuracy(rows)
