"""`predict` returns the simulated cost of an allreduce algorithm."""

from __future__ import annotations

from ..collectives.schedules.schedule import without_empty
from ..errors import ConfigError
from . import simulate, vector_simulator
from .network_model import Cost, Problem
from .rank_classes import CLASSES
from .two_levels import HIERARCHICAL, builder, lane_algorithm, with_node_phases

#: Up to this number of ranks, every schedule is simulated rank by rank.
ENUMERATED = 64
#: For more ranks, a schedule is simulated rank by rank if it has at most this many steps, which
#: takes about ten seconds.
MAX_STEPS = 1_000_000


def predict(name: str, problem: Problem, *, fast: bool | None = None) -> Cost:
    """Return the simulated cost of an allreduce by the algorithm `name`.

    With more than 64 ranks, similar ranks are simulated together, with the same result. Algorithms
    such as ``direct`` and ``naive`` cannot be simulated in this way.

    Parameters
    ----------
    fast : bool, optional
        Whether to simulate similar ranks together; None decides by the number of ranks.

    Raises
    ------
    ConfigError
        If there are too many ranks to simulate each of them, or the nodes have different numbers of
        ranks.
    """
    size, n, itemsize, _, ranks_per_node, _ = problem
    build = builder(name, ranks_per_node)
    lane = name
    if name == HIERARCHICAL:
        _check_full(problem)
        problem = with_node_phases(name, problem)
        lane = lane_algorithm(problem.nbytes // ranks_per_node)
    quick = size > ENUMERATED if fast is None else fast
    # In a ring of two nodes, messages in both directions are between the same two nodes, and so
    # they delay each other. In larger rings they do not.
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
                f"only these have a shortcut for many ranks: ring, {', '.join(CLASSES)}"
            )
    return simulate.simulate(build, problem)


def _check_full(problem: Problem) -> None:
    if not problem.even:
        raise ConfigError(
            f"{problem.size} ranks on nodes of {problem.ranks_per_node}: expected full nodes"
        )


def _equal(n: int, parts: int) -> int:
    return -(-n // parts) * parts
