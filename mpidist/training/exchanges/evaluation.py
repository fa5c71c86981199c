"""The accuracy of a model on test data, and a digest of its parameters."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from ... import events
from ...arrays import array_module
from ...checkpoint.format.state import array_of, region_of, shape_of
from ...collectives.allreduce import allreduce
from ...collectives.gather import gather
from ...data import BadRecordFilter, as_source
from ...errors import ConfigError
from ...partition import BlockPartition
from ...runtime.agreement.run_on_all import run_on_all
from ...runtime.communicator import check_comm
from ..feed import beside

#: Samples per call of ``model.predict``.
_CHUNK = 256
#: The largest number of bytes of an array that `digest_of_parts` sends to rank 0 at a time.
BLOCK = 4 << 20


class WholeModel:
    """Base class of objects that exchange gradients, if each worker has the whole model."""

    workers: Any
    model: Any

    def evaluate(self, data) -> float:
        """Return the fraction of samples that the model classifies correctly. Collective."""
        return evaluate(self.workers, self.model, data)

    def layout(self) -> dict | None:
        """Return None, because the model has no parts: each worker has the whole model."""
        return None

    def peer_facts(self) -> dict | None:
        """Return None: this strategy does not average the models of ranks."""
        return None

    def digest(self) -> str:
        """Return the SHA-256 digest of the parameters."""
        return parameters_digest(self.model.parameters)


def evaluate(comm, model, data) -> float:
    """Return the fraction of samples that `model` classifies correctly. Collective over `comm`.

    A sample is correct if the largest score of the model is at the label of the sample. If a sample
    has several labels (each 0 or 1), the label at the largest score must be 1. Bad records are left
    out.
    """
    check_comm(comm)
    source = as_source(data)
    careful = BadRecordFilter(source)
    start, stop = BlockPartition(len(source), comm.size).range(comm.rank)
    hits = used = 0
    for first in range(start, stop, _CHUNK):
        indices = np.arange(first, min(first + _CHUNK, stop))
        taken = careful.take(indices)
        for record in taken.bad:
            events.emit("bad_record", source="test data", index=record.index, reason=record.reason)
        *inputs, labels = beside(taken.batch, model)
        used += len(taken.kept)
        hits += count_hits(model.predict(*inputs), labels)
    return shared_accuracy(comm, hits, used)


def check_test_data(model, data) -> None:
    """Raise ConfigError if the model does not give class scores for the first two test samples.

    The arrays in ``model.state`` (such as running means) are restored.
    """
    source = as_source(data)
    if not len(source):
        return
    # With one sample, a model may drop the axis of length 1.
    taken = BadRecordFilter(source).take(np.arange(min(2, len(source))))
    if len(taken.kept):
        *inputs, labels = beside(taken.batch, model)
        state = getattr(model, "state", None)
        values = state.values() if isinstance(state, dict) else ()
        before = [(x, x.copy()) for x in values if hasattr(x, "shape")]
        count_hits(model.predict(*inputs), labels)
        for array, old in before:
            array[...] = old


def count_hits(scores, labels) -> int:
    """Return how many samples have their largest score at their label (or one of their labels).

    Raises ConfigError if `scores` are not class scores of shape (n, classes).
    """
    n, shape = len(labels), tuple(np.shape(scores))
    if n and (len(shape) != 2 or shape[0] != n or shape[1] < 2):
        raise ConfigError(
            f"test_data: model.predict returned shape {shape} for n = {n}; expected class scores "
            "of shape (n, classes), with 2 or more classes; leave test_data out for other models"
        )
    if n and labels.shape not in ((n,), shape):
        raise ConfigError(
            f"test_data: the labels have shape {tuple(labels.shape)}, the scores {shape}; expected "
            f"labels of shape ({n},) or {shape}"
        )
    best = scores.argmax(axis=1)
    true = labels[range(len(best)), best] > 0 if labels.ndim == 2 else best == labels
    return int(true.sum())


def shared_accuracy(comm, hits: int, used: int) -> float:
    """Return the fraction of all ranks' samples that were classified correctly.

    Collective over `comm`.
    """
    total = np.array([hits, used], np.int64)
    allreduce(comm, total, algorithm="native")
    return int(total[0]) / max(int(total[1]), 1)


def parameters_digest(parameters: dict) -> str:
    """Return the SHA-256 digest over the names, dtypes, shapes and bytes of all parameters."""
    total = hashlib.sha256()
    for name in sorted(parameters):
        add_to_digest(total, name, parameters[name])
    return total.hexdigest()


def add_to_digest(total, name: str, array) -> None:
    """Add one parameter to the hash object `total`."""
    host = array if array_module(array) is np else array.get()
    total.update(digest_header(name, host.dtype.str, host.shape))
    total.update(np.ascontiguousarray(host).tobytes())


def digest_header(name: str, dtype: str, shape: tuple[int, ...]) -> bytes:
    """Return the bytes that are hashed before the bytes of a parameter; `dtype` is a dtype.str."""
    return f"{name} {dtype} {shape}\n".encode()


def digest_of_parts(comm, arrays: Mapping) -> str:
    """Return on all ranks what `parameters_digest` returns for the whole arrays. Collective.

    `arrays` has the arrays of this rank by name: whole arrays, or parts of whole arrays (`Shard`).
    """

    def described() -> dict:
        return {
            name: (array_of(one).dtype.str, shape_of(one), tuple(region_of(one)))
            for name, one in arrays.items()
        }

    everyone = run_on_all(comm, "md.train: digest", described, list)
    total = hashlib.sha256()
    for name in sorted({name for each in everyone for name in each}):
        kind, shape, _ = next(each[name] for each in everyone if name in each)
        boxes = {}  # box -> the lowest rank that has it
        for rank, each in reversed(list(enumerate(everyone))):
            if name in each:
                boxes[tuple(map(tuple, each[name][2]))] = rank
        total.update(digest_header(name, kind, tuple(shape)))
        for block in _blocks(comm, arrays.get(name), np.dtype(kind), shape, boxes):
            total.update(block)
    return run_on_all(comm, "md.train: digest", total.hexdigest, lambda everyone: everyone[0])


def _blocks(comm, mine, dtype: np.dtype, shape, boxes: Mapping) -> Iterator[memoryview]:
    """Yield the bytes of an array on rank 0, a few rows at a time, and nothing on other ranks."""
    rows, row = (shape[0], tuple(shape[1:])) if len(shape) else (1, ())
    step = max(1, BLOCK // max(1, dtype.itemsize * int(np.prod(row, dtype=np.int64))))
    order = sorted(boxes.items(), key=lambda item: item[1])
    for first in range(0, rows, step):
        stop = min(first + step, rows)
        counts, places = [0] * comm.size, []
        for (start, extent), rank in order:
            top = start[0] if start else 0
            a, b = max(first, top), min(stop, top + (extent[0] if extent else 1))
            inside = (b - a, *extent[1:])
            if a >= b:
                continue
            counts[rank] = int(np.prod(inside, dtype=np.int64)) * dtype.itemsize
            columns = tuple(slice(s, s + n) for s, n in zip(start[1:], extent[1:], strict=True))
            places.append((rank, (slice(a - first, b - first), *columns), inside, a - top))
        sent = np.empty(0, np.uint8)
        for rank, _, inside, begin in places:
            if rank == comm.rank:
                part = array_of(mine)
                part = part.reshape(1) if part.ndim == 0 else part
                part = part[begin : begin + inside[0]]
                host = part if array_module(part) is np else part.get()
                sent = np.ascontiguousarray(host).reshape(-1).view(np.uint8)
        got = gather(comm, sent, counts=counts)
        if got is None:
            continue
        block, at = np.empty((stop - first, *row), dtype), 0
        for rank, place, inside, _ in places:
            block[place] = got[at : at + counts[rank]].view(dtype).reshape(inside)
            at += counts[rank]
        yield block.reshape(-1).view(np.uint8).data
