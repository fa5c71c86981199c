"""The programs of `elastic.py`: ``-m benchmarks.elastic_programs kill FOLDER ...`` and others.

They are started by `mpirun --with-ft ulfm`. Ranks show their pids and steps on a board, which is a
file that the driver maps too, and leave what they have measured in ``FOLDER/RANK.json``.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import time
from pathlib import Path

import numpy as np
from mpi4py import MPI

import mpidist as md
from mpidist.collectives import selection
from mpidist.elasticity import peer_state
from mpidist.gradients.exchange import Gradients
from mpidist.models import mlp
from mpidist.optim import momentum
from mpidist.runtime import polling, ulfm

comm, world = MPI.COMM_WORLD, MPI.COMM_WORLD.rank
PID, DONE = 0, 1
#: A rank of `kill` is behind the others when it has this step to do, and waits to be killed.
HELD = 30
#: Seconds of work of each rank in a step: with 2 ranks per core a step takes about 1 ms.
WORK = 0.0003


def leave(folder: Path, found) -> None:
    """Write what this rank has measured."""
    (folder / f"{world}.json").write_text(json.dumps(found))


def mapped(folder: Path) -> np.ndarray:
    """Return this rank's row of the board."""
    row = np.memmap(folder / "board", np.int64, "r+", shape=(comm.size, 2))[world]
    row[PID] = os.getpid()
    return row


def work() -> None:
    end = time.thread_time() + WORK
    while time.thread_time() < end:
        pass


# ------------------------------------------------------------------------------ kill to next step


def marked_repairs() -> list[tuple[str, float]]:
    """Let the parts of a repair note when they have ended; return the list of the notes."""
    marks: list[tuple[str, float]] = []

    def note(owner, name: str, mark: str, before: bool = False) -> None:
        original = getattr(owner, name)

        def noting(*args, **settings):
            if before:
                marks.append((mark, time.monotonic()))
            result = original(*args, **settings)
            if not before:
                marks.append((mark, time.monotonic()))
            return result

        setattr(owner, name, noting)

    note(ulfm.Membership, "end", "noticed", before=True)
    note(ulfm.Membership, "shrink", "shrunk")
    note(ulfm.Membership, "open", "opened")
    note(peer_state, "bring_up_to_date", "state")
    return marks


def kill(folder: Path, numbers: str, steps: str, victim: str, behind: str) -> None:
    """Do steps until the driver kills a rank, and some more.

    The state has so many numbers. With `behind` -1 the driver kills at any step. Otherwise rank
    `victim` waits to be killed in step `HELD`, which rank `behind` has not done by then.
    """
    row, marks = mapped(folder), marked_repairs()
    state = {"w": np.ones(int(numbers))}  # all pages are there, unlike those of zeros
    part = min(1000, state["w"].size)
    times = []
    with md.elastic(comm, state) as group:
        marks.clear()
        for step in group.steps(0, int(steps)):
            with step:
                work()
                total = md.allreduce(group.comm, np.ones(part))
                if step == HELD and group.deaths == 0 and int(behind) >= 0:
                    if world == int(victim):
                        row[DONE] = step + 1
                        time.sleep(60)
                    if world != int(behind):
                        state["w"][:part] += total
                        group.done(step)
                    md.allreduce(group.comm, total)  # in which they learn of the death
                state["w"][:part] += total
            row[DONE] = step + 1
            if group.deaths and len(marks) < 100:
                marks.append(("step", time.monotonic()))
            elif not group.deaths:
                times.append(time.monotonic())
    leave(folder, {"marks": marks, "step": float(np.median(np.diff(times)))})


# ------------------------------------------------------------------------------ late ranks, spares


def late(folder: Path, how: str, victim: str, deadline: str, steps: str) -> None:
    """Rank `victim` stops or sleeps in step `HELD`; the others note when the next step is done."""
    row, state, after = mapped(folder), {"w": np.zeros(1000)}, None
    with md.elastic(comm, state, deadline=float(deadline)) as group:
        for step in group.steps(0, int(steps)):
            with step:
                time.sleep(WORK)
                if step == HELD and world == int(victim):
                    (folder / "when").write_text(repr(time.monotonic()))
                    if how == "stopped":
                        os.kill(os.getpid(), signal.SIGSTOP)
                    time.sleep(60)
                state["w"] += md.allreduce(group.comm, np.ones(1000)) / group.size
            row[DONE] = step + 1
            if group.deaths and after is None:
                after = time.monotonic()
    assert group.evicted == 1
    assert (state["w"] == int(steps)).all()
    leave(folder, after)


