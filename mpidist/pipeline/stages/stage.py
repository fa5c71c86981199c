"""``md.Stage``: the layers of one rank of a pipeline, and the runtime of its schedule.

    stage = md.Stage(comm, model, grid)        # grid = md.pipeline.plan_stages(...)
    loss = stage.step((inputs, labels))        # the mean loss; also fills stage.gradients
    optimizer.update(stage.gradients, state, stage.parameters)
    scores = stage.predict(inputs)

A rank does the computations and messages of its list (`stage_plan`) one after the other. The
trained parameters have the same bits, whatever the stages and their numbers of ranks are. This does
not hold for the schedule "pipedream". If another rank raises an exception while a rank waits for
it, the waiting rank raises an error.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np

from ... import events
from ...arrays import array_module
from ...collectives.allgather import allgather
from ...collectives.allreduce import allreduce
from ...errors import ClosedError, ConfigError
from ...gradients.flat_views import flat_views, loss_dtype
from ...models.network import check_input_shape
from ...partition import BlockPartition
from ...runtime import polling
from ...runtime.agreement.mismatch import Signature
from ...runtime.agreement.run_on_all import run_on_all, same_on_all
from ...runtime.context import free, of
from ...tensors import dtype_of
from ..activation_wire import c_ordered
from ..pipeline_schedules import RECV_F, SEND_F, F, I
from ..stage_contract import checked_arrays
from ..stage_plan import PipelineGrid, check_layers
from .pipedream_steps import PipeDreamSteps
from .stage_chunk import Chunk
from .stage_messages import StageMessages
from .stage_pass import StagePass
from .synchronous_steps import SynchronousSteps


class Stage:
    """The stage of a pipeline on this rank. Collective over `comm`, as are all its methods.

    Parameters
    ----------
    comm : MPI.Comm
    model : object
        A model with ``layers`` and ``loss``, such as `mpidist.models.Network`. The parameters must
        be equal on all replicas of a stage.
    grid : PipelineGrid
        The result of `pipeline.plan_stages`.
    gradients : callable, optional
        `md.Gradients`, or a function with the same arguments. Needed for "pipedream" with replicas,
        which use it to add their gradients in each update.

    Attributes
    ----------
    stage, replica : int
        The number of this rank's stage, and this rank's number among the ranks of the stage.
    halves : bool
        Whether the gradients of inputs and of weights are computed at different times (as in
        "zero_bubble").
    parameters : dict of str to array
        The parameters of this stage: the arrays of the model, not copies.
    gradients : dict of str to array
        After `step`, the gradients of the mean loss over the global batch.
    replicas : MPI.Comm
        The ranks of this stage.
    steps : int
        The number of steps so far.
    seconds, computing : float
        The seconds that all steps so far took, and the seconds in which this rank computed.
    kept : int
        The largest number of (chunk, microbatch) pairs whose data this rank has kept at the same
        time. A chunk is a group of consecutive layers.
    bytes_sent : int
        The bytes that this rank has sent to other stages in the steps so far.
    cut_bytes : Counter of int
        `bytes_sent` for each cut: key c is the cut behind chunk c.
    stash_bytes : int
        The largest number of bytes that this rank has kept for backward passes at the same time:
        data that the layers save, and with "pipedream" old versions of the parameters.
    spans : list of (kind, chunk, microbatch, begin, end)
        The computations of the newest step. Times are those of `time.time`, in seconds.

    Raises
    ------
    ConfigError
        The model cannot be cut, or does not fit the grid.
    MismatchError
        The arguments differ between ranks.
    """

    def __init__(self, comm, model, grid: PipelineGrid, *, gradients: Callable | None = None):
        same_on_all(comm, "md.Stage", lambda: _facts(comm, model, grid, gradients))
        self.comm, self.model, self.grid = comm, model, grid
        self.rank = comm.rank
        self.stage, self.replica = grid.place(comm.rank)
        self.pieces = grid.pieces(comm.rank)
        self.context = of(comm)
        arrays: dict[int, dict] = {}

        def own_dtypes() -> dict[int, list[str]]:
            arrays.update((number, self._arrays(number)) for number in grid.chunks_of(self.stage))
            return {number: [a.dtype.name for a in one.values()] for number, one in arrays.items()}

        names = run_on_all(comm, "md.Stage", own_dtypes, _in_order)
        # A stage without parameters computes with the dtype of the other stages.
        self.dtype = dtype_of(names[0])
        like = next(iter(_joined(arrays.values()).values()), None)
        self.xp = np if like is None else array_module(like)
        self.replicas = comm.Split(self.stage, comm.rank)
        self.messages = StageMessages(comm.Dup(), self.xp)
        widest = loss_dtype(map(dtype_of, names))
        self._kind = PipeDreamSteps if grid.in_rounds else SynchronousSteps
        self.chunks = {number: self._chunk(number, own, widest) for number, own in arrays.items()}
        self.parameters = _joined(one.parameters for one in self.chunks.values())
        self.seconds = self.computing = 0.0
        self.kept = self.steps = self.bytes_sent = self.stash_bytes = 0
        self.cut_bytes = Counter[int]()
        self.spans: list[tuple[str, int, int, float, float]] = []
        self._times: dict[tuple[int, str], tuple[float, int]] = {}
        self.last_chunk = grid.stages * grid.chunks - 1
        self.halves = any(one.kind == I for one in grid.actions(comm.rank))
        self._steps = self._kind(self, gradients)
        self.gradients = _joined(one.gradients for one in self.chunks.values())
        self._closed = False

    def _arrays(self, number: int) -> dict:
        """Return the parameters of a chunk (group of consecutive layers), making no others."""
        model, mine = self.model, self.grid.layers_of(number)
        if "parameters" not in vars(model) and hasattr(model, "initial_parameters"):
            return model.initial_parameters(mine.start, mine.stop)
        return checked_arrays(model, [model.layers[k] for k in mine])

    def _chunk(self, number: int, parameters: dict, widest) -> Chunk:
        all_layers, mine = self.model.layers, self.grid.layers_of(number)
        layers = [all_layers[k] for k in mine]
        last = mine.stop == len(all_layers)
        views, vectors = flat_views(parameters, loss=widest) if parameters or last else ({}, [])
        # No layer before layer `first` has parameters, so the backward pass ends at `first`.
        first = next(k for k, layer in enumerate(all_layers) if layer.shapes())
        ends = None if first < mine.start else min(first, mine.stop) - mine.start
        return self._kind.chunk(number, layers, parameters, ends, views, vectors)

    @property
    def reads_inputs(self) -> bool:
        """Whether this rank has the first layers."""
        return 0 in self.chunks

    @property
    def reads_labels(self) -> bool:
        """Whether this rank has the last layers, and computes the loss."""
        return self.last_chunk in self.chunks

    @property
    def versions(self) -> int:
        """The largest number of versions of the parameters that this rank had at the same time."""
        return max(chunk.versions for chunk in self.chunks.values())

    def rows(self, count: int) -> slice | np.ndarray:
        """Return the indices of this rank's samples in a global batch of `count` samples."""
        bounds, pieces = BlockPartition(count, self.grid.microbatches).bounds(), self.pieces
        if not pieces:
            return slice(0, 0)
        if pieces.step == 1:
            return slice(bounds[pieces.start], bounds[pieces.stop])
        return np.concatenate([np.arange(bounds[i], bounds[i + 1]) for i in pieces])

    # -- whole batches -----------------------------------------------------------------

    def step(self, batch, update: Callable | None = None) -> float:
        """Compute the gradients of a global batch; return its mean loss. Collective.

        `batch` is (inputs, labels). Only the ranks of the first stage read the inputs, and only the
        ranks of the last stage read the labels; other ranks need arrays of the same length.

        With the schedule "pipedream", a stage calls ``update(gradients, parameters, weight)``
        several times in a step, each time with the gradients of one microbatch of each of its
        ranks. The function must update the parameters in place. `weight` is the fraction of the
        batch's samples in these microbatches. After the step, some microbatches are not finished
        yet, see `drain`.
        """
        with self._guard("md.Stage.step"):
            inputs, labels = batch
            if len(inputs) != len(labels):
                raise ConfigError(f"batch: {len(inputs)} inputs but {len(labels)} labels")
            mine = self.rows(len(inputs))
            sizes = BlockPartition(len(inputs), self.grid.microbatches).counts()
            x, y = inputs[mine], labels[mine]
        self.run(x, y, sizes, len(inputs), update)
        loss = np.array([self.loss_share()], np.float64)
        allreduce(self.comm, loss, algorithm="native")
        return float(loss[0])

    def predict(self, inputs):
        """Return one row of scores per sample, on all ranks. Collective. Calls `drain` first."""
        self.drain()
        with self._guard("md.Stage.predict"):
            rows = self.rows(len(inputs))
            sizes = BlockPartition(len(inputs), self.grid.microbatches).counts()
            x = inputs[rows]
        found = self.forward(x, sizes)
        # Without samples, the number of scores of a row is not known.
        mine = np.concatenate(found) if found else None if len(inputs) else np.empty((0, 0), "f4")

        def form() -> tuple | None:
            return None if mine is None else (mine.shape[1:], mine.dtype.name)

        shape, dtype = run_on_all(self.comm, "md.Stage.predict", form, _first_known)
        block = np.empty((0, *shape), dtype) if mine is None else mine
        scores = allgather(self.comm, block)
        if self.grid.in_rounds and self.grid.replicas[-1] > 1:
            last = self.grid.ranks_of(self.grid.stages - 1)
            bounds = BlockPartition(len(inputs), self.grid.microbatches).bounds()
            order = [row for rank in last for i in self.grid.pieces(rank)
                     for row in range(bounds[i], bounds[i + 1])]  # fmt: skip
            scores = scores[np.argsort(order)]
        return scores

    # -- one pass of the schedule --------------------------------------------------------

    def run(
        self, inputs, labels, sizes: Sequence[int], total: int, update: Callable | None = None
    ) -> None:
        """Compute, send and receive all microbatches of a step, and sum their gradients.

        Collective.

        Parameters
        ----------
        inputs, labels : arrays
            The samples of this rank's microbatches, one after the other. `inputs` are used only on
            ranks with `reads_inputs`, and `labels` only on ranks with `reads_labels`.
        sizes : sequence of int
            The number of samples, which may be 0, of each microbatch of the step, also of the other
            ranks' microbatches.
        total : int
            The number of samples over which the mean is taken: the mean gradients of a microbatch
            are multiplied by the number of its samples, divided by `total`. Pass the same number
            on all ranks: they do not compare it.
        update : callable
            Needed for "pipedream", see `step`.
        """
        with self._guard("md.Stage.step"):
            self._steps.check_update(update)
        began, sent = time.perf_counter(), self.messages.bytes_sent
        with self._operation("md.Stage.step", sizes):
            x, y = self._cut(inputs, labels, sizes)
            spans, self._loss = self._steps.step(x, y, sizes, total, update)
            self._note_times(spans)
        self.seconds += time.perf_counter() - began
        self.bytes_sent += self.messages.bytes_sent - sent
        self.steps += 1

    def drain(self) -> None:
        """Do the backward passes that a step has left, and their updates. Collective.

        Only the schedule "pipedream" leaves such passes; with other schedules, this method does
        nothing. The updates call the function `update` that was passed to the last step.
        """
        if not self.grid.in_rounds:
            return
        began, sent = time.perf_counter(), self.messages.bytes_sent
        with self._operation("md.Stage.drain", ()):
            self._note_times(self._steps.drain())
        self.seconds += time.perf_counter() - began
        self.bytes_sent += self.messages.bytes_sent - sent

    def _note_times(self, spans: list[tuple[str, int, int, float, float]]) -> None:
        """Add the times of a step's computations to the statistics, and keep them as `spans`."""
        zero = time.time() - time.perf_counter()
        if spans:  # a drain may have nothing to do
            self.spans = [
                (kind, chunk, i, begin + zero, end + zero) for kind, chunk, i, begin, end in spans
            ]
        for kind, chunk, _, begin, end in spans:
            seconds, count = self._times.get((chunk, kind), (0.0, 0))
            self._times[chunk, kind] = seconds + end - begin, count + 1

    def note_stash(self) -> None:
        """Update `kept` and `stash_bytes`, the maxima of the data kept for backward passes."""
        chunks = self.chunks.values()
        self.kept = max(self.kept, sum(one.kept for one in chunks))
        self.stash_bytes = max(self.stash_bytes, sum(one.stash_bytes for one in chunks))

    def mean_times(self) -> dict[tuple[int, str], float]:
        """Return {(number of the group of layers, kind of computation): mean seconds so far}."""
        return {key: seconds / count for key, (seconds, count) in self._times.items()}

    def staleness(self) -> tuple[int, float]:
        """Return the maximum and the mean of the number of updates that a gradient has missed.

        A gradient misses the updates between its forward pass and the update that uses it.
        """
        chunks = self.chunks.values()
        used = sum(one.gradients_used for one in chunks)
        missed = sum(one.staleness for one in chunks)
        return max(one.stalest for one in chunks), missed / max(used, 1)

    def forward(self, inputs, sizes: Sequence[int]) -> list:
        """Return the scores of this rank's microbatches; an empty list if not on the last stage.

        Collective over all ranks. `sizes` has the number of samples of each microbatch.
        """
        with self._operation("md.Stage.predict", sizes):
            x, _ = self._cut(inputs, None, sizes)
            padded = [*sizes, *[0] * (self.grid.padded - len(sizes))]
            one_pass = StagePass(self, padded, x, None, None)
            for action in self.grid.actions(self.rank):
                if action.kind in (F, SEND_F, RECV_F):
                    one_pass.do(action)
            self.wait(self.messages.progress, "the end of the sends")
        return [scores for _, scores in sorted(one_pass.scores.items())]

    def visit(self, arrays: dict, function: Callable[[str, Any], None]) -> None:
        """Call ``function(name, array)`` on rank 0 for the `arrays` of all stages. Collective.

        `arrays` has arrays of this rank by name. They are sent to rank 0 one at a time, in the
        order of their names.
        """

        def mine() -> dict:
            return {} if self.replica else dict.fromkeys(arrays, self.rank)

        owners = run_on_all(self.comm, "md.Stage: names", mine, _joined)
        channel = self.last_chunk + 1
        with self._operation("md.Stage.visit", ()):
            for number, name in enumerate(sorted(owners)):
                owner = owners[name]
                if self.rank == owner == 0:
                    function(name, arrays[name])
                elif self.rank == owner:
                    self.messages.send(arrays[name], 0, 2 * channel, number)
                    self.wait(self.messages.progress, f"the send of {name!r}")
                    self.messages.drop_sent(0, 2 * channel, number)
                elif self.rank == 0:
                    one = self.messages.receive(owner, 2 * channel, number)
                    self.wait(one.test, f"{name!r} of rank {owner}")
                    function(name, one.array())
                    self.messages.drop(one)

    def loss_share(self) -> float:
        """Return this rank's part of the last step's mean loss; all ranks' parts add up to it."""
        return self._loss if self.reads_labels else 0.0

    def _operation(self, name: str, sizes: Sequence[int]) -> ExitStack:
        """Return a context manager: if one rank raises an error in it, all ranks do."""
        with self._guard(name) as stack:
            extra = f"microbatches of {list(sizes)}"
            self.context.begin(Signature(name, "", f"({sum(sizes)})", extra=extra))
            return stack.pop_all()

    def _guard(self, name: str) -> ExitStack:
        """Return a context manager that reports an exception to all ranks of the pipeline."""
        if self._closed:
            raise ClosedError("this stage is closed")
        with ExitStack() as stack:
            # A replica may already wait for this rank in a sum over `replicas`, so the exception
            # is reported on this communicator, too.
            stack.enter_context(of(self.replicas).call(name))
            stack.enter_context(self.context.call(name))
            return stack.pop_all()

    def _cut(self, inputs, labels, sizes) -> tuple[dict, dict]:
        """Check the inputs and the labels, and cut them into this rank's microbatches."""
        mine = [sizes[i] for i in self.pieces]
        if self.reads_inputs and hasattr(self.model, "sample_shape"):
            check_input_shape(self.model, inputs)
        x, y = {}, {}
        stop = 0
        for i, size in zip(self.pieces, mine, strict=True):
            start, stop = stop, stop + size
            if self.reads_inputs:
                x[i] = c_ordered(self.xp.asarray(inputs[start:stop], dtype=self.dtype))[None]
            if self.reads_labels and labels is not None:
                y[i] = self.xp.asarray(labels[start:stop])[None]
        return x, y

    def wait(self, test: Callable[[], bool], what: str) -> None:
        """Wait until `test()` is true. If this takes long, log that the stage waits for `what`."""
        if test():
            return
        late: float | None = time.monotonic() + polling.PATIENCE + 0.2

        def patient() -> bool:
            nonlocal late
            if test():
                return True
            self.messages.progress()
            if late is not None and time.monotonic() > late:
                late = None
                events.emit("pipeline_wait", stage=self.stage, replica=self.replica, action=what)
            return False

        self.context.wait(patient)

    def close(self) -> None:
        """Free the stage's memory and communicators. Collective; a second call does nothing."""
        if self._closed:
            return
        self._closed = True
        self._steps.close()
        if self.context.failed or of(self.replicas).failed:
            return  # after an error, messages may still be on their way, so nothing is freed
        free(self.replicas)
        self.replicas.Free()
        self.messages.comm.Free()


