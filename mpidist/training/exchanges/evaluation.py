"""The accuracy of a model on test data, and a digest of its parameters.

Exchanges whose workers have the whole model inherit from `WholeModel`.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np

from ... import events
from ...arrays import array_module
from ...collectives.allreduce import allreduce
from ...data import BadRecordFilter, as_source
from ...partition import BlockPartition
from ...runtime.communicator import check_comm
from ..feed import beside

#: Samples per call of ``model.predict``.
_CHUNK = 256


class WholeModel:
    """What the summary of a run asks of an exchange whose workers have the whole model."""

    workers: Any
    model: Any

    def evaluate(self, data) -> float:
        """Return the share of samples that the model classifies correctly. Collective."""
        return evaluate(self.workers, self.model, data)

    def layout(self) -> dict | None:
        """Return where the parts of the model are: None, because each worker has the whole."""
        return None

    def peer_facts(self) -> dict | None:
        """Return what ranks that average their models have done: None, because no ranks do."""
        return None

    def digest(self) -> str:
        """Return the SHA-256 digest of the parameters."""
        return parameters_digest(self.model.parameters)


def evaluate(comm, model, data) -> float:
    """Return the share of samples that `model` classifies correctly. Collective over `comm`.

    A sample is correct if the largest score of the model is at the label of the sample. If a sample
    has several labels (each 0 or 1), the label at the largest score must be 1. Bad records are left
    out.

    Each rank predicts its part of the data. The correct samples are counted as integers, so the
    result is exact and does not depend on the number of ranks (R146).
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


def count_hits(scores, labels) -> int:
    """Return how many samples have their largest score at their label, or at one of them."""
    best = scores.argmax(axis=1)
    true = labels[range(len(best)), best] > 0 if labels.ndim == 2 else best == labels
    return int(true.sum())


def shared_accuracy(comm, hits: int, used: int) -> float:
    """Return the share of hits among the samples of all ranks. Collective over `comm`."""
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
    """Add one parameter to the digest `total`; the parameters come in the order of their names."""
    host = array if array_module(array) is np else array.get()
    total.update(f"{name} {host.dtype.str} {host.shape}\n".encode())
    total.update(np.ascontiguousarray(host).tobytes())
