"""The result of a run, equal on all ranks: accuracy, speed, and a digest of the parameters."""

from __future__ import annotations

import dataclasses
import math
import time

from ..fault_tolerance.communication_share import summarize_steps, warn_of_share
from ..launch import heartbeat
from ..runtime.agreement.run_on_all import run_on_all
from .run_state import Progress


@dataclasses.dataclass(frozen=True)
class Summary:
    """The result of `md.train`: accuracy, losses, times, and a digest of the parameters.

    `step_times` has the fraction of the steps' time that was communication, and for each worker a
    histogram of the times of its steps; if ranks have died, it covers only the steps since the last
    death. All times are wall-clock times. `rank_hours` is the wall-clock time in hours, multiplied
    by the number of ranks.
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
    pipeline: dict | None = None
    peers: dict | None = None
    step_times: dict | None = None

    def as_dict(self) -> dict:
        """Return the summary as a dict of plain numbers and strings, for ``summary.json``.

        A run that was resumed at its last step has a train loss of NaN, which becomes None.
        """
        loss = None if math.isnan(self.train_loss) else self.train_loss
        return {**dataclasses.asdict(self), "train_loss": loss}


def gather_facts(run: Progress, test_data) -> dict:
    """Evaluate the model on `test_data`; return the fields of a `Summary`, by name.

    Collective over the workers.
    """
    workers = run.exchange.workers
    run.exchange.check(run.step)
    if run.store is None:
        run.average_model_state()  # with a store, the last checkpoint has averaged the state
    mine = run.times.facts(run.comm.rank)
    everyone = run_on_all(workers, "md.train: times of steps", lambda: mine, list)
    times = summarize_steps(everyone)
    if workers.rank == 0:
        warn_of_share(times, run.loop_seconds)
    accuracy = None if test_data is None else run.exchange.evaluate(test_data)
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
        "parameters_sha256": run.exchange.digest(),
        "ordered_sum_overhead": run.exchange.price,
        "overlap_fraction": run.exchange.hidden(),
        "pipeline": run.exchange.layout(),
        "peers": run.exchange.peer_facts(),
        "step_times": times,
    }


def share(run: Progress, facts: dict | None) -> Summary:
    """Return the summary on all ranks. Collective over `run.comm`.

    `facts` is the result of `gather_facts`, or None on servers that are not workers.
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
    """Round to six significant digits."""
    return float(f"{value:.6g}")
