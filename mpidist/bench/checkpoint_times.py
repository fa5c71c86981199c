"""`mpidist bench checkpoint`: saving and restoring, against plain files of equal bytes.

The state is half replicated (parameters, equal on all ranks and stored once) and half sharded
(momentum, a block per rank), so `nbytes` are stored in all. Beside it every rank writes its equal
share with os.write and fsync, and reads what a restore has to bring it: all that is replicated,
and its own block. Candidates take turns inside each round, in an order that changes from round to
round; the time is that of the slowest rank, from a barrier; the ratio is the median of the rounds'
ratios. Before anything is read, the system is told to forget the pages of the files.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
from mpi4py import MPI

from ..checkpoint.format.state import Shard
from ..checkpoint.store import CheckpointStore
from ..errors import MpidistError
from ..partition import BlockPartition
from .bench_folder import bench_folder, forget_pages
from .torch_yardstick import checkpointer, leave

#: Seconds of a step that waits for its device.
_STEP = 10e-3
#: Less than this is not told apart from nothing.
_RESOLUTION = 1e-4
#: Elements that are made at once.
_PART = 1 << 16
#: Bytes per system call of the plain files.
_CALL = 8 << 20


class State:
    """A state of `nbytes`: one replicated array, and one of which this rank has a block."""

    def __init__(self, comm, nbytes: int):
        half = max(1, nbytes // 2 // 4)
        low, high = BlockPartition(half, comm.size).range(comm.rank)
        self.whole, self.block = np.empty(half, np.float32), np.empty(high - low, np.float32)
        self.nbytes = 2 * half * 4
        self.low = low
        self.tree = {
            "parameters": {"w": self.whole},
            "momentum": {"w": Shard(self.block, (half,), low)},
        }

    def fill(self, step: int) -> None:
        """Write the values of `step`."""
        for part, values in self._parts(step):
            part[:] = values

    def check(self, step: int) -> None:
        """Raise MpidistError where the values are not those of `step`."""
        if not all(np.array_equal(part, values) for part, values in self._parts(step)):
            raise MpidistError(f"bench: the restored state is not that of step {step}")

    def _parts(self, step: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield parts of both arrays, small enough for a cache, with the values of `step`."""
        for array, low, sign in ((self.whole, 0, 1), (self.block, self.low, -1)):
            for start in range(0, len(array), _PART):
                part = array[start : start + _PART]
                values = (low + start + np.arange(len(part))) % 8191 + sign * step
                yield part, values.astype(np.float32)


def measure(comm, nbytes: int, rounds: int, folder: str, torch: bool = False) -> list[dict]:
    """Return the rows for a state of `nbytes`, stored in `folder`. Collective over `comm`.

    Rows: what (save, stall, async, restore, unchecked), beside (write, read, copy; with `torch`
    also "torch save" and "torch restore"), bytes, ranks, median_s, plain_s, ratio (plain over
    ours), mb_per_s. "unchecked" is a restore that compares no checksums of numbers. The stall is
    the time until `save_async` returns; save and restore end when all is done. "async": by how
    much steps that wait for a device take longer, together, until a save in the background is
    committed; a copy is that of each rank's part of the state in memory.
    """
    state = State(comm, nbytes)
    with bench_folder(comm, folder) as made:
        seconds = _measure(comm, state, rounds, made, torch)
    pairs = [("save", "write"), ("stall", "write"), ("async", "copy")]
    pairs += [("restore", "read"), ("unchecked", "read")]
    if torch:
        pairs += [("save", "torch save")]
        pairs += [("restore", "torch restore"), ("unchecked", "torch restore")]
    rows = []
    for what, plain in pairs:
        median = float(np.median(seconds[what]))
        rows.append(
            {
                "what": what,
                "beside": plain,
                "bytes": state.nbytes,
                "ranks": comm.size,
                "median_s": float(f"{median:.4g}"),
                "plain_s": float(f"{np.median(seconds[plain]):.4g}"),
                "ratio": float(f"{np.median(seconds[plain] / seconds[what]):.4g}"),
                "mb_per_s": float(f"{state.nbytes / median / 1e6:.4g}"),
            }
        )
    return rows


