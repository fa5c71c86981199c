"""Arena: named tensors as views of one flat buffer, in memory that all ranks of a node see.

    /dev/shm segment of a node with 2 ranks        flags of the collectives live elsewhere
    | slot of local rank 0: w b w2 b2 | slot of local rank 1: w b w2 b2 |

Every rank writes its own slot; collectives add the slots where they lie (schedules/node.py), so
inside a node nothing is copied into a message. The segment is a file in /dev/shm, allocated by
`posix_fallocate` (a full /dev/shm is an error here, not a SIGBUS later), mapped by all and unlinked
before it is filled: a killed job leaves nothing behind, and nobody has to free it together.
"""

from __future__ import annotations

import mmap
import os
import secrets
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from math import prod
from operator import index, itemgetter
from pathlib import Path
from typing import NamedTuple

import numpy as np
from mpi4py import MPI

from ..errors import ClosedError, ConfigError, in_one_line, shown
from ..tensors import dtype_of
from .agreement.mismatch import Signature
from .agreement.run_on_all import run_on_all, same_on_all
from .context import Context, of
from .topology import topology_of, whole_nodes

_FOLDER = Path("/dev/shm")
_HEAD = mmap.PAGESIZE
_LINE = 8  # int64 per cache line
_MOST = 1 << 60  # bytes: far beyond any memory, and numbers of the C library hold it
_NAME, _TEXT = 64, 512  # bytes of a file's name, and of what is told of a problem

#: Polls a test until it is true.
Wait = Callable[[Callable[[], bool]], None]


