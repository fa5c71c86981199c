"""If a rank raises at any step of an operation, all other ranks raise an error, too."""

import re
import sys
from pathlib import Path

import pytest
from tiers import tiers

PROGRAM = Path(__file__).parent / "programs" / "broken_off.py"

#: Ranks -> every how manieth step is played; the others are left out for time.
STEPS = {2: 1, 3: 2, 4: 4, 5: 5}


@pytest.fixture(scope="module")
def played(launches, chosen):
    sizes = chosen("test_no_rank_waits_and_no_result_is_partial", "ranks")
    return launches({p: (p, [sys.executable, PROGRAM, str(STEPS[p])]) for p in sizes}, timeout=300)


@pytest.mark.parametrize("ranks", tiers(STEPS, 2, 4, 5))
def test_no_rank_waits_and_no_result_is_partial(played, ranks):
    """And two further calls work on all ranks or raise on all."""
    run = played[ranks]
    assert not run.timed_out, run.stdout + run.stderr
    found = re.search(r"^(\d+) cases$", run.stdout, re.MULTILINE)
    assert found is not None, run.stdout + run.stderr
    assert int(found[1]) > 50
    assert run.stdout.strip() == found[0]
    assert run.returncode == 0, run.stderr
