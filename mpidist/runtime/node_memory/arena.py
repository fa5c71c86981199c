"""Arena: named tensors as views of one 1-D array, in memory that all ranks of a node share.

    /dev/shm segment of a node with 2 ranks
    | slot of local rank 0: w b w2 b2 | slot of local rank 1: w b w2 b2 |

Each rank of the node has a slot (a part of the shared segment) for its own tensors. Collectives add
the tensors of all ranks of a node in place, so inside a node no messages are sent. The segment is
an unnamed file in /dev/shm, so a rank that is killed leaves no file behind. A full /dev/shm raises
an error when the segment is made.
"""

from __future__ import annotations

import mmap
import os
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import accumulate, chain
from math import prod
from operator import index
from pathlib import Path
from typing import NamedTuple

import numpy as np
from mpi4py import MPI

from ...errors import ClosedError, ConfigError, in_one_line, shown
from ...tensors import dtype_of
from ..agreement.mismatch import Signature
from ..agreement.run_on_all import run_on_all, same_on_all
from ..context import of
from ..topology import topology_of, whole_nodes
from .mapped_file import mapped_file

_FOLDER = Path("/dev/shm")
_HEAD = mmap.PAGESIZE
_LINE = 8  # int64 per cache line
_MOST = 1 << 60  # bytes: more than any machine has, and few enough for C integers
_FOUND, _TEXT = 128, 512  # most bytes of a file's place, and of an error text

#: A function that polls a test until the test returns true.
Wait = Callable[[Callable[[], bool]], None]


