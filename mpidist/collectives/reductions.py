"""Operations and dtypes: what ``op`` means for which elements. Local, no MPI calls.

Sums of float16 and bfloat16 travel and add as float32 and are rounded once. ``mean`` is a sum
divided at the end, on every rank from the same bits. ``min`` and ``max`` propagate NaN (NumPy's
do; MPI's own MIN and MAX may not, so the native path gets an operation made from NumPy's).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from mpi4py import MPI
from mpi4py.util.dtlib import to_numpy_dtype

from ..arrays import work_dtype
from ..errors import ConfigError, nearest

#: op name -> ufunc. Any binary ufunc that keeps its dtype may be passed instead of a name.
OPERATIONS: dict[str, np.ufunc] = {
    "sum": np.add,
    "mean": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "prod": np.multiply,
}

_MADE: dict[np.ufunc, MPI.Op] = {}


class Reduction(NamedTuple):
    """An operation on elements of one dtype, ready to run."""

    name: str
    ufunc: np.ufunc
    mean: bool
    dtype: np.dtype
    work: np.dtype


def resolve(op, dtype: np.dtype) -> Reduction:
    """Look up `op` for elements of `dtype`. Local; raises ConfigError for what has no meaning."""
    if isinstance(op, np.ufunc):
        return _resolve_ufunc(op, dtype)
    if op not in OPERATIONS:
        raise ConfigError(
            f"unknown op {op!r}; expected one of {', '.join(OPERATIONS)} or a binary NumPy ufunc"
            + nearest(str(op), OPERATIONS)
        )
    kind = "f" if dtype.name == "bfloat16" else dtype.kind
    if kind not in "fciub":
        raise ConfigError(f"cannot reduce elements of dtype {dtype}; convert them to numbers first")
    if op == "mean" and kind in "iub":
        raise ConfigError(
            f"op 'mean' of dtype {dtype} would have to round; use op='sum' and divide, "
            "or convert to float first"
        )
    if kind == "b" and op not in ("min", "max"):
        raise ConfigError(
            f"op {op!r} of bool is not defined; use 'max' (any), 'min' (all) or convert to integers"
        )
    if kind == "c" and op in ("min", "max"):
        raise ConfigError(f"op {op!r} of {dtype}: complex numbers have no order")
    return Reduction(op, OPERATIONS[op], op == "mean", dtype, work_dtype(dtype))


def _resolve_ufunc(ufunc: np.ufunc, dtype: np.dtype) -> Reduction:
    if dtype.hasobject:
        raise ConfigError(f"elements of dtype {dtype} are Python objects; convert them to numbers")
    if ufunc.nin != 2 or ufunc.nout != 1:
        raise ConfigError(f"op {ufunc.__name__!r} is not a binary ufunc (two inputs, one output)")
    work = work_dtype(dtype)
    one = np.ones(1, work)
    try:
        keeps = ufunc(one, one).dtype == work
    except TypeError:
        keeps = False
    if not keeps:
        raise ConfigError(f"op {ufunc.__name__!r} does not map two {dtype} to one {dtype}")
    return Reduction(ufunc.__name__, ufunc, False, dtype, work)


def device_safe(reduction: Reduction, native: bool) -> bool:
    """Whether device memory may be reduced where it lies. Local.

    Not by an operation that MPI calls back for: it would be given device pointers; nor by a ufunc
    that cupy may not have.
    """
    if native:
        return native_op(reduction).is_predefined
    return reduction.ufunc in OPERATIONS.values()


def native_op(reduction: Reduction) -> MPI.Op:
    """Return the MPI operation that computes `reduction`; made once per ufunc and process."""
    if reduction.ufunc is np.add:
        return MPI.SUM
    if reduction.ufunc is np.multiply:
        return MPI.PROD
    if reduction.work.kind in "iu":
        if reduction.ufunc is np.minimum:
            return MPI.MIN
        if reduction.ufunc is np.maximum:
            return MPI.MAX
    if reduction.ufunc not in _MADE:
        _MADE[reduction.ufunc] = MPI.Op.Create(_callback(reduction.ufunc), commute=True)
    return _MADE[reduction.ufunc]


def _callback(ufunc: np.ufunc):
    def apply(source, target, datatype):
        dtype = to_numpy_dtype(datatype)
        into = np.frombuffer(target, dtype)
        ufunc(np.frombuffer(source, dtype), into, out=into)

    return apply


def finish_mean(reduction: Reduction, work: np.ndarray, total) -> None:
    """Divide a sum by `total` in place, for ``mean``; nothing for other operations."""
    if reduction.mean:
        np.divide(work, work.dtype.type(total), out=work)
