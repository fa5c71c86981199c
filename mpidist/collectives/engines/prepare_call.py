"""Find prepared operations and check arguments, for all collectives except allreduce."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable

import numpy as np

from ...arrays import as_array, copy_into, host_empty, is_writable, mpi_empty
from ...errors import ConfigError, shown
from ...partition import BlockPartition
from ...runtime.agreement.mismatch import Signature
from ...runtime.context import Context
from ..plan import CachedPlan, remember
from ..schedules import algorithms
from .executor import Program
from .reductions import Reduction, device_safe

#: An error about differing counts shows the counts if there are at most this many, and otherwise a
#: digest of the counts.
_SHOWN = 32


def prepared(
    context: Context,
    signature: Signature,
    build: Callable,
    problem,
    dtype,
    ufunc=np.add,
    *,
    agreed: bool = False,
    **root,
) -> CachedPlan:
    """Return a prepared operation from the cache; if it is not there yet, make it.

    Making it is collective, and the ranks compare `signature`, which describes the operation,
    unless `agreed` says that they have done so. The function `build` returns the steps of one rank;
    the arguments are ``(size, rank, problem, itemsize)``, or ``(size, rank, problem, **root)`` if
    `root` is given. `problem` is the length of the vector, or a list of the lengths of its blocks.
    """
    # Ranks compare the names of ufuncs, but two ufuncs may have the same name, so the key has the
    # ufunc itself.
    key = (signature, ufunc)
    plan = context.plans.get(key)
    if plan is None:
        if not agreed:
            context.begin_agreed(signature, "first call")
        if isinstance(problem, np.ndarray):
            problem = problem.tolist()
        itemsize = () if root else (np.dtype(dtype).itemsize,)
        steps = build(context.size, context.rank, problem, *itemsize, **root)
        n = sum(problem) if isinstance(problem, list) else problem
        program = Program(context, steps, n, np.dtype(dtype), ufunc)
        plan = CachedPlan(context, signature, program)
        remember(context, key, plan)
    return plan


def packed_copy(x, reduction: Reduction, native: bool):
    """Return a copy of `x` as a 1-D vector that MPI can send, of the dtype used for additions."""
    make = mpi_empty if device_safe(reduction, native) else host_empty
    work = make(x.size, reduction.work, like=x)
    copy_into(work.reshape(x.shape), x)
    return work


def block_lengths(context: Context, signature: Signature, counts, mine: int) -> np.ndarray:
    """Return the lengths of all ranks' blocks, given the length `mine` of this rank's block.

    If `counts` is None, the function is collective: the ranks exchange their lengths. Raises
    ConfigError if ``counts[rank]`` is not `mine`.
    """
    if counts is not None:
        lengths = check_counts(counts, None, context.size)
        if lengths[context.rank] != mine:
            raise ConfigError(
                f"rank {context.rank} has a block of {mine} rows, "
                f"counts say {lengths[context.rank]}; counts[rank] must be len(x)"
            )
        return lengths
    lengths = np.zeros(context.size, np.int64)
    lengths[context.rank] = mine
    if context.size > 1:
        extra = f"lengths, {signature.extra}" if signature.extra else "lengths"
        signature = signature._replace(extra=extra)
        build = algorithms.ALLREDUCE["butterfly"]
        prepared(context, signature, build, context.size, lengths.dtype, agreed=True).run(lengths)
    return lengths


def check_counts(counts, total: int | None, size: int) -> np.ndarray:
    """Return `counts` as int64; raise ConfigError unless they are `size` valid lengths.

    If `total` is given, the counts must add up to it. If `counts` is None, the function divides
    `total` rows into `size` blocks as evenly as possible, and returns the lengths of the blocks.
    """
    if counts is None and total is not None:
        return np.array(BlockPartition(total, size).counts(), np.int64)
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


def counts_text(lengths: np.ndarray) -> str:
    """Return the `lengths` of blocks as text that ranks can compare; for long lists, a digest."""
    if len(lengths) <= _SHOWN:
        return f"counts=({', '.join(map(str, lengths.tolist()))})"
    digest = hashlib.blake2b(lengths.tobytes(), digest_size=8).hexdigest()
    first = ", ".join(map(str, lengths[:3].tolist()))
    return f"counts=({first}, ... {len(lengths)} of them, {digest})"


def bounds_at(lengths: np.ndarray, rank: int) -> tuple[int, int]:
    """Return the indices of the first row of block `rank` and of the first row after it."""
    return int(lengths[:rank].sum()), int(lengths[: rank + 1].sum())


def check_root(root: int, size: int) -> int:
    """Return `root` as a plain integer; raise ConfigError if it is not a rank."""
    try:
        number = operator.index(root)
    except TypeError:
        number = -1
    if not 0 <= number < size:
        raise ConfigError(f"root={shown(root)}: expected a rank from 0 to {size - 1}")
    return number


def check_out(out, dtype: np.dtype, shape: tuple | None = None) -> None:
    """Raise ConfigError if `out` is given and the result cannot be written into it."""
    if out is None:
        return
    array = as_array(out)
    fits = shape is None or array.shape == tuple(shape)
    if not fits or array.dtype != dtype or not is_writable(array):
        expected = "a writable array" if shape is None else f"a writable array of shape {shape}"
        state = "" if is_writable(array) else ", read-only"
        raise ConfigError(
            f"out has shape {array.shape} and dtype {array.dtype}{state}; expected {expected} "
            f"and dtype {dtype}"
        )