def _facts(comm, model, grid: PipelineGrid, gradients: Callable | None) -> dict:
    """Check the arguments of `Stage`; return the facts that must be equal on all ranks."""
    if not isinstance(grid, PipelineGrid):
        raise ConfigError(f"grid is {type(grid).__name__}; expected md.pipeline.plan_stages(...)")
    layers = check_layers(model)
    if grid.ranks != comm.size:
        raise ConfigError(f"the grid has {grid.ranks} ranks, the communicator {comm.size}")
    if grid.layers != len(layers):
        raise ConfigError(f"the grid has {grid.layers} layers, the model {len(layers)}")
    if grid.in_rounds:
        PipeDreamSteps.check(grid, gradients)
    shapes = {name: shape for layer in layers for name, shape in layer.shapes().items()}
    # The replicas of a stage have equal parameters, so they cannot have different parts of a layer.
    parts = {
        name: str(layer.window(name))
        for layer in layers if hasattr(layer, "window") for name in layer.shapes()
    }  # fmt: skip
    return {"grid": grid, "layers": shapes, "parts of layers": parts}


def _first_known(values: list):
    """Return the first value that is not None; there is one value for each rank."""
    return next(value for value in values if value is not None)


def _in_order(values: list[dict[int, list[str]]]) -> list[str]:
    """Return each dtype of the parameters once, in the order in which the chunks have it first."""
    return list(dict.fromkeys(name for _, one in sorted(_joined(values).items()) for name in one))


def _joined(dicts) -> dict:
    return {name: value for one in dicts for name, value in one.items()}
