"""Arena: named tensors as views of one flat buffer, in memory that all ranks of a node see.

    /dev/shm segment of a node with 2 ranks        flags of the collectives live elsewhere
    | slot of local rank 0: w b w2 b2 | slot of local rank 1: w b w2 b2 |

Every rank writes its own slot; collectives add the slots where they lie (collectives/node.py), so
inside a node nothing is copied into a message. The segment is a file in /dev/shm, allocated by
`posix_fallocate` (a full /dev/shm is an error here, not a SIGBUS later), mapped by all and unlinked
before it is filled: a killed job leaves nothing behind, and nobody has to free it together.
"""

from __future__ import annotations

import mmap
import os
import secrets
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path

import numpy as np
from mpi4py import MPI

from .errors import ClosedError, ConfigError
from .topology import Topology

_FOLDER = Path("/dev/shm")
_HEAD = mmap.PAGESIZE
_LINE = 8  # int64 per cache line


class Segment:
    """`nbytes` of memory for each rank of `comm`, seen by all of them; zeroed.

    Collective over `comm`, whose ranks must be on one node. Raises ConfigError, on all of them,
    where the memory is not to be had.

    Attributes
    ----------
    parts : list of numpy.ndarray
        Bytes of every rank, page-aligned.
    """

    def __init__(self, comm: MPI.Comm, nbytes: int):
        each = -(-max(nbytes, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
        file, problem = _open_together(comm)
        if file is not None:
            try:
                if comm.rank == 0:
                    os.ftruncate(file, each * comm.size)
                # Whoever allocates a page decides on which memory bank it lies: each rank its own.
                os.posix_fallocate(file, each * comm.rank, each)
            except OSError as error:
                problem = f"{each * comm.size} bytes in {_FOLDER}: {error.strerror}"
        problems = [text for text in comm.allgather(problem) if text]
        if not problems:
            assert file is not None
            memory = np.frombuffer(mmap.mmap(file, each * comm.size), np.uint8)
            self.parts = [memory[k * each : (k + 1) * each] for k in range(comm.size)]
        if file is not None:
            os.close(file)  # the mapping keeps the memory alive
        if problems:
            raise ConfigError(f"no memory shared by the {comm.size} ranks of a node: {problems[0]}")


def _open_together(comm) -> tuple[int | None, str | None]:
    """Open one new file on all ranks; it has lost its name when this returns. Collective."""
    file = name = problem = None
    flags = os.O_RDWR | os.O_CLOEXEC
    try:
        if comm.rank == 0:
            path = _FOLDER / f"mpidist-{os.getpid()}-{secrets.token_hex(8)}"
            file = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o600)
            name = str(path)
    except OSError as error:
        problem = f"{_FOLDER}: {error.strerror}"
    name = comm.bcast(name, root=0)
    if name is not None and comm.rank:
        try:
            file = os.open(name, flags)
        except OSError as error:
            problem = f"{name}: {error.strerror}"
    comm.Barrier()
    if name is not None and comm.rank == 0:
        Path(name).unlink(missing_ok=True)
    return file, problem


class Arena(Mapping):
    """Named tensors that are views of one flat vector per dtype.

    Collective over `comm`. `md.allreduce(comm, arena)` reduces all of it with no copy inside a
    node; afterwards every rank's own tensors hold the result and may be written again.

    Parameters
    ----------
    comm : mpi4py.MPI.Comm
    spec : mapping of name -> (shape, dtype)
        The same on every rank. Tensors lie in this order, those of one dtype together.
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
    reason : str or None
        Why the memory is private, where it is: then ``slots`` has this rank's vectors only.

    Raises
    ------
    ConfigError
        For a spec that is no mapping of names to (shape, dtype).
    """

    def __init__(self, comm: MPI.Comm, spec: Mapping, *, ranks_per_node: int | None = None):
        layout = _layout(spec)
        self.comm = comm
        self.topology = Topology(comm, ranks_per_node)
        self.reason: str | None = None
        nbytes = sum(count * dtype.itemsize for dtype, count, _ in layout)
        try:
            parts = Segment(self.topology.intra_comm, _HEAD + nbytes + 64 * len(layout)).parts
            mine = self.topology.local_rank
        except ConfigError as error:
            self.reason = str(error)
        # A node without shared memory makes all nodes go without: they run one algorithm.
        reasons = [text for text in comm.allgather(self.reason) if text]
        if reasons:
            self.reason, mine = reasons[0], 0
            parts = [np.zeros(_HEAD + nbytes + 64 * len(layout), np.uint8)]
        self.lines = [memoryview(part[:_HEAD]).cast("q") for part in parts]  # type: ignore[arg-type]
        self._free_line = 0
        self.slots: list[list[np.ndarray]] = []
        self._views: dict[str, np.ndarray] = {}
        start = _HEAD
        for dtype, count, tensors in layout:
            stop = start + count * dtype.itemsize
            self.slots.append([part[start:stop].view(dtype) for part in parts])
            for name, shape, first in tensors:
                vector = self.slots[-1][mine]
                self._views[name] = vector[first : first + prod(shape)].reshape(shape)
            start = -(-stop // 64) * 64
        self._views = {name: self._views[name] for name in spec}
        self.vectors = [slot[mine] for slot in self.slots]
        #: What collectives have prepared for this arena; goes with it.
        self.plans: dict = {}
        self._closed = False

    @property
    def shared(self) -> bool:
        """Whether the ranks of a node see each other's slots."""
        return self.reason is None

    @property
    def flat(self) -> np.ndarray:
        """The one vector of this rank; ConfigError where the tensors have several dtypes."""
        self._check_open()
        if len(self.vectors) != 1:
            names = ", ".join(str(vector.dtype) for vector in self.vectors)
            raise ConfigError(f"this arena has a vector for each of {names}; use arena.vectors")
        return self.vectors[0]

    def __getitem__(self, name: str) -> np.ndarray:
        self._check_open()
        return self._views[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._views)

    def __len__(self) -> int:
        return len(self._views)

    def take_lines(self, count: int) -> int | None:
        """Reserve `count` cache lines of ``lines``; None when they are used up. Local."""
        first = self._free_line
        if (first + count) * 8 * _LINE > _HEAD:
            return None
        self._free_line = first + count
        return first * _LINE

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("this arena was closed")

    def close(self) -> None:
        """Give the memory back as soon as no view of it is left. Collective; idempotent."""
        if not self._closed:
            self._closed = True
            for plan in self.plans.values():
                plan.close()
            self.plans.clear()
            self.topology.close()
            self.slots, self.vectors, self.lines, self._views = [], [], [], {}

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.close()


def _layout(spec) -> list[tuple[np.dtype, int, list]]:
    """Return (dtype, elements, [(name, shape, first element)]) for each dtype. Pure."""
    groups: dict[np.dtype, list] = {}
    lengths: dict[np.dtype, int] = {}
    try:
        for name, (shape, kind) in spec.items():
            dtype = np.dtype(kind)
            shape = (int(shape),) if np.ndim(shape) == 0 else tuple(map(int, shape))
            if dtype.hasobject or min(shape, default=0) < 0:
                raise ValueError
            first = lengths.get(dtype, 0)
            groups.setdefault(dtype, []).append((name, shape, first))
            lengths[dtype] = first + prod(shape)
    except (TypeError, ValueError, AttributeError) as error:
        raise ConfigError(
            "Arena: expected a mapping of name -> (shape, dtype), for example "
            f'{{"w": ((784, 128), "f4")}}; got {spec!r:.200}'
        ) from error
    if not groups:
        raise ConfigError("Arena: the spec names no tensor; expected at least one")
    return [(dtype, lengths[dtype], tensors) for dtype, tensors in groups.items()]
