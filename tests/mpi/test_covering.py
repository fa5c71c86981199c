"""Which cases of a test are in the first tier: each value of each parameter once, and no more."""

import itertools

from covering import covering, names_of


def seen(cases):
    return [set(values) for values in zip(*cases, strict=True)]


def test_each_value_is_there():
    for sizes in itertools.product((1, 2, 3, 5), repeat=3):
        cases = list(itertools.product(*map(range, sizes)))
        kept = covering(cases)
        assert len(kept) == max(sizes), sizes
        assert seen(kept) == seen(cases)
        assert set(kept) <= set(cases)


def test_pairs_differ():
    assert covering(list(itertools.product("abc", range(9)))) == [
        ("a", 0), ("b", 1), ("c", 2), ("a", 3), ("b", 4), ("c", 5), ("a", 6), ("b", 7), ("c", 8),
    ]  # fmt: skip
    kept = covering(list(itertools.product(range(2), range(2), range(4))))
    assert kept == [(0, 0, 0), (1, 1, 1), (0, 1, 2), (1, 0, 3)]


def test_where_not_each_combination_is_a_case():
    cases = [(p, q) for p in range(5) for q in range(5) if p > q]
    assert seen(covering(cases)) == seen(cases)
    assert covering([]) == []


def test_the_names_of_a_mark():
    class Mark:
        def __init__(self, *args):
            self.args = args

    assert names_of(Mark("a, b", [])) == names_of(Mark(("a", "b"), [])) == ("a", "b")
