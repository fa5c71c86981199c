"""The worked examples of docs/examples/ run as they stand, and learn."""

import re
import sys
from pathlib import Path

import pytest
from tiers import exhaustive

from mpidist.launch.launchers import launch

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"


def run(name, ranks, *words):
    """The numbers of the last line that an example prints."""
    program = [sys.executable, str(EXAMPLES / f"{name}.py"), *map(str, words)]
    said = launch(ranks, program, timeout=240).check().stdout.splitlines()[-1]
    return [float(number) for number in re.findall(r"\d+\.?\d*", said)]


@pytest.mark.exhaustive
def test_matrix_factorization():
    """The error on new ratings comes near to their noise, which is 0.1; it begins at 2."""
    error, noise = run("matrix_factorization", 4)
    assert noise == 0.1
    assert noise < error < 0.15


@pytest.mark.exhaustive
def test_factorization_machine():
    """It finds the pairs, of which a linear model sees nothing."""
    accuracy, linear = run("factorization_machine", 3)
    assert accuracy > 0.9
    assert linear < 0.65


@pytest.mark.parametrize("ranks", [exhaustive(2), 4])
def test_sparse_logistic_regression(data_dir, ranks):
    """R71: real records, with FTRL on the servers; most weights stay 0."""
    accuracy, nonzero, features = run("sparse_logistic_regression", ranks, data_dir / "agaricus")
    assert accuracy > 0.975
    assert 10 < nonzero < 0.75 * features


@pytest.mark.exhaustive
def test_tagger():
    hit, gap = run("tagger", 4)
    assert hit > 0.92
    assert gap > 0.85


def test_each_example_is_on_the_page_and_tested():
    page = (EXAMPLES.parent / "examples.md").read_text(encoding="utf-8")
    names = sorted(path.stem for path in EXAMPLES.glob("*.py"))
    assert re.findall(r"^```\{literalinclude\} examples/(\w+)\.py$", page, re.MULTILINE)
    assert sorted(re.findall(r"\{literalinclude\} examples/(\w+)\.py", page)) == names
    assert sorted(name[5:] for name in globals() if name[5:] in names) == names
