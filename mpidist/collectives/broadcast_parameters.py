"""``md.broadcast_parameters``: every rank gets the root's values of a whole model.

    description of rank 0:  w (784, 128) float32, b (128,) float32, ...
    agreement               an allreduce of a few integers compares digests of the descriptions
    messages                [ b | b2 | scale | ... ]  small tensors packed, up to 4 MiB
                            [ w ]                     large tensors without a copy

If the ranks' descriptions differ, or one rank has an error, all ranks raise an error.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import numpy as np

from ..arrays import copy_into, element_name, is_writable, named_arrays
from ..errors import ConfigError, MismatchError
from ..partition import bounds_of
from ..runtime.agreement.mismatch import rank_list
from ..runtime.agreement.run_on_all import run_on_all
from ..runtime.agreement.tell_others import tells
from ..runtime.context import of
from .broadcast import broadcast
from .engines.prepare_call import check_root

#: The most bytes of a message of packed tensors. A tensor of this many bytes or more is sent alone.
PACK = 4 << 20

_ALIGN = 64  # bytes: each tensor in a pack begins at a cache line


@tells
def broadcast_parameters(comm, params, *, root=0):
    """Give every rank the root's values of all `params`, in place; returns `params`.

    Collective over `comm`.

    Parameters
    ----------
    params : mapping of name -> array, or a model
        NumPy, CuPy or DLPack arrays, on the host or a device. A model is either an object with the
        attribute ``parameters`` (and perhaps ``state``), or a torch module, whose parameters and
        buffers are sent.
    root : int
        The rank whose values all ranks get.

    Raises
    ------
    ConfigError
        On all ranks, if `params` is not a mapping of arrays, or an array cannot be written; the
        message names the tensor and the rank.
    MismatchError
        On all ranks, if they differ in names, shapes or dtypes; the message names the tensor.
    """
    named: list[tuple[str, Any]] = []

    def describe() -> list[str]:
        check_root(root, comm.size)
        found, problem = named_arrays(params)
        for name, x in found:
            if comm.rank != root and not is_writable(x):
                problem = f"{name!r} is read-only; pass a writable array, such as numpy.array(x)"
        if problem:
            raise ConfigError(problem)
        named.extend(found)
        lines = [f"{name!r}\t{x.shape} {element_name(x.dtype)}" for name, x in found]
        return [f"root\t{operator.index(root)}", *lines]

    def same(everyone: list[list[str]]) -> None:
        differing = _difference(everyone, operator.index(root))
        if differing is not None:
            raise MismatchError(f"broadcast_parameters: {differing}")

    with of(comm).call("broadcast_parameters"):
        run_on_all(comm, "broadcast_parameters", describe, same, if_differs=True)
        if comm.size > 1:
            for group in _packs([x for _, x in named]):
                _broadcast_group(comm, group, root)
    return params


def _difference(everyone: list[list[str]], root: int) -> str | None:
    """Return a text on the first tensor that differs from the root's, or None.

    `everyone` has the names, shapes and dtypes of each rank's tensors.
    """
    other = next((lines for lines in everyone if lines != everyone[root]), None)
    if other is None:
        return None
    odd = [rank for rank, lines in enumerate(everyone) if lines == other]
    got, expected = (dict(line.split("\t") for line in lines) for lines in (other, everyone[root]))
    label = next(k for k in {**expected, **got} if got.get(k) != expected.get(k))
    here, there = (f"{label} {f[label]}" if label in f else f"no {label}" for f in (got, expected))
    return (
        f"{rank_list(odd)} has {here}, rank {root} (root) has {there}; all ranks must give the "
        "same names, shapes and dtypes"
    )


def _packs(arrays: list) -> Iterator[list]:
    """Group arrays into messages: large arrays alone, small arrays together up to `PACK` bytes."""
    group: list = []
    room = PACK
    for x in arrays:
        if x.nbytes >= PACK:
            yield [x]
            continue
        if x.nbytes > room:
            yield group
            group, room = [], PACK
        group.append(x)
        room -= _padded(x)
    if group:
        yield group


def _padded(x) -> int:
    """Return how many bytes, with padding, `x` takes in a message of several arrays."""
    return -(-x.nbytes // _ALIGN) * _ALIGN


def _broadcast_group(comm, group: list, root: int) -> None:
    if len(group) == 1:
        broadcast(comm, group[0], root=root)
        return
    *starts, size = bounds_of([_padded(x) for x in group])
    pack = np.empty(size, np.uint8)
    spans = [pack[start : start + x.nbytes] for start, x in zip(starts, group, strict=True)]
    views = [span.view(x.dtype).reshape(x.shape) for span, x in zip(spans, group, strict=True)]
    if comm.rank == root:
        for view, x in zip(views, group, strict=True):
            copy_into(view, x)
    broadcast(comm, pack, root=root)
    if comm.rank != root:
        for view, x in zip(views, group, strict=True):
            copy_into(x, view)
