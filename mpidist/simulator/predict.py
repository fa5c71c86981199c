"""The cost of an algorithm by name, in the quickest way that is exact: `predict`."""

from __future__ import annotations

from ..collectives.schedules.schedule import without_empty
from ..errors import ConfigError
from . import simulate, vector_simulator
from .network_model import Cost, Problem
from .rank_classes import CLASSES
from .two_levels import HIERARCHICAL, builder, lane_algorithm, with_node_phases

#: Ranks up to which every schedule is simulated rank by rank.
ENUMERATED = 64
#: Steps up to which a schedule without classes still is: some ten seconds.
MAX_STEPS = 1_000_000


def predict(name: str, problem: Problem, *, fast: bool | None = None) -> Cost:
    """Return the cost of an allreduce by its algorithm's name.

    ``hierarchical`` is its lanes and, before each call, the time of its phases in memory.
    Up to 64 ranks every rank is simulated. Beyond, a ring is simulated on the ranks of one node,
    since all nodes do the same, and trees and butterflies by class of ranks; where a rank has a
    piece of the vector, n is first rounded up so that all pieces are equal. Both give what all
    ranks would (`tests/unit/test_predict.py`). ``direct`` and ``naive`` have no such form.

    Parameters
    ----------
    fast : bool, optional
        Whether to simulate in the form for many ranks; None decides by their number.

    Raises
    ------
    ConfigError
        Where there is no fast form and the ranks are too many, or the nodes are uneven.
    """
    size, n, itemsize, _, ranks_per_node, _ = problem
    build = builder(name, ranks_per_node)
    lane = name
    if name == HIERARCHICAL:
        _check_full(problem)
        problem = with_node_phases(name, problem)
        lane = lane_algorithm(problem.nbytes // ranks_per_node)
    quick = size > ENUMERATED if fast is None else fast
    # Two ranks are each other's both neighbours: their messages cross, as no others in a ring do.
    if quick and lane == "ring" and size // ranks_per_node > 2:
        _check_full(problem)
        n = _equal(n, size)
        plans = [without_empty(build(size, r, n, itemsize)) for r in range(ranks_per_node)]
        return simulate.summary(plans, itemsize, simulate.run(plans, problem))
    if quick and name in CLASSES:
        if name in ("butterfly", "halving_doubling"):
            n = _equal(n, 1 << (size.bit_length() - 1))
        classes = [each.without_empty() for each in CLASSES[name](size, n, itemsize)]
        seconds = vector_simulator.run(classes, problem)
        return simulate.summary([each.steps for each in classes], itemsize, seconds)
    if size > ENUMERATED:
        steps = 6 * size if name == "naive" else size * len(build(size, 0, n, itemsize))
        if steps > MAX_STEPS:
            raise ConfigError(
                f"{name} on {size} ranks takes {steps} steps to simulate, at most {MAX_STEPS}; "
                f"forms for many ranks exist of ring, {', '.join(CLASSES)}"
            )
    return simulate.simulate(build, problem)


def _check_full(problem: Problem) -> None:
    if not problem.even:
        raise ConfigError(
            f"{problem.size} ranks on nodes of {problem.ranks_per_node}: expected full nodes"
        )


def _equal(n: int, parts: int) -> int:
    return -(-n // parts) * parts