class Segment:
    """`nbytes` zeroed bytes for each rank of `comm`, in memory that all ranks of `comm` share.

    Collective over `comm`, whose ranks must be on one node. Raises ConfigError on all ranks if the
    memory cannot be allocated.

    Parameters
    ----------
    comm : mpi4py.MPI.Comm
    nbytes : int, or sequence of int
        One number of bytes for every rank, or a sequence with a number for each rank; the same
        value on all ranks.
    wait : callable
        A function that waits until a test returns true, such as ``context.wait``.

    Attributes
    ----------
    parts : list of numpy.ndarray
        The bytes of each rank, aligned to pages.
    """

    def __init__(self, comm: MPI.Comm, nbytes: int | Sequence[int], wait: Wait):
        sizes = [nbytes] * comm.size if isinstance(nbytes, int) else nbytes
        pages = [-(-max(size, 1) // mmap.PAGESIZE) for size in sizes]
        stops = [page * mmap.PAGESIZE for page in accumulate(pages)]
        starts, total = [0, *stops[:-1]], stops[-1]
        memory = np.empty(0, np.uint8)
        with ExitStack() as files:  # closes the file; the mapping keeps the memory alive
            file, problem = _open_together(comm, total, wait, files)
            try:
                if file is not None:
                    # The rank that allocates a page decides in which memory bank the page lies, so
                    # each rank allocates its own part.
                    start, stop = starts[comm.rank], stops[comm.rank]
                    os.posix_fallocate(file, start, stop - start)
                    memory = mapped_file(file, total)
            except OSError as error:
                problem = f"{total} bytes in {_FOLDER}: {error.strerror}"
        problem = first_problem(comm, problem, wait)
        if problem:
            raise ConfigError(f"no memory shared by the {comm.size} ranks of a node: {problem}")
        self.parts = [memory[start:stop] for start, stop in zip(starts, stops, strict=True)]


def _open_together(comm, nbytes: int, wait: Wait, files: ExitStack) -> tuple[int | None, str]:
    """Return a new unnamed file of `nbytes` bytes that all ranks have open, and "". Collective.

    If the file cannot be made or opened, returns None and the cause. Closing the ExitStack `files`
    closes the file.
    """
    # The file has no name, so the other ranks open it by its path in /proc. If a rank sees other
    # processes or no processes in /proc, the file gets a name until all ranks have opened it.
    for named in (False, True):
        file, problem, well = _open_once(comm, nbytes, wait, files, named)
        if well:
            break
    return file, problem


def _open_once(comm, nbytes: int, wait: Wait, files: ExitStack, named: bool):
    """Make the file of `_open_together`, without a name or, if `named` is true, with a name.

    Returns the descriptor or None, this rank's problem, and whether all ranks have succeeded.
    """
    file, problem, flags = None, "", os.O_RDWR | os.O_CLOEXEC
    name = _FOLDER / f"mpidist-{os.getpid()}-{secrets.token_hex(8)}"
    found = bytearray(_FOUND)

    def opened(path: Path, flags: int) -> int:
        descriptor = os.open(path, flags, 0o600)
        files.callback(os.close, descriptor)
        return descriptor

    try:
        if comm.rank == 0:
            try:
                more = os.O_CREAT | os.O_EXCL if named else os.O_TMPFILE
                file = opened(name if named else _FOLDER, flags | more)
                os.ftruncate(file, nbytes)
                path = name if named else Path(f"/proc/{os.getpid()}/fd/{file}")
                found[:] = f"{_identity(path)} {path}".encode().ljust(_FOUND, b"\0")
            except OSError as error:
                file, problem = None, f"{nbytes} bytes in {_FOLDER}: {error.strerror}"
        wait(comm.Ibcast([found, MPI.BYTE], 0).Test)
        if comm.rank and found[0]:
            identity, place = found.rstrip(b"\0").decode().split(" ")
            try:
                # In another container, the process number of rank 0 may belong to another process.
                if _identity(Path(place)) == identity:
                    file = opened(Path(place), flags)
                else:
                    problem = f"{place} is another file on rank {comm.rank}"
            except OSError as error:
                problem = f"{_FOLDER}: {error.strerror}"
        return file, problem, not first_problem(comm, problem, wait)
    finally:
        if named and comm.rank == 0:
            name.unlink(missing_ok=True)


def _identity(path: Path) -> str:
    facts = path.stat()
    return f"{facts.st_dev}:{facts.st_ino}"


def first_problem(comm, problem: str, wait: Wait) -> str:
    """Return, on all ranks, the error text of the first rank that has one, or "". Collective."""
    who = np.array([comm.rank if problem else comm.size], np.int64)
    wait(comm.Iallreduce(MPI.IN_PLACE, who, MPI.MIN).Test)
    if who[0] == comm.size:
        return ""
    text = bytearray(problem.encode(errors="backslashreplace")[:_TEXT].ljust(_TEXT, b"\0"))
    wait(comm.Ibcast([text, MPI.BYTE], int(who[0])).Test)
    return text.rstrip(b"\0").decode(errors="replace")


class Arena(Mapping):
    """Named tensors; all tensors of one dtype are views of the same one-dimensional array.

    Collective over `comm`. ``md.allreduce(comm, arena)`` reduces all tensors in place.

    Parameters
    ----------
    comm : mpi4py.MPI.Comm
    spec : mapping of name -> (shape, dtype)
        Equal on all ranks. A dtype may also be "bfloat16" or a dtype of PyTorch.
    ranks_per_node : int, optional
        The number of consecutive ranks that are treated as a node, instead of the real nodes.

    Attributes
    ----------
    flat : numpy.ndarray
        The vector with all tensors of this rank, in the order of `spec`. Raises ConfigError if the
        tensors have several dtypes.
    vectors : list of numpy.ndarray
        The vectors of this rank, one per dtype, in the order in which the dtypes first appear.
    slots : list of list of numpy.ndarray
        ``slots[k][r]`` is the array ``vectors[k]`` of the rank with local rank r on this node.
    lines : list of memoryview
        ``lines[r]`` are int64 numbers in the memory of local rank r, with which the ranks of a node
        wait for each other in nonblocking collectives.
    label : str
        A name of the arena on the communicator. The ranks compare it in each operation on the
        arena.
    reason : str or None
        Why the ranks of a node could not share memory, or None if they do. If they do not,
        ``slots`` has only the vectors of this rank.

    Raises
    ------
    ConfigError
        On all ranks, if on some rank the spec is not a mapping of names to (shape, dtype).
    MismatchError
        On all ranks, if names, shapes, dtypes or their order differ between ranks, or if a rank
        makes another call.
    """

    def __init__(self, comm: MPI.Comm, spec: Mapping, *, ranks_per_node: int | None = None):
        context = of(comm)
        layout: list[DtypeGroup] = []

        def facts() -> dict:
            layout[:] = _layout(spec)
            tensors = sorted((t[0], *t[1:3], kind) for kind, _, group in layout for t in group)
            found = {f"tensor {k}": (name, shape, str(kind)) for k, name, shape, kind in tensors}
            return {**found, "ranks_per_node": whole_nodes(ranks_per_node)}

        key = Signature("Arena", "", "", extra=repr(same_on_all(comm, "Arena", facts))).key
        number = context.store["arenas"] = context.store.get("arenas", 0) + 1
        self.comm, self.label, self._closed = comm, f"arena {number} {key:016x}", False
        self.topology = topology_of(comm, ranks_per_node)
        mine = self.topology.local_rank
        nbytes = _HEAD + sum(64 + group.elements * group.dtype.itemsize for group in layout)
        parts, problem = [], ""
        with context.call("Arena"):
            try:
                parts = Segment(self.topology.intra_comm, nbytes, context.wait).parts
            except ConfigError as error:
                problem = str(error)
            # If one node has no shared memory, no node uses shared memory, so that all nodes run
            # the same algorithm.
            self.reason = first_problem(context.control, problem, context.wait) or None
        if self.reason:
            mine, parts = 0, [run_on_all(comm, "Arena", lambda: np.zeros(nbytes, np.uint8))]
        self.lines = [memoryview(part[:_HEAD]).cast("q") for part in parts]  # type: ignore[arg-type]
        self._free_line = 0
        self.slots: list[list[np.ndarray]] = []
        views: dict[int, tuple] = {}
        start = _HEAD
        for dtype, count, tensors in layout:
            stop = start + count * dtype.itemsize
            self.slots.append([part[start:stop].view(dtype) for part in parts])
            for place, name, shape, first in tensors:
                vector = self.slots[-1][mine]
                views[place] = name, vector[first : first + prod(shape)].reshape(shape)
            start = -(-stop // 64) * 64
        self._views = dict(views[place] for place in sorted(views))
        self.vectors = [slot[mine] for slot in self.slots]
        #: The plans that collectives have made for this arena; `close` releases them.
        self.plans: dict[object, list] = {}

    def __repr__(self):
        if self._closed:
            return f"<Arena: {self.label}, closed>"
        count = len(self._views)
        sizes = ", ".join(f"{vector.size} {vector.dtype}" for vector in self.vectors)
        ranks = self.topology.local_size
        where = f"in memory that {ranks} ranks of a node share" if ranks > 1 else "of one rank"
        if self.reason:
            where = in_one_line(f"private: {self.reason}", 120)
        return f"<Arena: {count} tensor{'s' * (count != 1)} of {sizes}, {where}>"

    @property
    def shared(self) -> bool:
        """Whether the tensors lie in memory that the ranks of a node share."""
        return not self.reason

    @property
    def flat(self) -> np.ndarray:
        """The vector with all tensors of this rank; raises ConfigError for several dtypes."""
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
        """Reserve `count` cache lines of int64 counters in ``lines[r]`` of each rank r of the node.

        Returns the index of the first reserved counter in ``lines[r]``, or None if too few cache
        lines are free.
        """
        first = self._free_line
        if (first + count) * 8 * _LINE > _HEAD:
            return None
        self._free_line = first + count
        return first * _LINE

    def check_open(self) -> None:
        """Raise ClosedError if the arena is closed."""
        if self._closed:
            raise ClosedError("this arena was closed")

    def close(self) -> None:
        """Free the memory when the program has no view of it any more; a second call does nothing.

        All ranks must close the arena between the same two operations that they do together.
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
    """The tensors of one dtype, each as a tuple (place, name, shape, first).

    `place` is the position of the tensor in the `spec` of the arena. `first` is the index that its
    first element has in the vector of all tensors of this dtype.
    """

    dtype: np.dtype
    elements: int
    tensors: list[tuple[int, object, tuple[int, ...], int]]


def _layout(spec) -> list[DtypeGroup]:
    """Return the tensors in the argument `spec` of `Arena`, grouped by dtype."""
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
