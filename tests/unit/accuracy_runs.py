"""Make the accuracy runs of docs/models.md in one process: ``python accuracy_runs.py digits``.

The program trains in one process with the models and optimizers of mpidist. It also trains with
delayed gradients, as on a parameter server to which `workers` push in turn and on which each
gradient is `stale` pushes old.
"""

import argparse
import statistics
import sys
import time
from collections import deque
from pathlib import Path

import numpy as np

from mpidist import data, models, optim
from mpidist.data.digits import stratified
from mpidist.data.distortion import distorted

# Chosen on parts of the training data; docs/models.md says how.
RECIPES = {
    "digits": {
        "model": ("lenet", {"image_shape": [1, 8, 8], "channels": [32, 64]}),
        "distort": {"copies": 20, "shift": 0.5, "turn": 10, "scale": 0.1},
        "optimizer": "momentum",
        "lr": 0.02,
        "weight_decay": 1e-3,
        "warmup": 20,
        "epochs": 5,
        "global_batch": 64,
    },
    "mnist10k": {
        "model": ("lenet", {"image_shape": [1, 28, 28]}),
        "distort": {"copies": 8, "shift": 1, "turn": 10, "scale": 0.1},
        "optimizer": "sgd",
        "lr": 0.2,
        "weight_decay": 5e-4,
        "warmup": 50,
        "epochs": 2,
        "global_batch": 64,
    },
}


def sources(name, root=None):
    """(train, test) of a recipe, undistorted; `root` holds the folder mnist10k."""
    if name == "digits":
        return data.digits()
    folder = Path(root) / "mnist10k"
    images, labels = (folder / f"t10k-{part}-ubyte.gz" for part in ("images-idx3", "labels-idx1"))
    return data.idx(images, labels, train=8000)


def validation(train, count, seed=1):
    """Cut `train` in (train, validation), stratified: hyper-parameters are chosen on this."""
    chosen = stratified(train.arrays[1], count, seed)
    rest = np.setdiff1d(np.arange(len(train)), chosen)
    return data.ArraySource(*train.take(rest)), data.ArraySource(*train.take(chosen))


def run(train, test, recipe, seed, workers=1, stale=0):
    """Train by `recipe` and return (test accuracy, last loss, CPU seconds)."""
    started = time.process_time()
    train = distorted(train, recipe.get("distort"))
    name, settings = recipe["model"]
    model = models.from_settings(name, {**settings, "seed": seed})
    sampler = data.Sampler(len(train), recipe["global_batch"], seed=seed)
    steps = recipe["epochs"] * sampler.steps_per_epoch
    rate = optim.cosine(recipe["lr"], steps=steps, warmup=recipe["warmup"])
    settings = {"lr": rate, "weight_decay": recipe["weight_decay"]}
    if "beta" in recipe:
        settings["beta"] = recipe["beta"]
    optimizer = optim.from_settings(recipe["optimizer"], settings)
    state = optimizer.init(model.parameters)
    late = deque()
    position = data.Position()
    loss = 0.0
    for _ in range(steps):
        indices, position = sampler.batch(position)
        for worker in range(workers):
            mine = sampler.local(indices, worker, workers)
            if not len(mine):
                continue
            gradients = {k: np.empty_like(v) for k, v in model.parameters.items()}
            loss = model.loss_and_gradients(train.take(mine), gradients)
            late.append((gradients, len(mine) / recipe["global_batch"] if workers > 1 else 1.0))
            if len(late) > stale:
                gradients, weight = late.popleft()
                optimizer.update(gradients, state, model.parameters, weight=weight)
    images, labels = test.arrays
    accuracy = float((model.predict(images).argmax(1) == labels).mean())
    return accuracy, loss, time.process_time() - started


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", choices=RECIPES)
    parser.add_argument("--data", help="folder that holds mnist10k/")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--stale", type=int, default=0)
    parser.add_argument("--validate", type=int, default=0, help="judge by so many training samples")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=NUMBER")
    args = parser.parse_args()
    recipe = dict(RECIPES[args.name])
    for item in args.set:
        key, value = item.split("=")
        recipe[key] = type(recipe[key])(float(value))
    train, test = sources(args.name, args.data)
    if args.validate:
        train, test = validation(train, args.validate)
    rows = [run(train, test, recipe, seed, args.workers, args.stale) for seed in args.seeds]
    accuracies = [row[0] for row in rows]
    seconds = statistics.median(row[2] for row in rows)
    print(
        f"{args.name}: median accuracy {statistics.median(accuracies):.4f} of "
        f"{[round(a, 4) for a in accuracies]}, {seconds:.1f} s of CPU per run"
    )


if __name__ == "__main__":
    sys.exit(main())
