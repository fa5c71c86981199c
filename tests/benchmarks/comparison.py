"""Train one LeNet in each mode of `md.train`, and simulate how the modes differ over time.

    PYTHONPATH=tests mpirun -n 4 python -m mpi4py -m benchmarks.comparison run
    PYTHONPATH=tests python -m benchmarks.comparison simulate
    PYTHONPATH=tests python -m benchmarks.comparison ages
    PYTHONPATH=tests python -m benchmarks.comparison draw

"run" trains on mnist10k, in each mode of `MODES`, which are lines of `md.train(strategy=...)`:
three ranks train; where a mode has a server, rank 3 serves. "simulate" trains on digits in one
process, with the gates of the servers and simulated times, so that the figures depend on no
machine. "ages" trains with gradients of parameters that are a fixed number of updates old. "draw"
makes the pictures and prints the tables. Results are in the folder `--out`.
"""

from __future__ import annotations

import argparse
import heapq
import json
import os
from collections import deque
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np

import mpidist as md
from mpidist import data, events, models, optim
from mpidist.partition import BlockPartition
from mpidist.servers.consistency import Answer, Apply, Consistency

MODES = {
    "allreduce": md.AllReduce(),
    "BSP": md.ParameterServer(consistency=md.BSP()),
    "ASP": md.ParameterServer(consistency=md.ASP()),
    "SSP(3)": md.ParameterServer(consistency=md.SSP(3)),
    "DSSP(2, 8)": md.ParameterServer(consistency=md.DSSP(2, 8)),
    "BackupWorkers(1)": md.ParameterServer(consistency=md.BackupWorkers(1)),
    "PeerAverage, every=8": md.PeerAverage("all", every=8),
    "pipeline": md.Pipeline(),
}
#: Over time, allreduce is BSP: all wait for all in each step. A number: of steps between averages.
GATES: dict[str, Consistency | int] = {
    "allreduce, BSP": md.BSP(),
    "ASP": md.ASP(),
    "SSP(3)": md.SSP(3),
    "DSSP(2, 8)": md.DSSP(2, 8),
    "BackupWorkers(1)": md.BackupWorkers(1),
    "PeerAverage, every=8": 8,
}
WORKERS, BATCH, RATE = 3, 48, 0.2
#: Seconds of a step of one worker, of which each differs by 10 %.
STEP = 0.03


def _equal(rng, steps: int) -> np.ndarray:
    return STEP * rng.lognormal(0, 0.1, (WORKERS, steps))


def _slow(rng, steps: int) -> np.ndarray:
    times = _equal(rng, steps)
    times[0] *= 3
    return times


