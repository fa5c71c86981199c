"""docs/coverage.md has every settled requirement, and names only existing tests and pages."""

import ast
import re
from functools import lru_cache
from pathlib import Path

from mpidist.training import strategies
from mpidist.training.exchanges import peer_strategies, server_strategy

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "coverage.md").read_text(encoding="utf-8")
ROWS = [
    (int(match[1]), match[2], re.findall(r"`([^`]+)`", match[3]))
    for match in re.finditer(r"^\| R(\d+) \| (.*?) \| (.*) \|$", PAGE, re.MULTILINE)
]

#: Rows that nothing settles today, in the list at the end of the page.
OPEN = [int(number) for number in re.findall(r"^- R(\d+) \S", PAGE, re.MULTILINE)]

#: The numbers of the requirements.
ALL = range(1, 161)

#: "Core and collectives" but R79 and R101, then the rest of the first release.
SETTLED = {
    1, 13, 15, 27, 29, 30, 31, 32, 33, 34, 35, 37, 38, 40, 64, 73, 74, 76, 78, 81, 109, 117, 123,
    124, 149, 152,
    4, 5, 6, 7, 12, 17, 18, 19, 20, 22, 39, 66, 67, 68, 71, 151,
    42, 44, 52, 53, 143, 90, 95, 97, 98, 144,
}  # fmt: skip


@lru_cache
def functions(file: str) -> set[str]:
    """Names of the functions that a file defines, without importing it."""
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def test_every_row_is_read():
    assert len(ROWS) == len(re.findall(r"^\| R\d+", PAGE, re.MULTILINE)) > 60


def test_every_requirement_is_in_one_place():
    """Settled, as a whole or in part, or open: none is forgotten, and none is in both."""
    numbers = [number for number, _, _ in ROWS] + OPEN
    assert sorted(set(ALL) - set(numbers)) == [], "in neither"
    assert sorted(set(numbers) - set(ALL)) == [], "no such requirement"
    assert sorted(number for number in set(numbers) if numbers.count(number) > 1) == []


def test_every_row_that_is_due_is_there():
    assert SETTLED - {number for number, _, _ in ROWS} == set()


def test_every_reference_exists():
    wrong = []
    for number, _, references in ROWS:
        if not references:
            wrong.append(f"R{number}: nothing settles it")
        for reference in references:
            file, test, name = reference.partition("::")
            page, anchor, heading = reference.partition("#")
            if test:
                good = name.startswith("test_") and (ROOT / file).is_file()
                good = good and name in functions(file)
            else:
                good = bool(anchor) and (ROOT / page).is_file()
                pattern = rf"^#+ {re.escape(heading)}$"
                good = good and bool(re.search(pattern, (ROOT / page).read_text(), re.MULTILINE))
            if not good:
                wrong.append(f"R{number}: no {reference}")
    assert wrong == []


def test_every_failure_has_a_test_that_exists():
    """The list of docs/faults.md, without hole."""
    page = (ROOT / "docs" / "faults.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+) \| (.*?) \| (.*) \|$", page, re.MULTILINE)
    assert [int(number) for number, _, _ in rows] == list(range(1, 26))
    for number, _, tests in rows:
        named = [reference.partition("::") for reference in re.findall(r"`([^`]+)`", tests)]
        assert named, number
        for file, _, name in named:
            assert name in functions(file), (number, file, name)


def test_the_guarantees_are_those_of_all_modes():
    """R125: docs/comparison.md has a row for each mode, and in each row tests that exist."""
    page = (ROOT / "docs" / "comparison.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `md\.(\w+)\(.*?\)` \| (.*?) \| (.*?) \| (.*) \|$", page, re.MULTILINE)
    kinds = [kind for kind in map(strategies.maker, strategies.STRATEGIES) if hasattr(kind, "open")]
    others = {kind.__name__ for kind in [*kinds, peer_strategies.PeerAverage]}
    modes = {kind.__name__ for kind in server_strategy.CONSISTENCIES.values()}
    assert {name for name, *_ in rows} == others | modes
    for name, *cells in rows:
        named = [reference for cell in cells for reference in re.findall(r"`([^`]+::[^`]+)`", cell)]
        assert len(named) >= 3, name
        for reference in named:
            file, _, test = reference.partition("::")
            assert test in functions(file), (name, reference)


def test_a_test_quotes_the_row_it_settles():
    """At least one of the files that settle a row names its number, so that grep finds it."""
    silent = []
    for number, _, references in ROWS:
        files = {r.partition("::")[0] for r in references if "::" in r}
        texts = [(ROOT / file).read_text(encoding="utf-8") for file in files]
        if files and not any(re.search(rf"\bR{number}\b", text) for text in texts):
            silent.append(f"R{number}: {sorted(files)}")
    assert silent == []
