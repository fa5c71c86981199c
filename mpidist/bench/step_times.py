"""`mpidist bench step`: a whole training step on all ranks, compared with PyTorch's DDP over gloo.

Two more are measured: PyTorch with `md.attach`, which is the fair comparison for DDP, and PyTorch
without any exchange, which is the lower limit.

The same layers, the same initial weights, the same batches, SGD with momentum; one BLAS thread per
rank for both. Steps of both take turns in blocks, the slowest rank's time counts, and the losses
of both must agree, or the two would not do the same work.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
from mpi4py import MPI

from ..errors import MpidistError
from ..gradients.exchange import Gradients
from ..gradients.torch_module import Attached, attach
from ..models import lenet, mlp
from ..optim import momentum

#: name -> (model of ours, shape of a sample, samples of all ranks)
MODELS: dict[str, tuple[Callable, tuple[int, ...], int]] = {
    "lenet 8x8": (lambda: lenet([1, 8, 8], channels=[32, 64]), (1, 8, 8), 64),
    "lenet 28x28": (lambda: lenet([1, 28, 28]), (1, 28, 28), 64),
    "mlp 784-512-256-10": (lambda: mlp([784, 512, 256, 10]), (784,), 64),
}
RATE, MOMENTUM = 0.01, 0.9
#: Steps that are timed together.
BLOCK = 10


def measure(comm, name: str, *, rounds: int, torch: bool) -> dict:
    """Return a row for one model: microseconds per step of each. Collective."""
    make, shape, batch = MODELS[name]
    local = max(1, batch // comm.size)
    rng = np.random.default_rng((0, comm.rank))
    x = rng.standard_normal((local, *shape)).astype(np.float32)
    y = rng.integers(0, 10, local)
    model = make()
    steps = {"ours": _ours(comm, model, (x, y))}
    if torch:
        steps["torch"] = _ddp(model, x, y)
        steps["alone"] = _steps(_in_torch(model), x, y, lambda: None)
        steps["attached"], attached = _attached(comm, model, x, y)
    seconds = {who: np.empty(rounds) for who in steps}
    losses = {who: [step() for _ in range(3)] for who, step in steps.items()}
    for who, told in losses.items():
        if who != "alone" and not np.allclose(losses["ours"], told, rtol=1e-3):
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
    row = {
        "model": name,
        "ranks": comm.size,
        "global_batch": local * comm.size,
        "step_us": round(float(np.median(seconds["ours"])) * 1e6, 1),
    }
    if torch:
        row["torch_us"] = round(float(np.median(seconds["torch"])) * 1e6, 1)
        row["ratio"] = round(float(np.median(seconds["torch"] / seconds["ours"])), 3)
        row["attached_us"] = round(float(np.median(seconds["attached"])) * 1e6, 1)
        row["over_attached"] = round(float(np.median(seconds["torch"] / seconds["attached"])), 3)
        row["alone_us"] = round(float(np.median(seconds["alone"])) * 1e6, 1)
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


def _ddp(model, x, y) -> Callable[[], float]:
    """Steps of the same model in PyTorch, wrapped in DDP. Collective."""
    from torch import nn

    wrapped = nn.parallel.DistributedDataParallel(_in_torch(model))
    return _steps(wrapped, x, y, lambda: None)


def _attached(comm, model, x, y) -> tuple[Callable[[], float], Attached]:
    """Steps of the same model in PyTorch, averaged by us. Collective."""
    module = _in_torch(model)
    attached = attach(comm, module)
    return _steps(module, x, y, attached.average), attached


def _in_torch(model):
    """Return the same model in PyTorch, with our weights."""
    from torch import nn

    layers: list = []
    for layer in model.layers:
        kind = type(layer).__name__
        if kind == "Convolution":
            weight = model.parameters[f"{layer.name}.weight"]
            made = nn.Conv2d(weight.shape[1], weight.shape[0], layer.kernel, padding=layer.pad)
            _set(made, weight, model.parameters[f"{layer.name}.bias"])
            layers.append(made)
        elif kind == "Dense":
            weight = model.parameters[f"{layer.name}.weight"]
            made = nn.Linear(*weight.shape)
            _set(made, weight.T, model.parameters[f"{layer.name}.bias"])
            layers.append(made)
        elif kind == "MaxPool":
            layers.append(nn.MaxPool2d(2))
        elif kind == "Relu":
            layers.append(nn.ReLU())
        elif kind in ("Features", "Rows"):
            layers.append(nn.Flatten())
    return nn.Sequential(*layers)


def _steps(module, x, y, average: Callable[[], None]) -> Callable[[], float]:
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


def _set(made, weight, bias) -> None:
    import torch

    with torch.no_grad():
        made.weight.copy_(torch.from_numpy(np.ascontiguousarray(weight)))
        made.bias.copy_(torch.from_numpy(np.ascontiguousarray(bias)))
