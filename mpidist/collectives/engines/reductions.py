"""Reductions: what the argument ``op`` means for a dtype.

Values of float16 and bfloat16 are sent and added as float32, and the sum is rounded once. ``mean``
is a sum that each rank divides at the end. ``min`` and ``max`` propagate NaN, as NumPy's do.
"""

from __future__ import annotations

import math
import warnings
from functools import cache, lru_cache
from itertools import product
from typing import NamedTuple

import numpy as np
from mpi4py import MPI
from mpi4py.util.dtlib import to_numpy_dtype

from ...arrays import device_of, work_dtype
from ...errors import ConfigError, nearest, shown

#: op name -> ufunc. Any binary ufunc that keeps its dtype may be passed instead of a name.
OPERATIONS: dict[str, np.ufunc] = {
    "sum": np.add,
    "mean": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "prod": np.multiply,
}

#: MPI's operations that have a name in `OPERATIONS`, and MPI's operations that have a ufunc in
#: NumPy.
_SAME = ((MPI.SUM, "sum"), (MPI.PROD, "prod"), (MPI.MIN, "min"), (MPI.MAX, "max"))
_IN_NUMPY = (
    (MPI.LAND, "LAND", "logical_and"), (MPI.BAND, "BAND", "bitwise_and"),
    (MPI.LOR, "LOR", "logical_or"), (MPI.BOR, "BOR", "bitwise_or"),
    (MPI.LXOR, "LXOR", "logical_xor"), (MPI.BXOR, "BXOR", "bitwise_xor"),
    (MPI.MINLOC, "MINLOC", ""), (MPI.MAXLOC, "MAXLOC", ""),
    (MPI.REPLACE, "REPLACE", ""), (MPI.NO_OP, "NO_OP", ""),
)  # fmt: skip

#: NumPy's ufuncs that are associative and commutative; any other ufunc is tested on some values.
GOOD = (
    "add", "multiply", "minimum", "maximum", "fmin", "fmax", "hypot", "logaddexp", "logaddexp2",
    "gcd", "lcm", "logical_and", "logical_or", "logical_xor", "bitwise_and", "bitwise_or",
    "bitwise_xor",
)  # fmt: skip
_GOOD = frozenset(getattr(np, name) for name in GOOD)
_PREDEFINED = {OPERATIONS[name]: op for op, name in _SAME}


class Reduction(NamedTuple):
    """An operation on elements of one dtype, with its ufunc and the dtype in which it computes."""

    name: str
    ufunc: np.ufunc
    mean: bool
    dtype: np.dtype
    work: np.dtype


def known(op):
    """Return `op` as a ufunc or as a name such as "sum".

    "average" becomes "mean", and MPI.SUM, PROD, MIN and MAX become the names of these operations.

    Raises
    ------
    ConfigError
        `op` is an MPI operation other than SUM, PROD, MIN and MAX, or not an operation at all.
    """
    if isinstance(op, np.ufunc):
        return op
    if isinstance(op, str):
        return "mean" if op == "average" else op
    if not isinstance(op, MPI.Op):
        named = getattr(op, "__name__", None) or shown(op)
        raise ConfigError(f"op {named} of type {type(op).__name__} is not known; {_expected()}")
    for same, name in _SAME:
        if op == same:
            return name
    for other, name, ufunc in _IN_NUMPY:
        if op == other:
            cure = f"pass np.{ufunc}" if ufunc else _expected()
            raise ConfigError(f"op MPI.{name} is not supported; {cure}")
    raise ConfigError(f"op is an MPI.Op of your own, which only MPI can call; {_expected()}")


def _expected() -> str:
    return f"expected one of {', '.join(OPERATIONS)} or a binary NumPy ufunc"


def resolve(op, dtype: np.dtype) -> Reduction:
    """Return the `Reduction` for `op` on elements of `dtype`; ConfigError if it is impossible."""
    op = known(op)
    if isinstance(op, np.ufunc):
        return _resolve_ufunc(op, dtype)
    if op not in OPERATIONS:
        raise ConfigError(f"unknown op {shown(op)}; {_expected()}" + nearest(op, OPERATIONS))
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
    work = work_dtype(dtype)
    if problem := _objection(ufunc, work):
        raise ConfigError(f"op {ufunc.__name__!r} {problem.format(dtype=dtype)}")
    return Reduction(ufunc.__name__, ufunc, False, dtype, work)


