"""Test a store with N random sequences of saves, kills and branches: `histories.py N [FIRST]`.

Each action is a process that opens the store. Most of these processes are killed at a random change
that they make to the disk. The program keeps a model of what the folder must hold. After each
action the program checks:

- the newest step of the newest history is the one that the model had before or after the action,
  and has the bytes of exactly that save;
- the line of this history (the steps that led to its last step) is that of the model, except for
  steps that retention may remove, and holds as many steps as must be kept, if there were so many;
- every older history is complete, except for steps that the newest history continues.

At the first sequence that violates these conditions, the program ends with exit code 1. The number
of a sequence is its seed, so a sequence can be repeated by its number.
"""

import random
import signal
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

sys.path.append(str(Path(__file__).parents[1] / "unit"))

from checkpoint_solo import Solo
from test_checkpoint_crash import in_child, kill_at

from mpidist.checkpoint import histories, load
from mpidist.checkpoint.storage import retention
from mpidist.checkpoint.store import CheckpointStore

ACTIONS = 14
KEEP = 3


def state(mark):
    return {"w": np.arange(60.0) * mark, "mark": mark}


class Model:
    """The lines that must be there: by history, ascending steps with the mark of their save.

    `least`: so many steps of the newest must not have been removed.
    """

    def __init__(self):
        self.lines: list[list[tuple[int, int]]] = []
        self.least = 0

    @property
    def newest(self):
        return self.lines[-1] if self.lines else []

    def saved(self, line, step, mark, there):
        """Return the model after a save that continues the last of `line`, a history or a part.

        The steps of it that are `there` are all that can be kept.
        """
        model = Model()
        model.lines = [list(one) for one in self.lines]
        below = [one for one in line if one[0] < step]
        if self.lines and line == self.newest and step >= (line[-1][0] if line else 0):
            model.lines[-1] = [*below, (step, mark)]
        else:
            model.lines.append([*below, (step, mark)])
        model.least = min(KEEP, 1 + sum(one < step for one in there))
        return model


def one_action(draw, folder, model, mark):
    """Do something in a process; return the model that it leads to when it is not killed."""
    kind = draw.choice(["on", "on", "on", "back", "back", "old", "fresh", "again"])
    if not model.lines:
        kind = "fresh"
    number = draw.randrange(len(model.lines)) if kind == "old" else len(model.lines) - 1
    line = model.lines[number] if model.lines else []
    last = line[-1][0] if line else 0
    there = histories.all_steps(str(folder), histories_of(folder)[number]) if line else []
    at, step = last, last + draw.randint(1, 5)
    if kind in ("back", "old"):
        at = draw.choice(there)
        step = at + draw.randint(1, 5)
    elif kind == "again":
        step = draw.choice([last, max(0, last - draw.randint(1, 6))])
    elif kind == "fresh":
        step = draw.randint(0, 8)
    count, after = draw.randint(1, 30), draw.random() < 0.5
    method = draw.choice(["save", "save_async"])
    killed = draw.random() < 0.7
    base = [] if kind == "fresh" else [one for one in line if one[0] <= at]

    def work():
        store = CheckpointStore(Solo(), folder, keep=KEEP, fresh=kind == "fresh")
        if kind != "fresh":
            history = histories_of(folder)[number]
            found = store.restore(step=at, history=history)
            assert found[1]["mark"] == dict(line)[at], (found[1]["mark"], line, at)
        if killed:
            kill_at(count, after)
        getattr(store, method)(step, state(mark))
        store.close()

    assert in_child(work) in (0, signal.SIGKILL)
    then = model.saved(base, step, mark, [one for one in there if one <= at and base])
    return f"{kind} {step} after {at} of {number}, {method}, {count if killed else ''}", then


def histories_of(folder):
    """Return the numbers of the histories that are there, in the order in which they began."""
    with histories.opened(str(folder)) as (_, listed):
        return sorted(listed.numbers())


def check(folder, before, then):
    """Return which of the two models the folder is like, or raise AssertionError."""
    step, found = load.load_step(folder) if before.lines or committed(folder) else (None, None)
    if step is None:
        return before
    assert found["w"].tobytes() == state(found["mark"])["w"].tobytes()
    model = next((m for m in (then, before) if m.newest[-1:] == [(step, found["mark"])]), None)
    assert model, f"newest is {step} of save {found['mark']}"
    follow(folder, model)
    kept = histories.all_steps(str(folder))
    assert len(kept) >= model.least, f"{kept} of {model.newest}"
    return model


def follow(folder, model):
    """Compare the histories with those of the model, and forget there what was to be removed.

    That is what the newest one continues: it is of its line, and goes when it is old.
    """
    numbers, left = histories_of(folder), []
    for number in numbers:
        steps = histories.all_steps(str(folder), number)
        marks = [load.load(folder, each, history=number)["mark"] for each in steps]
        found = list(zip(steps, marks, strict=True))
        line = next((one for one in model.lines if found[-1] in one and set(found) <= set(one)), [])
        assert line, f"history {number} has {found}"
        last = line.index(found[-1]) + 1
        assert last == len(line) or found[-1] in model.newest, f"{line[last:]} are gone"
        left.append(line[:last])
    assert left[-1] == model.newest, f"{left[-1]} is the newest"
    gone = [one for one in model.lines if one not in left]
    assert all(one[-1] in model.newest for one in gone), f"{gone} are gone"
    model.lines = left


def committed(folder):
    return bool(histories.all_steps(str(folder)))


def one_sequence(number):
    draw, model, told = random.Random(number), Model(), []
    kills = 0
    with tempfile.TemporaryDirectory(prefix="mpidist-histories-") as name:
        folder = Path(name, "store")
        for mark in range(1, ACTIONS + 1):
            said, then = one_action(draw, folder, model, mark)
            told.append(said)
            try:
                now = check(folder, model, then)
            except (AssertionError, load.CheckpointError) as error:
                there = sorted(path.name for path in folder.iterdir())
                print("\n  ".join([f"sequence {number}: {error}", *told, *there]))
                raise SystemExit(1) from error
            kills += now is model
            model = now
    return kills, len(model.lines)


def main(count, first=0):
    retention.PATIENCE_SECONDS = -1.0  # folders whose owner died before it could sign go at once
    began, kills, most = time.monotonic(), 0, 0
    for number in range(first, first + count):
        more, lines = one_sequence(number)
        kills, most = kills + more, max(most, lines)
    print(
        f"{count} of {count} sequences of {ACTIONS} actions, {kills} of them killed before they "
        f"counted, up to {most} histories: the newest of the newest each time, whole; "
        f"{time.monotonic() - began:.0f} s"
    )


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
