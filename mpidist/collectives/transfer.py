"""Shared machinery of the collectives other than allreduce: cached programs, lengths, roots."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence

import numpy as np
from mpi4py import MPI

from ..arrays import copy_into, host_empty, mpi_empty
from ..context import Context
from ..errors import ConfigError
from ..mismatch import Signature
from .executor import Program
from .plans import remember
from .reductions import Reduction, device_safe


class Prepared:
    """A program in the plan cache."""

    bound = 0

    def __init__(self, context: Context, program: Program):
        self.context, self.program, self.seen = context, program, 1
        self.runs = context.count(program.counters)

    def close(self) -> None:
        """Nothing to free but a place: scratch is memory of Python's."""
        self.context.uncount(self.runs)


def prepared(
    context: Context, signature: Signature, build: Callable, problem, dtype, ufunc, **root
):
    """Return the cached program of an operation; made, and agreed on, when first needed.

    Collective when made. `build` is called as ``build(size, rank, problem[, itemsize], **root)``.
    """
    plan = context.plans.get(signature)
    if plan is None:
        context.begin_agreed(signature, "first call")
        if root:
            steps = build(context.size, context.rank, problem, **root)
        else:
            steps = build(context.size, context.rank, problem, np.dtype(dtype).itemsize)
        n = sum(problem) if isinstance(problem, Sequence) else problem
        plan = Prepared(context, Program(steps, n, np.dtype(dtype), ufunc))
        remember(context, signature, plan)
    return plan


def packed_copy(x, reduction: Reduction, native: bool):
    """Return a copy of `x` as a flat vector of the work dtype that MPI can be given. Local."""
    make = mpi_empty if device_safe(reduction, native) else host_empty
    work = make(x.size, reduction.work, like=x)
    copy_into(work.reshape(x.shape), x)
    return work


def run_program(context: Context, signature: Signature, plan: Prepared, vector) -> None:
    """Run a prepared program on a flat vector, in place, and wait. Collective."""
    number = context.begin(signature, plan.runs)
    run = plan.program.start(context.data, vector, context.tag(signature, number))
    context.wait(run.test)


def block_lengths(context: Context, signature: Signature, counts, mine: int) -> tuple[int, ...]:
    """Return the length of every rank's block, where this rank's is `mine`.

    Collective, polled, where `counts` is None: then the ranks tell each other. Given counts are
    checked: ConfigError where they do not say `mine` for this rank.
    """
    if counts is None:
        return _exchange(context, signature, mine)
    counts = check_counts(counts, None, context.size)
    if counts[context.rank] != mine:
        raise ConfigError(
            f"rank {context.rank} has a block of {mine} rows, counts say {counts[context.rank]}"
        )
    return counts


def _exchange(context: Context, signature: Signature, length: int) -> tuple[int, ...]:
    context.begin_agreed(signature, "lengths")
    if context.size == 1:
        return (length,)
    mine = np.array([length], np.int64)
    lengths = np.empty(context.size, np.int64)
    context.wait(context.control.Iallgather(mine, lengths).Test)
    return tuple(int(n) for n in lengths)


def from_root(context: Context, signature: Signature, values: np.ndarray, root: int) -> np.ndarray:
    """Broadcast a few int64 values from the root. Collective, polled."""
    context.begin_agreed(signature, "facts")
    if context.size > 1:
        context.wait(context.control.Ibcast([values, MPI.INT64_T], root).Test)
    return values


def element_name(dtype: np.dtype) -> str:
    """Name elements whose bytes travel as they are, for a signature. Local.

    Swapped bytes are part of the name: the receiver would read other numbers. References to
    Python objects mean nothing in another process: ConfigError.
    """
    if dtype.hasobject:
        raise ConfigError(f"elements of dtype {dtype} are Python objects; convert them to numbers")
    return dtype.name if dtype.isnative and not dtype.names else str(dtype)


def check_counts(counts: Sequence[int], total: int | None, size: int) -> tuple[int, ...]:
    """Return `counts` as plain integers; ConfigError unless they are `size` lengths. Local.

    Where `total` is given they must add up to it.
    """
    try:
        counts = tuple(operator.index(count) for count in counts)
    except TypeError:
        raise ConfigError(f"counts={counts!r}: expected {size} whole numbers") from None
    if len(counts) != size or any(count < 0 for count in counts):
        raise ConfigError(f"counts={counts}: expected {size} lengths of 0 or more")
    if total is not None and sum(counts) != total:
        raise ConfigError(f"counts={counts} add up to {sum(counts)}, expected {total} rows")
    return counts


def check_root(root: int, size: int) -> None:
    """Raise ConfigError for a root that is no rank. Local."""
    if not 0 <= root < size:
        raise ConfigError(f"root={root}: expected a rank from 0 to {size - 1}")
