"""All code that uses PyTorch: dtypes, modules, and bfloat16 and float8 tensors of PyTorch.

mpidist never imports torch: a program that passes a torch tensor has imported torch itself. NumPy
and torch cannot exchange bfloat16 and float8 values directly, so they exchange integers with the
same bits.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from .errors import ConfigError


def dtype_of(kind) -> np.dtype:
    """Return the NumPy dtype for a dtype of NumPy or torch, or for a name such as "bfloat16".

    Raises
    ------
    TypeError
        If `kind` is not the name of a dtype.
    ConfigError
        If the dtype needs the package ml_dtypes, which is not installed.
    """
    try:
        return np.dtype(kind)
    except TypeError:
        name = str(kind).removeprefix("torch.")
    if not name.startswith(("bfloat16", "float8")):
        return np.dtype(name)
    if (found := extended_dtype(name)) is None:
        raise ConfigError(
            f"{name} needs the package ml_dtypes, which adds it to NumPy: pip install ml_dtypes"
        )
    return found


def extended_dtype(name: str) -> np.dtype | None:
    """Return the dtype `name` of the package ml_dtypes, or None if there is no such dtype."""
    try:
        import ml_dtypes
    except ImportError:
        return None
    kind = getattr(ml_dtypes, name, None)
    known = isinstance(kind, type) and issubclass(kind, np.generic)
    return np.dtype(kind) if known else None


def shared_bits(x) -> np.ndarray | None:
    """Return an array that shares the memory of a bfloat16 or float8 torch tensor, or None.

    The result is None for other dtypes, for a tensor on a device, and for a tensor that requires a
    gradient.
    """
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(x, torch.Tensor) or x.requires_grad or not x.is_cpu:
        return None
    name = str(x.dtype).removeprefix("torch.")
    if not name.startswith(("bfloat16", "float8")):
        return None
    bits = x.view(torch.int16 if x.element_size() == 2 else torch.uint8)
    return bits.numpy().view(dtype_of(name))


def tensor_over(array):
    """Return a torch tensor that shares the memory of a host or device array."""
    torch = sys.modules["torch"]
    if array.dtype.kind != "V":
        return torch.from_dlpack(array)
    bits = array.view(np.int16 if array.itemsize == 2 else np.uint8)
    return torch.from_dlpack(bits).view(getattr(torch, array.dtype.name))


def finish_work(tensor) -> None:
    """Wait until the GPU has computed a torch tensor; do nothing for a tensor on the host."""
    if getattr(tensor, "is_cuda", False):
        sys.modules["torch"].cuda.current_stream(tensor.device).synchronize()


def is_module(x) -> bool:
    """Return whether `x` has the methods of a ``torch.nn.Module`` for parameters and buffers."""
    return all(callable(getattr(x, f"named_{kind}", None)) for kind in ("parameters", "buffers"))


def tensors_of(module, *, buffers: bool = True) -> dict[str, Any]:
    """Return a dict with the name and the detached tensor of each parameter and buffer of a module.

    A tensor that has several names appears once. Raises ConfigError for a tensor of a lazy layer,
    which has no shape yet.
    """
    tensors = {}
    for name, x in (*module.named_parameters(), *(module.named_buffers() if buffers else ())):
        try:
            tensors[name] = x.detach()
        except ValueError as error:
            raise ConfigError(
                f"{name!r} belongs to a lazy layer and has no shape yet; pass a batch through the "
                "module first"
            ) from error
    return tensors
