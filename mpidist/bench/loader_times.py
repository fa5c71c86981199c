"""`mpidist bench loader`: measure samples read per second, and compare with a plain read.

The benchmark first writes files with records like those of YouTube-8M: 1,152 float32 values and a
few labels each. Every rank then reads its block of the records, batch by batch, with a `Loader`, as
a training run does. As the reference, every rank reads as many stored bytes with os.preadv, and
does not decode them. Both are timed in each round, from a barrier until the slowest rank has read
its block. "cold" means that the files were removed from the page cache of the system before each
read, "warm" that they are in the page cache. CPU time is the sum over all threads of all ranks.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
from mpi4py import MPI

from ..data import HDF5, Loader, Loading, YouTube8M
from ..data.readers import example, hdf5, tfrecord
from ..data.shuffle import Bijection
from ..partition import BlockPartition
from .bench_folder import bench_folder, forget_pages
from .ratios import interval

_CALL = 8 << 20
_WIDTHS = {"mean_rgb": 1024, "mean_audio": 128}
_RECORD = 4 * sum(_WIDTHS.values())


def measure(comm, nbytes: int, rounds: int, folder: str, batch: int) -> list[dict]:
    """Return result rows for files of about `nbytes` bytes in `folder`. Collective over `comm`.

    A row has the keys source, order ("in order" or "shuffled"), pages ("cold" or "warm"), ranks,
    bytes, samples_per_s (of the loader) and plain_samples_per_s (of the plain read, which does not
    decode samples). The key ratio is the time of the plain read divided by the time of the loader,
    as the median over the `rounds`; low and high are the ends of its 95 % interval. The keys cpu_us
    and plain_cpu_us are the CPU times per sample of the loader and of the plain read.
    """
    count = max(batch * comm.size, nbytes // _RECORD)
    rows = []
    with bench_folder(comm, folder) as made:
        if comm.rank == 0:
            _write(made, count)
        comm.Barrier()
        for source in ("hdf5", "hdf5 chunks", "tfrecord"):
            for pages in ("cold", "warm"):
                rows += _measure(comm, made, source, pages, count, batch, rounds)
    return rows


def _write(folder: Path, count: int) -> None:
    rng = np.random.default_rng(0)
    inputs = rng.standard_normal((count, _RECORD // 4), np.float32)
    arrays = {"inputs": inputs, "labels": np.arange(count)}
    hdf5.write(folder / "hdf5", arrays)
    hdf5.write(folder / "hdf5 chunks", arrays, chunks=128)
    tfrecord.write(folder / "tfrecord", (_video(k, row) for k, row in enumerate(inputs)))
    os.sync()  # pages that are not on the disk yet cannot be removed from the cache


def _video(k: int, row: np.ndarray) -> bytes:
    labels = np.unique((k * np.array([7, 31, 113])[: k % 3 + 1]) % 3862)
    name = [f"{k:04x}".encode()[-4:]]
    return example.encode_example(
        {"id": name, "labels": labels, "mean_rgb": row[:1024], "mean_audio": row[1024:]}
    )


def _measure(comm, folder, source, pages, count, batch, rounds) -> list[dict]:
    path = folder / source
    nbytes = path.stat().st_size  # later rank 0 removes the file
    start, stop = BlockPartition(count, comm.size).range(comm.rank)
    opened = YouTube8M(path) if source == "tfrecord" else HDF5(path, ["inputs", "labels"])
    order = Bijection(count, (0, 0))(np.arange(count))
    candidates: dict[str, Callable[[], None]] = {
        "plain": partial(_plain, path, comm.rank, comm.size, memoryview(bytearray(_CALL))),
        "in order": partial(_load, opened, partial(_batches, start, stop, batch, None)),
        "shuffled": partial(_load, opened, partial(_batches, start, stop, batch, order)),
    }
    seconds = {name: np.empty(rounds) for name in candidates}
    cpu = {name: np.empty(rounds) for name in candidates}
    rng = np.random.default_rng(0)
    for k in range(-1, rounds):  # round -1 warms up
        for name in rng.permutation(list(candidates)):
            if pages == "cold":
                forget_pages(comm, folder)
            comm.Barrier()
            began, worked = time.perf_counter(), time.process_time()
            candidates[name]()
            elapsed, used = time.perf_counter() - began, time.process_time() - worked
            elapsed, used = comm.allreduce(elapsed, MPI.MAX), comm.allreduce(used)
            if k >= 0:
                seconds[name][k], cpu[name][k] = elapsed, used
    opened.close()
    rows = []
    for name in list(candidates)[1:]:
        ratios = seconds["plain"] / seconds[name]
        low, high = interval(ratios)
        rows.append(
            {
                "source": source,
                "order": name,
                "pages": pages,
                "ranks": comm.size,
                "bytes": nbytes,
                "samples_per_s": float(f"{count / np.median(seconds[name]):.4g}"),
                "plain_samples_per_s": float(f"{count / np.median(seconds['plain']):.4g}"),
                "ratio": float(f"{np.median(ratios):.4g}"),
                "low": float(f"{low:.4g}"),
                "high": float(f"{high:.4g}"),
                "cpu_us": float(f"{np.median(cpu[name]) / count * 1e6:.3g}"),
                "plain_cpu_us": float(f"{np.median(cpu['plain']) / count * 1e6:.3g}"),
            }
        )
    return rows


def _batches(start: int, stop: int, batch: int, order) -> Iterator[np.ndarray]:
    for first in range(start, stop, batch):
        places = np.arange(first, min(first + batch, stop))
        yield places if order is None else order[places]


def _load(source, plan: Callable[[], Iterator[np.ndarray]]) -> None:
    with Loader(source, plan, Loading()) as loader:
        for indices in plan():
            loader.take(indices)


def _plain(path: Path, rank: int, size: int, inbox: memoryview) -> None:
    """Read this rank's share of the bytes of the file `path` into the buffer `inbox`."""
    start, stop = BlockPartition(path.stat().st_size, size).range(rank)
    with path.open("rb", buffering=0) as file:
        while start < stop:
            start += os.preadv(file.fileno(), [inbox[: stop - start]], start)