@lru_cache(maxsize=256)  # the check calls the ufunc on many values
def _objection(ufunc: np.ufunc, work: np.dtype) -> str:
    """Return why `ufunc` cannot combine the values of many ranks; "" if it can combine them."""
    if ufunc.nin != 2 or ufunc.nout != 1 or ufunc.signature:
        return "is not a binary ufunc (two inputs, one output, element by element)"
    one = np.ones(1, work)
    try:
        result = ufunc(one, one).dtype
    except Exception:  # TypeError for a dtype that the ufunc does not take; others from user code
        return "does not map two {dtype} to one {dtype}"
    if result == np.dtype(object):
        return "returns Python objects, as those of np.frompyfunc do; numba.vectorize makes others"
    if result != work:
        return "does not map two {dtype} to one {dtype}"
    if ufunc not in _GOOD and not _order_is_free(ufunc, work):
        return (
            "is not associative and commutative, so ranks in another order would get another "
            f"result; these are: {', '.join(GOOD)}"
        )
    return ""


def _order_is_free(ufunc: np.ufunc, work: np.dtype) -> bool:
    """Whether `ufunc` gives the same result for a few test values in any order and grouping."""
    if work.kind == "b":
        values = np.array([False, True])
    else:
        least = 0 if work.kind == "u" else -3
        values = np.array([least, 0, 1, 2, 3, 5, 8]).astype(work)
        if work.kind not in "iu":
            values = np.append(values, np.array([0.75, -1.5, 6.25]).astype(work))
    a, b, c = np.array(list(product(values, repeat=3)), work).T
    try:
        with np.errstate(all="ignore"), warnings.catch_warnings(action="ignore"):
            swapped = _alike(ufunc(a, b), ufunc(b, a))
            return swapped and _alike(ufunc(ufunc(a, b), c), ufunc(a, ufunc(b, c)))
    except Exception:  # from user code
        return False


def _alike(first: np.ndarray, second: np.ndarray) -> bool:
    if first.dtype.kind not in "fc":
        return bool(np.array_equal(first, second))
    close = math.sqrt(np.finfo(first.dtype).eps)
    return bool(np.allclose(first, second, rtol=close, atol=close, equal_nan=True))


def device_safe(reduction: Reduction, native: bool) -> bool:
    """Whether device memory can be reduced without a copy to the host."""
    if native:
        return native_op(reduction).is_predefined
    return reduction.ufunc in OPERATIONS.values()


def native_op(reduction: Reduction) -> MPI.Op:
    """Return the MPI operation that computes `reduction`."""
    ufunc = reduction.ufunc
    if ufunc in (np.add, np.multiply) or (reduction.work.kind in "iu" and ufunc in _PREDEFINED):
        return _PREDEFINED[ufunc]
    return _operation(ufunc)


@cache
def _operation(ufunc: np.ufunc) -> MPI.Op:
    """Return a new MPI operation that calls `ufunc` on the operands."""

    def apply(source, target, datatype):
        dtype = to_numpy_dtype(datatype)
        into = np.frombuffer(target, dtype)
        ufunc(np.frombuffer(source, dtype), into, out=into)

    return MPI.Op.Create(apply, commute=True)


def finish_mean(reduction: Reduction, work: np.ndarray, total) -> None:
    """If the operation is ``mean``, divide the sum in place by `total`; otherwise do nothing."""
    if reduction.mean:
        with device_of(work):
            np.divide(work, work.dtype.type(total), out=work)


# ------------------------------------------------------------------------------------- weights


def weight_sums(weight, rank: int) -> np.ndarray:
    """Return four numbers to sum over the ranks, so that all ranks learn of an invalid weight.

    They are (weight, 0, 0, 0) for a valid weight, and (0, 1, rank, weight) for a weight that is
    negative, not finite or no number.
    """
    try:
        value = float(weight)
    except (TypeError, ValueError, OverflowError):
        value = math.nan
    good = 0 <= value < math.inf
    return np.array([value, 0.0, 0.0, 0.0] if good else [0.0, 1.0, rank, value])


def total_weight(sums: np.ndarray) -> float:
    """Return the sum of the weights of all ranks.

    `sums` is the sum over the ranks of the arrays that `weight_sums` has returned.

    Raises
    ------
    ConfigError
        If the weight of some rank is below 0 or not finite, or the sum of all weights is zero or
        not finite.
    """
    total, bad, rank, value = (float(each) for each in sums)
    if bad:
        who = f"rank {rank:.0f}: weight={value}" if bad == 1 else f"the weights of {bad:.0f} ranks"
        raise ConfigError(f"{who}; expected finite numbers of 0 or more")
    if not 0 < total < math.inf:
        raise ConfigError(f"the weights of all ranks add up to {total}; expected more than 0")
    return total
