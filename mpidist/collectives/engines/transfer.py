"""Shared machinery of the collectives other than allreduce: cached programs, lengths, roots."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable, Sequence

import numpy as np
from mpi4py import MPI

from ...arrays import as_array, copy_into, host_empty, is_writable, mpi_empty
from ...errors import ConfigError, shown
from ...partition import BlockPartition
from ...runtime.agreement.mismatch import Signature
from ...runtime.context import Context
from ..plan import CachedPlan, remember
from ..schedules import algorithms
from .executor import Program
from .reductions import Reduction, device_safe

#: Up to so many counts are told in full where ranks differ in them; of more, their digest.
_SHOWN = 32


def prepared(
    context: Context,
    signature: Signature,
    build: Callable,
    problem,
    dtype,
    ufunc,
    *,
    agreed: bool = False,
    **root,
) -> CachedPlan:
    """Return the cached program of an operation; made, and agreed on, when first needed.

    Collective when made, unless the ranks have `agreed` already. `build` is called as
    ``build(size, rank, problem[, itemsize], **root)``.
    """
    # Ranks compare names. Here two ufuncs of one name are two operations.
    key = (signature, ufunc)
    plan = context.plans.get(key)
    if plan is None:
        if not agreed:
            context.begin_agreed(signature, "first call")
        if isinstance(problem, np.ndarray):
            problem = problem.tolist()
        if root:
            steps = build(context.size, context.rank, problem, **root)
        else:
            steps = build(context.size, context.rank, problem, np.dtype(dtype).itemsize)
        n = sum(problem) if isinstance(problem, Sequence) else problem
        program = Program(context, steps, n, np.dtype(dtype), ufunc)
        plan = CachedPlan(context, signature, program)
        remember(context, key, plan)
    return plan


def packed_copy(x, reduction: Reduction, native: bool):
    """Return a copy of `x` as a flat vector of the work dtype that MPI can be given."""
    make = mpi_empty if device_safe(reduction, native) else host_empty
    work = make(x.size, reduction.work, like=x)
    copy_into(work.reshape(x.shape), x)
    return work


def block_lengths(context: Context, signature: Signature, counts, mine: int) -> np.ndarray:
    """Return the length of every rank's block, where this rank's is `mine`.

    Collective, polled, where `counts` is None: then the ranks tell each other, which proves that
    they begin the same operation. Given counts are checked: ConfigError where they do not say
    `mine` for this rank.
    """
    if counts is None:
        return _exchange(context, signature, mine)
    lengths = check_counts(counts, None, context.size)
    if lengths[context.rank] != mine:
        raise ConfigError(
            f"rank {context.rank} has a block of {mine} rows, "
            f"counts say {lengths[context.rank]}; counts[rank] must be len(x)"
        )
    return lengths


def _exchange(context: Context, signature: Signature, length: int) -> np.ndarray:
    lengths = np.zeros(context.size, np.int64)
    lengths[context.rank] = length
    if context.size > 1:
        extra = f"lengths, {signature.extra}" if signature.extra else "lengths"
        signature = signature._replace(extra=extra)
        build = algorithms.ALLREDUCE["butterfly"]
        plan = prepared(context, signature, build, context.size, lengths.dtype, np.add, agreed=True)
        plan.run(lengths)
    return lengths


def from_root(context: Context, signature: Signature, values: np.ndarray, root: int) -> np.ndarray:
    """Broadcast a few int64 values from the root. Collective, polled."""
    context.begin_agreed(signature, "facts")
    if context.size > 1:
        context.wait(context.control.Ibcast([values, MPI.INT64_T], root).Test)
    return values


def check_counts(counts, total: int | None, size: int) -> np.ndarray:
    """Return `counts` as int64; ConfigError unless they are `size` lengths.

    Where `total` is given they must add up to it.
    """
    try:
        lengths = np.asarray(counts)
    except ValueError:
        lengths = np.empty(0)
    if lengths.ndim != 1 or (lengths.dtype.kind not in "iu" and lengths.size):
        raise ConfigError(f"counts={shown(counts)}: expected {size} whole numbers")
    lengths = lengths.astype(np.int64)
    if len(lengths) != size or (lengths < 0).any():
        raise ConfigError(f"{counts_text(lengths)}: expected {size} lengths of 0 or more")
    if total is not None and lengths.sum() != total:
        raise ConfigError(
            f"{counts_text(lengths)} add up to {lengths.sum()}, expected {total} rows"
        )
    return lengths


def equal_counts(rows: int, size: int) -> np.ndarray:
    """Return the lengths of blocks that are as equal as possible."""
    return np.array(BlockPartition(rows, size).counts(), np.int64)


def counts_text(lengths: np.ndarray) -> str:
    """Write counts for a signature, equal only for equal ones: many of them by a digest."""
    if len(lengths) <= _SHOWN:
        return f"counts=({', '.join(map(str, lengths.tolist()))})"
    digest = hashlib.blake2b(lengths.tobytes(), digest_size=8).hexdigest()
    first = ", ".join(map(str, lengths[:3].tolist()))
    return f"counts=({first}, ... {len(lengths)} of them, {digest})"


def bounds_at(lengths: np.ndarray, rank: int) -> tuple[int, int]:
    """Return where block `rank` begins and ends."""
    start = int(lengths[:rank].sum())
    return start, start + int(lengths[rank])


def check_root(root: int, size: int) -> int:
    """Return `root` as a plain integer; ConfigError where it is no rank."""
    try:
        number = operator.index(root)
    except TypeError:
        number = -1
    if not 0 <= number < size:
        raise ConfigError(f"root={shown(root)}: expected a rank from 0 to {size - 1}")
    return number


def check_out(out, dtype: np.dtype, shape: tuple | None = None):
    """Return `out` as an array that can take a result; ConfigError where it cannot.

    None stays None. Without a `shape` only dtype and memory are looked at.
    """
    if out is None:
        return None
    array = as_array(out)
    fits = shape is None or array.shape == tuple(shape)
    if not fits or array.dtype != dtype or not is_writable(array):
        expected = "a writable array" if shape is None else f"a writable array of shape {shape}"
        state = "" if is_writable(array) else ", read-only"
        raise ConfigError(
            f"out has shape {array.shape} and dtype {array.dtype}{state}; expected {expected} "
            f"and dtype {dtype}"
        )
    return out
