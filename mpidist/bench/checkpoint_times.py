"""`mpidist bench checkpoint`: time saves and restores, and compare them with plain files.

Each save stores a simulated training state. One half of the state, the parameters, is equal on all
ranks and stored once; of the other half, the momentum, each rank has a block. As the reference,
every rank writes or reads as many bytes in plain files. In each round every operation and every
reference is timed once, from a barrier until the slowest rank has finished. Before each timing, all
files are removed from the page cache of the system.
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

#: Seconds of a simulated training step, in which the rank only waits, as if for a device.
_STEP = 10e-3
#: The smallest difference in seconds that the benchmark can measure.
_RESOLUTION = 1e-4
#: Elements of the state that are computed at once.
_PART = 1 << 16
#: Bytes per system call on the plain files.
_CALL = 8 << 20


class State:
    """A state of `nbytes` bytes: two arrays of equal size, which are saved and restored."""

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
        """Write the test values for step number `step` into both arrays of the state."""
        for part, values in self._parts(step):
            part[:] = values

    def check(self, step: int) -> None:
        """Raise MpidistError if the state's arrays do not have the test values for this step."""
        if not all(np.array_equal(part, values) for part, values in self._parts(step)):
            raise MpidistError(f"bench: the restored state is not that of step {step}")

    def _parts(self, step: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield small parts of the state's arrays, each with its test values for this step."""
        for array, low, sign in ((self.whole, 0, 1), (self.block, self.low, -1)):
            for start in range(0, len(array), _PART):
                part = array[start : start + _PART]
                values = (low + start + np.arange(len(part))) % 8191 + sign * step
                yield part, values.astype(np.float32)


def measure(comm, nbytes: int, rounds: int, folder: str, torch: bool = False) -> list[dict]:
    """Return result rows for a state of `nbytes` bytes, saved in `folder`. Collective over `comm`.

    Each row compares an operation of mpidist with a reference: ``row["what"]`` is the name of the
    operation, ``row["beside"]`` is the name of the reference. The other keys of a row are bytes,
    ranks, median_s (seconds of the operation), plain_s (seconds of the reference), ratio (plain_s
    divided by median_s, as the median over the `rounds`), and mb_per_s.

    The operations "save" and "restore" are timed until the method of that name returns. The
    operation "unchecked" is a restore that does not compare the checksums of arrays. The operation
    "stall" is a call of `save_async`, timed until it returns. The time of "async" is the additional
    time that simulated training steps take while a save runs in the background. The references are
    "write" and "read" of plain files, and "copy", which copies this rank's part of the state in
    memory.
    """
    state = State(comm, nbytes)
    with bench_folder(comm, folder) as made:
        seconds = _measure(comm, state, rounds, made, torch)
    pairs = [("save", "write"), ("stall", "write"), ("async", "copy")]
    pairs += [("restore", "read"), ("unchecked", "read")]
    if torch:
        beside = ("save", "save"), ("restore", "restore"), ("unchecked", "restore")
        pairs += [(what, f"torch {plain}") for what, plain in beside]
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
    """Return, for each operation and reference, the seconds on the slowest rank in each round."""
    share = np.ones(BlockPartition(state.nbytes, comm.size).size(comm.rank), np.uint8)
    target = np.ones_like(share)
    plain = folder / f"plain-{comm.rank}"
    inbox = np.empty(state.whole.nbytes + state.block.nbytes, np.uint8)
    rng = np.random.default_rng(0)
    with CheckpointStore(comm, folder / "store", keep=1) as store:
        run: dict[str, Callable[[int], object]] = {
            "write": lambda step: _write(plain, share),
            "save": lambda step: store.save(step, state.tree),
            "stall": lambda step: store.save_async(step, state.tree),
            "async": lambda step: _steps_beside(comm, store, step, state.tree),
            "copy": lambda step: np.copyto(target, share),
            "read": lambda step: _read(folder, comm.size, inbox),
            "restore": lambda step: store.restore(state.tree),
            "unchecked": lambda step: store.restore(state.tree, verify=False),
        }
        if torch:
            save, load = checkpointer(comm, state.whole, state.block, folder)
            run |= {"torch save": lambda step: save(), "torch restore": lambda step: load()}
        seconds = {name: np.empty(rounds) for name in run}
        step, saved = 0, {}  # steps saved by mpidist and by PyTorch
        for k in range(-1, rounds):  # round -1 warms up
            # In the warm-up round the candidates run in the order of `run`, in which files are
            # written before they are read.
            for name in rng.permutation(list(run)) if k >= 0 else run:
                by_torch = name.startswith("torch")
                restores = name.endswith("restore") or name == "unchecked"
                if name in ("save", "stall", "async", "torch save"):
                    step += 1
                    state.fill(step)
                    saved[by_torch] = step
                elif name == "write":
                    plain.unlink(missing_ok=True)
                elif restores:
                    state.fill(-1)
                forget_pages(comm, folder)
                elapsed = _time(comm, partial(run[name], step))
                if k >= 0:
                    seconds[name][k] = elapsed
                store.wait()  # a save in the background may still run; its end is not timed
                if restores:
                    state.check(saved[by_torch])
    if torch:
        leave()
    for times in seconds.values():
        comm.Allreduce(MPI.IN_PLACE, times, MPI.MAX)
    return seconds


def _time(comm, call: Callable[[], object]) -> float:
    """Return the seconds that `call` took; if `call` returns a float, return this float instead."""
    comm.Barrier()
    start = time.perf_counter()
    returned = call()
    elapsed = time.perf_counter() - start
    comm.Barrier()  # no rank removes or rewrites a file that another rank still reads
    return returned if isinstance(returned, float) else elapsed


def _steps_beside(comm, store: CheckpointStore, step: int, tree) -> float:
    """Return how many seconds simulated training steps lose while a save runs in the background."""
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
    with path.open("wb", buffering=0) as file:
        left = data.data
        while left:
            left = left[file.write(left[:_CALL]) :]
        os.fsync(file.fileno())


def _read(folder: Path, size: int, inbox: np.ndarray) -> None:
    """Fill the buffer `inbox` from the plain files of the ranks, beginning with rank 0's file."""
    view = inbox.data
    for rank in range(size):
        with (folder / f"plain-{rank}").open("rb", buffering=0) as file:
            while view and (count := file.readinto(view[:_CALL])):
                view = view[count:]
