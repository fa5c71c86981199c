"""`mpidist bench step`: time a training step, and compare it with PyTorch's DDP over gloo.

DDP is PyTorch's DistributedDataParallel. Two more ways to run a step are timed, both in PyTorch:
with `md.attach` in place of DDP, and without any exchange of gradients. All have the same layers,
initial weights and batches, SGD with momentum, and one BLAS thread per rank. The time of the
slowest rank counts. The benchmark fails if the losses of the steps that exchange gradients differ.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
from mpi4py import MPI

from ..errors import MpidistError
from ..gradients.exchange import Gradients
from ..gradients.torch_module import attach
from ..models import lenet, mlp
from ..optim import momentum

#: name -> (function that makes the mpidist model, shape of a sample, samples of all ranks)
MODELS: dict[str, tuple[Callable, tuple[int, ...], int]] = {
    "lenet 8x8": (lambda: lenet([1, 8, 8], channels=[32, 64]), (1, 8, 8), 64),
    "lenet 28x28": (lambda: lenet([1, 28, 28]), (1, 28, 28), 64),
    "mlp 784-512-256-10": (lambda: mlp([784, 512, 256, 10]), (784,), 64),
}
RATE, MOMENTUM = 0.01, 0.9
#: Steps that are timed together.
BLOCK = 10


def measure(comm, name: str, *, rounds: int, torch: bool) -> dict:
    """Measure a training step of the model `name`; return a row with times in microseconds.

    Collective over `comm`. In each of `rounds` rounds, a block of ten steps (`BLOCK`) is timed for
    every way to run a step.
    """
    make, shape, batch = MODELS[name]
    local = max(1, batch // comm.size)
    rng = np.random.default_rng((0, comm.rank))
    x = rng.standard_normal((local, *shape)).astype(np.float32)
    y = rng.integers(0, 10, local)
    model = make()
    steps = {"ours": _ours(comm, model, (x, y))}
    if torch:
        from torch.nn.parallel import DistributedDataParallel

        wrapped, module = DistributedDataParallel(_in_torch(model)), _in_torch(model)
        attached = attach(comm, module)
        steps["torch"] = _steps(wrapped, x, y)
        steps["alone"] = _steps(_in_torch(model), x, y)
        steps["attached"] = _steps(module, x, y, attached.average)
    seconds = {who: np.empty(rounds) for who in steps}
    losses = {who: [step() for _ in range(3)] for who, step in steps.items()}
    for who, values in losses.items():
        if who != "alone" and not np.allclose(losses["ours"], values, rtol=1e-3):
            raise MpidistError(f"bench step: {name}: the losses differ: {losses}")
    for k in range(rounds):
        for who, step in steps.items() if k % 2 else reversed(steps.items()):
            comm.Barrier()
            start = time.perf_counter()
            for _ in range(BLOCK):
                step()
            seconds[who][k] = (time.perf_counter() - start) / BLOCK
    for each in seconds.values():
        comm.Allreduce(MPI.IN_PLACE, each, MPI.MAX)
    row = {"model": name, "ranks": comm.size, "global_batch": local * comm.size}
    for who, each in seconds.items():
        key = "step_us" if who == "ours" else f"{who}_us"
        row[key] = round(float(np.median(each)) * 1e6, 1)
    if torch:
        row["ratio"] = round(float(np.median(seconds["torch"] / seconds["ours"])), 3)
        row["over_attached"] = round(float(np.median(seconds["torch"] / seconds["attached"])), 3)
        attached.close()
    return row


def _ours(comm, model, batch) -> Callable[[], float]:
    optimizer = momentum(RATE, MOMENTUM)
    state = optimizer.init(model.parameters)
    gradients = Gradients(comm, model.parameters)

    def step() -> float:
        gradients.begin(1 / comm.size)
        loss = model.loss_and_gradients(batch, gradients.views, gradients.ready)
        gradients.reduce()
        optimizer.update(gradients.views, state, model.parameters)
        return loss

    return step


def _in_torch(model):
    """Return a PyTorch model with the same layers and weights as `model`."""
    import torch
    from torch import nn

    makers: dict[str, Callable] = {
        "Convolution": lambda layer: nn.Conv2d(
            layer.inputs, layer.outputs, layer.kernel, padding=layer.pad
        ),
        "Dense": lambda layer: nn.Linear(layer.inputs, layer.outputs),
        "MaxPool": lambda layer: nn.MaxPool2d(2),
        "Relu": lambda layer: nn.ReLU(),
        "Features": lambda layer: nn.Flatten(),
        "Rows": lambda layer: nn.Flatten(),
    }
    layers: list = []
    for layer in model.layers:
        kind = type(layer).__name__
        if kind in makers:  # PyTorch needs no counterpart of Images
            layers.append(makers[kind](layer))
        with torch.no_grad():
            for name in layer.shapes():
                ours = model.parameters[name]
                theirs = getattr(layers[-1], name.rpartition(".")[2])
                ours = ours.T if kind == "Dense" else ours
                theirs.copy_(torch.from_numpy(np.ascontiguousarray(ours)))
    return nn.Sequential(*layers)


def _steps(module, x, y, average: Callable[[], None] = lambda: None) -> Callable[[], float]:
    """Return a function that runs a PyTorch step; it calls `average` before the weights change."""
    import torch

    optimizer = torch.optim.SGD(module.parameters(), RATE, MOMENTUM)
    inputs, labels = torch.from_numpy(x), torch.from_numpy(y)
    cost = torch.nn.CrossEntropyLoss()

    def step() -> float:
        optimizer.zero_grad()
        loss = cost(module(inputs), labels)
        loss.backward()
        average()
        optimizer.step()
        return float(loss.detach())

    return step
