"""The result of a run, equal on all ranks: accuracy, speed, and a digest of the parameters."""

from __future__ import annotations

import dataclasses
import hashlib
import math
import time

import numpy as np

from .. import events
from ..arrays import array_module
from ..collectives.allreduce import allreduce
from ..data import BadRecordFilter, as_source
from ..launch import heartbeat
from ..partition import BlockPartition
from ..runtime.agreement.run_on_all import run_on_all
from ..runtime.communicator import check_comm
from .feed import beside
from .run_state import Progress

#: Samples per call of ``model.predict``.
_CHUNK = 256


@dataclasses.dataclass(frozen=True)
class Summary:
    """Result of `md.train`.

    Times are wall-clock times. `rank_hours` is the wall-clock time in hours, times the number of
    ranks.
    """

    test_accuracy: float | None
    train_loss: float
    steps: int
    epochs: int
    ranks: int
    workers: int
    wall_seconds: float
    samples_per_second: float
    rank_hours: float
    restarts: int
    resizes: int
    grown: int
    deaths: int
    evicted: int
    skipped_records: int
    failed_saves: int
    resumed_at: int
    finished: bool
    parameters_sha256: str
    ordered_sum_overhead: dict | None = None
    overlap_fraction: float | None = None

    def as_dict(self) -> dict:
        """Return plain numbers and strings for ``summary.json``.

        A run that was resumed at its last step has a train loss of NaN, which becomes None.
        """
        loss = None if math.isnan(self.train_loss) else self.train_loss
        return {**dataclasses.asdict(self), "train_loss": loss}


def gather_facts(run: Progress, test_data) -> dict:
    """Evaluate the model and return the fields of the summary. Collective over the workers.

    Raises ReplicaError if the parameters differ between workers.
    """
    workers = run.exchange.workers
    run.exchange.check(run.step)
    if run.store is None:
        run.average_model_state()  # with a store, the last checkpoint has averaged the state
    accuracy = None if test_data is None else evaluate(workers, run.model, test_data)
    return {
        "test_accuracy": accuracy,
        "train_loss": run.train_loss(),
        "steps": run.step,
        "epochs": run.position.epoch,
        "ranks": run.comm.size,
        "workers": workers.size,
        "samples_per_second": six_digits(run.samples / max(run.loop_seconds, 1e-9)),
        "restarts": heartbeat.attempt(),
        "resizes": run.resizes,
        "grown": run.grown,
        "deaths": run.deaths,
        "evicted": run.evicted,
        "skipped_records": run.quarantine.skipped,
        "failed_saves": run.failed_saves,
        "resumed_at": run.first_step,
        "finished": run.step >= run.last,
        "parameters_sha256": parameters_digest(run.model.parameters),
        "ordered_sum_overhead": run.exchange.price,
        "overlap_fraction": run.exchange.hidden(),
    }


def share(run: Progress, facts: dict | None) -> Summary:
    """Return the summary on all ranks. Collective over `run.comm`.

    `facts` is None on dedicated servers, which receive the summary from the first worker.
    """
    if facts is not None:
        wall = time.perf_counter() - run.began
        facts["wall_seconds"] = six_digits(wall)
        facts["rank_hours"] = six_digits(wall * run.comm.size / 3600)
    facts = run_on_all(
        run.comm, "md.train: summary", lambda: facts, lambda everyone: next(filter(None, everyone))
    )
    return Summary(**facts)


def six_digits(value: float) -> float:
    """Round to six significant digits, so that even the times of a run of 40 ms are precise."""
    return float(f"{value:.6g}")


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
        best = model.predict(*inputs).argmax(axis=1)
        true = labels[range(len(best)), best] > 0 if labels.ndim == 2 else best == labels
        hits += int(true.sum())
    total = np.array([hits, used], np.int64)
    allreduce(comm, total, algorithm="native")
    return int(total[0]) / max(int(total[1]), 1)


def parameters_digest(parameters: dict) -> str:
    """Return the SHA-256 digest over the names, dtypes, shapes and bytes of all parameters."""
    total = hashlib.sha256()
    for name in sorted(parameters):
        array = parameters[name]
        host = array if array_module(array) is np else array.get()
        total.update(f"{name} {host.dtype.str} {host.shape}\n".encode())
        total.update(np.ascontiguousarray(host).tobytes())
    return total.hexdigest()
