"""The settings of the strategy `Pipeline`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from ....errors import ConfigError
from ....models.split_model import check_layers_of_split, check_split_settings, split_ways
from ....registry import look_up
from ...checks import expect, is_whole_number


@dataclass(frozen=True)
class Pipeline:
    """Each rank has some layers of the model, and the microbatches of a batch pass through them.

    The model is a list of layers, such as `mpidist.models.Network`. The argument `microbatches` of
    `md.train` is required. The trained parameters have the same bits as with `AllReduce` and the
    same number of microbatches.

    Parameters
    ----------
    stages : int, optional
        The number of stages. By default, it follows from `cuts` or `replicas`, or each rank has a
        stage of its own.
    cuts : sequence of int or "auto"
        The number of layers before each cut: ``[4, 8]`` cuts 12 layers into 1-4, 5-8 and 9-12. With
        "auto", the cuts are chosen from measured times so that the slowest stage takes the least
        time.
    replicas : sequence of int, optional
        The number of ranks of each stage, such as ``[3, 1]``. By default, all stages have the same
        number of ranks.
    schedule : str
        "1f1b", "gpipe", "zero_bubble" or "interleaved", see docs/pipelines.md. With "pipedream",
        the optimizer makes several updates in a step, so the bits of the parameters depend on the
        stages and replicas.
    chunks : int
        The number of parts of each stage, for "interleaved".
    flush : int, optional
        For "pipedream": after each `flush` microbatches, all stages finish these microbatches
        before the next one enters. `flush` must be a multiple of each number in `replicas`.
    split : mapping of str to str, optional
        Names of dense layers that several ranks share, such as ``{"dense2": "columns"}``: each rank
        has some "columns" or "rows" of the weights, see `md.models.SplitDense`.
    split_ranks : int, optional
        The number of ranks that share these layers. The job then needs `split_ranks` times as many
        ranks as without `split`. By default, `split_ranks` is as large as the number of ranks of
        the job allows.
    """

    stages: int | None = None
    cuts: Sequence[int] | str = "auto"
    replicas: Sequence[int] | None = None
    schedule: str = "1f1b"
    chunks: int = 1
    flush: int | None = None
    split: Mapping[str, str] | None = None
    split_ranks: int | None = None
    in_parts: ClassVar[bool] = True  # no rank makes the parameters of the whole model
    takes_microbatches: ClassVar[bool] = True
    has_replicas: ClassVar[bool] = True
    modules: ClassVar[tuple[str, ...]] = ("split_exchange", "pipelines.pipeline_order")
    reads_last_run: ClassVar[bool] = True  # `open` takes the arguments `store` and `resume`

    def __post_init__(self):
        # Imported in functions, because every run imports this file, and few runs have a pipeline.
        from ....pipeline.pipeline_schedules import SCHEDULES

        look_up(SCHEDULES, self.schedule, "schedule")
        whole = self.stages is None or (is_whole_number(self.stages) and self.stages >= 1)
        expect(whole, "stages", self.stages, "a whole number of 1 or more")
        many = is_whole_number(self.chunks) and self.chunks >= 1
        expect(many, "chunks", self.chunks, "a whole number of 1 or more")
        emptied = self.flush is None or (is_whole_number(self.flush) and self.flush >= 1)
        expect(emptied, "flush", self.flush, "a whole number of 1 or more")
        check_split_settings(self.split, self.split_ranks)
        for name in ("cuts", "replicas"):
            value = getattr(self, name)
            listed = isinstance(value, Sequence) and not isinstance(value, str)
            absent = value == "auto" if name == "cuts" else value is None
            example = "[4, 8], or 'auto'" if name == "cuts" else "[3, 1]"
            expect(listed or absent, name, value, f"a list of whole numbers, such as {example}")
        told = {"stages": self.stages}
        if self.replicas is not None:
            told["replicas"] = len(self.replicas)
        if self.cuts != "auto":
            told["cuts"] = (len(self.cuts) + 1) / self.chunks
        numbers = {number for number in told.values() if number is not None}
        if len(numbers) > 1:
            each = ", ".join(f"{name}={getattr(self, name)}" for name in told)
            raise ConfigError(f"{each}: these give different numbers of stages; let them agree")

    def workers(self, size: int) -> int:
        """Return how many of `size` ranks compute gradients: all."""
        return size

    def _ways(self, size: int) -> int:
        """Return how many of `size` ranks share each split layer; 1 without `split`."""
        if self.split is None:
            return 1
        stages = self.stages or (0 if self.cuts == "auto" else self._parts(1) // self.chunks)
        others = stages if self.replicas is None else sum(self.replicas)
        return split_ways(size, others, self.split_ranks)

    def _parts(self, size: int) -> int:
        """Return the number of parts of the model on `size` ranks."""
        if self.cuts != "auto":
            return len(self.cuts) + 1
        several = len(self.replicas) if self.replicas is not None else size
        return (self.stages or several) * self.chunks

    def check_run(self, size: int | None, model, optimizer, microbatches: int | None) -> None:
        """Raise ConfigError if a run on `size` ranks is not possible.

        `size` is None if the number of ranks is not yet known.
        """
        from ....pipeline.stage_plan import check_layers

        layers, cuts = len(check_layers(model)), self.cuts
        if size is None:
            several = sum(self.replicas) if self.replicas is not None else None
            size = several or self.stages or self._parts(1) // self.chunks
            size *= self.split_ranks or 1
        ways = self._ways(size)
        size //= ways
        parts = self._parts(size)
        if parts > layers:
            raise ConfigError(
                f"{parts} parts for the {layers} layers of the model: give fewer stages or chunks"
            )
        if cuts == "auto":
            cuts = list(range(1, parts))
            if not hasattr(model, "sample_shape"):
                raise ConfigError(
                    f"cuts='auto' measures the layers, and {type(model).__name__} has no "
                    "sample_shape; give the cuts"
                )
        self._grid(layers, cuts, size, microbatches)
        if self.split is not None:
            check_layers_of_split(model, optimizer, self.split, ways)
        if "clip_norm" in (getattr(optimizer, "settings", None) or {}):
            raise ConfigError(
                "clip_norm is a norm over all layers, and each stage has only some of them; leave "
                "it out, or use md.AllReduce()"
            )

    def _grid(self, layers: int, cuts, size: int, microbatches: int | None):
        from ....pipeline.stage_plan import plan_stages

        return plan_stages(
            layers, cuts=cuts, ranks=size, microbatches=microbatches, replicas=self.replicas,
            schedule=self.schedule, chunks=self.chunks, flush=self.flush,
        )  # fmt: skip

    def open(
        self, comm, model, optimizer, *, global_batch: int, seed: int, microbatches=None,
        store=None, resume=False,
    ):  # fmt: skip
        """Return the object that trains the stages in one run. Collective over `comm`.

        With ``cuts="auto"``, a run that may resume (`resume`) reads the cuts and the measurements
        of the last run from `store`, the checkpoint store.
        """
        from ..pipeline_exchange import CutChoice, Stages
        from .pipeline_choice import choose_cuts, last_run
        from .pipeline_order import order_of_ranks

        samples = -(-global_batch // microbatches)
        last = None
        if isinstance(self.cuts, str):
            last = last_run(comm, store, resume, self.split or {}, self._ways(comm.size))
        if self.split is not None:
            return self._open_split(comm, model, optimizer, samples, microbatches, last)
        if isinstance(self.cuts, str):
            choice = choose_cuts(comm, model, self._parts(comm.size), samples, last)
        else:
            choice = CutChoice(list(self.cuts))
        grid = self._grid(len(model.layers), choice.cuts, comm.size, microbatches)
        order = order_of_ranks(comm, model, grid, choice, samples)
        return Stages(comm, model, optimizer, grid, choice, order)

    def _open_split(self, comm, model, optimizer, samples: int, microbatches: int, last):
        from ..split_exchange import SplitStages

        ways = self._ways(comm.size)
        ranks, layers = comm.size // ways, len(model.layers)
        return SplitStages(
            comm, model, optimizer, split=self.split or {}, ways=ways, samples=samples,
            plan=lambda cuts: self._grid(layers, cuts, ranks, microbatches),
            cuts=None if self.cuts == "auto" else self.cuts, parts=self._parts(ranks), last=last,
        )  # fmt: skip
