"""Which cases of a test that has many are enough to see each value of each parameter once."""

from collections import defaultdict

import pytest


def names_of(mark):
    """The parameters that one ``parametrize`` gives together."""
    names = mark.args[0]
    return tuple(n.strip() for n in names.split(",")) if isinstance(names, str) else tuple(names)


def covering(cases):
    """Return those of the cases that have each value of each place once: as many as values there.

    `cases` are tuples of one length. Each further round over the values of a place begins one later
    than the last, so that pairs of values differ, too.
    """
    places = [list(dict.fromkeys(values)) for values in zip(*cases, strict=True)]
    chosen = [
        tuple(values[(k + j * (k // len(values))) % len(values)] for j, values in enumerate(places))
        for k in range(max(map(len, places), default=0))
    ]
    kept, given = [], set(cases)
    seen = [set() for _ in places]
    # Where not each combination is a case, the first that has a value not seen yet.
    for case in [*(case for case in chosen if case in given), *cases]:
        if any(value not in had for value, had in zip(case, seen, strict=True)):
            kept.append(case)
            for value, had in zip(case, seen, strict=True):
                had.add(value)
    return kept


def mark_the_rest(items):
    """Mark as exhaustive what a test that is marked ``covering`` can do without.

    The parameters are those of its marks ``parametrize`` and ``ranks``. What a fixture adds, such
    as arrays of CuPy, is there in each of these cases: it is mostly skipped.
    """
    tests = defaultdict(list)
    for item in items:
        if item.get_closest_marker("covering") and not item.get_closest_marker("exhaustive"):
            tests[item.nodeid.partition("[")[0]].append(item)
    for cases in tests.values():
        axes = [names_of(mark) for mark in cases[0].iter_markers("parametrize")]
        axes = [axis for axis in [("comm",), *axes] if axis[0] in cases[0].callspec.params]
        assert axes, f"{cases[0].nodeid} is marked covering, and has no cases"
        points = {
            item: tuple(tuple(id(item.callspec.params[name]) for name in axis) for axis in axes)
            for item in cases
        }
        kept = set(covering(list(points.values())))
        for item, point in points.items():
            if point not in kept:
                item.add_marker(pytest.mark.exhaustive)
