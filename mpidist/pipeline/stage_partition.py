"""Cut a profiled model into the stages of a pipeline, and give each stage its number of replicas.

Each of the r replicas of a stage takes every r-th microbatch. C is the time in seconds in which one
worker computes a microbatch with the layers of the stage. `a` is the number of bytes that cross the
cuts before and behind the stage in a forward pass. W is the number of bytes of the stage's
parameters, and B is the bandwidth in bytes per second. The stage needs this time for a microbatch:

    overlap     max(C, (a + 2 (r - 1) / r W) / B) / r     messages travel while the stage computes
    serial      (C + (a + 2 (r - 1) / r W) / B) / r       the stage waits for messages
    pipedream   (C + 4 (r - 1) / r W / B) / r             the formula of PipeDream's program

The slowest stage limits how many microbatches the pipeline finishes per second, so the best plan is
the one whose slowest stage takes the least time. Of several such plans, `cut` takes those with the
fewest workers, and of these the one with the fewest stages. The search is a dynamic programme, as
in PipeDream (Narayanan et al., SOSP 2019).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from numbers import Real

import numpy as np

from ..errors import ConfigError, MpidistError, shown
from ..registry import checked_whole, look_up
from .cut_sets import crossing_bytes, cut_sets
from .layer_profile import LayerProfile

#: Bytes per second of data on a network of 10 Gbit/s; the rest carries headers of the protocol.
BANDWIDTH = 1e9
#: Plans whose slowest stages differ by less than this fraction count as equal, because sums of many
#: times have rounding errors.
_EQUAL = 1e-12

#: name -> the function that computes the seconds of stages from the arrays (C, a, W, r, B).
COSTS: dict[str, Callable] = {
    "overlap": lambda c, a, w, r, b: np.maximum(c, (a + 2 * (r - 1) / r * w) / b) / r,
    "serial": lambda c, a, w, r, b: (c + (a + 2 * (r - 1) / r * w) / b) / r,
    "pipedream": lambda c, a, w, r, b: (c + 4 * (r - 1) / r * w / b) / r,
}


class NoPartition(MpidistError):
    """The model cannot be cut into the wanted stages, or the stages do not fit into memory."""

    exit_code = 1


@dataclass(frozen=True)
class StagePlan:
    """One stage of a model that `cut` has cut. Times are in seconds per microbatch, sizes in bytes.

    `nodes` are the names of the stage's layers. `seconds` is the time from one microbatch to the
    next, and `compute_seconds` is the time of a forward and a backward pass. In the forward pass of
    a microbatch, the stage receives `input_bytes` bytes and sends `output_bytes` bytes. A worker
    keeps the data of `in_flight` microbatches at the same time, which take `memory_bytes`.
    """

    nodes: tuple[str, ...]
    replicas: int
    seconds: float
    compute_seconds: float
    parameter_bytes: float
    input_bytes: float
    output_bytes: float
    in_flight: int
    memory_bytes: float


@dataclass(frozen=True)
class PipelinePlan:
    """The best way to cut a model into stages, as `cut` has found it.

    `single_seconds` is the time of a microbatch on one worker. `data_parallel_seconds` is the time
    of a microbatch without cuts, if each worker is a replica of the whole model. `exact` is false
    if the model has so many possible cuts that only some of them were tried.
    """

    bottleneck_seconds: float
    single_seconds: float
    speedup: float
    data_parallel_seconds: float
    workers: int
    exact: bool
    stages: tuple[StagePlan, ...]

    def as_dict(self) -> dict:
        """Return the fields of this plan, with its stages as dicts, as JSON can store them."""
        return asdict(self)


def cut(
    profile: LayerProfile,
    *,
    workers: int,
    bandwidth: float = BANDWIDTH,
    stages: int | None = None,
    replication: bool = True,
    memory: float | None = None,
    cost: str = "overlap",
    evaluate: bool = False,
) -> PipelinePlan:
    """Return the best way to cut a model into stages.

    Parameters
    ----------
    profile : LayerProfile
    workers : int
        The largest number of workers that may be used.
    bandwidth : float
        Bytes per second between two workers.
    stages : int, optional
        The number of stages; by default, the plan may have any number of stages.
    replication : bool
        Whether a stage may have several workers.
    memory : float, optional
        Bytes of memory of each worker. A stage keeps the data of several microbatches at the same
        time; for each of these, it needs the bytes of its parameters and of all outputs of its
        layers.
    cost : "overlap", "serial" or "pipedream"
        Which formula gives the time of a stage. "overlap": messages travel while the stage
        computes. "serial": the stage waits for messages. "pipedream": the formula of PipeDream's
        program, which ignores the messages between stages.
    evaluate : bool
        Whether to keep the stages that the profile names (``stage_id``), and to choose only the
        number of workers of each.

    Raises
    ------
    ConfigError
        An argument is wrong, or the stages that the profile names cannot form a pipeline.
    NoPartition
        No plan fits into `memory`, or the model has no plan with this number of stages.
    """
    asked = _Asked(workers, bandwidth, stages, replication, memory, cost)
    if evaluate:
        sets, exact = _named_stages(profile), True
        if stages not in (None, len(sets) - 1):
            raise ConfigError(f"stages={stages}, but the profile names {len(sets) - 1} stages")
    else:
        sets, exact = cut_sets(profile)
    bound = math.inf
    if exact and not evaluate:  # the time of any plan is an upper bound for the best plan
        in_order = np.tri(len(profile.layers) + 1, len(profile.layers), -1, dtype=bool)
        bound = _Search(profile, in_order, asked).least()
    search = _Search(profile, sets, asked, successive=evaluate, bound=bound)
    # With more stages than workers or layers there is no plan, and the search could take minutes.
    plans = search.plans() if (stages or 1) <= min(workers, len(profile.layers)) else ()
    if not plans:
        what = f"{len(profile.layers)} layers, {workers} workers"
        what += "" if stages is None else f", {stages} stages"
        what += "" if memory is None else f", {memory:.0f} bytes of memory"
        raise NoPartition(f"no partition fits: {what}{_too_large(profile, memory)}")
    slowest, alone = max(plan.seconds for plan in plans), profile.seconds
    in_one = _Search(profile, sets[[0, -1]], replace(asked, replication=True))
    return PipelinePlan(
        bottleneck_seconds=slowest,
        single_seconds=alone,
        speedup=alone / slowest if slowest else 1.0,
        data_parallel_seconds=float(in_one.times(0)[1][0, -1]),
        workers=sum(plan.replicas for plan in plans),
        exact=exact,
        stages=plans,
    )


def _too_large(profile: LayerProfile, memory: float | None) -> str:
    """Return advice if a single layer needs more memory than a worker has; otherwise ""."""
    need, name, text, parameters = max(
        (one.parameter_bytes + one.output_bytes, one.name, one.text, one.parameter_bytes)
        for one in profile.layers
    )
    if memory is None or need <= memory:
        return ""
    told = f"; node {name} ({text}) alone needs {need:.0f} bytes"
    room = memory - (need - parameters)
    if room <= 0:
        return f"{told}, of which outputs take {need - parameters:.0f}: use smaller microbatches"
    return (
        f"{told}: split it over {math.ceil(parameters / room)} ranks or more, by the settings "
        "split and split_ranks of the strategy pipeline"
    )


@dataclass(frozen=True)
class _Asked:
    """The checked arguments of `cut`."""

    workers: int
    bandwidth: float
    stages: int | None
    replication: bool
    memory: float | None
    cost: str

    def __post_init__(self):
        checked_whole("workers", self.workers, 1)
        if self.stages is not None:
            checked_whole("stages", self.stages, 1)
        for name in ("bandwidth", "memory"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, Real) and 0 < value < math.inf):
                raise ConfigError(f"{name}={shown(value)}; expected a finite number > 0")
        look_up(COSTS, self.cost, "cost")


class _Search:
    """The search for the best plan: a dynamic programme from the end of the model to its beginning.

    ``table[k, w]`` has the time of the slowest stage of the best plan for the layers that are not
    in set k (of the sets after which the model may be cut), with exactly w workers. The search may
    leave out plans whose slowest stage takes longer than `bound`.
    """

    def __init__(self, profile, sets, asked: _Asked, successive=False, bound=math.inf):
        self.profile, self.sets, self.asked = profile, sets, asked
        self.successive, self.bound = successive, bound * (1 + _EQUAL)
        layers = profile.layers
        self.facts = sets @ np.array(
            [[one.seconds, one.parameter_bytes, one.output_bytes] for one in layers]
        )
        self.crossing = crossing_bytes(profile, sets)
        self.packed = np.packbits(sets, axis=1)
        self.replicas = np.arange(1, (asked.workers if asked.replication else 1) + 1)

    def times(self, k: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the sets with which a stage that begins after set k may end, and its costs.

        Returns
        -------
        ends : array (ends,) of int
            Indices of sets.
        seconds : array (ends, replicas)
            The time of the stage for one microbatch.
        memory : array (ends,)
            The bytes that the stage needs for each microbatch whose data it keeps.
        """
        ends = np.arange(k + 1, k + 2 if self.successive else len(self.sets))
        if not self.successive:
            ends = ends[~(self.packed[k] & ~self.packed[ends]).any(axis=1)]
            seconds = self.facts[ends, 0] - self.facts[k, 0]
            ends = ends[seconds <= self.bound * self.replicas[-1]]
        seconds, parameters, outputs = (self.facts[ends] - self.facts[k]).T
        across = self.crossing[k] + self.crossing[ends]
        cost, column = COSTS[self.asked.cost], (slice(None), None)
        found = cost(seconds[column], across[column], parameters[column], self.replicas,
                     self.asked.bandwidth)  # fmt: skip
        return ends, found, parameters + outputs

    def _stages(self, k: int, table: np.ndarray) -> Iterator[tuple]:
        """Yield, for each number r of replicas, the fast enough stages that begin after set k.

        Yields (r, ends, seconds, after). `ends` are the sets with which these stages end, `seconds`
        is a column of the stages' times, and `after` has the rows of `table` for `ends`.
        """
        ends, seconds, memory = self.times(k)
        for r in self.replicas:
            near = np.flatnonzero(seconds[:, r - 1] <= self.bound)
            after = table[ends[near], : self.asked.workers - r + 1]
            if self.asked.memory is not None:
                in_flight = -(-np.arange(r, self.asked.workers + 1) // r)
                fits = memory[near, None] * in_flight <= self.asked.memory
                after = np.where(fits, after, math.inf)
            yield int(r), ends[near], seconds[near, r - 1 : r], after

    def _tables(self, of: Callable) -> list[np.ndarray]:
        """Fill a table; if S stages were asked for, fill a table for each number up to S.

        ``of(seconds, after)`` returns the value of a plan: `seconds` is the time of its first
        stage, and `after` is the value of the later stages.
        """
        first = np.full((len(self.sets), self.asked.workers + 1), math.inf)
        tables = [first.copy() for _ in range((self.asked.stages or 0) + 1)]
        tables[0][-1, 0] = 0.0
        for before, table in zip(tables, tables[1:] or tables, strict=False):
            for k in range(len(self.sets) - 2, -1, -1):
                for r, ends, seconds, after in self._stages(k, before):
                    if len(ends):
                        row = table[k, r:]
                        np.minimum(row, of(seconds, after).min(axis=0), out=row)
        return tables

    def least(self) -> float:
        """Return the time of the slowest stage of the best plan; infinity if no plan fits."""
        return float(self._tables(np.maximum)[-1][0].min())

    def plans(self) -> tuple[StagePlan, ...]:
        """Return the stages of the best plan; an empty tuple if no plan fits."""
        values = self._tables(np.maximum)[-1][0]
        if values.min() == math.inf:
            return ()
        self.bound = float(values.min()) * (1 + _EQUAL)
        left = int(np.argmax(values <= self.bound))
        # In these tables, the value of a plan is its number of stages.
        tables = self._tables(lambda seconds, after: 1 + after)
        found, k = [], 0
        while left:
            if self.asked.stages is not None:
                tables.pop()
            fewest = min(
                (after[at, left - r], r, int(ends[at]))
                for r, ends, _, after in self._stages(k, tables[-1])
                if r <= left and len(ends)
                for at in [int(np.argmin(after[:, left - r]))]
            )
            _, replicas, end = fewest
            found.append(self._plan(k, end, replicas, left))
            k, left = end, left - replicas
        return tuple(found)

    def _plan(self, k: int, end: int, replicas: int, left: int) -> StagePlan:
        ends, seconds, memory = self.times(k)
        at = int(np.flatnonzero(ends == end)[0])
        inside = np.flatnonzero(self.sets[end] & ~self.sets[k])
        layers = [self.profile.layers[index] for index in inside]
        in_flight = -(-left // replicas)
        return StagePlan(
            nodes=tuple(layer.name for layer in layers),
            replicas=replicas,
            seconds=float(seconds[at, replicas - 1]),
            compute_seconds=math.fsum(layer.seconds for layer in layers),
            parameter_bytes=math.fsum(layer.parameter_bytes for layer in layers),
            input_bytes=float(self.crossing[k]),
            output_bytes=float(self.crossing[end]),
            in_flight=in_flight,
            memory_bytes=float(in_flight * memory[at]),
        )


def _named_stages(profile: LayerProfile) -> np.ndarray:
    """Return, for the stages that a profile names (stage_id), the sets of layers they end with."""
    missing = [layer.name for layer in profile.layers if layer.stage is None]
    if missing:
        raise ConfigError(f"node {missing[0]} has no stage_id; evaluate needs one for each node")
    stages = np.array([layer.stage for layer in profile.layers])
    for a, b in profile.edges:
        if stages[a] > stages[b]:
            first, second = profile.layers[a], profile.layers[b]
            raise ConfigError(
                f"node {first.name} of stage {first.stage} feeds node {second.name} of stage "
                f"{second.stage}; expected that no stage feeds an earlier stage"
            )
    found = np.unique(stages)
    return np.array([stages < stage for stage in (*found, found[-1] + 1)])
