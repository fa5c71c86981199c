"""How `Pipeline` trains: each rank has some layers; microbatches pass from rank to rank.

The ranks with the first layers read the inputs, and the ranks with the last layers read the labels.
A bad record is left out before its microbatch enters the pipeline. The gradients of the
microbatches are added in the same fixed order as with ``AllReduce`` and ``microbatches=``, so the
parameters have the same bits, except with "pipedream".

A run can restart from a checkpoint with other cuts and replicas, or with `AllReduce`.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Mapping
from types import MappingProxyType

import numpy as np

from ... import events
from ...collectives.allreduce import allreduce
from ...collectives.broadcast_parameters import broadcast_parameters
from ...data import BadRecordFilter, as_source
from ...errors import BadRecord
from ...fault_tolerance.check_replicas import check_replicas
from ...gradients.exchange import Gradients
from ...partition import BlockPartition
from ...pipeline import PipelineGrid
from ...pipeline.action_trace import EVENT
from ...pipeline.grid.recut import CutChoice
from ...pipeline.stages.stage import Stage
from ...runtime.agreement.run_on_all import run_on_all
from ...runtime.agreement.tell_others import tell
from ...runtime.context import free, of
from ...runtime.polling import wait_until
from .evaluation import add_to_digest, count_hits, shared_accuracy
from .pipelines.pipeline_choice import ENTRY, chunk_seconds, shared_layers, simulated_bubble

#: The number of samples of a microbatch of test data.
_CHUNK = 128


class Untimed:
    """Takes the place of `Stragglers`, and reports no slow ranks."""

    def note(self, *seconds: float) -> None:
        """Do nothing with the times of a step."""


class Stages:
    """Train a model in stages (groups of layers, each on its own ranks). Collective over `comm`.

    Parameters
    ----------
    comm : MPI.Comm
    model, optimizer
    grid : PipelineGrid
    choice : CutChoice
        Where the model is cut, and why there.
    order : list of int, optional
        The ranks of the replicas (copies) of stage 0, then of stage 1, and so on. By default, these
        ranks are 0, 1, 2 and so on.
    """

    dedicated = False
    synchronous = True
    equal_state = True
    price: dict | None = None
    split: Mapping[str, str] = MappingProxyType({})  # see `SplitStages`, also for `ways`
    ways = 1
    wait = staticmethod(wait_until)

    def __init__(
        self, comm, model, optimizer, grid: PipelineGrid, choice: CutChoice, order=None
    ):  # fmt: skip
        self.comm = self.workers = comm
        self.model, self.optimizer = model, optimizer
        # In the communicator of the stages, the rank of a process is the number of its slot (of its
        # replica of a stage).
        self._order = order
        self._ordered = None if order is None else comm.Split(0, order.index(comm.rank))
        placed = comm if self._ordered is None else self._ordered
        self.stage = Stage(placed, model, grid, gradients=Gradients)
        # The parameters of other layers would keep their initial values, so they are left out.
        model.parameters = self.parameters = self.stage.parameters
        if self.parameters:
            broadcast_parameters(self.stage.replicas, self.parameters)
        self.optimizer_state = run_on_all(
            comm, "md.train: optimizer", lambda: optimizer.init(self.parameters)
        )
        self.stragglers = Untimed()
        self._choice, self._skipped = choice, False
        self._at_once = grid.schedule == "pipedream"

    # -- a step ------------------------------------------------------------------------

    def part(self, count: int, step: int = 0) -> slice | np.ndarray:
        """Return the indices of this rank's samples in a global batch of `count` samples."""
        reads = self.stage.reads_inputs or self.stage.reads_labels
        return self.stage.rows(count) if reads else slice(0, 0)

    def compute(self, feed, indices) -> tuple[float, int]:
        """Compute the gradients of this step; return (0.0, number of samples that this rank read).

        Collective. `reduce` returns the loss.
        """
        mine = indices[self.part(len(indices))]
        taken = feed.take(mine)
        if taken is not None:
            self._reject(feed, taken, mine)
        quarantine = feed.quarantine
        found = {index for index, _ in quarantine.found}
        missing, starved = self._agree_on_missing(sorted(found), taken is None)
        # Each bad record is counted by only one rank.
        quarantine.found = [
            one for one in quarantine.found if missing.get(one[0]) == self.comm.rank
        ]
        self._skipped = starved
        if starved or taken is None:
            return 0.0, 0
        batch, sizes = self._without(missing, indices, mine, taken)
        *inputs, labels = batch
        update = self._update_now if self._at_once else None
        self.stage.run(inputs[0], labels, sizes, len(indices), update)
        return 0.0, len(labels)

    def _reject(self, feed, taken, mine) -> None:
        """Record as bad those records whose labels the model would reject."""
        classes = getattr(self.model, "classes", None)
        labels = taken.batch[-1]
        if classes is None or not self.stage.reads_labels or labels.ndim != 1:
            return
        wrong = np.flatnonzero((labels < 0) | (labels >= classes))
        told = f"the model says ConfigError: expected labels from 0 to {classes - 1}"
        feed.quarantine.note(
            BadRecord(int(mine[taken.kept[k]]), f"{told}, got {labels[k]}") for k in wrong
        )

    def _agree_on_missing(self, bad: list[int], starved: bool) -> tuple[dict[int, int], bool]:
        """Return ({bad record: the lowest rank that has found it}, whether a rank has no records).

        Collective. A rank has no records if they were not read in time.
        """
        counts = np.array([len(bad), starved], np.int64)
        allreduce(self.comm, counts, algorithm="native")
        missing: dict[int, int] = {}
        if counts[0]:
            everyone = run_on_all(self.comm, "md.train: bad records", lambda: bad, list)
            for rank, records in enumerate(everyone):
                for index in records:
                    missing.setdefault(index, rank)
        return missing, bool(counts[1])

    def _without(self, missing: dict[int, int], indices, mine, taken):
        """Return this rank's samples without the bad ones, and the sizes of all microbatches."""
        bounds = BlockPartition(len(indices), self.stage.grid.microbatches).bounds()
        if not missing:
            return taken.batch, np.diff(bounds).tolist()
        gone = np.array(sorted(missing), np.int64)
        good = ~np.isin(indices, gone)
        sizes = [int(good[a:b].sum()) for a, b in itertools.pairwise(bounds)]
        kept = ~np.isin(mine[taken.kept], gone)
        return tuple(array[kept] for array in taken.batch), sizes

    def reduce(self, loss: float, samples: int, total: int, stop: int) -> tuple[float, bool]:
        """Return (mean loss of the global batch, whether `stop` is true on any rank).

        Collective.
        """
        values = np.array([0.0 if self._skipped else self.stage.loss_share(), bool(stop)])
        allreduce(self.comm, values, algorithm="native")
        return float(values[0]), bool(values[1] > 0)

    def rescale(self, factor: float) -> None:
        """Multiply the gradients by `factor`, which corrects the mean for samples left out."""
        for gradient in self.stage.gradients.values():
            gradient *= factor

    def _update_now(self, gradients: dict, parameters: dict, weight: float) -> None:
        """Update the parameters with gradients that have the weight `weight` in this step."""
        self.optimizer.update(gradients, self.optimizer_state, parameters, weight)

    def update(self) -> None:
        """Update the parameters of this stage, unless "pipedream" has done so during the step."""
        if self._at_once:
            return
        self.optimizer.update(self.stage.gradients, self.optimizer_state, self.parameters)

    def order(self) -> dict[str, int]:
        """Return {}: this strategy does not depend on the order of the gradients in memory."""
        return {}

    def arrange(self, order: dict[str, int]) -> None:
        """Do nothing: this strategy does not depend on the order of the gradients in memory."""

    def hidden(self) -> None:
        """Return None: it is not measured how much of the exchange overlaps with computing."""

    def begin(self) -> None:
        """Do nothing: before the first step, this strategy has nothing to prepare."""

    # -- the state -----------------------------------------------------------------------

    def state(self, saving: bool) -> dict:
        """Return this stage's parameters and optimizer state: the arrays, not copies.

        Collective if `saving` is true: all microbatches in the pipeline are then finished first.
        """
        if saving:
            self.stage.drain()
        state = {"parameters": dict(self.parameters), "optimizer": dict(self.optimizer_state)}
        # An empty dict would be saved as an entry, but other stages have no such entry.
        state["optimizer"] = {
            key: one for key, one in state["optimizer"].items()
            if not isinstance(one, Mapping) or one
        }  # fmt: skip
        if saving:
            state[ENTRY] = facts = self._facts_to_save()
            # With "pipedream", counts of updates differ between stages, so they are saved apart.
            for name in _counts(state["optimizer"]) if self._at_once else ():
                one, values = state["optimizer"][name], facts["counts"].values()
                state["optimizer"][name] = np.full_like(one, max(each[name] for each in values))
        return {key: one for key, one in state.items() if one}

    def _facts_to_save(self) -> dict:
        """Return plain values for the checkpoint, equal on all ranks. Collective."""
        stage, grid, choice = self.stage, self.stage.grid, self._choice
        known = stage.rank, (stage.stage, _counts(self.optimizer_state), stage.mean_times())

        def together(everyone: list) -> dict:
            # With `split`, all pipelines have the same counts; those of the first one are saved.
            first = dict(reversed(everyone))
            stages, counts, times = zip(*(first[rank] for rank in sorted(first)), strict=True)
            return {
                "cuts": list(grid.cuts), "replicas": list(grid.replicas),
                "samples": choice.samples, "layers": list(choice.layers),
                "seconds": chunk_seconds(grid, times),
                "counts": {str(s): one for s, one in zip(stages, counts, strict=True)},
                **shared_layers(self.split, self.ways),
            }  # fmt: skip

        return run_on_all(self.comm, "md.train: stages", lambda: known, together)

    def restored(self, state: Mapping) -> None:
        """Take over the checkpoint's counts of updates, if this run has the same `replicas`."""
        facts, grid = state.get(ENTRY, {}), self.stage.grid
        if self._at_once and facts.get("replicas") == list(grid.replicas):
            for name, value in facts["counts"].get(str(self.stage.stage), {}).items():
                self.optimizer_state[name][...] = value

    def check(self, step: int) -> None:
        """Raise ReplicaError on all ranks unless the replicas of each stage are equal.

        Collective.
        """
        run_on_all(
            self.comm, "md.train",
            lambda: check_replicas(self.stage.replicas, self.parameters, step=step),
        )  # fmt: skip

    def save_point(self, step: int) -> None:
        """Before a checkpoint, finish all microbatches; check that a stage's replicas are equal.

        Collective.
        """
        self.stage.drain()
        self.check(step)

    def finish(self) -> None:
        """At the end of the run, finish all microbatches, so that all parameters are final.

        Collective.
        """
        self.stage.drain()

    def evaluate(self, data) -> float:
        """Return the fraction of samples that the model classifies correctly. Collective."""
        source, stage = as_source(data), self.stage
        careful = BadRecordFilter(source)
        hits = used = 0
        count = stage.grid.microbatches * _CHUNK
        for first in range(0, len(source), count):
            indices = np.arange(first, min(first + count, len(source)))
            mine = indices[self.part(len(indices))]
            taken = careful.take(mine)
            for one in taken.bad:
                events.emit("bad_record", source="test data", index=one.index, reason=one.reason)
            missing, _ = self._agree_on_missing([one.index for one in taken.bad], False)
            batch, sizes = self._without(missing, indices, mine, taken)
            *inputs, labels = batch
            scores = stage.forward(inputs[0], sizes)
            if scores:
                used += len(labels)
                hits += count_hits(np.concatenate(scores), labels)
        return shared_accuracy(self.comm, hits, used)

    def layout(self) -> dict:
        """Return how the model is cut, and measurements of all ranks, for the summary. Collective.

        docs/pipelines.md ("What a run reports") explains each entry.
        """
        stage, grid = self.stage, self.stage.grid
        events.emit(EVENT, step=stage.steps, spans=stage.spans)
        idle = 1 - stage.computing / stage.seconds if stage.seconds else 0.0
        sent = stage.bytes_sent // max(stage.steps, 1)
        stalest, staleness = stage.staleness()
        mine = {
            "stages": stage.stage, "idle": round(idle, 4), "kept": stage.kept,
            "stash_bytes": stage.stash_bytes, "bytes_sent": sent, "versions": stage.versions,
            "staleness": stalest, "staleness_mean": round(staleness, 4),
        }  # fmt: skip

        def together(everyone: list) -> dict:
            by_stage, cuts, times = zip(*everyone, strict=True)
            rows = list(by_stage)
            for slot, rank in enumerate(self._order or ()):  # from the order of slots to ranks
                rows[rank] = by_stage[slot]
            steps = max(stage.steps, 1)
            return {
                **{name: [row[name] for row in rows] for name in mine},
                "cut_bytes": [sum(one[c] for one in cuts) // steps for c in range(len(grid.cuts))],
                "bubble": round(sum(row["idle"] for row in rows) / len(rows), 4),
                "bubble_simulated": simulated_bubble(grid, times, stage.steps),
            }

        known = mine, stage.cut_bytes, stage.mean_times()
        return {
            "cuts": list(grid.cuts), "replicas": list(grid.replicas), "schedule": grid.schedule,
            "chunks": grid.chunks, "microbatches": grid.microbatches,
            "cuts_from": self._choice.origin, "cuts_before": self._choice.before,
            "plan_off": self._choice.off,
            **run_on_all(stage.comm, "md.train: layout", lambda: known, together),
        }  # fmt: skip

    def peer_facts(self) -> None:
        """Return None, because the ranks do not average models."""

    def digest(self) -> str:
        """Return the SHA-256 digest of all parameters. Collective."""
        total = hashlib.sha256()
        self.stage.visit(self.parameters, lambda *named: add_to_digest(total, *named))
        return run_on_all(
            self.stage.comm, "md.train: digest", total.hexdigest, lambda everyone: everyone[0]
        )

    # -- the end -------------------------------------------------------------------------

    def close(self) -> None:
        """Free the memory and the communicators of this rank's stage. Collective."""
        self.stage.close()
        if self._ordered is not None and not of(self._ordered).failed:
            free(self._ordered)
            self._ordered.Free()

    def abandon(self, error: BaseException) -> None:
        """Send the other ranks the error that has ended the run on this rank."""
        for comm in (self.stage.replicas, self.comm, *([self._ordered] if self._ordered else [])):
            tell(comm, error)

    def lost(self, error: BaseException) -> None:
        """Do nothing after a death: a run with a pipeline ends when a rank dies."""


def _counts(optimizer_state: Mapping) -> dict[str, float]:
    """Return the numbers in an optimizer's state that belong to no parameter, such as a count."""
    return {
        name: one.item() for name, one in optimizer_state.items()
        if not isinstance(one, Mapping) and getattr(one, "shape", None) == ()
    }  # fmt: skip