def spare(folder: Path, steps: str) -> None:
    """Do steps on all ranks but the last, which steps in when the driver kills another one."""
    row, state, after = mapped(folder), {"w": np.zeros(1000)}, []

    def loop(group) -> None:
        for step in group.steps(0, int(steps)):
            with step:
                work()
                state["w"] += md.allreduce(group.comm, np.ones(1000)) / group.size
            row[DONE] = step + 1
            if group.deaths:
                after.append(time.monotonic())

    md.run_elastic(comm, loop, state, spares=1)
    assert (state["w"] == int(steps)).all()
    leave(folder, after[:2])


# ------------------------------------------------------------------------------ nobody dies


def cost(folder: Path, rounds: str) -> None:
    """Time sums and training steps with and without an elastic group, in turns."""
    plain = comm.Dup()
    found: dict[str, list] = {}
    with md.elastic(comm, {"w": np.zeros(7)}) as group:
        member = ulfm.current

        def switch(on: bool) -> None:
            # Without a group of this process: no wait looks for deaths.
            ulfm.current, polling.look = (member, member.look) if on else (None, None)

        pairs = {}
        for name, n in {"8 B": 1, "1 MiB": 1 << 17}.items():
            pairs[name] = [_summing(c, n) for c in (plain, group.comm)], max(50, 2000 // n)
        pairs["training step"] = [_training(c) for c in (plain, group.comm)], 20
        switch(False)
        for calls, _ in pairs.values():
            for _ in range(20):
                calls[0]()
        table = selection.table(plain)
        switch(True)
        selection.restore(group.comm, table)  # or each would measure, and might choose another
        for calls, _ in pairs.values():
            for _ in range(20):
                calls[1]()
        for name, (calls, count) in pairs.items():
            found[name] = [[], []]
            for k in range(int(rounds)):
                for on in (False, True) if k % 2 else (True, False):
                    switch(on)
                    comm.Barrier()
                    start = time.perf_counter()
                    for _ in range(count):
                        calls[on]()
                    found[name][on].append((time.perf_counter() - start) / count)
        switch(True)
    worst = {name: np.array(each) for name, each in found.items()}
    for each in worst.values():
        comm.Allreduce(MPI.IN_PLACE, each, MPI.MAX)
    leave(folder, {name: each.tolist() for name, each in worst.items()})


def _summing(on, n: int):
    x = np.zeros(n)
    return lambda: md.allreduce(on, x)


def _training(on):
    """The step of `mpidist bench step` for a perceptron."""
    model, optimizer = mlp([784, 512, 256, 10]), momentum(0.01, 0.9)
    state = optimizer.init(model.parameters)
    rng = np.random.default_rng(world)
    local = 64 // comm.size
    batch = rng.standard_normal((local, 784)).astype("f4"), rng.integers(0, 10, local)
    gradients = Gradients(on, model.parameters)

    def step() -> None:
        gradients.begin(1 / comm.size)
        model.loss_and_gradients(batch, gradients.views, gradients.ready)
        gradients.reduce()
        optimizer.update(gradients.views, state, model.parameters)

    return step


# ------------------------------------------------------------------------------ many deaths


def held(group) -> dict[str, float]:
    """Count what this process holds. Collective over the group."""
    gc.collect()
    new = group.comm.Dup()  # both are numbered; the number of a new one rises if old ones stay
    number = new.py2f() & 0x3FFFFFF
    new.Free()
    shared = [line.split(maxsplit=5)[-1] for line in Path("/proc/self/maps").read_text().split("\n")
              if "/dev/shm/" in line or "memfd:" in line]  # fmt: skip
    return {
        "communicators": number,
        "files": len(list(Path("/proc/self/fd").iterdir())),
        "mapped": len(set(shared)),
        "MiB": round(int(Path("/proc/self/statm").read_text().split()[1]) / 256, 1),
        "named": len(list(Path("/dev/shm").glob(f"*{os.getpid()}*"))),
        "ranks": group.size,
    }


def flat(folder: Path, steps: str, every: str) -> None:
    """Many steps, in which the driver kills a rank now and then; look between the deaths."""
    row, looks = mapped(folder), {}
    state = {"w": np.zeros(100_000)}
    with md.elastic(comm, state) as group:
        for step in group.steps(0, int(steps)):
            with step:
                if step % int(every) == int(every) - 10 or step == int(steps) - 1:
                    looks[int(step)] = held(group) | {"deaths": group.deaths}
                total = md.allreduce(group.comm, np.ones(100_000) / group.size)
                state["w"] += total
            row[DONE] = step + 1
    assert (abs(state["w"] - int(steps)) < 1e-6 * int(steps)).all()
    leave(folder, looks)


if __name__ == "__main__":
    what = {each.__name__: each for each in (kill, late, spare, cost, flat)}[sys.argv[1]]
    what(Path(sys.argv[2]), *sys.argv[3:])