class Segment:
    """`nbytes` of memory for each rank of `comm`, seen by all of them; zeroed.

    Collective over `comm`, whose ranks must be on one node and all be here: nothing is compared.
    Raises ConfigError, on all of them, where the memory is not to be had.

    Parameters
    ----------
    comm : mpi4py.MPI.Comm
    nbytes : int
        Equal on all ranks.
    wait : callable
        How to wait for a test to become true: ``context.wait`` of the operation that this is for.

    Attributes
    ----------
    parts : list of numpy.ndarray
        Bytes of every rank, page-aligned.
    """

    def __init__(self, comm: MPI.Comm, nbytes: int, wait: Wait):
        each = -(-max(nbytes, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
        file, problem = _open_together(comm, each * comm.size, wait)
        memory = np.empty(0, np.uint8)
        try:
            if file is not None:
                # Whoever allocates a page decides on which memory bank it lies: each rank its own.
                os.posix_fallocate(file, each * comm.rank, each)
                memory = np.frombuffer(mmap.mmap(file, each * comm.size), np.uint8)
        except OSError as error:
            problem = f"{each * comm.size} bytes in {_FOLDER}: {error.strerror}"
        finally:
            _close(file)  # the mapping keeps the memory alive
        problem = first_problem(comm, problem, wait)
        if problem:
            raise ConfigError(f"no memory shared by the {comm.size} ranks of a node: {problem}")
        self.parts = [memory[k * each : (k + 1) * each] for k in range(comm.size)]


def _open_together(comm, nbytes: int, wait: Wait) -> tuple[int | None, str | None]:
    """Open one new file of `nbytes` on all ranks; it has lost its name afterwards. Collective."""
    file: int | None = None
    problem = path = None
    flags = os.O_RDWR | os.O_CLOEXEC
    name = np.zeros(_NAME, np.uint8)
    try:
        if comm.rank == 0:
            path = _FOLDER / f"mpidist-{os.getpid()}-{secrets.token_hex(8)}"
            try:
                file = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o600)
                os.ftruncate(file, nbytes)
                text = path.name.encode()
                name[: len(text)] = np.frombuffer(text, np.uint8)
            except OSError as error:
                problem = f"{nbytes} bytes in {_FOLDER}: {error.strerror}"
                _close(file)
                file = None
        wait(comm.Ibcast(name, 0).Test)
        if comm.rank and name[0]:
            try:
                file = os.open(_FOLDER / name.tobytes().rstrip(b"\0").decode(), flags)
            except OSError as error:
                problem = f"{_FOLDER}: {error.strerror}"
        wait(comm.Ibarrier().Test)
    except BaseException:
        _close(file)
        raise
    finally:
        if path is not None:
            path.unlink(missing_ok=True)
    return file, problem


def _close(file: int | None) -> None:
    if file is not None:
        os.close(file)


def first_problem(comm, problem: str | None, wait: Wait) -> str | None:
    """Return, on all ranks, the problem of the first rank with one, or None. Collective."""
    who = np.array([comm.rank if problem else comm.size], np.int64)
    wait(comm.Iallreduce(MPI.IN_PLACE, who, MPI.MIN).Test)
    if who[0] == comm.size:
        return None
    told = np.zeros(_TEXT, np.uint8)
    if who[0] == comm.rank:
        text = (problem or "").encode(errors="backslashreplace")[:_TEXT]
        told[: len(text)] = np.frombuffer(text, np.uint8)
    wait(comm.Ibcast(told, int(who[0])).Test)
    return told.tobytes().rstrip(b"\0").decode(errors="replace")


class Arena(Mapping):
    """Named tensors that are views of one flat vector per dtype.

    Collective over `comm`. `md.allreduce(comm, arena)` reduces all of it with no copy inside a
    node; afterwards every rank's own tensors hold the result and may be written again.

    Parameters
    ----------
    comm : mpi4py.MPI.Comm
    spec : mapping of name -> (shape, dtype)
        The same on every rank. Tensors lie in this order, those of one dtype together. A dtype
        may be "bfloat16" or one of torch's.
    ranks_per_node : int, optional
        Fake nodes of that many consecutive ranks, as in `Topology`.

    Attributes
    ----------
    flat : numpy.ndarray
        The vector of this rank; only where all tensors have one dtype.
    vectors : list of numpy.ndarray
        One per dtype, in order of first appearance.
    slots : list of list of numpy.ndarray
        ``slots[k][r]`` is ``vectors[k]`` of local rank r.
    lines : list of memoryview
        A page of int64 of every local rank, for the counters of nonblocking collectives.
    label : str
        Its number on the communicator and a hash of its spec: its operations are told by it.
    reason : str or None
        Why the memory is private, where it is: then ``slots`` has this rank's vectors only.

    Raises
    ------
    ConfigError
        On all ranks: a spec that is no mapping of names to (shape, dtype) on some rank.
    MismatchError
        On all ranks: other names, shapes, dtypes or another order on some rank, or a rank that
        makes another call.
    """

    def __init__(self, comm: MPI.Comm, spec: Mapping, *, ranks_per_node: int | None = None):
        context = of(comm)
        layout: list[DtypeGroup] = []

        def facts() -> dict:
            layout[:] = _layout(spec)
            return _facts(layout, ranks_per_node)

        key = Signature("Arena", "", "", extra=repr(same_on_all(comm, "Arena", facts))).key
        number = context.store["arenas"] = context.store.get("arenas", 0) + 1
        self.comm, self.label, self._closed = comm, f"arena {number} {key:016x}", False
        self.topology = topology_of(comm, ranks_per_node)
        mine = self.topology.local_rank
        nbytes = _HEAD + sum(64 + group.elements * group.dtype.itemsize for group in layout)
        with context.call("Arena"):
            parts = self._share(context, nbytes)
        if self.reason is not None:
            private = run_on_all(comm, "Arena", lambda: np.zeros(nbytes, np.uint8))
            mine, parts = 0, [private]
        self.lines = [memoryview(part[:_HEAD]).cast("q") for part in parts]  # type: ignore[arg-type]
        self._free_line = 0
        self.slots: list[list[np.ndarray]] = []
        self._views: dict[str, np.ndarray] = {}
        start = _HEAD
        views: dict[int, tuple] = {}
        for dtype, count, tensors in layout:
            stop = start + count * dtype.itemsize
            self.slots.append([part[start:stop].view(dtype) for part in parts])
            for place, name, shape, first in tensors:
                vector = self.slots[-1][mine]
                views[place] = name, vector[first : first + prod(shape)].reshape(shape)
            start = -(-stop // 64) * 64
        self._views = dict(view for _, view in sorted(views.items(), key=itemgetter(0)))
        self.vectors = [slot[mine] for slot in self.slots]
        #: What collectives have prepared for this arena, lists of plans; they go with it.
        self.plans: dict[object, list] = {}

    def __repr__(self):
        if self._closed:
            return f"<Arena: {self.label}, closed>"
        count = len(self._views)
        sizes = ", ".join(f"{vector.size} {vector.dtype}" for vector in self.vectors)
        ranks = self.topology.local_size
        where = f"in memory that {ranks} ranks of a node share" if ranks > 1 else "of one rank"
        if self.reason is not None:
            where = in_one_line(f"private: {self.reason}", 120)
        return f"<Arena: {count} tensor{'s' * (count != 1)} of {sizes}, {where}>"

    def _share(self, context: Context, nbytes: int) -> list[np.ndarray]:
        """Return everyone's memory on this node; none, and the reason, where there is none."""
        parts, problem = [], None
        try:
            parts = Segment(self.topology.intra_comm, nbytes, context.wait).parts
        except ConfigError as error:
            problem = str(error)
        # A node without shared memory makes all nodes go without: they run one algorithm.
        self.reason = first_problem(context.control, problem, context.wait)
        return parts

    @property
    def shared(self) -> bool:
        """Whether the ranks of a node see each other's slots."""
        return self.reason is None

    @property
    def flat(self) -> np.ndarray:
        """The one vector of this rank; ConfigError where the tensors have several dtypes."""
        self.check_open()
        if len(self.vectors) != 1:
            names = ", ".join(str(vector.dtype) for vector in self.vectors)
            raise ConfigError(f"this arena has a vector for each of {names}; use arena.vectors")
        return self.vectors[0]

    def __getitem__(self, name: str) -> np.ndarray:
        self.check_open()
        return self._views[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._views)

    def __len__(self) -> int:
        return len(self._views)

    def take_lines(self, count: int) -> int | None:
        """Reserve `count` cache lines of ``lines``; None when they are used up."""
        first = self._free_line
        if (first + count) * 8 * _LINE > _HEAD:
            return None
        self._free_line = first + count
        return first * _LINE

    def check_open(self) -> None:
        """Raise ClosedError where the arena was closed."""
        if self._closed:
            raise ClosedError("this arena was closed")

    def close(self) -> None:
        """Give the memory back as soon as no view of it is left. Idempotent.

        Sends nothing; all ranks must call it between the same two operations.
        """
        if not self._closed:
            self._closed = True
            for plan in chain.from_iterable(self.plans.values()):
                plan.release()
            self.plans.clear()
            self.slots, self.vectors, self.lines, self._views = [], [], [], {}

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.close()


class DtypeGroup(NamedTuple):
    """The tensors of one dtype: (place in the spec, name, shape, first element) of each."""

    dtype: np.dtype
    elements: int
    tensors: list[tuple[int, object, tuple[int, ...], int]]


def _layout(spec) -> list[DtypeGroup]:
    """Return the tensors of each dtype. Pure."""
    groups: dict[np.dtype, DtypeGroup] = {}
    try:
        for place, (name, (shape, kind)) in enumerate(spec.items()):
            dtype = dtype_of(kind)
            shape = tuple(map(index, (shape,) if np.ndim(shape) == 0 else shape))
            group = groups.get(dtype, DtypeGroup(dtype, 0, []))
            good = dtype.itemsize and not dtype.hasobject and min(shape, default=0) >= 0
            if not good or (group.elements + prod(shape)) * dtype.itemsize > _MOST:
                raise ValueError
            group.tensors.append((place, name, shape, group.elements))
            groups[dtype] = group._replace(elements=group.elements + prod(shape))
    except (TypeError, ValueError, AttributeError) as error:
        raise ConfigError(
            "Arena: expected a mapping of name -> (shape, dtype), for example "
            f'{{"w": ((784, 128), "f4")}}; got {shown(spec)}'
        ) from error
    if not groups:
        raise ConfigError("Arena: the spec names no tensor; expected at least one")
    return list(groups.values())


def _facts(layout: list[DtypeGroup], ranks_per_node) -> dict:
    """Return what must be equal on all ranks."""
    tensors = sorted((t[0], *t[1:3], group.dtype) for group in layout for t in group.tensors)
    facts: dict = {f"tensor {k}": (name, shape, str(kind)) for k, name, shape, kind in tensors}
    facts["ranks_per_node"] = whole_nodes(ranks_per_node)
    return facts