def _pauses(rng, steps: int) -> np.ndarray:
    times = _equal(rng, steps)
    for worker in range(WORKERS):
        times[worker, worker * 50 // WORKERS :: 50] *= 20
    return times


#: Scene -> the seconds of each step of each worker.
SCENES: dict[str, Callable] = {"equal": _equal, "slow": _slow, "pauses": _pauses}
#: How many updates old the gradients of "ages" are, and what applies them.
AGES = (0, 1, 2, 4, 8, 16, 32, 64)
RULES: dict[str, Callable] = {
    "sgd, 0.2": lambda age: optim.sgd(0.2),
    "sgd, 0.05": lambda age: optim.sgd(0.05),
    "sgd, 0.2 / (1 + age)": lambda age: optim.sgd(0.2 / (1 + age)),
    "momentum 0.9, 0.02": lambda age: optim.momentum(0.02, 0.9),
    "momentum 0.9, 0.02 / (1 + age)": lambda age: optim.momentum(0.02 / (1 + age), 0.9),
}


# ------------------------------------------------------------------------------- real runs


def train(comm, strategy, folder: Path, steps: int, seed: int) -> dict | None:
    """Train on mnist10k; return a row on rank 0 of the world. Collective over `comm`."""
    ranks = comm.size if strategy.workers(comm.size) == WORKERS else WORKERS
    part = comm.Split(0 if comm.rank < ranks else 1)
    summary = None
    if comm.rank < ranks:
        files = [folder / f"t10k-{what}-ubyte.gz" for what in ("images-idx3", "labels-idx1")]
        distort = {"copies": 8, "shift": 1, "turn": 10, "scale": 0.1}
        training, test = data.idx(*files, train=8000, distort=distort)
        summary = md.train(
            part, models.lenet((1, 28, 28), seed=seed), training, test_data=test,
            optimizer=step_rule(steps), global_batch=BATCH, steps=steps,
            seed=seed, strategy=strategy,
            microbatches=4 if isinstance(strategy, md.Pipeline) else None,
        )  # fmt: skip
    part.Free()
    return None if comm.rank or summary is None else summary.as_dict()


def run(args) -> None:
    """Train in all modes, with each seed. Collective over COMM_WORLD."""
    from mpi4py import MPI

    comm, rows = MPI.COMM_WORLD, []
    for seed in range(args.seeds):
        for name in args.modes:
            found = train(comm, MODES[name], args.data, args.steps, seed)
            if found is not None:
                row = {"mode": name, "seed": seed, "accuracy": found["test_accuracy"]}
                rows.append({**row, "seconds": found["wall_seconds"]})
                print(f"{name:18} {rows[-1]}", flush=True)
    if comm.rank == 0:
        write(args.out / "mnist10k.json", rows)


# -------------------------------------------------------------------------- simulated time


@cache
def digits() -> list[tuple]:
    """The training and test samples of scikit-learn's digits."""
    return [source.take(np.arange(len(source))) for source in data.digits()]


class Digits:
    """LeNet on the digits of scikit-learn, and batches of them in a fixed order."""

    def __init__(self, seed: int):
        self.training, self.test = digits()
        self.model, self.seed = models.lenet((1, 8, 8), seed=seed), seed
        self.gradients = {n: np.empty_like(a) for n, a in self.model.parameters.items()}

    def batch(self, step: int, worker: int = 0, workers: int = 1) -> tuple:
        """The samples of one worker in a step, as `md.train` deals them."""
        per_epoch = len(self.training[0]) // BATCH
        epoch, at = divmod(step, per_epoch)
        order = np.random.default_rng((self.seed, epoch)).permutation(len(self.training[0]))
        start, stop = BlockPartition(BATCH, workers).range(worker)
        chosen = order[at * BATCH + start : at * BATCH + stop]
        return tuple(each[chosen] for each in self.training)

    def values(self) -> dict[str, np.ndarray]:
        """A copy of the parameters."""
        return {name: array.copy() for name, array in self.model.parameters.items()}

    def compute(self, parameters: dict, batch: tuple) -> float:
        """Compute the gradients at these parameters, and return the loss."""
        for name, array in parameters.items():
            self.model.parameters[name][...] = array
        return self.model.loss_and_gradients(batch, self.gradients)

    def judge(self, parameters: dict) -> tuple[float, float]:
        """The loss of all training samples, and the accuracy on the test samples."""
        loss = self.compute(parameters, self.training)
        return loss, float((self.model.predict(self.test[0]).argmax(1) == self.test[1]).mean())


def average(every: int, delays: np.ndarray, seed: int) -> dict:
    """Train a model on each worker, and set all to their mean every few steps, as in `simulate`."""
    steps, problem = delays.shape[1], Digits(seed)
    own = [problem.values() for _ in range(WORKERS)]
    optimizer = step_rule(steps)
    states = [optimizer.init(values) for values in own]
    now, losses = np.zeros(WORKERS), []
    for step in range(steps):
        now += delays[:, step]
        for worker, values in enumerate(own):
            loss = problem.compute(values, problem.batch(step, worker, WORKERS))
            losses.append((now[worker], loss))
            optimizer.update(problem.gradients, states[worker], values)
        if (step + 1) % every == 0 or step + 1 == steps:
            now[:] = now.max()
            for name in own[0]:
                mean = np.mean([values[name] for values in own], axis=0)
                for values in own:
                    values[name][...] = mean
    loss, accuracy = problem.judge(own[0])
    end = float(now.max())
    return {"seconds": end, "first_end": end, "loss": loss, "accuracy": accuracy,
            "computed": WORKERS * steps, "losses": sorted(losses)}  # fmt: skip


def step_rule(steps: int):
    """The optimizer of all modes."""
    rate = optim.cosine(RATE, steps=steps, warmup=steps // 12)
    return optim.sgd(rate, weight_decay=5e-4)


def simulate(mode: Consistency | int, delays: np.ndarray, seed: int) -> dict:
    """Train with one server and workers whose steps take `delays` seconds; messages take none."""
    if isinstance(mode, int):
        return average(mode, delays, seed)
    now, steps, problem = 0.0, delays.shape[1], Digits(seed)
    gate = mode.gate(WORKERS, now=lambda: now)
    newest = problem.values()
    optimizer = step_rule(steps)
    state = optimizer.init(newest)
    pulled: list[dict] = [{}] * WORKERS
    computed = [0] * WORKERS
    losses: list[tuple[float, float]] = []
    ends = [(0.0, worker) for worker in range(WORKERS)]  # a heap of (when it is done, worker)
    first_end = 0.0

    def update(pushes, weight: float) -> None:
        mean = {n: np.mean([push[n] for _, push in pushes], axis=0) for n in newest}
        optimizer.update(mean, state, newest, weight=weight)

    while ends:
        now, worker = heapq.heappop(ends)
        actions: list = []
        if computed[worker]:
            batch = problem.batch(gate.clocks[worker], worker, WORKERS)
            losses.append((now, problem.compute(pulled[worker], batch)))
            push = {name: array.copy() for name, array in problem.gradients.items()}
            actions = [*gate.push(worker, push), *gate.tick(worker)]
        more = gate.clocks[worker] < steps
        first_end = first_end if more or first_end else now
        for action in actions + (gate.pull(worker) if more else gate.leave(worker)):
            if isinstance(action, Apply):
                update(action.pushes, 1.0 if mode.merges else 1 / WORKERS)
            elif isinstance(action, Answer):
                free = action.worker
                pulled[free] = {name: array.copy() for name, array in newest.items()}
                heapq.heappush(ends, (now + delays[free, computed[free]], free))
                computed[free] += 1
    loss, accuracy = problem.judge(newest)
    return {"seconds": now, "first_end": first_end, "loss": loss, "accuracy": accuracy,
            "computed": sum(computed), "losses": losses}  # fmt: skip


def simulations(args) -> None:
    """Simulate each mode in each scene."""
    for scene, trace in SCENES.items():
        rows = []
        for name, mode in GATES.items():
            for seed in range(args.seeds):
                delays = trace(np.random.default_rng((seed, 3)), args.steps)
                rows.append({"mode": name, "seed": seed, **simulate(mode, delays, seed)})
            print(f"{scene:8} {name:18} {rows[-1]['seconds']:7.2f} s", flush=True)
        write(args.out / f"{scene}.json", rows)


def train_late(age: int, optimizer, seed: int, steps: int) -> tuple[float, float]:
    """Train with gradients of parameters `age` updates old: (final training loss, accuracy)."""
    problem = Digits(seed)
    newest = problem.values()
    state = optimizer.init(newest)
    past: deque = deque(maxlen=age + 1)
    with np.errstate(all="ignore"):  # where training fails
        for step in range(steps):
            past.append({name: array.copy() for name, array in newest.items()})
            problem.compute(past[0], problem.batch(step))
            optimizer.update(problem.gradients, state, newest)
        loss, accuracy = problem.judge(newest)
    return (loss if np.isfinite(loss) else 1e9), accuracy


def ages(args) -> None:
    """Train with old gradients, of each age and by each rule."""
    rows = []
    for rule, make in RULES.items():
        for age in AGES:
            each = [train_late(age, make(age), seed, args.steps) for seed in range(args.seeds)]
            loss, accuracy = np.median(np.array(each), axis=0).tolist()
            rows.append({"rule": rule, "age": age, "loss": loss, "accuracy": accuracy})
            print(f"{rule:30} age {age:3}  loss {loss:.4f}  accuracy {accuracy:.4f}", flush=True)
    write(args.out / "ages.json", rows)


def write(file: Path, rows: list[dict]) -> None:
    """Write the rows of one part."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(rows) + "\n", encoding="utf-8")


def main() -> None:
    """Do one part: run, simulate, ages or draw."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parts = parser.add_subparsers(dest="part", required=True)
    running, timed, old, drawing = map(parts.add_parser, ("run", "simulate", "ages", "draw"))
    running.add_argument("--modes", nargs="+", choices=MODES, default=[*MODES])
    running.add_argument("--data", type=Path, default=Path("../shared/data/mnist10k"))
    drawing.add_argument("--pictures", type=Path, default=Path("docs"))
    for each, steps in ((running, 1500), (timed, 400), (old, 600)):
        each.add_argument("--seeds", type=int, default=3)
        each.add_argument("--steps", type=int, default=steps)
    for each in (running, timed, old, drawing):
        each.add_argument("--out", type=Path, default=Path("runs/comparison"))
    args = parser.parse_args()
    events.VERBOSITY = 0
    os.environ.setdefault("MPIDIST_SELECTION_CACHE", "0")
    if args.part == "draw":
        from . import comparison_pictures

        comparison_pictures.draw(args.out, args.pictures)
    else:
        {"run": run, "simulate": simulations, "ages": ages}[args.part](args)


if __name__ == "__main__":
    main()
