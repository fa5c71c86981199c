"""Cut a profiled model into the stages of a pipeline, and give each stage its number of replicas.

Each of the r replicas of a stage takes every r-th microbatch. So with C seconds for its layers, a
bytes over its two cuts, W bytes of parameters and B bytes per second, a stage takes for one
microbatch

    overlap     max(C, (a + 2 (r - 1) / r W) / B) / r     messages travel while the stage computes
    serial      (C + (a + 2 (r - 1) / r W) / B) / r       no message does
    pipedream   (C + 4 (r - 1) / r W / B) / r             the formula of PipeDream's program

The slowest stage limits the throughput, so this stage is made as fast as possible. Of equal plans,
the one with the fewest workers is taken, and then the one with the fewest stages. The search
is a dynamic programme over downward closed sets of layers (`cut_sets`) and numbers of workers, as
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

#: Bytes per second of a network of 10 Gbit/s, less its protocol.
BANDWIDTH = 1e9
#: Plans whose slowest stages differ by less than this share are equal: sums of many times round.
_EQUAL = 1e-12

#: name -> function of (C, a, W, r, B), of arrays.
COSTS: dict[str, Callable] = {
    "overlap": lambda c, a, w, r, b: np.maximum(c, (a + 2 * (r - 1) / r * w) / b) / r,
    "serial": lambda c, a, w, r, b: (c + (a + 2 * (r - 1) / r * w) / b) / r,
    "pipedream": lambda c, a, w, r, b: (c + 4 * (r - 1) / r * w / b) / r,
}


class NoPartition(MpidistError):
    """The model cannot be cut into the wanted number of stages that fit into the memory."""

    exit_code = 1


@dataclass(frozen=True)
class StagePlan:
    """One stage. Times are in seconds for one microbatch, sizes in bytes.

    `nodes` are names of layers. `seconds` is the time from one microbatch to the next.
    `compute_seconds` is the time of a forward and a backward pass. `input_bytes` and `output_bytes`
    cross its two cuts. A worker keeps `in_flight` microbatches at a time, in `memory_bytes`.
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
    """A model cut into stages.

    `single_seconds` is the time of a microbatch on one worker, and `data_parallel_seconds` its time
    if the whole model is one stage on all workers that were asked for. `exact` is false if the
    model has so many cuts that only some of them were tried.
    """

    bottleneck_seconds: float
    single_seconds: float
    speedup: float
    data_parallel_seconds: float
    workers: int
    exact: bool
    stages: tuple[StagePlan, ...]

    def as_dict(self) -> dict:
        """Return this plan as a dict for JSON."""
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
        The exact number of stages; by default any.
    replication : bool
        Whether a stage may have several workers.
    memory : float, optional
        Bytes of each worker. A stage needs, for each microbatch that is kept at a time, its
        parameters and all outputs of its layers.
    cost : "overlap", "serial" or "pipedream"
    evaluate : bool
        Whether to keep the stages that the profile names, and choose only their replicas.

    Raises
    ------
    ConfigError
        An argument is wrong, or the stages that the profile names cannot be those of a pipeline.
    NoPartition
        Nothing fits.
    """
    asked = _Asked(workers, bandwidth, stages, replication, memory, cost)
    if evaluate:
        sets, exact = _named_stages(profile), True
        if stages not in (None, len(sets) - 1):
            raise ConfigError(f"stages={stages}, but the profile names {len(sets) - 1} stages")
    else:
        sets, exact = cut_sets(profile)
    bound = math.inf
    if exact and not evaluate:  # any plan bounds the time of the best one
        in_order = np.tri(len(profile.layers) + 1, len(profile.layers), -1, dtype=bool)
        bound = _Search(profile, in_order, asked).least()
    search = _Search(profile, sets, asked, successive=evaluate, bound=bound)
    # A search that can find nothing could take minutes.
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
    """Return what to do with a layer that alone needs more than the memory of a worker."""
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
    """The arguments of `cut`, checked."""

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
    """The dynamic programme: from the end of the model to its beginning.

    ``table[k, w]`` is about the stages behind the set k, which together have exactly w workers. A
    stage in front of them that ends at k and has r workers makes it a plan of w + r workers. With
    `successive`, each stage is the difference of a set and the next one. Plans that are slower than
    `bound` need not be found.
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
        """Return the sets at which a stage behind the set k may end, and what the stage needs.

        Returns
        -------
        ends : array (ends,) of int
        seconds : array (ends, replicas)
        memory : array (ends,)
            The bytes for each microbatch that is kept.
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
        """Yield all stages behind the set k that are within the bound, by their replicas r.

        Yields r, the ends of the stages, their seconds in a column, and `table` behind their ends:
        in column w for a plan that has r + w workers from this stage on.
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
        """Fill the tables by ``of(seconds, behind)``; one, or one for each number of stages."""
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
        """Return the time of the slowest stage of the best plan; infinity if nothing fits."""
        return float(self._tables(np.maximum)[-1][0].min())

    def plans(self) -> tuple[StagePlan, ...]:
        """Return the stages of the best plan; none if nothing fits."""
        values = self._tables(np.maximum)[-1][0]
        if values.min() == math.inf:
            return ()
        self.bound = float(values.min()) * (1 + _EQUAL)
        left = int(np.argmax(values <= self.bound))
        tables = self._tables(lambda seconds, after: 1 + after)  # the number of stages
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
    """Return the downward closed sets at the cuts that the stage_ids of a profile name."""
    missing = [layer.name for layer in profile.layers if layer.stage is None]
    if missing:
        raise ConfigError(f"node {missing[0]} has no stage_id; evaluate needs one for each node")
    stages = np.array([layer.stage for layer in profile.layers])
    for a, b in profile.edges:
        if stages[a] > stages[b]:
            first, second = profile.layers[a], profile.layers[b]
            raise ConfigError(
                f"node {first.name} of stage {first.stage} feeds node {second.name} of stage "
                f"{second.stage}; expected that no stage feeds an earlier one"
            )
    found = np.unique(stages)
    return np.array([stages < stage for stage in (*found, found[-1] + 1)])
