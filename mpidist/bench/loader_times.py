"""`mpidist bench loader`: samples per second of file sources, over a plain read of the same bytes.

Files of videos as in YouTube-8M (1,152 float32 and a few labels each) are written once. Every rank
then brings in its block of the records, batch by batch, through a `Loader` as a run would, and
beside it reads its share of the same file's bytes, as they are stored, with os.preadv into one and
the same 8 MiB: nothing is looked at and nothing kept. What a loader gives are arrays of their own,
checked and decoded, of every sample. Candidates take turns inside each round, in an order that
changes from round to round; the time is that of the slowest rank, from a barrier; the ratio is the
median of the rounds' ratios. "cold": the system was told to forget the file's pages before; "warm":
they lie in memory. CPU time is that of all threads, which a busy machine changes less.
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
    """Return the rows for files of about `nbytes` in `folder`. Collective over `comm`.

    Rows: source, order, pages, ranks, bytes, samples_per_s, plain_samples_per_s, ratio, low, high,
    cpu_us and plain_cpu_us of a sample.
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
    os.sync()  # pages that are not on disk yet cannot be forgotten


def _video(k: int, row: np.ndarray) -> bytes:
    labels = np.unique((k * np.array([7, 31, 113])[: k % 3 + 1]) % 3862)
    name = [f"{k:04x}".encode()[-4:]]
    return example.encode_example(
        {"id": name, "labels": labels, "mean_rgb": row[:1024], "mean_audio": row[1024:]}
    )


def _measure(comm, folder, source, pages, count, batch, rounds) -> list[dict]:
    path = folder / source
    nbytes = path.stat().st_size  # now: rank 0 removes it while others still make their rows
    start, stop = BlockPartition(count, comm.size).range(comm.rank)
    opened = YouTube8M(path) if source == "tfrecord" else HDF5(path, ["inputs", "labels"])
    order = Bijection(count, (0, 0))(np.arange(count))
    candidates: dict[str, Callable[[], None]] = {
        "plain": partial(_plain, path, comm.rank, comm.size, memoryview(bytearray(_CALL))),
        "in order": partial(_load, opened, partial(_batches, start, stop, batch, None)),
    }
    shuffled = partial(_batches, start, stop, batch, order)
    candidates["shuffled"] = partial(_load, opened, shuffled)
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
            elapsed = np.array([time.perf_counter() - began])
            used = np.array([time.process_time() - worked])
            comm.Allreduce(MPI.IN_PLACE, elapsed, MPI.MAX)
            comm.Allreduce(MPI.IN_PLACE, used)
            if k >= 0:
                seconds[name][k], cpu[name][k] = elapsed[0], used[0]
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
    """Read this rank's share of a file, whatever is in it."""
    start, stop = BlockPartition(path.stat().st_size, size).range(rank)
    file = os.open(path, os.O_RDONLY)
    try:
        while start < stop:
            start += os.preadv(file, [inbox[: stop - start]], start)
    finally:
        os.close(file)
