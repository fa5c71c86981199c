"""The job of `elastic_kills.py`: elastic_job.py KIND FOLDER RANKS STEPS.

A program that goes on after deaths and has the same result on any number of ranks, to the bit. Each
rank leaves in FOLDER what the driver reads: a row of the file `board` (its pid, how many steps are
done, whether it saves), the steps that it has done (`RANK.log`), and at the end a hash of what it
has (`RANK.end`). On SIGUSR1 it writes its stacks to `RANK.stack`.

KIND is ``with ALGORITHM N`` or ``function ALGORITHM N`` (N numbers are added by an algorithm),
``arena N``, ``store N`` (saves every few steps), or ``train MICROBATCHES ALGORITHM SAVES``: an
elastic `md.train`, with 0 or more microbatches, which saves every few steps if SAVES is 1. ``served
MODE PLACEMENT SERVERS SAVES COPIES`` is one with parameter servers, which keep copies of each
other's partitions if COPIES is 1: each parameter counts how often a sample was used, with the
opposite sign. With PLACEMENT "shares", servers only serve, and their shares change every 3 clocks.
"""

import faulthandler
import hashlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from mpi4py import MPI

import mpidist as md
from mpidist.elasticity.elastic_group import Group
from mpidist.servers.client import Client

SAMPLES, SERVED_SAMPLES = 24, 240
clients: list[Client] = []
#: Values in the board: a rank is in its group; and it has left it.
INSIDE, LEFT = 1, 1_000_000
PID, DONE, SAVING = range(3)
SAVE_EVERY = 5

kind, words = sys.argv[1].split()[0], sys.argv[1].split()[1:]
folder, ranks, steps = Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
comm, world = MPI.COMM_WORLD, MPI.COMM_WORLD.rank
n = int(words[-1])  # numbers that a loop adds
stacks = (folder / f"{world}.stack").open("w")
faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
board = np.memmap(folder / "board", np.int64, "r+", shape=(ranks, 3))[world]
board[PID] = os.getpid()
log = (folder / f"{world}.log").open("a", buffering=1)
state = {"w": np.zeros(n), "more": {"count": 0, "v": np.zeros(7, "i4")}}


def make_and_show(group, *args, make=Group.__init__, **settings) -> None:
    """Make the group, and show on the board that this rank is inside."""
    make(group, *args, **settings)
    board[DONE] = max(INSIDE, board[DONE])


Group.__init__ = make_and_show


def part(rank: int, size: int, step: int) -> np.ndarray:
    """Whole numbers: every order of additions gives the same bits."""
    total, numbers = np.zeros(n), np.arange(n) % 97
    for k in range(rank, SAMPLES, size):
        total += (numbers * (k + 1) + step) % 89
    return total


def apply(step: int, total: np.ndarray) -> None:
    state["w"] += total
    state["more"]["v"] += int(total[0])
    state["more"]["count"] += 1
    log.write(f"{int(step)}\n")
    board[DONE] = INSIDE + step + 1


def busy(group, algorithm: str) -> None:
    """Sums that nobody needs: a short step is mostly communication, and lasts milliseconds."""
    for _ in range(30 if n < 10_000 else 1):
        md.allreduce(group.comm, np.ones(n), algorithm=algorithm)


def with_steps(algorithm: str):
    """A loop whose steps are ``with`` blocks."""
    with md.elastic(comm, state) as group:
        for step in group.steps(0, steps):
            with step:
                total = part(group.rank, group.size, step)
                busy(group, algorithm)
                md.allreduce(group.comm, total, algorithm=algorithm)
                apply(step, total)
    return group


def function(one_step, opened=None):
    """A function that begins again; `opened` gives what it makes of each communicator."""
    groups = []

    def work(group):
        groups.append(group)
        if opened is None:
            return loop(group, None)
        with opened(group) as made:
            if isinstance(made, Store) and made.all_steps():
                made.restore()  # or its saves would be refused; the group has a newer state
            return loop(group, made)

    def loop(group, made):
        for step in group.steps(0, steps):
            apply(step, one_step(group, made, step))
            group.done(step)
            due = isinstance(made, Store) and step % SAVE_EVERY == SAVE_EVERY - 1
            if due and step not in made.all_steps():
                made.save(int(step), state)
        return group.size

    md.run_elastic(comm, work, state)
    return groups[-1]


def summed(group, algorithm: str, step: int) -> np.ndarray:
    busy(group, algorithm)
    return md.allreduce(group.comm, part(group.rank, group.size, step), algorithm=algorithm)


def in_arena(group, arena, step) -> np.ndarray:
    arena["g"][...] = part(group.rank, group.size, step)
    md.allreduce(group.comm, arena)
    return arena["g"].copy()


