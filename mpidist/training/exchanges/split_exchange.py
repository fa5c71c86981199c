"""How ``Pipeline(split=...)`` trains: several ranks share the large dense layers of each stage.

    2 stages, split_ranks = 2     ranks 0, 1 have stage 0, and ranks 2, 3 stage 1

                 stage 0     stage 1
    pipeline 0   rank 0 ---- rank 2
                   |           |          | ranks that share the layers named in `split`
    pipeline 1   rank 1 ---- rank 3

Both pipelines train with the same microbatches. Of a split layer, each rank of a stage computes its
part; the ranks then sum or gather their results. The other layers are computed on each rank of the
stage. A checkpoint has whole arrays, so a run can restart from it with another `split`, other
`cuts` and `replicas`, or with `AllReduce`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from ...checkpoint.format.state import Shard
from ...collectives.allreduce import allreduce
from ...collectives.broadcast_parameters import broadcast_parameters
from ...fault_tolerance.check_replicas import check_replicas
from ...models.split_model import parts_of, split_model
from ...pipeline import PipelineGrid
from ...runtime.agreement.run_on_all import run_on_all
from ...runtime.agreement.tell_others import tell
from ...runtime.context import free, of
from .evaluation import digest_of_parts
from .pipeline_exchange import CutChoice, Stages
from .pipelines.pipeline_choice import choose_cuts

#: The entries of `Stages.layout` that have a value for each rank.
_BY_RANK = (
    "stages", "idle", "kept", "stash_bytes", "bytes_sent", "versions", "staleness",
    "staleness_mean",
)  # fmt: skip


class SplitStages(Stages):
    """Train a model in stages whose large layers several ranks share. Collective over `comm`.

    Parameters
    ----------
    comm : MPI.Comm
    model, optimizer
        The layers of `model` are whole, not split.
    split : mapping of str to str
        The names of the layers that ranks share, and how each is divided: "columns" or "rows".
    ways : int
        The number of ranks that share a layer. The size of `comm` is a multiple of it.
    plan : callable
        ``plan(cuts)`` returns a `PipelineGrid`, the stages and replicas of a pipeline. There are
        `ways` pipelines, which all have this plan.
    cuts : sequence of int, or None
        The number of layers before each cut into stages. None if the cuts must be chosen by a
        measurement.
    parts, samples : int
        For this measurement: into how many parts the model is cut, and how many samples a
        microbatch has.
    last : mapping or None
        What the last run has measured, from `pipeline_choice.last_run`.
    """

    def __init__(
        self, comm, model, optimizer, *, split: Mapping[str, str], ways: int,
        plan: Callable[..., PipelineGrid], cuts, parts: int, samples: int, last,
    ):  # fmt: skip
        self.ways, self.split, self.way = ways, dict(split), comm.rank % ways
        # Ranks with consecutive numbers share a layer, because they are usually on one node.
        self.sharers = comm.Split(comm.rank // ways, comm.rank)
        self.pipeline = comm.Split(self.way, comm.rank)
        own = split_model(model, self.sharers, split)
        if cuts is None:
            choice = choose_cuts(comm, own, parts, samples, last, measuring=ways)
        else:
            choice = CutChoice(list(cuts))
        super().__init__(self.pipeline, own, optimizer, plan(choice.cuts), choice)
        self.comm = self.workers = comm
        model.parameters = self.parameters
        self._parts = parts_of(own)
        if self._shared():
            broadcast_parameters(self.sharers, self._shared())

    def _shared(self) -> dict:
        """Return the parameters that are not split, of which each rank has the whole arrays."""
        return {name: a for name, a in self.parameters.items() if name not in self._parts}

    def reduce(self, loss: float, samples: int, total: int, stop: int) -> tuple[float, bool]:
        """Return (mean loss of the global batch, whether `stop` is true on a rank). Collective."""
        # All pipelines have the same loss, so only the first one adds its loss.
        counts = not self._skipped and self.way == 0
        values = np.array([self.stage.loss_share() if counts else 0.0, bool(stop)])
        allreduce(self.comm, values, algorithm="native")
        return float(values[0]), bool(values[1] > 0)

    def state(self, saving: bool) -> dict:
        """Return this stage's parameters and optimizer state: the arrays, not copies."""
        return self._as_shards(super().state(saving))

    def _as_shards(self, tree: Mapping) -> dict:
        def leaf(name: str, value):
            if isinstance(value, Mapping):
                return self._as_shards(value)
            return Shard(value, *self._parts[name]) if name in self._parts else value

        return {name: leaf(name, value) for name, value in tree.items()}

    def check(self, step: int) -> None:
        """Raise ReplicaError on all ranks unless all copies of each parameter are equal.

        Collective.
        """
        super().check(step)
        run_on_all(
            self.comm, "md.train", lambda: check_replicas(self.sharers, self._shared(), step=step)
        )

    def layout(self) -> dict:
        """Return the stages and the measurements of all ranks, for the run's summary.

        Collective.
        """
        mine = super().layout()

        def together(everyone: list) -> dict:
            each = everyone[: self.ways]  # one rank of each pipeline
            found = dict(each[0])
            for name in _BY_RANK:
                rows = zip(*(one[name] for one in each), strict=True)
                found[name] = [value for row in rows for value in row]
            cuts = zip(*(one["cut_bytes"] for one in each), strict=True)
            found["cut_bytes"] = [sum(row) for row in cuts]
            found["bubble"] = round(sum(found["idle"]) / len(found["idle"]), 4)
            return {**found, "split": self.split, "split_ranks": self.ways}

        return run_on_all(self.comm, "md.train: layout", lambda: mine, together)

    def digest(self) -> str:
        """Return the SHA-256 digest of all parameters as whole arrays. Collective."""
        return digest_of_parts(self.comm, self._as_shards(self.parameters))

    def close(self) -> None:
        """Free the stage's memory, and the communicators of ranks that share layers. Collective."""
        super().close()
        for comm in (self.sharers, self.pipeline):
            if of(comm).failed:
                return  # after an error, messages may still be on their way, so nothing is freed
            free(comm)
            comm.Free()

    def abandon(self, error: BaseException) -> None:
        """Send the other ranks the error that has ended the run on this rank."""
        for comm in (self.sharers, self.pipeline):
            tell(comm, error)
        super().abandon(error)
