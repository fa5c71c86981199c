"""The only door to PyTorch: its dtypes, its modules, and tensors that NumPy has no type for.

mpidist never imports torch: whoever has a tensor has imported it. NumPy knows float8 and bfloat16
by the package ml_dtypes alone, and neither DLPack nor the array protocol carries them between the
two, so such tensors cross as integers of the same bits.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from .errors import ConfigError


def dtype_of(kind) -> np.dtype:
    """Return the dtype that is meant: what NumPy takes, ``"bfloat16"``, ``torch.bfloat16``.

    Raises
    ------
    TypeError
        What names no dtype.
    ConfigError
        A type beyond NumPy's, where ml_dtypes is not installed.
    """
    try:
        return np.dtype(kind)
    except TypeError:
        name = str(kind).removeprefix("torch.")
    if not name.startswith(("bfloat16", "float8")):
        return np.dtype(name)
    if (found := extended_dtype(name)) is None:
        raise ConfigError(
            f"{name} needs the package ml_dtypes, by which NumPy knows it: pip install ml_dtypes"
        )
    return found


def extended_dtype(name: str) -> np.dtype | None:
    """Return a dtype of ml_dtypes by its name, or None; imported only when a name is asked for."""
    try:
        import ml_dtypes
    except ImportError:
        return None
    kind = getattr(ml_dtypes, name, None)
    if not isinstance(kind, type) or not issubclass(kind, np.generic):
        return None
    return np.dtype(kind)


def shared_bits(x) -> np.ndarray | None:
    """Return a torch tensor of bfloat16 or float8 as an array over its memory; None for others.

    Not where torch itself would not share it: on a device, or when it requires a gradient.
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
    """Return the torch tensor over the memory of an array, host or device."""
    torch = sys.modules["torch"]
    if array.dtype.kind != "V":
        return torch.from_dlpack(array)
    bits = array.view(np.int16 if array.itemsize == 2 else np.uint8)
    return torch.from_dlpack(bits).view(getattr(torch, array.dtype.name))


def is_module(x) -> bool:
    """Whether `x` names parameters and buffers as a ``torch.nn.Module`` does."""
    return all(callable(getattr(x, f"named_{kind}", None)) for kind in ("parameters", "buffers"))


def tensors_of(module, *, buffers: bool = True) -> dict[str, Any]:
    """Return name -> tensor of all parameters and buffers, tied ones once, without history.

    Raises ConfigError for one that has no shape yet.
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