def run():
    if kind == "with":
        return with_steps(words[0])
    if kind == "function":
        return function(lambda group, _, step: summed(group, words[0], step))
    if kind == "arena":
        return function(in_arena, lambda group: md.Arena(group.comm, {"g": ((n,), "f8")}))
    if kind == "store":
        place = folder / "store"
        return function(lambda group, _, step: summed(group, "auto", step),
                        lambda group: Store(group.comm, place, keep=2))  # fmt: skip
    if kind == "train":
        return train(int(words[0]), words[1], words[2] == "1")
    if kind == "served":
        return served(words[0], words[1], int(words[2]), words[3] == "1", int(words[4]))
    raise SystemExit(f"no kind {kind!r}")


class Store(md.CheckpointStore):
    """A store that shows on the board that it saves."""

    def save(self, *args, **settings):
        return self._showing(super().save, *args, **settings)

    def save_async(self, *args, **settings):
        return self._showing(super().save_async, *args, **settings)

    def _showing(self, save, *args, **settings):
        board[SAVING] = 1
        try:
            return save(*args, **settings)
        finally:
            board[SAVING] = 0


def train(microbatches: int, algorithm: str, saves: bool):
    """An elastic run of `md.train`, whose callbacks get each step once."""
    rng = np.random.default_rng(5)
    data = rng.standard_normal((480, 196)).astype("f4"), rng.integers(0, 10, 480)
    model = md.models.mlp([196, 128, 64, 10])

    def note(report) -> None:
        log.write(f"{report.step - 1}\n")
        board[DONE] = INSIDE + report.step

    place = {"checkpoint": lambda comm: Store(comm, folder / "store", keep=2)} if saves else {}
    summary = md.train(
        comm, model, data, optimizer=md.optim.momentum(0.01, 0.9), global_batch=48, steps=steps,
        strategy=md.AllReduce(algorithm), microbatches=microbatches or None, callbacks=[note],
        elastic=md.Elastic(), **place, **({"checkpoint_every": SAVE_EVERY} if saves else {}),
    )  # fmt: skip
    state["w"] = np.concatenate([x.ravel() for x in model.parameters.values()])
    state["more"]["count"] = summary.steps
    return SimpleNamespace(size=summary.ranks, deaths=summary.deaths)


class Counts:
    """A model whose gradient of a sample is 1 in the place of this sample, in two tensors."""

    def __init__(self):
        self.parameters = {name: np.zeros(SERVED_SAMPLES) for name in "ab"}
        self.state = {}

    def predict(self, inputs):
        return inputs

    def loss_and_gradients(self, batch, gradients, ready=None):
        for gradient in gradients.values():
            gradient[...] = batch[0].mean(axis=0)
        time.sleep(0.001 + 0.002 * ((world + board[DONE]) % 3 == 0))
        return 1.0


class Turns(md.Rebalance):
    """At each look, the shares of the servers change places."""

    def follow(self, shares, since):
        return [shares[-1], *shares[:-1]]


def remember(client, *args, make=Client.__init__) -> None:
    make(client, *args)
    clients.append(client)


def served(mode: str, placement: str, servers: int, saves: bool, copies: int):
    """An elastic run of `md.train` with parameter servers."""
    servers = min(servers, ranks - 1)
    Client.__init__ = remember
    shares = {}
    if placement == "shares":
        shares = {rank: rank + 1 for rank in range(ranks - servers, ranks)}
    modes = {"bsp": md.BSP(), "asp": md.ASP(), "ssp": md.SSP(2), "ssp0": md.SSP(0)}
    model, data = Counts(), (np.eye(SERVED_SAMPLES), np.zeros(SERVED_SAMPLES))

    def note(report) -> None:
        log.write(f"{report.step - 1}\n")
        board[DONE] = INSIDE + report.step

    place = {"checkpoint": lambda comm: Store(comm, folder / "store", keep=2)} if saves else {}
    summary = md.train(
        comm, model, data, optimizer=md.optim.sgd(48.0), global_batch=48, steps=steps, seed=1,
        strategy=md.ParameterServer(
            shares or servers, modes[mode], "dedicated" if shares else placement,
            replicas=copies if servers > 1 else 0, rebalance=Turns(3) if shares else None,
        ),
        callbacks=[note], elastic=True, watch_seconds=40,
        **place, **({"checkpoint_every": SAVE_EVERY} if saves else {}),
    )  # fmt: skip
    counts = np.stack([-np.rint(x) for x in model.parameters.values()])
    np.save(folder / f"{world}.npy", counts)
    state["w"], state["more"]["count"] = counts, summary.steps
    return SimpleNamespace(size=summary.ranks, deaths=summary.deaths)


def sha256(state: dict) -> str:
    found = hashlib.sha256()
    for array in (state["w"], state["more"]["v"], np.array(state["more"]["count"])):
        found.update(array.tobytes())
    return found.hexdigest()


began = time.monotonic()
group = run()
board[DONE] = LEFT
end = {"sha256": sha256(state), "count": state["more"]["count"], "size": group.size,
       "gap": max((max(one.gaps, default=0) for one in clients), default=0),
       "deaths": group.deaths, "seconds": round(time.monotonic() - began, 3)}  # fmt: skip
(folder / f"{world}.part").write_text(json.dumps(end))
(folder / f"{world}.part").replace(folder / f"{world}.end")
