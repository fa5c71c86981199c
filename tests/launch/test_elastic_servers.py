"""Parameter servers of an elastic job when ranks are really killed: R26, R51, R54, R77."""

from pathlib import Path

import pytest
from test_elastic import launch_with_ulfm, with_ulfm

PROGRAMS = Path(__file__).with_name("programs")


@with_ulfm
@pytest.mark.parametrize(("placement", "deaths"), [("dedicated", "1:6"), ("colocated", "0:6,4:9")])
def test_a_function_that_makes_its_own_servers(placement, deaths):
    """`on_resize` is called on servers, too, and each step counts once."""
    done = launch_with_ulfm(5, PROGRAMS / "elastic_own_servers.py", placement, DEATHS=deaths)
    done.check()
    told = sorted(line for line in done.stdout.splitlines() if line.startswith("rank "))
    if placement == "colocated":
        assert told == [f"rank {r}: [5, (5, 4), (4, 3)], w [20.0]" for r in (1, 2, 3)], done
    else:
        workers = [f"rank {r}: [5, (5, 4)], w [20.0]" for r in (0, 2)]
        assert told[:2] == workers, done
        assert all(f"rank {r}: [5, (5, 4)]" in told[r - 1] for r in (3, 4)), done