def _measure(comm, state: State, rounds: int, folder: Path, torch) -> dict[str, np.ndarray]:
    """Seconds of each candidate in each round, those of the slowest rank."""
    share = [np.ones(n, np.uint8) for n in BlockPartition(state.nbytes, comm.size).counts()]
    plain = folder / f"plain-{comm.rank}"
    inbox = np.empty(state.whole.nbytes + state.block.nbytes, np.uint8)
    names = ["write", "save", "stall", "async", "copy", "read", "restore", "unchecked"]
    source, target = np.ones_like(share[comm.rank]), np.ones_like(share[comm.rank])
    seconds = {name: np.empty(rounds) for name in names}
    rng = np.random.default_rng(0)
    with CheckpointStore(comm, folder / "store", keep=1) as store:
        run: dict[str, Callable[[int], object]] = {
            "write": lambda step: _write(plain, share[comm.rank]),
            "save": lambda step: store.save(step, state.tree),
            "stall": lambda step: store.save_async(step, state.tree),
            "read": lambda step: _read(folder, comm.size, inbox),
            "restore": lambda step: store.restore(state.tree),
            "unchecked": lambda step: store.restore(state.tree, verify=False),
            "async": lambda step: _steps_beside(comm, store, step, state.tree),
            "copy": lambda step: np.copyto(target, source),
        }
        if torch:
            _, save, load = checkpointer(comm, state.whole, state.block, folder)
            run |= {"torch save": lambda step: save(), "torch restore": lambda step: load()}
            names += ["torch save", "torch restore"]
            seconds |= {name: np.empty(rounds) for name in names[-2:]}
        step = ours = of_torch = 0
        for k in range(-1, rounds):  # round -1 warms up
            # In the first round in this order: what is read was written before.
            order = rng.permutation(names) if k >= 0 else names
            for name in order:
                if name in ("save", "stall", "async", "torch save"):
                    step += 1
                    state.fill(step)
                    of_torch = step if name == "torch save" else of_torch
                    ours = step if name != "torch save" else ours
                elif name == "write":
                    plain.unlink(missing_ok=True)
                elif name in ("restore", "unchecked", "torch restore"):
                    state.fill(-1)
                forget_pages(comm, folder)
                elapsed = _time(comm, partial(run[name], step))
                if k >= 0:
                    seconds[name][k] = elapsed
                store.wait()  # what `save_async` has begun, off the clock
                if name in ("restore", "unchecked"):
                    state.check(ours)
                elif name == "torch restore":
                    state.check(of_torch)
    if torch:
        leave()
    for times in seconds.values():
        comm.Allreduce(MPI.IN_PLACE, times, MPI.MAX)
    return seconds


def _time(comm, call: Callable[[], object]) -> float:
    """Return the seconds of a call, or those that it returns itself."""
    comm.Barrier()
    start = time.perf_counter()
    told = call()
    elapsed = time.perf_counter() - start
    comm.Barrier()  # nobody removes or rewrites what another still reads
    return told if isinstance(told, float) else elapsed


def _steps_beside(comm, store: CheckpointStore, step: int, tree) -> float:
    """Return by how much a loop of waiting steps lasts longer until a save is committed."""
    manifest = Path(store.path) / f"step-{step:012d}" / "MANIFEST.json"
    start, steps = time.perf_counter(), 0
    store.save_async(step, tree)
    while not manifest.exists() or steps < 2:
        time.sleep(_STEP)
        steps += 1
    together = time.perf_counter() - start
    comm.Barrier()
    start = time.perf_counter()
    for _ in range(steps):
        manifest.exists()
        time.sleep(_STEP)
    return max(together - (time.perf_counter() - start), _RESOLUTION)


def _write(path: Path, data: np.ndarray) -> None:
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    try:
        for start in range(0, data.nbytes, _CALL):
            piece = data[start : start + _CALL].data
            while piece:
                piece = piece[os.write(file, piece) :]
        os.fsync(file)
    finally:
        os.close(file)


def _read(folder: Path, size: int, inbox: np.ndarray) -> None:
    """Fill `inbox` from the plain files, beginning with the first."""
    view = inbox.data
    for rank in range(size):
        with (folder / f"plain-{rank}").open("rb", buffering=0) as file:
            while view and (count := file.readinto(view[:_CALL])):
                view = view[count:]
